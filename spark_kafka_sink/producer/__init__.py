"""L4: the producer. The only room that starts a thread, the Sender's."""
