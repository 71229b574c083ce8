/* See _variant.h. The twin in Python is variant.py: it makes the same checks in the same order. */
#include "_columns.h"
#include "_variant.h"

enum { VERSION = 1, PRIMITIVE = 0, SHORT_TEXT = 1, OBJECT = 2 }; /* the lowest two bits of a value's first byte */

/* By the upper six bits of a primitive's first byte: what it is, and the bytes after the first. */
typedef struct {
    uint8_t kind, size, is_known;
} primitive;

enum { LENGTH = 4 }; /* bytes of the length of text and bytes */

static const primitive PRIMITIVES[] = {
    {OF_NULL, 0, 1},    {OF_TRUE, 0, 1},     {OF_FALSE, 0, 1},   {OF_INTEGER, 1, 1}, {OF_INTEGER, 2, 1},
    {OF_INTEGER, 4, 1}, {OF_INTEGER, 8, 1},  {OF_DOUBLE, 8, 1},  {OF_DECIMAL, 5, 1}, {OF_DECIMAL, 9, 1},
    {OF_DECIMAL, 17, 1}, {OF_DATE, 4, 1},    {OF_INSTANT, 8, 1}, {OF_LOCAL, 8, 1},   {OF_FLOAT, 4, 1},
    {OF_BYTES, LENGTH, 1}, {OF_TEXT, LENGTH, 1}, {0, 0, 0},      {0, 0, 0},          {0, 0, 0},
    {OF_UUID, 16, 1}};

/* An unsigned number of 1 to 4 bytes; the caller knows that they are there. */
static inline int64_t unsigned_at(const uint8_t *bytes, int size)
{
    uint32_t number = 0;
    for (int index = 0; index < size; index++)
        number |= (uint32_t)bytes[index] << 8 * index;
    return number;
}

static inline int64_t signed_at(const uint8_t *bytes, int size)
{
    switch (size) {
    case 1: return (int8_t)*bytes;
    case 2: return i16_at(bytes, 0);
    case 4: return i32_at(bytes, 0);
    default: return i64_at(bytes, 0);
    }
}

int open_variant(variant *of)
{
    of->left = of->size;
    return of->metadata_size < 1 || (of->metadata[0] & 15) != VERSION ? NOT_VARIANT : 0;
}

/* Takes `size` bytes from `at` on for one value. */
static int taken(variant *of, int64_t at, int64_t size)
{
    if (size > of->size - at || size > of->left)
        return NOT_VARIANT;
    of->left -= size;
    return 0;
}

static int read_text(variant *of, int64_t at, int64_t before, int64_t size, variant_part *part)
{
    part->bytes = of->value + at + before;
    part->size = size;
    return taken(of, at, before + size);
}

static int read_primitive(variant *of, int64_t at, int type, variant_part *part)
{
    if (type >= (int)(sizeof PRIMITIVES / sizeof *PRIMITIVES) || !PRIMITIVES[type].is_known)
        return UNKNOWN_VARIANT;
    int size = PRIMITIVES[type].size;
    part->kind = PRIMITIVES[type].kind;
    if (size > of->size - at - 1)
        return NOT_VARIANT;
    const uint8_t *bytes = of->value + at + 1;
    switch (part->kind) {
    case OF_BYTES:
    case OF_TEXT: return read_text(of, at, 1 + LENGTH, unsigned_at(bytes, LENGTH), part);
    case OF_INTEGER:
    case OF_DATE:
    case OF_INSTANT:
    case OF_LOCAL: part->number = signed_at(bytes, size); break;
    case OF_DECIMAL:
        part->scale = *bytes++;
        part->most_digits = size == 5 ? 9 : size == 9 ? 18 : 38;
        if (part->scale > part->most_digits)
            return NOT_VARIANT;
        if (size < 17)
            part->number = signed_at(bytes, size - 1);
        break;
    default: break;
    }
    part->bytes = bytes;
    part->size = size;
    return taken(of, at, 1 + size);
}

static int read_nested(variant *of, int64_t at, int is_object, int bits, variant_part *part)
{
    int length = bits >> (is_object ? 4 : 2) & 1 ? 4 : 1;
    if (length > of->size - at - 1)
        return NOT_VARIANT;
    part->kind = is_object ? OF_OBJECT : OF_ARRAY;
    part->count = unsigned_at(of->value + at + 1, length);
    part->id_size = is_object ? (bits >> 2 & 3) + 1 : 0;
    part->offset_size = (bits & 3) + 1;
    part->bytes = of->value + at + 1 + length;
    part->offsets = at + 1 + length + part->count * part->id_size;
    part->data = part->offsets + (part->count + 1) * part->offset_size;
    return taken(of, at, part->data - at);
}

int variant_value(variant *of, int64_t at, variant_part *part)
{
    if (at >= of->size)
        return NOT_VARIANT;
    int basic = of->value[at] & 3, bits = of->value[at] >> 2;
    if (basic == PRIMITIVE)
        return read_primitive(of, at, bits, part);
    if (basic != SHORT_TEXT)
        return read_nested(of, at, basic == OBJECT, bits, part);
    part->kind = OF_TEXT;
    return read_text(of, at, 1, bits, part);
}

int64_t variant_element(const variant *of, const variant_part *part, int64_t index)
{
    return part->data + unsigned_at(of->value + part->offsets + index * part->offset_size, part->offset_size);
}

int variant_name(const variant *of, const variant_part *part, int64_t index, const uint8_t **name, int64_t *size)
{
    const uint8_t *names = of->metadata;
    int64_t id = unsigned_at(part->bytes + index * part->id_size, part->id_size);
    int width = (names[0] >> 6) + 1;
    if (of->metadata_size < 1 + width)
        return NOT_VARIANT;
    int64_t count = unsigned_at(names + 1, width), first = 1 + (count + 2) * width;
    if (id >= count || first > of->metadata_size)
        return NOT_VARIANT;
    int64_t start = unsigned_at(names + 1 + (id + 1) * width, width), end = unsigned_at(names + 1 + (id + 2) * width, width);
    if (end < start || end > of->metadata_size - first)
        return NOT_VARIANT;
    *name = names + first + start;
    *size = end - start;
    return 0;
}
