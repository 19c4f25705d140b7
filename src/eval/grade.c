/* Grading generated answers. The rules, stated once and used for both models of a comparison:
 *
 *   answer part   after the first "####" to the end of that line, else the whole stripped text
 *   number        [sign] [currency] digits, digits grouped by commas in threes, optional fraction.
 *                 The sign is "-" or U+2212, and only where no letter, digit or closing bracket
 *                 stands before it (so "10-5" is 10 and 5). A comma, a period or a currency sign
 *                 alone is never a number; markup (**, \$) around a number does not matter.
 *   which number  after the mark the first, without the mark the last
 *   unparsed      the reference is a number and the answer part holds none: wrong, and counted
 *
 * Numbers are kept as canonical decimal text, so equality is exact at any size. */
#include "eval/grade.h"
#include <stdio.h>
#include <string.h>

static bool digit(char c)
{
    return c >= '0' && c <= '9';
}
static bool space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}

static void strip(const char **s, size_t *n)
{
    while (*n && space(**s)) {
        (*s)++;
        (*n)--;
    }
    while (*n && space((*s)[*n - 1]))
        (*n)--;
}

/* Bytes of a minus sign that ends just before s+i: "-" 1, U+2212 3, none 0. */
static size_t minus_before(const char *s, size_t i)
{
    if (i >= 1 && s[i - 1] == '-') return 1;
    if (i >= 3 && !memcmp(s + i - 3, "\xE2\x88\x92", 3)) return 3;
    return 0;
}

static size_t currency_before(const char *s, size_t i)
{
    static const char *const signs[] = {"$", "\xE2\x82\xAC", "\xC2\xA3", "\xC2\xA5"};
    for (size_t k = 0; k < sizeof signs / sizeof *signs; k++) {
        size_t n = strlen(signs[k]);
        if (i >= n && !memcmp(s + i - n, signs[k], n)) {
            size_t j = i - n;
            return n + (j >= 1 && s[j - 1] == '\\' ? 1 : 0);
        }
    }
    return 0;
}

static bool is_negative(const char *s, size_t at)
{
    size_t m = minus_before(s, at), i = at;
    if (!m) {
        i = at - currency_before(s, at);
        m = minus_before(s, i);
    }
    if (!m) return false;
    i -= m;
    if (!i) return true;
    char c = s[i - 1];
    bool word =
        digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == ')' || c == ']';
    return !word;
}

/* Length of the integer part at s: grouped in threes by commas, or plain digits. */
static size_t integer_part(const char *s, size_t n)
{
    size_t i = 0;
    while (i < n && digit(s[i]))
        i++;
    if (i == 0 || i > 3) return i;
    size_t end = i;
    while (end + 3 < n && s[end] == ',' && digit(s[end + 1]) && digit(s[end + 2]) &&
           digit(s[end + 3]) && !(end + 4 < n && digit(s[end + 4])))
        end += 4;
    return end;
}

/* Writes the canonical text; false when it does not fit (no such answer is sensible). */
static bool canonical(const char *s, size_t int_n, size_t frac_n, bool neg, number *out)
{
    char t[64];
    size_t k = 0;
    if (neg) t[k++] = '-';
    size_t digits_at = k;
    for (size_t i = 0; i < int_n; i++) {
        if (s[i] == ',' || (k == digits_at && s[i] == '0')) continue;
        if (k > 50) return false;
        t[k++] = s[i];
    }
    if (k == digits_at) t[k++] = '0';
    while (frac_n && s[int_n + frac_n] == '0')
        frac_n--;
    if (frac_n) {
        if (k + frac_n + 2 > sizeof t) return false;
        t[k++] = '.';
        memcpy(t + k, s + int_n + 1, frac_n);
        k += frac_n;
    }
    t[k] = 0;
    bool zero = !strcmp(t + digits_at, "0");
    snprintf(out->text, sizeof out->text, "%s", zero ? "0" : t);
    return true;
}

/* The number that starts at or after *pos; moves *pos behind it. */
static bool next_number(const char *s, size_t n, size_t *pos, number *out)
{
    for (size_t i = *pos; i < n; i++) {
        bool lone_fraction = s[i] == '.' && i + 1 < n && digit(s[i + 1]) && !(i && digit(s[i - 1]));
        if (!digit(s[i]) && !lone_fraction) continue;
        size_t int_n = integer_part(s + i, n - i), frac_n = 0, end = i + int_n;
        if (end + 1 < n && s[end] == '.' && digit(s[end + 1]))
            while (end + 1 + frac_n < n && digit(s[end + 1 + frac_n]))
                frac_n++;
        bool ok = canonical(s + i, int_n, frac_n, is_negative(s, i), out);
        *pos = end + (frac_n ? frac_n + 1 : 0);
        if (ok) return true;
        i = *pos - 1;
    }
    *pos = n;
    return false;
}

bool grade_first_number(const char *s, size_t n, number *out)
{
    size_t pos = 0;
    return next_number(s, n, &pos, out);
}

bool grade_last_number(const char *s, size_t n, number *out)
{
    size_t pos = 0;
    number x;
    bool any = false;
    while (next_number(s, n, &pos, &x)) {
        *out = x;
        any = true;
    }
    return any;
}

bool grade_number_equal(const number *a, const number *b)
{
    return !strcmp(a->text, b->text);
}

void grade_answer_part(const char *s, size_t n, const char **part, size_t *len, bool *marked)
{
    const char *at = n >= 4 ? memmem(s, n, "####", 4) : NULL;
    *marked = at != NULL;
    *part = s;
    *len = n;
    if (at) {
        *part = at + 4;
        *len = n - (size_t)(at + 4 - s);
        while (*len && space(**part)) {
            (*part)++;
            (*len)--;
        }
        const char *nl = memchr(*part, '\n', *len);
        if (nl) *len = (size_t)(nl - *part);
    }
    strip(part, len);
}

/* Is the whole reference one number (with currency, sign or a period around it)? */
static bool reference_number(const char *s, size_t n, number *out)
{
    size_t pos = 0, rest = 0;
    number more;
    if (!next_number(s, n, &pos, out)) return false;
    rest = pos;
    if (next_number(s, n, &pos, &more)) return false;
    for (size_t i = rest; i < n; i++)
        if ((s[i] >= 'a' && s[i] <= 'z') || (s[i] >= 'A' && s[i] <= 'Z') ||
            (unsigned char)s[i] >= 0x80)
            return false;
    for (size_t i = 0; i < n && !digit(s[i]); i++)
        if ((s[i] >= 'a' && s[i] <= 'z') || (s[i] >= 'A' && s[i] <= 'Z')) return false;
    return true;
}

static void keep(grade *g, const char *s, size_t n)
{
    size_t k = n < sizeof g->answer - 1 ? n : sizeof g->answer - 1;
    while (k && k < n && ((unsigned char)s[k] & 0xC0) == 0x80)
        k--; /* not in the middle of a character */
    memcpy(g->answer, s, k);
    g->answer[k] = 0;
}

void grade_generate(const char *text, size_t n, const char *reference, grade *out)
{
    const char *ref, *part;
    size_t ref_n, len;
    bool ref_marked, marked;
    number want, got;
    *out = (grade){0};
    grade_answer_part(reference, strlen(reference), &ref, &ref_n, &ref_marked);
    grade_answer_part(text, n, &part, &len, &marked);
    if (reference_number(ref, ref_n, &want)) {
        bool found =
            marked ? grade_first_number(part, len, &got) : grade_last_number(part, len, &got);
        if (!found) {
            out->unparsed = true;
            keep(out, part, len);
            return;
        }
        keep(out, got.text, strlen(got.text));
        out->correct = grade_number_equal(&want, &got);
        return;
    }
    keep(out, part, len);
    out->unparsed = len == 0;
    if (len && part[len - 1] == '.') len--;
    if (ref_n && ref[ref_n - 1] == '.') ref_n--;
    out->correct = len == ref_n && len > 0 && !memcmp(part, ref, len);
}

void grade_code_block(const char *text, size_t n, buf *out)
{
    const char *end = text + n;
    const char *fence = n >= 3 ? memmem(text, n, "```", 3) : NULL;
    if (!fence) {
        const char *done = n >= 6 ? memmem(text, n, "[DONE]", 6) : NULL;
        buf_add(out, text, done ? (size_t)(done - text) : n);
        return;
    }
    const char *body = memchr(fence, '\n', (size_t)(end - fence));
    if (!body) return;
    body++;
    const char *close = memmem(body, (size_t)(end - body), "```", 3);
    buf_add(out, body, (size_t)((close ? close : end) - body));
}
