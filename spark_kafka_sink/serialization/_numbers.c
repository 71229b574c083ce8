/* Numbers as text, in the form of Java's Double.toString, Float.toString and BigDecimal.toString.
 *
 * The digits are the fewest that lead back to the same number, and among those the nearest to it; as in Java 19 and later
 * at least two are considered, so the smallest double is 4.9E-324. The method is Schubfach (Raffaello Giulietti, "The
 * Schubfach way to render doubles"): the number and the bounds of its interval are multiplied by a power of ten, and
 * rounded to odd. `powers` has the powers of ten from 10^-292 to 10^324 as 128 bits: see powers_of_ten in plan.py.
 */
#include "_columns.h"

enum { LEAST_POWER = -292 };

static const char PAIRS[] = "00010203040506070809101112131415161718192021222324252627282930313233343536373839404142434445464748495051525354555657"
                            "58596061626364656667686970717273747576777879808182838485868788899091929394959697989900";

static inline int digits_of(uint64_t number)
{
    int digits = 1;
    for (; number >= 10000; number /= 10000)
        digits += 4;
    return digits + (number >= 10) + (number >= 100) + (number >= 1000);
}

/* Writes exactly `digits` digits. */
static inline uint8_t *put_padded(uint8_t *at, uint64_t number, int digits)
{
    uint8_t *end = at + digits;
    for (uint8_t *to = end; digits > 0; digits -= 2, number /= 100) {
        const char *pair = PAIRS + 2 * (number % 100);
        *--to = (uint8_t)pair[1];
        if (digits > 1)
            *--to = (uint8_t)pair[0];
    }
    return end;
}

uint8_t *put_digits(uint8_t *at, uint64_t number) { return put_padded(at, number, digits_of(number)); }

/* ---- products of 64 bits --------------------------------------------------------------------------------------- */

/* The high 64 bits of a product, and the low ones. */
static inline uint64_t multiplied(uint64_t one, uint64_t other, uint64_t *low)
{
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)one * other;
    *low = (uint64_t)product;
    return (uint64_t)(product >> 64);
#else
    uint64_t one_low = (uint32_t)one, one_high = one >> 32, other_low = (uint32_t)other, other_high = other >> 32;
    uint64_t lowest = one_low * other_low, left = one_high * other_low, right = one_low * other_high;
    uint64_t middle = (lowest >> 32) + (uint32_t)left + (uint32_t)right;
    *low = middle << 32 | (uint32_t)lowest;
    return one_high * other_high + (left >> 32) + (right >> 32) + (middle >> 32);
#endif
}

/* The product of a power of ten and a number, without its last 128 bits. Its lowest bit says whether they were not 0; the
 * power may be too large by one unit, which the comparison with 1 takes into account. */
static inline uint64_t rounded_to_odd(const uint8_t *power, uint64_t number)
{
    uint64_t low, ignored;
    uint64_t carried = multiplied(u64_at(power, 0), number, &ignored);
    uint64_t high = multiplied(u64_at(power, 1), number, &low);
    low += carried;
    high += low < carried;
    return high | (low > 1);
}

static inline int64_t shifted(int64_t number, int bits) /* rounds down */
{
    return number >= 0 ? number >> bits : ~(~number >> bits);
}

/* ---- the digits ------------------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t digits;
    int exponent; /* the number is digits * 10^exponent */
} decimal;

/* The decimal of mantissa * 2^exponent. `is_even`: the bounds of the interval belong to it. `is_edge`: the number below is
 * only half as far away as the one above. `is_tiny`: the mantissa was multiplied by ten. */
static decimal shortest(uint64_t mantissa, int exponent, int is_even, int is_edge, int is_tiny, const uint8_t *powers)
{
    int ten = (int)shifted((int64_t)exponent * 1262611 - (is_edge ? 524031 : 0), 22); /* log10(2^e), or of 3/4 of it */
    int shift = exponent + (int)shifted(-(int64_t)ten * 1741647, 19) + 1;             /* with log2(10^-ten) */
    const uint8_t *power = powers + 16 * (-ten - LEAST_POWER);
    uint64_t low = rounded_to_odd(power, (4 * mantissa - 2 + (uint64_t)is_edge) << shift) + !is_even;
    uint64_t middle = rounded_to_odd(power, 4 * mantissa << shift);
    uint64_t high = rounded_to_odd(power, (4 * mantissa + 2) << shift) - !is_even;
    uint64_t digits = middle / 4;
    if (digits >= 100) {
        uint64_t fewer = digits / 10;
        int is_below = low <= 40 * fewer, is_above = 40 * fewer + 40 <= high;
        if (is_below != is_above)
            return (decimal){fewer + (uint64_t)is_above, ten + 1 - is_tiny};
    }
    int is_below = low <= 4 * digits, is_above = 4 * digits + 4 <= high;
    uint64_t half = 4 * digits + 2;
    if (is_below != is_above)
        digits += (uint64_t)is_above;
    else
        digits += middle > half || (middle == half && (digits & 1));
    return (decimal){digits, ten - is_tiny};
}

static inline decimal without_zeros(decimal of)
{
    while (of.digits % 10000 == 0) {
        of.digits /= 10000;
        of.exponent += 4;
    }
    while (of.digits % 10 == 0) {
        of.digits /= 10;
        of.exponent++;
    }
    return of;
}

/* At least 10^-3 and below 10^7: as 0.001 and 1234.5. Others: as 1.0E7 and 1.5E-4. */
static uint8_t *put_decimal_number(uint8_t *at, decimal of)
{
    of = without_zeros(of);
    int count = digits_of(of.digits), point = count + of.exponent;
    if (point > 7 || point <= -3) {
        uint8_t *first = at;
        at = put_padded(at + 1, of.digits, count);
        first[0] = first[1];
        first[1] = '.';
        if (count == 1)
            *at++ = '0';
        *at++ = 'E';
        if (point < 1)
            *at++ = '-';
        return put_digits(at, (uint64_t)(point > 1 ? point - 1 : 1 - point));
    }
    if (point <= 0) {
        memcpy(at, "0.00", 4);
        return put_padded(at + 2 - point, of.digits, count);
    }
    if (of.exponent >= 0) {
        at = put_padded(at, of.digits, count);
        for (; of.exponent > 0; of.exponent--)
            *at++ = '0';
        memcpy(at, ".0", 2);
        return at + 2;
    }
    uint8_t *end = put_padded(at + 1, of.digits, count);
    memmove(at, at + 1, (size_t)point);
    at[point] = '.';
    return end;
}

static uint8_t *put_name(uint8_t *at, const char *name, size_t length, int quoted)
{
    if (quoted)
        *at++ = '"';
    memcpy(at, name, length);
    at += length;
    if (quoted)
        *at++ = '"';
    return at;
}

/* Infinity or NaN. */
static uint8_t *put_unusual(uint8_t *at, int is_nan, int is_negative, int quoted)
{
    if (is_nan)
        return put_name(at, "NaN", 3, quoted);
    return is_negative ? put_name(at, "-Infinity", 9, quoted) : put_name(at, "Infinity", 8, quoted);
}

uint8_t *put_double(uint8_t *at, double number, const uint8_t *powers, int quoted)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint64_t hidden = (uint64_t)1 << 52;
    uint64_t rest = bits & (hidden - 1);
    int exponent = (int)(bits >> 52 & 2047), is_negative = (int)(bits >> 63);
    if (UNLIKELY(exponent == 2047))
        return put_unusual(at, rest != 0, is_negative, quoted);
    if (is_negative)
        *at++ = '-';
    if (number > -1e7 && number < 1e7 && (double)(int64_t)number == number) {
        at = put_digits(at, (uint64_t)(int64_t)(is_negative ? -number : number));
        memcpy(at, ".0", 2);
        return at + 2;
    }
    int is_tiny = exponent == 0 && rest < 3;
    uint64_t mantissa = exponent == 0 ? (is_tiny ? 10 * rest : rest) : hidden | rest;
    int is_edge = rest == 0 && exponent > 1;
    exponent = (exponent == 0 ? 1 : exponent) - 1075;
    return put_decimal_number(at, shortest(mantissa, exponent, !(mantissa & 1), is_edge, is_tiny, powers));
}

uint8_t *put_float(uint8_t *at, float number, const uint8_t *powers, int quoted)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint32_t hidden = (uint32_t)1 << 23;
    uint32_t rest = bits & (hidden - 1);
    int exponent = (int)(bits >> 23 & 255), is_negative = (int)(bits >> 31);
    if (UNLIKELY(exponent == 255))
        return put_unusual(at, rest != 0, is_negative, quoted);
    if (is_negative)
        *at++ = '-';
    if (number > -1e7f && number < 1e7f && (float)(int64_t)number == number) {
        at = put_digits(at, (uint64_t)(int64_t)(is_negative ? -number : number));
        memcpy(at, ".0", 2);
        return at + 2;
    }
    int is_tiny = exponent == 0 && rest < 8;
    uint64_t mantissa = exponent == 0 ? (is_tiny ? 10 * rest : rest) : hidden | rest;
    int is_edge = rest == 0 && exponent > 1;
    exponent = (exponent == 0 ? 1 : exponent) - 150;
    return put_decimal_number(at, shortest(mantissa, exponent, !(mantissa & 1), is_edge, is_tiny, powers));
}

/* ---- decimals --------------------------------------------------------------------------------------------------- */

uint8_t *put_long_digits(uint8_t *at, uint64_t high, uint64_t low)
{
    if (high == 0)
        return put_digits(at, low);
    uint32_t limbs[4] = {(uint32_t)(high >> 32), (uint32_t)high, (uint32_t)(low >> 32), (uint32_t)low};
    uint8_t digits[45], *first = digits + sizeof digits;
    for (int group = 0; group < 5; group++) { /* 9 digits each, the last first */
        uint64_t rest = 0;
        for (int limb = 0; limb < 4; limb++) {
            rest = rest << 32 | limbs[limb];
            limbs[limb] = (uint32_t)(rest / 1000000000);
            rest %= 1000000000;
        }
        for (int digit = 0; digit < 9; digit++, rest /= 10)
            *--first = (uint8_t)('0' + rest % 10);
    }
    while (*first == '0')
        first++;
    size_t count = (size_t)(digits + sizeof digits - first);
    memcpy(at, first, count);
    return at + count;
}

uint8_t *put_point(uint8_t *first, uint8_t *at, int64_t scale)
{
    int64_t count = at - first, zeros = scale - count + 1; /* before the digits, so that one stands before the point */
    if (zeros > 0) {
        memmove(first + zeros, first, (size_t)count);
        memset(first, '0', (size_t)zeros);
        at += zeros;
    }
    memmove(at - scale + 1, at - scale, (size_t)scale);
    at[-scale] = '.';
    return at + 1;
}

/* BigDecimal.toString. */
uint8_t *put_decimal_text(const node *of, int64_t row, uint8_t *at)
{
    int64_t high, scale = of->other;
    uint64_t low;
    decimal_at(of, row, &high, &low);
    if (high < 0) {
        *at++ = '-';
        low = 0 - low;
        high = (int64_t)(~(uint64_t)high + (low == 0));
    }
    uint8_t *first = at;
    at = put_long_digits(at, (uint64_t)high, low);
    int64_t count = at - first, exponent = count - 1 - scale;
    if (scale == 0)
        return at;
    if (scale > 0 && exponent >= -6)
        return put_point(first, at, scale);
    if (count > 1) {
        memmove(first + 2, first + 1, (size_t)count - 1);
        first[1] = '.';
        at++;
    }
    if (exponent != 0) {
        *at++ = 'E';
        *at++ = exponent < 0 ? '-' : '+';
        at = put_digits(at, (uint64_t)(exponent < 0 ? -exponent : exponent));
    }
    return at;
}
