/* Values as the JSON of Spark's to_json (JacksonGenerator): see json_text.py for the form of each type. */
#include "_columns.h"
#include "_variant.h"

static inline uint8_t *put_text(uint8_t *at, const char *text, size_t length)
{
    memcpy(at, text, length);
    return at + length;
}

/* ---- text --------------------------------------------------------------------------------------------------------- */

static const char HEX[] = "0123456789ABCDEF";

/* What stands behind the backslash, for bytes below 128: 0 for none, 'u' for \u00XX. */
static const char ESCAPES[128] = {
    'u', 'u', 'u', 'u', 'u', 'u', 'u', 'u', 'b', 't', 'n', 'u', 'f', 'r', 'u', 'u', 'u', 'u', 'u', 'u', 'u', 'u',
    'u', 'u', 'u', 'u', 'u', 'u', 'u', 'u', 'u', 'u', ['"'] = '"', ['\\'] = '\\'};

/* Bytes of these 8 that need more than a copy have their highest bit set in the result. So may bytes above the first of
 * them; the first is exact. */
static inline uint64_t unusual(uint64_t word)
{
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t quote = word ^ ones * '"', backslash = word ^ ones * '\\';
    return ((((word - ones * 32) | (quote - ones) | (backslash - ones)) & ~word) | word) & tops;
}

/* Writes what follows at `from` up to the next plain byte. `*from` moves on. Needs 6 bytes for each byte that it takes. */
static NEVER_INLINE uint8_t *put_escaped(const uint8_t **from, const uint8_t *end, uint8_t *at)
{
    const uint8_t *text = *from;
    if (*text < 128) {
        char escape = ESCAPES[*text];
        *at++ = '\\';
        *at++ = (uint8_t)escape;
        if (escape == 'u') {
            at = put_text(at, "00", 2);
            *at++ = (uint8_t)HEX[*text >> 4];
            *at++ = (uint8_t)HEX[*text & 15];
        }
        *from = text + 1;
        return at;
    }
    int is_good;
    int64_t size = character_at(text, end, &is_good);
    *from = text + size;
    if (!is_good)
        return put_text(at, "\xEF\xBF\xBD", 3);
    memcpy(at, text, (size_t)size);
    return at + size;
}

static inline int64_t first_of(uint64_t marks)
{
#ifdef __GNUC__
    return __builtin_ctzll(marks) >> 3;
#else
    int64_t index = 0;
    for (; !(marks & 0x80); marks >>= 8)
        index++;
    return index;
#endif
}

/* Writes text between quotes. */
static ALWAYS_INLINE uint8_t *put_string(writer *to, const node *of, const uint8_t *text, int64_t length, uint8_t *at)
{
    const uint8_t *end = text + length;
    if (UNLIKELY(to->end - at < length + ROOM)) /* as long as it is copied, it needs no more */
        return refused(to, of, FULL);
    *at++ = '"';
    while (text < end) {
        while (end - text >= 8) {
            uint64_t word = u64_at(text, 0), marks = unusual(word);
            memcpy(at, &word, 8);
            if (UNLIKELY(marks != 0)) {
                int64_t plain = first_of(marks);
                text += plain;
                at += plain;
                goto escape;
            }
            text += 8;
            at += 8;
        }
        while (text < end && *text < 128 && ESCAPES[*text] == 0)
            *at++ = *text++;
        if (text == end)
            break;
    escape:
        at = put_escaped(&text, end, at);
        if (UNLIKELY(to->end - at < end - text + ROOM))
            return refused(to, of, FULL);
    }
    *at++ = '"';
    return at;
}

static uint8_t *put_base64(writer *to, const node *of, const uint8_t *bytes, int64_t length, uint8_t *at)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (to->end - at < length / 3 * 4 + ROOM)
        return refused(to, of, FULL);
    *at++ = '"';
    for (; length > 0; bytes += 3, length -= 3) {
        uint32_t three = (uint32_t)bytes[0] << 16;
        if (length > 1)
            three |= (uint32_t)bytes[1] << 8;
        if (length > 2)
            three |= bytes[2];
        at[0] = (uint8_t)digits[three >> 18];
        at[1] = (uint8_t)digits[three >> 12 & 63];
        at[2] = length > 1 ? (uint8_t)digits[three >> 6 & 63] : '=';
        at[3] = length > 2 ? (uint8_t)digits[three & 63] : '=';
        at += 4;
    }
    *at++ = '"';
    return at;
}

/* ---- numbers ------------------------------------------------------------------------------------------------------ */

static inline uint8_t *put_integer(const node *of, int64_t number, uint8_t *at)
{
    uint64_t size = (uint64_t)number;
    if (number < 0 && of->op != U64) {
        *at++ = '-';
        size = 0 - size;
    }
    return put_digits(at, size);
}

/* `number - number` is not 0 for NaN and infinity. */
static inline uint8_t *put_floating(writer *to, const node *of, double number, uint8_t *at)
{
    if (UNLIKELY(of->how == FINITE && number - number != 0))
        return refused(to, of, OUT_OF_RANGE);
    return put_double(at, number, to->powers, 1);
}

static inline uint8_t *put_single(writer *to, const node *of, float number, uint8_t *at)
{
    if (UNLIKELY(of->how == FINITE && number - number != 0))
        return refused(to, of, OUT_OF_RANGE);
    return put_float(at, number, to->powers, 1);
}

/* ---- times -------------------------------------------------------------------------------------------------------- */

static const int64_t DAY = 86400;
static const int64_t FOUR_CENTURIES = 146097 * (int64_t)86400;
static const int64_t FURTHEST = (int64_t)1 << 45; /* seconds: a million years */

static inline uint8_t *put_two(uint8_t *at, int64_t number)
{
    at[0] = (uint8_t)('0' + number / 10);
    at[1] = (uint8_t)('0' + number % 10);
    return at + 2;
}

static inline uint8_t *put_three(uint8_t *at, int64_t number)
{
    *at = (uint8_t)('0' + number / 100);
    return put_two(at + 1, number % 100);
}

/* yyyy-MM-dd of the proleptic Gregorian calendar, by eras of 400 years that begin on 1 March. */
static uint8_t *put_date(uint8_t *at, int64_t days)
{
    int64_t shifted = days + 719468, era = floor_divided(shifted, 146097), of_era = shifted - era * 146097;
    int64_t year_of_era = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t day = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100), month = (5 * day + 2) / 153;
    day -= (153 * month + 2) / 5 - 1;
    month += month < 10 ? 3 : -9;
    int64_t year = era * 400 + year_of_era + (month <= 2);
    if (year < 0) {
        *at++ = '-';
        year = -year;
    } else if (year > 9999)
        *at++ = '+';
    if (year > 9999)
        at = put_digits(at, (uint64_t)year);
    else
        at = put_two(put_two(at, year / 100), year % 100);
    *at++ = '-';
    at = put_two(at, month);
    *at++ = '-';
    return put_two(at, day);
}

static inline uint8_t *put_clock(uint8_t *at, int64_t seconds)
{
    at = put_two(at, seconds / 3600);
    *at++ = ':';
    at = put_two(at, seconds / 60 % 60);
    *at++ = ':';
    return put_two(at, seconds % 60);
}

/* The seconds that a zone is ahead of UTC. `extra`: pairs of 64 bits: from when, and how far. The first begins before
 * all times. After the last time, `other`, the last four centuries repeat. */
static int64_t zone_offset(const node *of, int64_t seconds)
{
    int64_t low = 0, high = of->extra_size / 16;
    if (seconds >= of->other)
        seconds = of->other - FOUR_CENTURIES + (seconds - of->other) % FOUR_CENTURIES;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (i64_at(of->extra, 2 * middle) <= seconds)
            low = middle;
        else
            high = middle;
    }
    return i64_at(of->extra, 2 * low + 1);
}

static uint8_t *put_offset(uint8_t *at, int64_t offset)
{
    if (offset == 0) {
        *at++ = 'Z';
        return at;
    }
    *at++ = offset < 0 ? '-' : '+';
    uint8_t *end = put_clock(at, offset < 0 ? -offset : offset);
    return offset % 60 == 0 ? end - 3 : end;
}

/* `arg`: units in a second. Without `extra` there is no zone. */
static uint8_t *put_timestamp(writer *to, const node *of, int64_t number, uint8_t *at)
{
    int64_t seconds = floor_divided(number, of->arg), offset = 0;
    int64_t units = floor_rest(number, of->arg);
    int64_t millis = of->arg >= 1000 ? units / (of->arg / 1000) : units * 1000 / of->arg;
    if (seconds > FURTHEST || seconds < -FURTHEST)
        return refused(to, of, OUT_OF_RANGE);
    if (of->extra_size > 0) {
        offset = zone_offset(of, seconds);
        seconds += offset;
    }
    int64_t days = floor_divided(seconds, DAY);
    *at++ = '"';
    at = put_date(at, days);
    *at++ = 'T';
    at = put_clock(at, seconds - days * DAY);
    *at++ = '.';
    at = put_three(at, millis);
    if (of->extra_size > 0)
        at = put_offset(at, offset);
    *at++ = '"';
    return at;
}

/* A point and the digits of a fraction of a second, without zeros at the end; nothing if it is 0. */
static uint8_t *put_fraction(uint8_t *at, int64_t units, int64_t in_a_second)
{
    if (units == 0)
        return at;
    *at++ = '.';
    while (units > 0) {
        units *= 10;
        *at++ = (uint8_t)('0' + units / in_a_second);
        units %= in_a_second;
    }
    return at;
}

static uint8_t *put_time(writer *to, const node *of, int64_t number, uint8_t *at)
{
    if (number < 0 || number >= DAY * of->arg)
        return refused(to, of, OUT_OF_RANGE);
    *at++ = '"';
    at = put_clock(at, number / of->arg);
    at = put_fraction(at, number % of->arg, of->arg);
    *at++ = '"';
    return at;
}

static uint8_t *put_interval(const node *of, int64_t number, uint8_t *at)
{
    uint64_t size = number < 0 ? 0 - (uint64_t)number : (uint64_t)number, unit = (uint64_t)of->arg;
    uint64_t seconds = size / unit;
    at = put_text(at, "\"INTERVAL '", 11);
    if (number < 0)
        *at++ = '-';
    at = put_digits(at, seconds / (uint64_t)DAY);
    *at++ = ' ';
    at = put_clock(at, (int64_t)(seconds % (uint64_t)DAY));
    at = put_fraction(at, (int64_t)(size % unit), of->arg);
    return put_text(at, "' DAY TO SECOND\"", 16);
}

static uint8_t *put_number(writer *to, const node *of, int64_t number, uint8_t *at)
{
    switch (of->how) {
    case DATE:
        *at++ = '"';
        at = put_date(at, of->op == I64 ? floor_divided(number, of->arg) : number);
        *at++ = '"';
        return at;
    case TIMESTAMP: return put_timestamp(to, of, number, at);
    case TIME: return put_time(to, of, number, at);
    case INTERVAL: return put_interval(of, number, at);
    default: return put_integer(of, number, at);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------------- */

static uint8_t *put_value_at(writer *to, const node *of, int64_t row, uint8_t *at);

static uint8_t *put_struct(writer *to, const node *of, int64_t row, uint8_t *at)
{
    uint8_t *start = at;
    for (int64_t index = 0; index < of->count; index++) {
        const node *child = of->children + index, *value = child;
        int64_t place = row;
        int is_there = value->op == DICT ? found(&value, &place) : is_valid(value, place);
        if (is_there == 0 && UNLIKELY(child->null_branch == REQUIRED))
            return refused(to, child, IS_NULL);
        if (is_there == 0 && of->how == WITHOUT_NULLS)
            continue;
        if (UNLIKELY(is_there < 0))
            return refused(to, child, CORRUPT);
        if (UNLIKELY(to->end - at < child->name_size + ROOM))
            return refused(to, child, FULL);
        memcpy(at, child->name, (size_t)child->name_size);
        at += child->name_size;
        if (is_there == 0)
            at = put_text(at, "null", 4);
        else if ((at = put_value_at(to, value, place, at)) == NULL)
            return NULL;
    }
    if (at == start)
        *at++ = '{'; /* else the first name's comma becomes it */
    *start = '{';
    if (UNLIKELY(to->end - at < ROOM))
        return refused(to, of, FULL);
    *at++ = '}';
    return at;
}

static uint8_t *put_list(writer *to, const node *of, int64_t row, uint8_t *at)
{
    int64_t start, end;
    if (!elements_at(of, row, &start, &end))
        return refused(to, of, CORRUPT);
    *at++ = '[';
    for (int64_t element = start; element < end; element++) {
        if (element > start)
            *at++ = ',';
        if ((at = put_json(to, of->children, element, at)) == NULL)
            return NULL;
        if (UNLIKELY(to->end - at < ROOM))
            return refused(to, of, FULL);
    }
    *at++ = ']';
    return at;
}

/* A key that is no text stands between quotes, as it is printed. */
static uint8_t *put_key(writer *to, const node *of, int64_t row, uint8_t *at)
{
    const node *key = of;
    int is_there = found(&key, &row);
    if (is_there <= 0)
        return refused(to, of, is_there == 0 ? IS_NULL : CORRUPT);
    switch (key->op) {
    CASE_TEXT: return put_value_at(to, key, row, at);
    default: break;
    }
    uint8_t *start = at;
    if ((at = put_value_at(to, key, row, at + 1)) == NULL)
        return NULL;
    if (start[1] == '"') { /* NaN and infinity have quotes already */
        memmove(start, start + 1, (size_t)(at - start - 1));
        return at - 1;
    }
    *start = '"';
    *at++ = '"';
    return at;
}

static uint8_t *put_map(writer *to, const node *of, int64_t row, uint8_t *at)
{
    int64_t start, end;
    if (!elements_at(of, row, &start, &end))
        return refused(to, of, CORRUPT);
    *at++ = '{';
    for (int64_t entry = start; entry < end; entry++) {
        if (entry > start)
            *at++ = ',';
        if ((at = put_key(to, of->children, entry, at)) == NULL)
            return NULL;
        *at++ = ':'; /* a key leaves room for it */
        if ((at = put_json(to, of->children + 1, entry, at)) == NULL)
            return NULL;
        if (UNLIKELY(to->end - at < ROOM))
            return refused(to, of, FULL);
    }
    *at++ = '}';
    return at;
}

/* ---- variants: as Variant.toJson of Spark prints them, which differs from to_json for decimals and times ------------ */

/* A copy of its own, so that put_bytes has the other one inline. */
static uint8_t *put_variant_text(writer *to, const node *of, const uint8_t *text, int64_t length, uint8_t *at)
{
    return put_string(to, of, text, length, at);
}

/* BigDecimal.toPlainString, without zeros at the end of the fraction. */
static uint8_t *put_plain_decimal(writer *to, const node *of, const variant_part *part, uint8_t *at)
{
    int64_t high = part->number >> 63, scale = part->scale;
    uint64_t low = (uint64_t)part->number;
    if (part->most_digits == 38) {
        low = u64_at(part->bytes, 0);
        high = i64_at(part->bytes, 1);
    }
    if (high < 0) {
        *at++ = '-';
        low = 0 - low;
        high = (int64_t)(~(uint64_t)high + (low == 0));
    }
    uint8_t *first = at;
    at = put_long_digits(at, (uint64_t)high, low);
    if (at - first > part->most_digits)
        return refused(to, of, NOT_VARIANT);
    if ((high | (int64_t)low) == 0)
        return at;
    for (; scale > 0 && at[-1] == '0'; scale--)
        at--;
    return scale > 0 ? put_point(first, at, scale) : at;
}

/* The offset as +HH:MM: seconds are left out. */
static uint8_t *put_minutes(uint8_t *at, int64_t offset)
{
    int64_t minutes = (offset < 0 ? -offset : offset) / 60;
    *at++ = offset < 0 && minutes > 0 ? '-' : '+';
    at = put_two(at, minutes / 60);
    *at++ = ':';
    return put_two(at, minutes % 60);
}

static uint8_t *put_instant(writer *to, const node *of, int64_t micros, int has_zone, uint8_t *at)
{
    int64_t seconds = floor_divided(micros, of->arg), units = floor_rest(micros, of->arg), offset = 0;
    if (has_zone) {
        if (of->extra_size == 0)
            return refused(to, of, NO_ZONE);
        offset = zone_offset(of, seconds);
        seconds += offset;
    }
    int64_t days = floor_divided(seconds, DAY);
    *at++ = '"';
    at = put_date(at, days);
    *at++ = ' ';
    at = put_clock(at, seconds - days * DAY);
    at = put_fraction(at, units, of->arg);
    if (has_zone)
        at = put_minutes(at, offset);
    *at++ = '"';
    return at;
}

static uint8_t *put_uuid(const uint8_t *bytes, uint8_t *at)
{
    static const char digits[] = "0123456789abcdef";
    *at++ = '"';
    for (int index = 0; index < 16; index++) {
        if (index == 4 || index == 6 || index == 8 || index == 10)
            *at++ = '-';
        *at++ = (uint8_t)digits[bytes[index] >> 4];
        *at++ = (uint8_t)digits[bytes[index] & 15];
    }
    *at++ = '"';
    return at;
}

static uint8_t *put_part(writer *to, const node *of, const variant_part *part, uint8_t *at)
{
    switch (part->kind) {
    case OF_NULL: return put_text(at, "null", 4);
    case OF_TRUE: return put_text(at, "true", 4);
    case OF_FALSE: return put_text(at, "false", 5);
    case OF_INTEGER: return put_integer(of, part->number, at);
    case OF_DOUBLE: return put_double(at, f64_at(part->bytes, 0), to->powers, 1);
    case OF_FLOAT: return put_float(at, f32_at(part->bytes, 0), to->powers, 1);
    case OF_DECIMAL: return put_plain_decimal(to, of, part, at);
    case OF_DATE:
        *at++ = '"';
        at = put_date(at, part->number);
        *at++ = '"';
        return at;
    case OF_INSTANT: return put_instant(to, of, part->number, 1, at);
    case OF_LOCAL: return put_instant(to, of, part->number, 0, at);
    case OF_BYTES: return put_base64(to, of, part->bytes, part->size, at);
    case OF_TEXT: return put_variant_text(to, of, part->bytes, part->size, at);
    default: return put_uuid(part->bytes, at);
    }
}

/* Writes the value at a place, inside of `depth` arrays and objects. */
static uint8_t *put_variant_value(writer *to, const node *of, variant *from, int64_t place, int depth, uint8_t *at)
{
    variant_part part;
    int code = variant_value(from, place, &part);
    if (code != 0)
        return refused(to, of, code);
    if (part.kind < OF_OBJECT)
        return put_part(to, of, &part, at);
    if (depth == MOST_NESTED)
        return refused(to, of, TOO_DEEP);
    *at++ = part.kind == OF_OBJECT ? '{' : '[';
    for (int64_t index = 0; index < part.count; index++) {
        if (index > 0)
            *at++ = ',';
        if (part.kind == OF_OBJECT) {
            const uint8_t *name;
            int64_t size;
            if ((code = variant_name(from, &part, index, &name, &size)) != 0)
                return refused(to, of, code);
            if ((at = put_variant_text(to, of, name, size, at)) == NULL)
                return NULL;
            *at++ = ':';
        }
        if (UNLIKELY(to->end - at < ROOM))
            return refused(to, of, FULL);
        if ((at = put_variant_value(to, of, from, variant_element(from, &part, index), depth + 1, at)) == NULL)
            return NULL;
        if (UNLIKELY(to->end - at < ROOM))
            return refused(to, of, FULL);
    }
    *at++ = part.kind == OF_OBJECT ? '}' : ']';
    return at;
}

static int64_t bytes_of_child(const node *of, int64_t row, const uint8_t **bytes)
{
    int is_there = found(&of, &row);
    *bytes = (const uint8_t *)"";
    return is_there > 0 ? bytes_at(of, row, bytes) : is_there;
}

static uint8_t *put_variant(writer *to, const node *of, int64_t row, uint8_t *at)
{
    variant from;
    from.size = bytes_of_child(of->children, row, &from.value);
    from.metadata_size = bytes_of_child(of->children + 1, row, &from.metadata);
    if (from.size < 0 || from.metadata_size < 0)
        return refused(to, of, CORRUPT);
    int code = open_variant(&from);
    return code != 0 ? refused(to, of, code) : put_variant_value(to, of, &from, 0, 0, at);
}

static uint8_t *put_bytes(writer *to, const node *of, int64_t row, uint8_t *at)
{
    const uint8_t *bytes = NULL;
    int64_t length = bytes_at(of, row, &bytes);
    if (UNLIKELY(length < 0))
        return refused(to, of, CORRUPT);
    if (of->op <= TEXT_VIEW)
        return put_string(to, of, bytes, length, at);
    return put_base64(to, of, bytes, length, at);
}

/* The value is not null and no entry of a dictionary. */
static uint8_t *put_value_at(writer *to, const node *of, int64_t row, uint8_t *at)
{
    switch (of->op) {
    case F64:
        FETCH_AHEAD(of->values + 8 * row);
        return put_floating(to, of, f64_at(of->values, row), at);
    case F32: return put_single(to, of, f32_at(of->values, row), at);
    case F16: return put_single(to, of, half_at(of->values, row), at);
    case BOOL: return is_true(of, row) ? put_text(at, "true", 4) : put_text(at, "false", 5);
    CASE_INTEGER: return put_number(to, of, integer_at(of, row), at);
    CASE_TEXT:
    CASE_BYTES: return put_bytes(to, of, row, at);
    case DECIMAL: return put_decimal_text(of, row, at);
    case STRUCT: return put_struct(to, of, row, at);
    case MAP: return put_map(to, of, row, at);
    case VARIANT: return put_variant(to, of, row, at);
    default: return put_list(to, of, row, at);
    }
}

uint8_t *put_json(writer *to, const node *of, int64_t row, uint8_t *at)
{
    const node *value = of;
    int is_there = found(&value, &row);
    if (UNLIKELY(is_there < 0))
        return refused(to, of, CORRUPT);
    if (UNLIKELY(to->end - at < ROOM))
        return refused(to, of, FULL);
    if (is_there > 0)
        return put_value_at(to, value, row, at);
    return of->null_branch == REQUIRED ? refused(to, of, IS_NULL) : put_text(at, "null", 4);
}
