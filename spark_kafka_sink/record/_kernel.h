/* Declarations that the files of the kernel share. */
#ifndef SPARK_KAFKA_SINK_KERNEL_H
#define SPARK_KAFKA_SINK_KERNEL_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* Adds the type RowTaker. Returns -1 with an exception if that fails. */
int add_row_taker(PyObject *module);

/* Adds `encode_rows`, of serialization/. Returns -1 with an exception if that fails. */
int add_encode_rows(PyObject *module);

#endif
