"""Kafka's messages: their versions, how a request is built and framed, how a response is checked and read.

The messages themselves are kio's, generated from Kafka's schemas. The modules here have no state and no thread.
"""
