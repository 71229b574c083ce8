"""The protocol of exactly-once delivery against a coordinator and logs in memory, in one thread, with faults at any
request.
"""
