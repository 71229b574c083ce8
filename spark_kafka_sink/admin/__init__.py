"""The driver's blocking client: topics, groups, transactions, single records, and reading a topic. No socket, no
thread; one thread at a time.
"""
