"""Spark's side: options, columns, the pooled producer of a worker process, and the interfaces that Spark calls."""
