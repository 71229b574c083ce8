"""The compiled kernel, which setup.cfg cannot describe. Without a C compiler its numpy twin replaces it
(spark_kafka_sink/record/kernel.py).
"""

from setuptools import Extension, setup

KERNEL = Extension(
    "spark_kafka_sink.record._kernel",
    ["spark_kafka_sink/record/_kernel.c", "spark_kafka_sink/record/_rows.c"],
    depends=["spark_kafka_sink/record/_kernel.h"],
    extra_compile_args=["-O3"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[KERNEL])
