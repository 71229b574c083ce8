"""The producer. It starts one thread, the Sender."""
