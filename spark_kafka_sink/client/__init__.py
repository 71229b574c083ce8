"""The cluster and the connections to it: metadata, the network client, and request futures on top. No socket, no
thread.
"""
