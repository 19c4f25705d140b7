/* UTF-8 by the table of Unicode 3.9 (no overlong forms, no surrogates, at most U+10FFFF). */
#include "base/utf8.h"
#include <string.h>

/* Bytes that a valid sequence starting with lead byte c takes; 0 = c cannot lead. */
static int sequence_length(unsigned char c)
{
    if (c < 0x80) return 1;
    if (c < 0xC2) return 0;
    if (c < 0xE0) return 2;
    if (c < 0xF0) return 3;
    return c < 0xF5 ? 4 : 0;
}

/* Range of the second byte after lead c. */
static void second_range(unsigned char c, unsigned char *lo, unsigned char *hi)
{
    *lo = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    *hi = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
}

/* How many of the first n bytes form a valid start of one sequence; *whole says it is complete. */
static size_t sequence_start(const unsigned char *s, size_t n, bool *whole)
{
    *whole = false;
    if (!n) return 0;
    int len = sequence_length(s[0]);
    if (!len) return 0;
    size_t k = 1;
    for (; k < (size_t)len && k < n; k++) {
        unsigned char lo = 0x80, hi = 0xBF;
        if (k == 1) second_range(s[0], &lo, &hi);
        if (s[k] < lo || s[k] > hi) return k;
    }
    *whole = k == (size_t)len;
    return k;
}

int utf8_decode(const char *str, size_t n, uint32_t *cp)
{
    const unsigned char *s = (const unsigned char *)str;
    bool whole;
    size_t k = sequence_start(s, n, &whole);
    if (!whole) return 0;
    static const unsigned char mask[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    uint32_t v = s[0] & mask[k];
    for (size_t i = 1; i < k; i++)
        v = v << 6 | (s[i] & 0x3Fu);
    *cp = v;
    return (int)k;
}

int utf8_encode(uint32_t cp, char out[4])
{
    if (cp > 0x10FFFF || (cp >= 0xD800 && cp <= 0xDFFF)) cp = 0xFFFD; /* never invalid output */
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}

size_t utf8_valid_prefix(const char *str, size_t n)
{
    const unsigned char *s = (const unsigned char *)str;
    size_t i = 0;
    while (i < n) {
        uint64_t word;
        if (n - i >= 8) {
            memcpy(&word, s + i, 8);
            if (!(word & 0x8080808080808080u)) {
                i += 8;
                continue;
            }
        }
        bool whole;
        size_t k = sequence_start(s + i, n - i, &whole);
        if (!whole) return i;
        i += k;
    }
    return n;
}

size_t utf8_complete_prefix(const char *str, size_t n)
{
    const unsigned char *s = (const unsigned char *)str;
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = s[n - back];
        if ((c & 0xC0) == 0x80) continue;
        bool whole;
        size_t k = sequence_start(s + n - back, back, &whole);
        return !whole && k == back ? n - back : n;
    }
    return n;
}

void utf8_add_lossy(buf *b, const char *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        size_t ok = utf8_valid_prefix(s + i, n - i);
        buf_add(b, s + i, ok);
        i += ok;
        if (i == n) break;
        bool whole;
        size_t k = sequence_start((const unsigned char *)s + i, n - i, &whole);
        buf_add(b, "\xEF\xBF\xBD", 3);
        i += k ? k : 1;
    }
}
