/* Values as Avro (specification 1.12, "Binary Encoding"). Bytes are those of Java's and Python's writers: an array or map is
 * one block, and a union has the number of its branch first.
 */
#include "_columns.h"

enum { SHORT = 16 }; /* bytes */

static inline uint8_t *put_long(uint8_t *at, int64_t number)
{
    uint64_t zigzag = ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
    if (zigzag >= 0x80 && zigzag < 0x4000) { /* the most frequent, without a loop */
        at[0] = (uint8_t)(zigzag | 0x80);
        at[1] = (uint8_t)(zigzag >> 7);
        return at + 2;
    }
    while (zigzag >= 0x80) {
        *at++ = (uint8_t)(zigzag | 0x80);
        zigzag >>= 7;
    }
    *at++ = (uint8_t)zigzag;
    return at;
}

/* Another unit of time. `other`: whether the result must have 32 bits. */
static inline uint8_t *put_scaled(writer *to, const node *of, int64_t number, uint8_t *at)
{
    if (of->how == DIVIDED)
        number = floor_divided(number, of->arg);
    else if (of->how == MULTIPLIED) {
        if (number > INT64_MAX / of->arg || number < INT64_MIN / of->arg)
            return refused(to, of, OUT_OF_RANGE);
        number *= of->arg;
    } else {
        if (number % of->arg != 0)
            return refused(to, of, INEXACT);
        number /= of->arg;
    }
    if (of->other && number != (int32_t)number)
        return refused(to, of, OUT_OF_RANGE);
    return put_long(at, number);
}

static inline uint8_t *put_integer(writer *to, const node *of, int64_t number, uint8_t *at)
{
    if (UNLIKELY(of->op == U64 && number < 0))
        return refused(to, of, OUT_OF_RANGE);
    return of->how == PLAIN ? put_long(at, number) : put_scaled(to, of, number, at);
}

/* The number of a symbol, or -1. `extra`: the length of each symbol as 32 bits, and its bytes. */
static int64_t symbol_of(const node *of, const uint8_t *bytes, int64_t length)
{
    int64_t at = 0;
    for (int64_t symbol = 0; symbol < of->other; symbol++) {
        int64_t size = i32_at(of->extra + at, 0);
        if (size == length && memcmp(of->extra + at + 4, bytes, (size_t)length) == 0)
            return symbol;
        at += 4 + size;
    }
    return -1;
}

static uint8_t *put_odd_bytes(writer *to, const node *of, const uint8_t *bytes, int64_t length, uint8_t *at)
{
    if (of->how == SYMBOL) {
        int64_t symbol = symbol_of(of, bytes, length);
        return symbol < 0 ? refused(to, of, NO_SYMBOL) : put_long(at, symbol);
    }
    if (of->how == OF_SIZE && length != of->other)
        return refused(to, of, WRONG_SIZE);
    if (to->end - at < length)
        return refused(to, of, FULL);
    memcpy(at, bytes, (size_t)length);
    return at + length;
}

static inline uint8_t *put_bytes(writer *to, const node *of, int64_t row, uint8_t *at)
{
    const uint8_t *bytes = NULL;
    int64_t length = bytes_at(of, row, &bytes);
    if (UNLIKELY(length < 0))
        return refused(to, of, CORRUPT);
    if (UNLIKELY(of->how != SIZED))
        return put_odd_bytes(to, of, bytes, length, at);
    at = put_long(at, length);
    if (length <= SHORT && of->data_size >= SHORT && bytes <= of->data + of->data_size - SHORT && bytes >= of->data) {
        memcpy(at, bytes, SHORT); /* a copy of a fixed size is faster; there is room for it */
        return at + length;
    }
    if (UNLIKELY(to->end - at < length))
        return refused(to, of, FULL);
    memcpy(at, bytes, (size_t)length);
    return at + length;
}

/* Whether a decimal has more digits than its precision, which a sloppy writer of Arrow data may give. Readers round such
 * a value. `extra`: 10 to the power of the precision, in 16 bytes. */
static int has_more_digits(const node *of, int64_t high, uint64_t low)
{
    if (of->extra_size == 0)
        return 0;
    uint64_t limit = u64_at(of->extra, 1), top = (uint64_t)high;
    if (high < 0) {
        low = ~low + 1;
        top = ~top + (low == 0);
    }
    return top > limit || (top == limit && low >= u64_at(of->extra, 0));
}

/* Two's complement, the highest byte first: in `other` bytes, or in as few as hold it, with their number before. */
static uint8_t *put_decimal(writer *to, const node *of, int64_t row, uint8_t *at)
{
    uint8_t octets[16];
    int64_t high;
    uint64_t low;
    decimal_at(of, row, &high, &low);
    if (UNLIKELY(has_more_digits(of, high, low)))
        return refused(to, of, TOO_LARGE);
    for (int index = 0; index < 8; index++) {
        octets[index] = (uint8_t)(high >> (56 - 8 * index));
        octets[8 + index] = (uint8_t)(low >> (56 - 8 * index));
    }
    uint8_t sign = high < 0 ? 0xFF : 0;
    int64_t size = of->other;
    if (of->how == AS_BYTES) {
        int64_t skipped = 0;
        while (skipped < 15 && octets[skipped] == sign && (octets[skipped + 1] ^ sign) < 0x80)
            skipped++;
        size = 16 - skipped;
        at = put_long(at, size);
    }
    if (size < 1)
        return refused(to, of, TOO_LARGE);
    for (; size > 16; size--)
        *at++ = sign;
    int64_t skipped = 16 - size;
    for (int64_t index = 0; index < skipped; index++)
        if (octets[index] != sign)
            return refused(to, of, TOO_LARGE);
    if (skipped > 0 && (octets[skipped] ^ sign) >= 0x80)
        return refused(to, of, TOO_LARGE);
    memcpy(at, octets + skipped, (size_t)size);
    return at + size;
}

static uint8_t *put_elements(writer *to, const node *of, int64_t row, uint8_t *at)
{
    int64_t start, end;
    if (!elements_at(of, row, &start, &end))
        return refused(to, of, CORRUPT);
    if (end > start)
        at = put_long(at, end - start);
    for (int64_t element = start; element < end; element++)
        for (int64_t child = 0; child < of->count; child++)
            if ((at = put_avro(to, of->children + child, element, at)) == NULL)
                return NULL;
    if (UNLIKELY(to->end - at < ROOM))
        return refused(to, of, FULL);
    *at++ = 0;
    return at;
}

/* The one field that is not null is the value: the struct of a union. */
static uint8_t *put_member(writer *to, const node *of, int64_t row, uint8_t *at)
{
    const node *chosen = NULL;
    for (int64_t child = 0; child < of->count; child++) {
        const node *member = of->children + child;
        int64_t place = row;
        if (found(&member, &place) == 0)
            continue;
        if (chosen != NULL)
            return refused(to, of->children + child, SECOND);
        chosen = of->children + child;
    }
    if (chosen != NULL)
        return put_avro(to, chosen, row, at);
    if (of->null_branch < 0)
        return refused(to, of, IS_NULL);
    return put_long(at, of->null_branch);
}

static uint8_t *put_null(writer *to, const node *of, uint8_t *at)
{
    if (of->null_branch >= 0)
        return put_long(at, of->null_branch);
    const node *values = of;
    while (values->op == DICT)
        values = values->children;
    return values->op == ABSENT && values->how == NOTHING ? at : refused(to, of, IS_NULL);
}

static uint8_t *put_struct(writer *to, const node *of, int64_t row, uint8_t *at);

static ALWAYS_INLINE uint8_t *put_one(writer *to, const node *of, int64_t row, uint8_t *at)
{
    if (UNLIKELY(to->end - at < ROOM))
        return refused(to, of, FULL);
    const node *asked = of;
    int is_there = of->op == DICT ? found(&of, &row) : is_valid(of, row);
    if (is_there <= 0)
        return is_there < 0 ? refused(to, asked, CORRUPT) : put_null(to, asked, at);
    if (of->value_branch >= 0)
        *at++ = (uint8_t)(of->value_branch << 1); /* at most 63 */
    switch (of->op) {
    case F64:
        FETCH_AHEAD(of->values + 8 * row);
        memcpy(at, of->values + 8 * row, 8);
        return at + 8;
    case F32: memcpy(at, of->values + 4 * row, 4); return at + 4;
    case F16: {
        float number = half_at(of->values, row);
        memcpy(at, &number, 4);
        return at + 4;
    }
    case BOOL: *at++ = (uint8_t)is_true(of, row); return at;
    CASE_INTEGER: return put_integer(to, of, integer_at(of, row), at);
    CASE_TEXT:
    CASE_BYTES: return put_bytes(to, of, row, at);
    case DECIMAL: return put_decimal(to, of, row, at);
    case STRUCT: return put_struct(to, of, row, at);
    default: return put_elements(to, of, row, at);
    }
}

/* The values of a record stand one after the other. The loop has a copy of the code for a value in it, without a call. */
static uint8_t *put_struct(writer *to, const node *of, int64_t row, uint8_t *at)
{
    if (of->how == UNION)
        return put_member(to, of, row, at);
    const node *child = of->children, *end = child + of->count;
    for (; child < end && at != NULL; child++)
        at = put_one(to, child, row, at);
    return at;
}

uint8_t *put_avro(writer *to, const node *of, int64_t row, uint8_t *at) { return put_one(to, of, row, at); }
