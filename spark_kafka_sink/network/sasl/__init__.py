"""SASL. Each mechanism is one file that takes and returns bytes. The authenticator carries them over Kafka's frames,
and slow steps run on their own threads.
"""
