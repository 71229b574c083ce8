"""The network client: the metadata of the cluster and the connections to it. No socket, no thread."""
