/* Values with Python's meaning: truth, equality, order, printing, slices, dictionaries.
 *
 * A value is 24 bytes and is copied freely; what it points to lives in the render's arena or in
 * the template's. Strings are UTF-8 and are counted in code points, as Python does. Dictionaries
 * keep insertion order: two parallel arrays, and above 8 entries a hash index of entry numbers.
 * Keys compare as Python's do: 1 == 1.0 == True. An integer beyond 64 bits (J_BIG) is its decimal
 * digits: it can be printed, compared and be a key, and nothing computes with it.
 *
 * Printing and comparing walk shared values again and again, so both take steps, and printing asks
 * for room: a list that holds itself twice, twenty levels deep, ends in an error and not in a
 * full memory. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

jv j_undef(const char *name)
{
    return (jv){.t = J_UNDEF, .s = name};
}

jv j_none(void)
{
    return (jv){.t = J_NONE};
}

jv j_bool(bool b)
{
    return (jv){.t = J_BOOL, .b = b};
}

jv j_int(int64_t i)
{
    return (jv){.t = J_INT, .i = i};
}

jv j_float(double f)
{
    return (jv){.t = J_FLOAT, .f = f};
}

jv j_str(const char *s, size_t n)
{
    return (jv){.t = J_STR, .n = n, .s = s};
}

jv j_strz(const char *s)
{
    return j_str(s, strlen(s));
}

jv j_copy(jrun *r, const char *s, size_t n)
{
    char *p = j_alloc(r, n + 1);
    if (n) memcpy(p, s, n);
    return j_str(p, n);
}

jv j_take(jrun *r, buf *b)
{
    jv v = j_copy(r, b->data, b->len);
    buf_free(b);
    return v;
}

jv j_list(jrun *r, size_t cap)
{
    jlist *l = j_alloc(r, sizeof(*l));
    if (cap) l->v = j_alloc(r, cap * sizeof(jv));
    l->cap = cap;
    return (jv){.t = J_LIST, .list = l};
}

void j_push(jrun *r, jlist *l, jv v)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 8;
        jv *grown = j_alloc(r, cap * sizeof(jv));
        if (l->n) memcpy(grown, l->v, l->n * sizeof(jv));
        l->v = grown;
        l->cap = cap;
    }
    l->v[l->n++] = v;
}

/* ---- dictionaries ---- */

static uint32_t hash_bytes(const void *p, size_t n)
{
    const uint8_t *s = p;
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ s[i]) * 16777619u;
    return h ^ (h >> 15);
}

jv j_int_text(jrun *r, const char *s, size_t n)
{
    bool minus = n && s[0] == '-';
    const char *p = s + (n && (s[0] == '-' || s[0] == '+')), *end = s + n;
    int64_t v = 0;
    while (p + 1 < end && *p == '0')
        p++;
    for (const char *d = p; d < end; d++) {
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_sub_overflow(v, *d - '0', &v)) {
            char *text = j_alloc(r, (size_t)(end - p) + 2);
            text[0] = '-';
            memcpy(text + minus, p, (size_t)(end - p));
            return (jv){.t = J_BIG, .n = (size_t)(end - p) + minus, .s = text};
        }
    }
    if (minus) return j_int(v);
    if (v != INT64_MIN) return j_int(-v);
    return (jv){.t = J_BIG, .n = 19, .s = "9223372036854775808"};
}

jv j_range(jrun *r, int64_t start, int64_t stop, int64_t step)
{
    jv v = j_list(r, 0);
    for (int64_t x = start; step > 0 ? x < stop : x > stop;) {
        j_push(r, v.list, j_int(x));
        if (__builtin_add_overflow(x, step, &x)) break;
    }
    v.t = J_SEQ;
    v.list->kind = J_RANGE;
    v.list->range[0] = start;
    v.list->range[1] = stop;
    v.list->range[2] = step;
    return v;
}

static long double number(jv v) /* holds every int64_t and double exactly */
{
    return v.t == J_FLOAT ? (long double)v.f : v.t == J_BOOL ? v.b : (long double)v.i;
}

static uint32_t hash_key(jv k)
{
    if (k.t == J_STR) return hash_bytes(k.s, k.n);
    if (j_is_num(k)) {
        double f = (double)number(k) + 0.0;
        return hash_bytes(&f, sizeof(f));
    }
    return k.t == J_BIG ? hash_bytes(k.s, k.n) : k.t;
}

static bool same_num(jv a, jv b)
{
    if (a.t == J_FLOAT || b.t == J_FLOAT) return number(a) == number(b);
    return (a.t == J_BOOL ? a.b : a.i) == (b.t == J_BOOL ? b.b : b.i);
}

static bool same_key(jv a, jv b)
{
    if (a.t == J_STR || a.t == J_BIG) return b.t == a.t && a.n == b.n && !memcmp(a.s, b.s, a.n);
    if (j_is_num(a)) return j_is_num(b) && same_num(a, b);
    if (a.t != b.t) return false;
    if (a.t == J_SEQ && a.list->kind == J_RANGE && b.list->kind == J_RANGE)
        return a.list->n == b.list->n && (!a.list->n || (same_num(a.list->v[0], b.list->v[0]) &&
                                                         a.list->range[2] == b.list->range[2]));
    if (a.t == J_TUPLE) {
        if (a.list->n != b.list->n) return false;
        for (size_t i = 0; i < a.list->n; i++)
            if (!same_key(a.list->v[i], b.list->v[i])) return false;
        return true;
    }
    return a.t == J_NONE || a.t == J_UNDEF || a.s == b.s; /* the same object */
}

static bool hashable_at(jv v, int depth)
{
    if (v.t == J_TUPLE) {
        for (size_t i = 0; i < v.list->n; i++)
            if (depth > 4 || !hashable_at(v.list->v[i], depth + 1)) return false;
        return true;
    }
    return v.t != J_LIST && v.t != J_DICT &&
           !(v.t == J_SEQ && (v.list->kind == J_KEYS || v.list->kind == J_ITEMS));
}

/* Values that cannot change or that are equal to themselves only; tuples five deep at most. */
bool j_hashable(jv v)
{
    return hashable_at(v, 0);
}

jv j_dict(jrun *r)
{
    return (jv){.t = J_DICT, .dict = j_alloc(r, sizeof(jdict))};
}

/* Entry number + 1 of key, 0 when absent. */
static size_t dict_find(const jdict *d, jv key)
{
    if (!d->index) {
        for (size_t i = 0; i < d->n; i++)
            if (same_key(d->keys[i], key)) return i + 1;
        return 0;
    }
    size_t mask = d->index_cap - 1;
    for (size_t h = hash_key(key) & mask; d->index[h]; h = (h + 1) & mask)
        if (same_key(d->keys[d->index[h] - 1], key)) return d->index[h];
    return 0;
}

static void index_add(jdict *d, size_t entry)
{
    size_t mask = d->index_cap - 1, h = hash_key(d->keys[entry]) & mask;
    while (d->index[h])
        h = (h + 1) & mask;
    d->index[h] = (uint32_t)(entry + 1);
}

void j_dict_set(jrun *r, jdict *d, jv key, jv v)
{
    size_t at = dict_find(d, key);
    if (at) {
        d->vals[at - 1] = v;
        return;
    }
    if (d->n == d->cap) {
        size_t cap = d->cap ? d->cap * 2 : 8;
        jv *keys = j_alloc(r, cap * sizeof(jv)), *vals = j_alloc(r, cap * sizeof(jv));
        if (d->n) {
            memcpy(keys, d->keys, d->n * sizeof(jv));
            memcpy(vals, d->vals, d->n * sizeof(jv));
        }
        d->keys = keys;
        d->vals = vals;
        d->cap = cap;
        if (cap > 8) {
            d->index_cap = cap * 2;
            d->index = j_alloc(r, d->index_cap * sizeof(uint32_t));
            for (size_t i = 0; i < d->n; i++)
                index_add(d, i);
        }
    }
    d->keys[d->n] = key;
    d->vals[d->n++] = v;
    if (d->index) index_add(d, d->n - 1);
}

bool j_dict_get(const jdict *d, jv key, jv *out)
{
    size_t at = j_hashable(key) ? dict_find(d, key) : 0;
    if (at) *out = d->vals[at - 1];
    return at != 0;
}

bool j_dict_gets(const jdict *d, const char *s, size_t n, jv *out)
{
    return j_dict_get(d, j_str(s, n), out);
}

/* ---- predicates ---- */

bool j_is_num(jv v)
{
    return v.t == J_BOOL || v.t == J_INT || v.t == J_FLOAT;
}

bool j_is_int(jv v)
{
    return v.t == J_INT || v.t == J_BOOL;
}

bool j_is_str(jv v, const char *s)
{
    return v.t == J_STR && v.n == strlen(s) && !memcmp(v.s, s, v.n);
}

bool j_truth(jv v)
{
    switch (v.t) {
    case J_UNDEF:
    case J_NONE:
        return false;
    case J_BOOL:
        return v.b;
    case J_INT:
        return v.i != 0;
    case J_FLOAT:
        return v.f != 0;
    case J_STR:
        return v.n != 0;
    case J_LIST:
    case J_TUPLE:
    case J_SEQ:
        return v.list->n != 0;
    case J_DICT:
        return v.dict->n != 0;
    case J_LOOP:
        return v.loop->items->n != 0;
    default:
        return true;
    }
}

const char *j_type_name(jv v)
{
    static const char *const names[] = {
        "undefined", "None",      "bool",     "int",  "float",     "str",    "list", "tuple",
        "dict",      "namespace", "function", "loop", "generator", "cycler", "int",  "sequence"};
    return names[v.t];
}

static int equal_at(jrun *r, jv a, jv b, int depth, bool *out);

/* Ranges are equal by their numbers, keys and items as sets, values by being the same object. */
static int equal_seq(jrun *r, jlist *a, jlist *b, int depth, bool *out)
{
    int rc = 0;
    *out = a == b;
    if (a->kind != b->kind || a->kind == J_VALUES || a->n != b->n) return 0;
    *out = true;
    for (size_t i = 0; i < a->n && *out; i++) {
        size_t k = a->kind == J_RANGE ? i : 0, end = a->kind == J_RANGE ? i + 1 : b->n;
        for (*out = false; k < end && !*out; k++)
            if ((rc = equal_at(r, a->v[i], b->v[k], depth + 1, out)) < 0) return rc;
    }
    return 0;
}

static int equal_at(jrun *r, jv a, jv b, int depth, bool *out)
{
    int rc = j_step(r);
    if (rc < 0) return rc;
    if (depth > J_MAX_NEST)
        return j_limit(r, "values nested deeper than the limit of %d", J_MAX_NEST);
    *out = false;
    if (j_is_num(a) || j_is_num(b)) {
        *out = j_is_num(a) && j_is_num(b) && same_num(a, b);
    } else if (a.t != b.t) {
        *out = false;
    } else if (a.t == J_STR || a.t == J_BIG) {
        *out = same_key(a, b);
        return j_work(r, *out ? a.n : 0);
    } else if (a.t == J_SEQ) {
        return equal_seq(r, a.list, b.list, depth, out);
    } else if (a.t == J_LIST || a.t == J_TUPLE) {
        bool same = a.list->n == b.list->n;
        for (size_t i = 0; same && i < a.list->n; i++)
            if ((rc = equal_at(r, a.list->v[i], b.list->v[i], depth + 1, &same)) < 0) return rc;
        *out = same;
    } else if (a.t == J_DICT) {
        bool same = a.dict->n == b.dict->n;
        for (size_t i = 0; same && i < a.dict->n; i++) {
            jv other;
            same = j_dict_get(b.dict, a.dict->keys[i], &other);
            if (same && (rc = equal_at(r, a.dict->vals[i], other, depth + 1, &same)) < 0) return rc;
        }
        *out = same;
    } else if (a.t == J_UNDEF || a.t == J_NONE) {
        *out = true;
    } else {
        *out = a.s == b.s; /* the same object */
    }
    return 0;
}

int j_equal(jrun *r, jv a, jv b, bool *out)
{
    return equal_at(r, a, b, 0, out);
}

/* An integer beyond 64 bits against any number. */
static int less_big(jrun *r, jv a, jv b, bool *out)
{
    bool minus_a = a.t == J_BIG && a.s[0] == '-', minus_b = b.t == J_BIG && b.s[0] == '-';
    if (a.t == J_FLOAT || b.t == J_FLOAT)
        return j_limit(r, "integers above the limit of 64 bits do not compare with floats");
    if (a.t != J_BIG || b.t != J_BIG) {
        *out = a.t == J_BIG ? minus_a : !minus_b;
        return 0;
    }
    if (minus_a != minus_b) {
        *out = minus_a;
        return 0;
    }
    int c = a.n != b.n ? (a.n < b.n ? -1 : 1) : memcmp(a.s, b.s, a.n);
    *out = minus_a ? c > 0 : c < 0;
    return 0;
}

static int less_at(jrun *r, jv a, jv b, int depth, bool *out)
{
    int rc = j_step(r);
    if (rc < 0) return rc;
    if (j_is_num(a) && j_is_num(b)) {
        if (a.t == J_FLOAT || b.t == J_FLOAT)
            *out = number(a) < number(b); /* false for NaN */
        else
            *out = (a.t == J_BOOL ? a.b : a.i) < (b.t == J_BOOL ? b.b : b.i);
        return 0;
    }
    if ((a.t == J_BIG && (b.t == J_BIG || j_is_num(b))) || (b.t == J_BIG && j_is_num(a)))
        return less_big(r, a, b, out);
    if (a.t == J_SEQ && b.t == J_SEQ && a.list->kind != J_RANGE && b.list->kind != J_RANGE)
        return j_fail(r, "an order of dictionaries' keys is not supported");
    if (a.t == J_STR && b.t == J_STR) { /* UTF-8 bytes order as code points do */
        size_t n = a.n < b.n ? a.n : b.n;
        int c = n ? memcmp(a.s, b.s, n) : 0;
        *out = c < 0 || (c == 0 && a.n < b.n);
        return 0;
    }
    if (a.t == b.t && (a.t == J_LIST || a.t == J_TUPLE) && depth < J_MAX_NEST) {
        size_t n = a.list->n < b.list->n ? a.list->n : b.list->n;
        for (size_t i = 0; i < n; i++) {
            bool same;
            if ((rc = equal_at(r, a.list->v[i], b.list->v[i], depth, &same)) < 0) return rc;
            if (!same) return less_at(r, a.list->v[i], b.list->v[i], depth + 1, out);
        }
        *out = a.list->n < b.list->n;
        return 0;
    }
    if (a.t == J_UNDEF || b.t == J_UNDEF)
        return j_fail(r, "'%s' is undefined",
                      (a.t == J_UNDEF ? a.s : b.s) ? (a.t == J_UNDEF ? a.s : b.s) : "value");
    return j_fail(r, "cannot order %s and %s", j_type_name(a), j_type_name(b));
}

int j_less(jrun *r, jv a, jv b, bool *out)
{
    return less_at(r, a, b, 0, out);
}

/* The end of a generator: what went wrong while it was made goes wrong now. */
static int spent(jrun *r, jv gen)
{
    if (!gen.list->fail) return 0;
    return err_set(r->e, ERR_VALUE, "%s", gen.list->fail);
}

int j_contains(jrun *r, jv box, jv x, bool *out)
{
    int rc = 0;
    jv ignored;
    *out = false;
    switch (box.t) {
    case J_STR:
        if (x.t != J_STR) return j_fail(r, "'in <str>' needs a string, not %s", j_type_name(x));
        *out = x.n == 0 || (x.n <= box.n && memmem(box.s, box.n, x.s, x.n) != NULL);
        return j_work(r, box.n);
    case J_DICT:
        if (!j_hashable(x)) return j_fail(r, "%s cannot be a key", j_type_name(x));
        *out = j_dict_get(box.dict, x, &ignored);
        return 0;
    case J_SEQ:
        if (box.list->kind == J_KEYS && !j_hashable(x))
            return j_fail(r, "%s cannot be a key", j_type_name(x));
        /* fall through */
    case J_LIST:
    case J_TUPLE:
        for (size_t i = 0; i < box.list->n && !*out && rc >= 0; i++)
            rc = j_equal(r, box.list->v[i], x, out);
        return rc;
    case J_GEN:
        while (box.list->at < box.list->n && !*out && rc >= 0)
            rc = j_equal(r, box.list->v[box.list->at++], x, out);
        return rc < 0 || *out ? rc : spent(r, box);
    case J_UNDEF:
        return 0;
    default:
        return j_fail(r, "a value of type %s cannot be searched with 'in'", j_type_name(box));
    }
}

int j_iter(jrun *r, jv v, jlist **out)
{
    int rc;
    jv l;
    switch (v.t) {
    case J_LIST:
    case J_TUPLE:
    case J_SEQ:
        *out = v.list;
        return 0;
    case J_GEN:
        l = j_list(r, 0);
        if (v.list->n) l.list->v = v.list->v + v.list->at;
        l.list->n = l.list->cap = v.list->n - v.list->at;
        v.list->at = v.list->n;
        *out = l.list;
        return spent(r, v);
    case J_UNDEF:
        *out = j_list(r, 0).list;
        return 0;
    case J_DICT:
        l = j_list(r, v.dict->n);
        for (size_t i = 0; i < v.dict->n; i++)
            j_push(r, l.list, v.dict->keys[i]);
        *out = l.list;
        return 0;
    case J_STR:
        if ((rc = j_room(r, v.n * sizeof(jv))) < 0 || (rc = j_work(r, v.n)) < 0) return rc;
        l = j_list(r, j_chars(v));
        for (size_t i = 0, k; i < v.n; i += k) {
            uint32_t cp;
            int used = utf8_decode(v.s + i, v.n - i, &cp);
            k = used > 0 ? (size_t)used : 1;
            j_push(r, l.list, j_str(v.s + i, k));
        }
        *out = l.list;
        return 0;
    default:
        return j_fail(r, "a value of type %s cannot be iterated", j_type_name(v));
    }
}

int j_length(jrun *r, jv v, int64_t *out)
{
    switch (v.t) {
    case J_UNDEF:
        *out = 0;
        return 0;
    case J_STR:
        *out = (int64_t)j_chars(v);
        return j_work(r, v.n);
    case J_LOOP:
        *out = (int64_t)v.loop->items->n;
        return 0;
    case J_LIST:
    case J_TUPLE:
    case J_SEQ:
        *out = (int64_t)v.list->n;
        return 0;
    case J_DICT:
        *out = (int64_t)v.dict->n;
        return 0;
    default:
        return j_fail(r, "a value of type %s has no length", j_type_name(v));
    }
}

/* ---- printing ---- */

/* Python's repr(float): the shortest digits that read back equal, exponent below 1e-4 and from
 * 1e16 on, ".0" for whole numbers. */
void j_print_float(buf *b, double f)
{
    char s[40];
    if (isnan(f) || isinf(f)) {
        buf_puts(b, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    int digits = 1;
    for (; digits <= 17; digits++) {
        snprintf(s, sizeof(s), "%.*e", digits - 1, f);
        if (strtod(s, NULL) == f) break;
    }
    const char *exp_at = strchr(s, 'e');
    int e = exp_at ? (int)strtol(exp_at + 1, NULL, 10) : 0;
    if (e < -4 || e >= 16) {
        buf_add(b, s, (size_t)(exp_at - s));
        buf_printf(b, "e%c%02d", e < 0 ? '-' : '+', abs(e));
        return;
    }
    int places = digits - 1 - e;
    buf_printf(b, "%.*f", places > 0 ? places : 1, f);
}

static void escaped_char(buf *b, uint32_t cp)
{
    buf_printf(b, cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x", cp);
}

jv j_ascii(jrun *r, jv s)
{
    buf b = {0};
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (cp < 0x80)
            buf_putc(&b, s.s[i]);
        else
            escaped_char(&b, cp);
        i += (size_t)(k > 0 ? k : 1);
    }
    return j_take(r, &b);
}

static void repr_char(buf *b, const char *s, int k, uint32_t cp, char quote)
{
    if (cp >= ' ' && cp < 0x7f && cp != '\\' && cp != (uint32_t)quote)
        buf_putc(b, (char)cp);
    else if (cp == '\n')
        buf_puts(b, "\\n");
    else if (cp == '\r')
        buf_puts(b, "\\r");
    else if (cp == '\t')
        buf_puts(b, "\\t");
    else if (cp == '\\' || cp == (uint32_t)quote)
        buf_printf(b, "\\%c", (char)cp);
    else if (!j_is(cp, J_IS_PRINTABLE))
        escaped_char(b, cp);
    else
        buf_add(b, s, (size_t)(k > 0 ? k : 1));
}

static void repr_str(buf *b, jv v)
{
    bool single = v.n && memchr(v.s, '\'', v.n), dbl = v.n && memchr(v.s, '"', v.n);
    char quote = single && !dbl ? '"' : '\'';
    buf_putc(b, quote);
    for (size_t i = 0; i < v.n;) {
        uint32_t cp = 0;
        int k = utf8_decode(v.s + i, v.n - i, &cp);
        repr_char(b, v.s + i, k, cp, quote);
        i += (size_t)(k > 0 ? k : 1);
    }
    buf_putc(b, quote);
}

static int repr_items(jrun *r, buf *b, jv v, int depth)
{
    bool dict = v.t == J_DICT;
    size_t n = dict ? v.dict->n : v.list->n;
    buf_putc(b, v.t == J_LIST ? '[' : dict ? '{' : '(');
    for (size_t i = 0; i < n; i++) {
        int rc = 0;
        if (i) buf_puts(b, ", ");
        if (dict) {
            if ((rc = j_repr(r, b, v.dict->keys[i], depth + 1)) < 0) return rc;
            buf_puts(b, ": ");
        }
        if ((rc = j_repr(r, b, dict ? v.dict->vals[i] : v.list->v[i], depth + 1)) < 0) return rc;
    }
    if (v.t == J_TUPLE && n == 1) buf_putc(b, ',');
    buf_putc(b, v.t == J_LIST ? ']' : dict ? '}' : ')');
    return 0;
}

static int repr_seq(jrun *r, buf *b, jv v, int depth)
{
    static const char *const names[] = {"", "range", "dict_keys", "dict_values", "dict_items", ""};
    const jlist *l = v.list;
    buf_printf(b, "%s(", names[l->kind]);
    if (l->kind == J_RANGE) {
        buf_printf(b, "%lld, %lld", (long long)l->range[0], (long long)l->range[1]);
        if (l->range[2] != 1) buf_printf(b, ", %lld", (long long)l->range[2]);
    } else {
        int rc = repr_items(r, b, (jv){.t = J_LIST, .list = v.list}, depth);
        if (rc < 0) return rc;
    }
    buf_putc(b, ')');
    return 0;
}

int j_repr(jrun *r, buf *b, jv v, int depth)
{
    int rc = j_step(r);
    if (rc < 0) return rc;
    if (depth > J_MAX_NEST)
        return j_limit(r, "values nested deeper than the limit of %d", J_MAX_NEST);
    if (b->len > r->max_bytes)
        return j_limit(r, "an output above the limit of %zu bytes", r->max_bytes);
    switch (v.t) {
    case J_UNDEF:
        buf_puts(b, "Undefined");
        return 0;
    case J_NONE:
        buf_puts(b, "None");
        return 0;
    case J_BOOL:
        buf_puts(b, v.b ? "True" : "False");
        return 0;
    case J_INT:
        buf_printf(b, "%lld", (long long)v.i);
        return 0;
    case J_FLOAT:
        j_print_float(b, v.f);
        return 0;
    case J_STR:
        j_slow(r, v.n);
        if (v.safe) buf_puts(b, "Markup(");
        repr_str(b, v);
        if (v.safe) buf_putc(b, ')');
        return 0;
    case J_BIG:
        buf_add(b, v.s, v.n);
        return 0;
    case J_LIST:
    case J_TUPLE:
    case J_DICT:
        return repr_items(r, b, v, depth);
    case J_SEQ:
        return repr_seq(r, b, v, depth);
    case J_LOOP:
        buf_printf(b, "<LoopContext %zu/%zu>", v.loop->index + 1, v.loop->items->n);
        return 0;
    case J_NS:
        buf_puts(b, "<TemplateNamespace ");
        rc = repr_items(r, b, (jv){.t = J_DICT, .dict = v.dict}, depth);
        buf_puts(b, ">");
        return rc;
    default:
        if (v.t == J_FUNC && v.fn->macro)
            buf_printf(b, "<Macro '%s'>", v.fn->name);
        else
            buf_printf(b, "<%s>", j_type_name(v));
        return 0;
    }
}

int j_print(jrun *r, buf *b, jv v)
{
    if (v.t == J_UNDEF) return 0;
    if (v.t != J_STR) return j_repr(r, b, v, 0);
    if (b->len + v.n > r->max_bytes)
        return j_limit(r, "an output above the limit of %zu bytes", r->max_bytes);
    buf_add(b, v.s, v.n);
    return 0;
}

int j_to_str(jrun *r, jv v, jv *out)
{
    buf b = {0};
    if (v.t == J_STR) {
        *out = v;
        return 0;
    }
    int rc = j_print(r, &b, v);
    if (rc >= 0)
        *out = j_take(r, &b);
    else
        buf_free(&b);
    return rc;
}

/* ---- strings ---- */

size_t j_chars(jv s)
{
    size_t k = 0;
    for (size_t i = 0; i < s.n; i++)
        k += ((uint8_t)s.s[i] & 0xc0) != 0x80;
    return k;
}

size_t j_char_at(jv s, size_t i)
{
    size_t at = 0;
    for (; at < s.n; at++)
        if (((uint8_t)s.s[at] & 0xc0) != 0x80 && i-- == 0) break;
    return at;
}

static bool strips(const char *s, size_t k, const char *set, size_t n_set)
{
    uint32_t cp;
    if (!set) return utf8_decode(s, k, &cp) > 0 && j_space(cp);
    return memmem(set, n_set, s, k) != NULL;
}

jv j_strip(jv s, const char *set, size_t n_set, bool left, bool right)
{
    while (left && s.n) {
        size_t k = 1;
        while (k < s.n && ((uint8_t)s.s[k] & 0xc0) == 0x80)
            k++;
        if (!strips(s.s, k, set, n_set)) break;
        s.s += k;
        s.n -= k;
    }
    while (right && s.n) {
        size_t k = 1;
        while (k < s.n && ((uint8_t)s.s[s.n - k] & 0xc0) == 0x80)
            k++;
        if (!strips(s.s + s.n - k, k, set, n_set)) break;
        s.n -= k;
    }
    return s;
}

/* ---- slices ---- */

static int slice_index(jrun *r, jv v, int64_t *out, bool *given)
{
    *given = v.t != J_NONE;
    if (!*given) return 0;
    if (v.t == J_BIG) {
        *out = v.s[0] == '-' ? -INT64_MAX : INT64_MAX;
        return 0;
    }
    if (v.t != J_INT && v.t != J_BOOL) return j_fail(r, "a slice's border must be an integer");
    *out = v.t == J_INT ? v.i : v.b;
    return 0;
}

/* Python's slice.indices(n). */
static void slice_bounds(int64_t n, int64_t step, bool has_lo, int64_t *lo, bool has_hi,
                         int64_t *hi)
{
    int64_t low = step > 0 ? 0 : -1, high = step > 0 ? n : n - 1;
    int64_t *side[2] = {lo, hi};
    bool has[2] = {has_lo, has_hi};
    for (int i = 0; i < 2; i++) {
        int64_t *x = side[i];
        if (!has[i]) {
            *x = (i == 0) == (step > 0) ? low : high;
            if (i == 1 && step > 0) *x = high;
            if (i == 1 && step < 0) *x = low;
            continue;
        }
        if (*x < 0) *x = *x < -n ? low : *x + n;
        if (*x < low) *x = low;
        if (*x > high) *x = high;
    }
}

int j_slice(jrun *r, jv v, jv a, jv b, jv c, jv *out)
{
    int64_t lo = 0, hi = 0, step = 1, n;
    bool has_lo, has_hi, has_step;
    int rc = 0;
    if (v.t == J_UNDEF) return j_fail(r, "'%s' is undefined", v.s ? v.s : "value");
    bool range = v.t == J_SEQ && v.list->kind == J_RANGE;
    if (v.t != J_STR && v.t != J_LIST && v.t != J_TUPLE && !range) {
        return j_fail(r, "a value of type %s cannot be sliced", j_type_name(v));
    }
    TRY(slice_index(r, a, &lo, &has_lo));
    TRY(slice_index(r, b, &hi, &has_hi));
    TRY(slice_index(r, c, &step, &has_step));
    if (step == 0) return j_fail(r, "a slice's step must not be zero");
    if (step > INT32_MAX) step = INT32_MAX;
    if (step < -INT32_MAX) step = -INT32_MAX;
    TRY(j_length(r, v, &n));
    slice_bounds(n, step, has_lo, &lo, has_hi, &hi);
    if (range) {
        int64_t *a0 = v.list->range;
        *out = j_range(r, a0[0] + lo * a0[2], a0[0] + hi * a0[2], a0[2] * step);
        return 0;
    }
    if (v.t == J_STR && step == 1) {
        size_t from = hi > lo ? j_char_at(v, (size_t)lo) : 0;
        jv rest = j_str(v.s + from, v.n - from);
        *out = j_str(rest.s, hi > lo ? j_char_at(rest, (size_t)(hi - lo)) : 0);
        out->safe = v.safe;
        return j_work(r, v.n);
    }
    jlist *from;
    TRY(j_iter(r, v, &from));
    jv l = j_list(r, 0);
    buf text = {0};
    for (int64_t i = lo; step > 0 ? i < hi : i > hi; i += step) {
        jv x = from->v[i];
        if (v.t == J_STR)
            buf_add(&text, x.s, x.n);
        else
            j_push(r, l.list, x);
    }
    l.t = v.t;
    *out = v.t == J_STR ? j_take(r, &text) : l;
    out->safe = v.safe;
out:
    return rc;
}

/* ---- from JSON ---- */

/* cJSON keeps numbers as doubles, and json_parse_exact beside them the text where they differ. */
static jv from_number(jrun *r, const json *x)
{
    double f = x->valuedouble;
    const char *s = x->valuestring;
    if (s && !strpbrk(s, ".eE")) return j_int_text(r, s, strlen(s));
    if (s) return j_float(f);
    return f == floor(f) && fabs(f) < 9007199254740992.0 ? j_int((int64_t)f) : j_float(f);
}

jv j_from_json(jrun *r, const json *x, int depth)
{
    jv v;
    if (!x || cJSON_IsNull(x) || depth > JSON_MAX_DEPTH) return j_none();
    if (cJSON_IsBool(x)) return j_bool(cJSON_IsTrue(x));
    if (cJSON_IsNumber(x)) return from_number(r, x);
    if (cJSON_IsString(x)) return j_strz(x->valuestring);
    if (cJSON_IsArray(x)) {
        v = j_list(r, 0);
        for (const json *k = x->child; k; k = k->next)
            j_push(r, v.list, j_from_json(r, k, depth + 1));
        return v;
    }
    v = j_dict(r);
    for (const json *k = x->child; k; k = k->next)
        j_dict_set(r, v.dict, j_strz(k->string), j_from_json(r, k, depth + 1));
    return v;
}
