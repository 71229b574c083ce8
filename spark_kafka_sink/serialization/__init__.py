"""From a column of structs to Avro, Protobuf or JSON: the schema, a plan for the type tree, and the code that runs it.

The schema and its registry are looked up once, on the driver. A task gets a `ColumnFormat`, a plain value, and encodes
whole Arrow columns with it: in the C kernel, or in Python where there is none. Nothing here talks to Spark or Kafka.
"""
