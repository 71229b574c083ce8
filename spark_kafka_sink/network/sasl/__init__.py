"""SASL: one file a mechanism, bytes in and bytes out; the authenticator that carries them over Kafka's frames; and the
thread beside the loop on which a slow step runs.
"""
