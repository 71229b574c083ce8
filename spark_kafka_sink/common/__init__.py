"""L0: what every room may use, made of the standard library alone."""
