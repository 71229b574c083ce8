"""Kafka's records as bytes and back: Arrow columns to record batches (format v2, KIP-98), codecs, murmur2, and a
reader.

The only room that uses numpy and the codecs. Nothing here keeps state between calls or knows a thread: every function
may be called from any thread, and the values it returns are not changed afterwards.
"""
