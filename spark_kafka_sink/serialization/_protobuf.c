/* Values as Protobuf (the guide's "Encoding"). Bytes are those of the official runtimes: fields by their numbers, packed
 * numbers as one field, and entries of maps with key and value. `name` is a field's tag; of the fields of a message that
 * the column has no array for, there is no node.
 */
#include "_columns.h"

enum { SHORT = 16 }; /* bytes */
static const int64_t FIRST_SECOND = -62135596800, LAST_SECOND = 253402300799; /* of the years 1 and 9999 */
static const int64_t MOST_SECONDS = 315576000000;                             /* of a Duration: 10,000 years */
static const int64_t NANOS = 1000000000;

static inline uint8_t *put_varint(uint8_t *at, uint64_t number)
{
    while (number >= 0x80) {
        *at++ = (uint8_t)(number | 0x80);
        number >>= 7;
    }
    *at++ = (uint8_t)number;
    return at;
}

static inline uint8_t *put_tag(const node *of, uint8_t *at)
{
    if (of->name_size <= 2) { /* the most frequent; a tag of no byte is that of an element */
        for (int64_t index = 0; index < of->name_size; index++)
            *at++ = of->name[index];
        return at;
    }
    memcpy(at, of->name, (size_t)of->name_size);
    return at + of->name_size;
}

/* The length of what was written behind `start`, where one byte was left for it. Moves it if the length needs more. */
static inline uint8_t *put_length(writer *to, const node *of, uint8_t *start, uint8_t *at)
{
    uint64_t length = (uint64_t)(at - start - 1);
    if (length < 0x80) {
        *start = (uint8_t)length;
        return at;
    }
    if (UNLIKELY(to->end - at < ROOM))
        return refused(to, of, FULL);
    int64_t more = 1;
    for (uint64_t rest = length >> 14; rest > 0; rest >>= 7)
        more++;
    memmove(start + 1 + more, start + 1, (size_t)length);
    put_varint(start, length);
    return at + more;
}

/* ---- numbers ------------------------------------------------------------------------------------------------------ */

/* The number in the field's unit: `arg` divides it, and `other` multiplies it. `extra`: pairs of 64 bits, the first and
 * the last number of each range that is allowed. Returns why it does not fit, or 0. */
static int scaled(const node *of, int64_t *number)
{
    if (of->arg > 1) {
        if (*number % of->arg != 0)
            return INEXACT;
        *number /= of->arg;
    }
    if (of->other > 1)
        *number = (int64_t)((uint64_t)*number * (uint64_t)of->other);
    for (int64_t at = 0; at + 16 <= of->extra_size; at += 16)
        if (i64_at(of->extra + at, 0) <= *number && *number <= i64_at(of->extra + at, 1))
            return 0;
    return of->extra_size > 0 ? OUT_OF_RANGE : 0;
}

/* google.protobuf.Timestamp and Duration: seconds and nanoseconds. `arg`: units in a second. A Timestamp is rounded down,
 * so that its nanoseconds are not negative; those of a Duration have the sign of its seconds. */
static uint8_t *put_seconds(writer *to, const node *of, int64_t number, uint8_t *at)
{
    int64_t seconds = of->how == INSTANT ? floor_divided(number, of->arg) : number / of->arg;
    int64_t rest = of->how == INSTANT ? floor_rest(number, of->arg) : number % of->arg, nanos = rest * (NANOS / of->arg);
    int64_t least = of->how == INSTANT ? FIRST_SECOND : -MOST_SECONDS;
    int64_t most = of->how == INSTANT ? LAST_SECOND : MOST_SECONDS;
    if (seconds < least || seconds > most)
        return refused(to, of, OUT_OF_RANGE);
    uint8_t *start = put_tag(of, at);
    at = start + 1;
    if (seconds != 0) {
        *at++ = 1 << 3;
        at = put_varint(at, (uint64_t)seconds);
    }
    if (nanos != 0) {
        *at++ = 2 << 3;
        at = put_varint(at, (uint64_t)nanos);
    }
    *start = (uint8_t)(at - start - 1);
    return at;
}

static inline uint8_t *put_number(writer *to, const node *of, int64_t number, uint8_t *at)
{
    if (of->how >= INSTANT)
        return put_seconds(to, of, number, at);
    if (of->arg > 1 || of->other > 1 || of->extra_size > 0) {
        int code = scaled(of, &number);
        if (UNLIKELY(code != 0))
            return refused(to, of, code);
    }
    if (number == 0 && of->value_branch == WITHOUT_DEFAULT)
        return at;
    at = put_tag(of, at);
    switch (of->how) {
    case VARINT: return put_varint(at, (uint64_t)number);
    case ZIGZAG: return put_varint(at, ((uint64_t)number << 1) ^ (uint64_t)(number >> 63));
    case BITS_32: memcpy(at, &number, 4); return at + 4; /* little-endian: the low half */
    default: memcpy(at, &number, 8); return at + 8;
    }
}

static inline uint8_t *put_bits(const node *of, const void *bits, int64_t size, uint8_t *at)
{
    static const uint8_t zero[8];
    if (of->value_branch == WITHOUT_DEFAULT && memcmp(bits, zero, (size_t)size) == 0) /* -0.0 is another number */
        return at;
    at = put_tag(of, at);
    memcpy(at, bits, (size_t)size);
    return at + size;
}

static inline uint8_t *put_single(const node *of, float number, uint8_t *at)
{
    double twice = number;
    return of->how == AS_DOUBLE ? put_bits(of, &twice, 8, at) : put_bits(of, &number, 4, at);
}

static inline uint8_t *put_truth(const node *of, int is_so, uint8_t *at)
{
    if (!is_so && of->value_branch == WITHOUT_DEFAULT)
        return at;
    at = put_tag(of, at);
    *at++ = (uint8_t)is_so;
    return at;
}

/* BigDecimal.toString, which has less than 128 bytes. */
static uint8_t *put_decimal(const node *of, int64_t row, uint8_t *at)
{
    uint8_t *start = put_tag(of, at);
    at = put_decimal_text(of, row, start + 1);
    *start = (uint8_t)(at - start - 1);
    return at;
}

/* ---- text and bytes ----------------------------------------------------------------------------------------------- */

static int is_utf8(const uint8_t *at, int64_t length)
{
    const uint8_t *end = at + length;
    const uint64_t tops = 0x8080808080808080u;
    while (at < end) {
        while (end - at >= 8 && (u64_at(at, 0) & tops) == 0)
            at += 8;
        while (at < end && *at < 0x80)
            at++;
        if (at < end) {
            int is_good;
            at += character_at(at, end, &is_good);
            if (!is_good)
                return 0;
        }
    }
    return 1;
}

/* The number of an enum's name. `extra`: names, and behind each its number as it is written; each with its length as 32
 * bits before it. `other`: names and numbers together. */
static uint8_t *put_symbol(writer *to, const node *of, const uint8_t *bytes, int64_t length, uint8_t *at)
{
    const uint8_t *entry = of->extra;
    for (int64_t symbol = 0; symbol + 1 < of->other; symbol += 2) {
        int64_t size = i32_at(entry, 0), written = i32_at(entry + 4 + size, 0);
        const uint8_t *number = entry + 8 + size;
        entry = number + written;
        if (size != length || memcmp(number - 4 - size, bytes, (size_t)length) != 0)
            continue;
        if (of->value_branch == WITHOUT_DEFAULT && written == 1 && *number == 0)
            return at;
        at = put_tag(of, at);
        if (to->end - at < written)
            return refused(to, of, FULL);
        memcpy(at, number, (size_t)written);
        return at + written;
    }
    return refused(to, of, NO_SYMBOL);
}

static inline uint8_t *put_bytes(writer *to, const node *of, int64_t row, uint8_t *at)
{
    const uint8_t *bytes = NULL;
    int64_t length = bytes_at(of, row, &bytes);
    if (UNLIKELY(length < 0))
        return refused(to, of, CORRUPT);
    if (of->op <= TEXT_VIEW) {
        if (UNLIKELY(of->how == SYMBOL))
            return put_symbol(to, of, bytes, length, at);
        if (UNLIKELY(!is_utf8(bytes, length)))
            return refused(to, of, NOT_UTF8);
    }
    if (length == 0 && of->value_branch == WITHOUT_DEFAULT)
        return at;
    at = put_varint(put_tag(of, at), (uint64_t)length);
    if (length <= SHORT && of->data_size >= SHORT && bytes <= of->data + of->data_size - SHORT && bytes >= of->data) {
        memcpy(at, bytes, SHORT); /* a copy of a fixed size is faster; there is room for it */
        return at + length;
    }
    if (UNLIKELY(to->end - at < length))
        return refused(to, of, FULL);
    memcpy(at, bytes, (size_t)length);
    return at + length;
}

/* ---- values ------------------------------------------------------------------------------------------------------- */

static uint8_t *put_message(writer *to, const node *of, int64_t row, uint8_t *at);
static uint8_t *put_list(writer *to, const node *of, int64_t row, uint8_t *at);
static uint8_t *put_map(writer *to, const node *of, int64_t row, uint8_t *at);
static uint8_t *put_wrapped(writer *to, const node *of, int64_t row, uint8_t *at);

/* The value is not null and no entry of a dictionary. */
static ALWAYS_INLINE uint8_t *put_present(writer *to, const node *of, int64_t row, uint8_t *at)
{
    if (UNLIKELY(of->value_branch == WRAPPED))
        return put_wrapped(to, of, row, at);
    switch (of->op) {
    case F64:
        FETCH_AHEAD(of->values + 8 * row);
        return put_bits(of, of->values + 8 * row, 8, at);
    case F32: return put_single(of, f32_at(of->values, row), at);
    case F16: return put_single(of, half_at(of->values, row), at);
    case BOOL: return put_truth(of, is_true(of, row), at);
    CASE_INTEGER: return put_number(to, of, integer_at(of, row), at);
    CASE_TEXT:
    CASE_BYTES: return put_bytes(to, of, row, at);
    case DECIMAL: return put_decimal(of, row, at);
    case STRUCT: return put_message(to, of, row, at);
    case MAP: return put_map(to, of, row, at);
    default: return put_list(to, of, row, at);
    }
}

static ALWAYS_INLINE uint8_t *put_one(writer *to, const node *of, int64_t row, uint8_t *at)
{
    const node *asked = of;
    int is_there = of->op == DICT ? found(&of, &row) : is_valid(of, row);
    if (UNLIKELY(to->end - at < of->name_size + ROOM))
        return refused(to, asked, FULL);
    if (is_there > 0)
        return put_present(to, of, row, at);
    if (UNLIKELY(is_there < 0))
        return refused(to, asked, CORRUPT);
    return UNLIKELY(asked->null_branch == REQUIRED) ? refused(to, asked, IS_NULL) : at;
}

static uint8_t *put_field(writer *to, const node *of, int64_t row, uint8_t *at) { return put_one(to, of, row, at); }

/* The fields of a message, without its length. Members of a oneof have its number as branch of null: one may be there.
 * The loop has a copy of the code for a value in it, without a call. */
static uint8_t *put_fields(writer *to, const node *of, int64_t row, uint8_t *at)
{
    uint64_t chosen = 0;
    for (const node *child = of->children, *end = child + of->count; child < end; child++) {
        uint8_t *next = put_one(to, child, row, at);
        if (UNLIKELY(next == NULL))
            return NULL;
        if (UNLIKELY(child->null_branch >= 0) && next != at) { /* a member that is there is always written */
            uint64_t oneof = (uint64_t)1 << child->null_branch;
            if (chosen & oneof)
                return refused(to, child, SECOND);
            chosen |= oneof;
        }
        at = next;
    }
    return at;
}

static uint8_t *put_message(writer *to, const node *of, int64_t row, uint8_t *at)
{
    uint8_t *start = put_tag(of, at);
    at = put_fields(to, of, row, start + 1);
    return at == NULL ? NULL : put_length(to, of, start, at);
}

static uint8_t *put_list(writer *to, const node *of, int64_t row, uint8_t *at)
{
    int64_t first, end;
    if (!elements_at(of, row, &first, &end))
        return refused(to, of, CORRUPT);
    uint8_t *start = at;
    if (of->how == PACKED && end > first) {
        start = put_tag(of, at);
        at = start + 1;
    }
    for (int64_t element = first; element < end && at != NULL; element++)
        at = put_field(to, of->children, element, at);
    return at == NULL || of->how != PACKED || end == first ? at : put_length(to, of, start, at);
}

static uint8_t *put_map(writer *to, const node *of, int64_t row, uint8_t *at)
{
    int64_t first, end;
    if (!elements_at(of, row, &first, &end))
        return refused(to, of, CORRUPT);
    for (int64_t entry = first; entry < end; entry++) {
        if (UNLIKELY(to->end - at < of->name_size + ROOM))
            return refused(to, of, FULL);
        uint8_t *start = put_tag(of, at);
        if ((at = put_field(to, of->children, entry, start + 1)) == NULL
            || (at = put_field(to, of->children + 1, entry, at)) == NULL
            || (at = put_length(to, of, start, at)) == NULL)
            return NULL;
    }
    return at;
}

/* A number or text in a message of its own (google/protobuf/wrappers.proto), as its field 1. The tag of that field is the
 * last byte of `name`. */
static uint8_t *put_wrapped(writer *to, const node *of, int64_t row, uint8_t *at)
{
    if (of->name_size < 1 || of->op >= STRUCT)
        return refused(to, of, CORRUPT);
    node outer = *of, inner = *of;
    outer.name_size--;
    inner.name += outer.name_size;
    inner.name_size = 1;
    inner.value_branch = WITHOUT_DEFAULT;
    uint8_t *start = put_tag(&outer, at);
    if ((at = put_present(to, &inner, row, start + 1)) == NULL) {
        to->at = of;
        return NULL;
    }
    return put_length(to, of, start, at);
}

uint8_t *put_protobuf(writer *to, const node *of, int64_t row, uint8_t *at)
{
    if (found(&of, &row) <= 0 || of->op != STRUCT)
        return refused(to, of, CORRUPT);
    return put_fields(to, of, row, at);
}
