"""Kafka's messages at the edge: which versions we speak, how a request is built and framed, how a response is checked
and read.

The messages themselves are kio's, generated from Kafka's schemas. The room has no state and no thread of its own.
"""
