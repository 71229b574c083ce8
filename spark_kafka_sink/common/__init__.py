"""The lowest layer: used by every other, made of the standard library only."""
