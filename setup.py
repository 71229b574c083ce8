"""What setup.cfg cannot say: the compiled kernel. Where there is no C compiler its numpy twin does the work
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
