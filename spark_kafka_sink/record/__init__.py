"""Kafka's records as bytes and back: Arrow columns to record batches (format v2, KIP-98), codecs, murmur2, a reader.

Only these modules use numpy and the codecs. Nothing here keeps state between calls: any thread may call every function,
and the values that it returns do not change.
"""
