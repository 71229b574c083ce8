/* The binary encoding of a variant (Parquet, VariantEncoding.md), read value by value. Every read stays inside of the
 * two buffers, and no byte belongs to two values, so that a walk ends after as many steps as there are bytes.
 */
#ifndef SPARK_KAFKA_SINK_VARIANT_H
#define SPARK_KAFKA_SINK_VARIANT_H

#include <stdint.h>

enum { MOST_NESTED = 1000 }; /* arrays and objects around a value: as many as Spark's parse_json takes */

/* What a value is: as in variant.py, in this order. */
enum {
    OF_NULL,
    OF_TRUE,
    OF_FALSE,
    OF_INTEGER, /* `number` */
    OF_DOUBLE,  /* `bytes`: 8 */
    OF_FLOAT,   /* `bytes`: 4 */
    OF_DECIMAL, /* `bytes`: 16, or `number`; `scale` and `most_digits` */
    OF_DATE,    /* `number`: days */
    OF_INSTANT, /* `number`: microseconds */
    OF_LOCAL,   /* likewise, without a time zone */
    OF_BYTES,   /* `bytes` */
    OF_TEXT,
    OF_UUID,
    OF_OBJECT, /* `count`; see `variant_element` */
    OF_ARRAY
};

typedef struct {
    const uint8_t *value, *metadata;
    int64_t size, metadata_size;
    int64_t left; /* bytes of the value that belong to no value that was read yet */
} variant;

typedef struct {
    int kind;
    int scale, most_digits;
    int id_size, offset_size;
    const uint8_t *bytes; /* of arrays and objects: the ids */
    int64_t size;         /* of `bytes` */
    int64_t number;
    int64_t count;
    int64_t offsets, data; /* places in the value */
} variant_part;

/* Checks the metadata. Returns 0, or a code of _columns.h, as all functions here. */
int open_variant(variant *of);
/* Reads the value at a place. */
int variant_value(variant *of, int64_t at, variant_part *part);
/* The place of a member of an array or object. */
int64_t variant_element(const variant *of, const variant_part *part, int64_t index);
/* The name of a member of an object, as UTF-8. */
int variant_name(const variant *of, const variant_part *part, int64_t index, const uint8_t **name, int64_t *size);

#endif
