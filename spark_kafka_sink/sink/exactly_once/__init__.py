"""Exactly-once delivery: the driver, its tasks, and the operator's command. The proof is in docs/exactly-once.md."""
