"""The only room with sockets: connections without blocking, frames out and in.

A selector and its channels belong to one thread, the Sender's in a producer. Any thread may call
`Selector.wakeup`.
"""
