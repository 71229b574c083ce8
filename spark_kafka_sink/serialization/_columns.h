/* What the emitters of Avro, JSON and Protobuf share: a plan of nodes over Arrow's buffers, and reads that stay inside of them.
 *
 * The plan is a flat array of nodes: the children of a node stand side by side, after it. Python made it (plan.py), and
 * gives the buffers of a column for it (bound in _columns.c, where all sizes are checked). A row is written by one
 * walk down the plan. Numbers of Arrow are little-endian, as the machines for which pyarrow exists.
 */
#ifndef SPARK_KAFKA_SINK_COLUMNS_H
#define SPARK_KAFKA_SINK_COLUMNS_H

#include "../record/_kernel.h"
#include <stdint.h>
#include <string.h>

/* How the values of a node are stored: as in plan.py, in this order. */
enum {
    ABSENT, /* no array: null in every row */
    BOOL,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F16,
    F32,
    F64,
    TEXT32, /* offsets of 32 bits, of 64 bits, and views */
    TEXT64,
    TEXT_VIEW,
    BYTES32,
    BYTES64,
    BYTES_VIEW,
    BYTES_FIXED,
    DECIMAL,
    STRUCT,
    LIST32,
    LIST64,
    LIST_FIXED,
    MAP, /* offsets of 32 bits; two children: keys and values */
    DICT, /* indices; the child is the dictionary */
    VARIANT, /* two children of bytes: value and metadata */
    OPS
};

/* The labels of a switch over ops, for each emitter the same. */
#define CASE_INTEGER                                                                                                   \
    case I8:                                                                                                           \
    case I16:                                                                                                          \
    case I32:                                                                                                          \
    case I64:                                                                                                          \
    case U8:                                                                                                           \
    case U16:                                                                                                          \
    case U32:                                                                                                          \
    case U64
#define CASE_TEXT                                                                                                      \
    case TEXT32:                                                                                                       \
    case TEXT64:                                                                                                       \
    case TEXT_VIEW
#define CASE_BYTES                                                                                                     \
    case BYTES32:                                                                                                      \
    case BYTES64:                                                                                                      \
    case BYTES_VIEW:                                                                                                   \
    case BYTES_FIXED

/* How a value is written: as in plan.py. 0 is the plain way of each op. */
enum { PLAIN, DIVIDED, MULTIPLIED, EXACTLY_DIVIDED, DATE, TIMESTAMP, TIME, INTERVAL }; /* numbers */
enum { SIZED, OF_SIZE, SYMBOL, UNSIZED };                                              /* text and bytes, in Avro */
enum { AS_FIXED, AS_BYTES };                                                           /* decimals, in Avro */
enum { RECORD, UNION };                                                                /* structs, in Avro */
enum { NULL_IS_BAD, NOTHING };                                                         /* what is absent, in Avro */
enum { WITH_NULLS, WITHOUT_NULLS };                                                    /* structs, in JSON */
enum { ANY_NUMBER, FINITE };                                                           /* float and double, in JSON */
enum { VARINT, ZIGZAG, BITS_32, BITS_64, INSTANT, SPAN };                              /* numbers, in Protobuf */
enum { AS_FLOAT, AS_DOUBLE };                                                          /* F16 and F32, in Protobuf */
enum { EACH_WITH_TAG, PACKED };                                                        /* lists, in Protobuf */
enum { WITHOUT_DEFAULT, WRAPPED }; /* the branch of a value, in Protobuf: 0 is left out; in a message of its own */
enum { REQUIRED = -2 };            /* the branch of null, in JSON and Protobuf: a null is an error */

/* Why a row could not be written: as in plan.py. */
enum { FULL = 1, IS_NULL, TOO_LARGE, NO_SYMBOL, WRONG_SIZE, OUT_OF_RANGE, INEXACT, NOT_UTF8, SECOND, NOT_VARIANT,
       UNKNOWN_VARIANT, TOO_DEEP, NO_ZONE, CORRUPT };

enum { ROOM = 128 }; /* bytes that are free before each value: more than any number or time has */

typedef struct node {
    int op, how;
    int null_branch, value_branch; /* Avro: the numbers in a union, or -1. Protobuf: the oneof's number, or see above */
    const uint8_t *valid;          /* bits, or NULL if no row is null */
    int64_t bit;                   /* the bit of row 0 */
    const uint8_t *values;         /* of row 0: values, offsets, views or indices */
    const uint8_t *data;           /* bytes of texts */
    int64_t data_size;
    int64_t length;                /* rows */
    int64_t first;                 /* LIST_FIXED and BOOL: the index of row 0 */
    const struct node *children;
    int64_t count;                 /* of children */
    int64_t arg, other;            /* see plan.py */
    const uint8_t *name;           /* JSON: `,"name":`; Protobuf: the tag */
    int64_t name_size;
    const uint8_t *extra; /* symbols of an enum, changes of a time zone, allowed numbers, or the limit of a decimal */
    int64_t extra_size;
    const Py_buffer *views; /* of views: the buffers of long texts */
    int64_t view_count;
    int depth;
} node;

typedef struct {
    const uint8_t *end;    /* of the output */
    const uint8_t *powers; /* see powers_of_ten in plan.py */
    int code;              /* why a value could not be written */
    const node *at;        /* and which */
} writer;

/* Writes a value, or notes why it cannot and returns NULL. `at` is where the output goes on. */
typedef uint8_t *put_value(writer *to, const node *of, int64_t row, uint8_t *at);
uint8_t *put_avro(writer *to, const node *of, int64_t row, uint8_t *at);
uint8_t *put_json(writer *to, const node *of, int64_t row, uint8_t *at);
uint8_t *put_protobuf(writer *to, const node *of, int64_t row, uint8_t *at);

/* Numbers as Java prints them. They need at most 32 bytes. */
uint8_t *put_digits(uint8_t *at, uint64_t number);
uint8_t *put_double(uint8_t *at, double number, const uint8_t *powers, int quoted);
uint8_t *put_float(uint8_t *at, float number, const uint8_t *powers, int quoted);
/* The digits of a number of 128 bits. */
uint8_t *put_long_digits(uint8_t *at, uint64_t high, uint64_t low);
/* Puts a point before the last `scale` of the digits from `first` to `at`, with a zero before it if there are no more. */
uint8_t *put_point(uint8_t *first, uint8_t *at, int64_t scale);
/* The decimal of a row, with the scale `other`: at least -200 and at most 100. */
uint8_t *put_decimal_text(const node *of, int64_t row, uint8_t *at);

static inline uint8_t *refused(writer *to, const node *of, int code)
{
    to->code = code;
    to->at = of;
    return NULL;
}

#ifdef __GNUC__
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NEVER_INLINE __attribute__((noinline)) /* what is rare, so that the loop around it stays small */
/* A row reads from as many places as there are fields, more than a processor follows by itself. */
#define FETCH_AHEAD(address) __builtin_prefetch((const void *)((uintptr_t)(address) + 512), 0)
#else
#define UNLIKELY(condition) (condition)
#define ALWAYS_INLINE inline
#define NEVER_INLINE
#define FETCH_AHEAD(address) ((void)(address))
#endif

/* ---- reads: the caller has checked that `row` is below the node's length ------------------------------------------ */

static inline int is_valid(const node *of, int64_t row)
{
    if (of->valid == NULL)
        return of->op != ABSENT;
    int64_t bit = of->bit + row;
    return of->valid[bit >> 3] >> (bit & 7) & 1;
}

static inline int is_true(const node *of, int64_t row)
{
    int64_t bit = of->first + row;
    return of->values[bit >> 3] >> (bit & 7) & 1;
}

#define READ(type, name)                                                                                               \
    static inline type name(const uint8_t *from, int64_t index)                                                        \
    {                                                                                                                  \
        type number;                                                                                                   \
        memcpy(&number, from + (int64_t)sizeof number * index, sizeof number);                                         \
        return number;                                                                                                 \
    }
READ(int16_t, i16_at)
READ(int32_t, i32_at)
READ(int64_t, i64_at)
READ(uint16_t, u16_at)
READ(uint32_t, u32_at)
READ(uint64_t, u64_at)
READ(float, f32_at)
READ(double, f64_at)

/* The integer of a row, of each op from I8 to U64. U64 over 2^63-1 becomes negative. */
static inline int64_t integer_at(const node *of, int64_t row)
{
    switch (of->op) {
    case I8: return (int8_t)of->values[row];
    case I16: return i16_at(of->values, row);
    case I32: return i32_at(of->values, row);
    case U8: return of->values[row];
    case U16: return u16_at(of->values, row);
    case U32: return u32_at(of->values, row);
    default: return i64_at(of->values, row);
    }
}

/* A half as float: exact. */
static inline float half_at(const uint8_t *from, int64_t row)
{
    uint32_t half = u16_at(from, row), sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    float number;
    if (exponent == 0) {
        number = (float)rest * (1.0f / 16777216.0f); /* 2^-24 */
        return sign ? -number : number;
    }
    uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | rest << 13;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The bytes of a row, or -1 if they are not inside of the buffer. */
static inline int64_t between(const node *of, int64_t start, int64_t end, const uint8_t **bytes)
{
    if (UNLIKELY(start < 0 || end < start || end > of->data_size))
        return -1;
    *bytes = end > start ? of->data + start : (const uint8_t *)"";
    return end - start;
}

static inline int64_t viewed(const node *of, int64_t row, const uint8_t **bytes)
{
    const uint8_t *view = of->values + 16 * row;
    int32_t length = i32_at(view, 0);
    if (length < 0)
        return -1;
    if (length <= 12) {
        *bytes = view + 4;
        return length;
    }
    int64_t index = i32_at(view, 2), start = i32_at(view, 3);
    if (index < 0 || index >= of->view_count || start < 0 || start + length > of->views[index].len)
        return -1;
    *bytes = (const uint8_t *)of->views[index].buf + start;
    return length;
}

/* The bytes of a row, of each op from TEXT32 to BYTES_FIXED. -1 if they are not inside of the buffers. */
static inline int64_t bytes_at(const node *of, int64_t row, const uint8_t **bytes)
{
    switch (of->op) {
    case TEXT32:
    case BYTES32: return between(of, i32_at(of->values, row), i32_at(of->values, row + 1), bytes);
    case TEXT64:
    case BYTES64: return between(of, i64_at(of->values, row), i64_at(of->values, row + 1), bytes);
    case BYTES_FIXED: *bytes = of->arg > 0 ? of->values + of->arg * row : (const uint8_t *)""; return of->arg;
    default: return viewed(of, row, bytes);
    }
}

/* The first element of a list or map, and behind its last. 0 if they are not inside of the child. */
static inline int elements_at(const node *of, int64_t row, int64_t *start, int64_t *end)
{
    if (of->op == LIST_FIXED) {
        *start = (of->first + row) * of->arg;
        *end = *start + of->arg;
        return 1;
    }
    *start = of->op == LIST64 ? i64_at(of->values, row) : i32_at(of->values, row);
    *end = of->op == LIST64 ? i64_at(of->values, row + 1) : i32_at(of->values, row + 1);
    return *start >= 0 && *end >= *start && *end <= of->children[0].length
           && (of->op != MAP || *end <= of->children[1].length);
}

/* The number of an entry in the dictionary, or -1 if there is none. */
static inline int64_t entry_at(const node *of, int64_t row)
{
    int64_t entry;
    switch (of->arg) {
    case 1: entry = of->other ? (int64_t)of->values[row] : (int8_t)of->values[row]; break;
    case 2: entry = of->other ? (int64_t)u16_at(of->values, row) : i16_at(of->values, row); break;
    case 4: entry = of->other ? (int64_t)u32_at(of->values, row) : i32_at(of->values, row); break;
    default: entry = i64_at(of->values, row);
    }
    return entry < of->children[0].length ? entry : -1;
}

/* Follows dictionaries to where the value is. Returns 0 for a null, 1 for a value, -1 for an entry that is not there. */
static inline int found(const node **of, int64_t *row)
{
    for (;;) {
        if (!is_valid(*of, *row))
            return 0;
        if ((*of)->op != DICT)
            return 1;
        int64_t entry = entry_at(*of, *row);
        if (entry < 0)
            return -1;
        *of = (*of)->children;
        *row = entry;
    }
}

static inline int is_continuation(const uint8_t *at, const uint8_t *end) { return at < end && (*at & 0xC0) == 0x80; }

/* Returns how many bytes at `at`, the first of them at least 128, belong together. `*is_good` says whether they are a
 * character of UTF-8. If not, one U+FFFD replaces them: that many bytes as Java's decoder takes for one. */
static inline int64_t character_at(const uint8_t *at, const uint8_t *end, int *is_good)
{
    int lead = at[0], more;
    *is_good = 0;
    if (lead < 0xC2 || lead > 0xF4)
        return 1;
    more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
    if (!is_continuation(at + 1, end) || (lead == 0xE0 && at[1] < 0xA0) || (lead == 0xF0 && at[1] < 0x90)
        || (lead == 0xF4 && at[1] > 0x8F))
        return 1;
    for (int index = 2; index <= more; index++)
        if (!is_continuation(at + index, end))
            return index;
    *is_good = !(lead == 0xED && at[1] >= 0xA0); /* not a half of a surrogate pair */
    return more + 1;
}

/* A decimal as two's complement of 128 bits: `high` and `low`. Widths: 4, 8 and 16 bytes. */
static inline void decimal_at(const node *of, int64_t row, int64_t *high, uint64_t *low)
{
    if (of->arg == 16) {
        *low = u64_at(of->values, 2 * row);
        *high = i64_at(of->values, 2 * row + 1);
        return;
    }
    int64_t number = of->arg == 8 ? i64_at(of->values, row) : i32_at(of->values, row);
    *low = (uint64_t)number;
    *high = number >> 63;
}

static inline int64_t floor_divided(int64_t number, int64_t by)
{
    int64_t whole = number / by;
    return whole - (number % by < 0);
}

/* What `floor_divided` leaves: from 0 to `by` - 1. */
static inline int64_t floor_rest(int64_t number, int64_t by)
{
    int64_t rest = number % by;
    return rest < 0 ? rest + by : rest;
}

#endif
