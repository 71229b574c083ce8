"""The driver's blocking client: topics, groups, transactions, single records, and reading a topic.

It opens no socket, starts no thread, and is not thread-safe.
"""
