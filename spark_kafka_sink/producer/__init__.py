"""L4: the producer. Starts one thread, the Sender's."""
