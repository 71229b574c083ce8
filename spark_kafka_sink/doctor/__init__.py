"""The doctor: python -m spark_kafka_sink.doctor says why a sink does not work, and what to change.

Facts are gathered at the edges, each within a time limit. Plain functions turn facts into findings. Nothing is written
into a topic. No other room uses this one.
"""
