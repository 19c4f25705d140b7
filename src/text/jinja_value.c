/* Values with Python's meaning: truth, equality, order, printing, slices, dictionaries.
 *
 * A value is 24 bytes and is copied freely; what it points to lives in the render's arena or in
 * the template's. Strings are UTF-8 and are counted in code points, as Python does. Dictionaries
 * keep insertion order: two parallel arrays, and above 8 entries a hash index of entry numbers.
 * Keys compare as Python's do: 1 == 1.0 == True.
 *
 * Printing and comparing walk shared values again and again, so both take steps, and printing asks
 * for room: a list that holds itself twice, twenty levels deep, ends in an error and not in a
 * full memory. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>
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

static double number(jv v)
{
    return v.t == J_FLOAT ? v.f : v.t == J_BOOL ? (double)v.b : (double)v.i;
}

static uint32_t hash_key(jv k)
{
    if (k.t == J_STR) return hash_bytes(k.s, k.n);
    if (j_is_num(k)) {
        double f = number(k) + 0.0;
        return hash_bytes(&f, sizeof(f));
    }
    return k.t;
}

static bool same_num(jv a, jv b)
{
    if (a.t == J_FLOAT || b.t == J_FLOAT) return number(a) == number(b);
    return (a.t == J_BOOL ? a.b : a.i) == (b.t == J_BOOL ? b.b : b.i);
}

static bool same_key(jv a, jv b)
{
    if (a.t == J_STR) return b.t == J_STR && a.n == b.n && !memcmp(a.s, b.s, a.n);
    if (j_is_num(a)) return j_is_num(b) && same_num(a, b);
    if (a.t != b.t) return false;
    if (a.t == J_TUPLE) {
        if (a.list->n != b.list->n) return false;
        for (size_t i = 0; i < a.list->n; i++)
            if (!same_key(a.list->v[i], b.list->v[i])) return false;
    }
    return true;
}

/* Only values whose comparison is flat, or tuples of them (tuples of tuples are refused). */
bool j_hashable(jv v)
{
    if (v.t == J_TUPLE) {
        for (size_t i = 0; i < v.list->n; i++)
            if (v.list->v[i].t == J_TUPLE || !j_hashable(v.list->v[i])) return false;
        return true;
    }
    return v.t == J_NONE || v.t == J_STR || j_is_num(v);
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
        return v.list->n != 0;
    case J_DICT:
        return v.dict->n != 0;
    default:
        return true;
    }
}

const char *j_type_name(jv v)
{
    static const char *const names[] = {"undefined", "None", "bool",     "int",  "float",
                                        "str",       "list", "tuple",    "dict", "namespace",
                                        "function",  "loop", "generator"};
    return names[v.t];
}

static int equal_at(jrun *r, jv a, jv b, int depth, bool *out)
{
    int rc = j_step(r);
    if (rc < 0) return rc;
    if (depth > J_MAX_NEST) return j_fail(r, "values nested too deep to compare");
    *out = false;
    if (j_is_num(a) || j_is_num(b)) {
        *out = j_is_num(a) && j_is_num(b) && same_num(a, b);
    } else if (a.t != b.t) {
        *out = false;
    } else if (a.t == J_STR) {
        *out = same_key(a, b);
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

static int less_at(jrun *r, jv a, jv b, int depth, bool *out)
{
    int rc = j_step(r);
    if (rc < 0) return rc;
    if (j_is_num(a) && j_is_num(b)) {
        if (a.t == J_FLOAT || b.t == J_FLOAT)
            *out = number(a) < number(b);
        else
            *out = (a.t == J_BOOL ? a.b : a.i) < (b.t == J_BOOL ? b.b : b.i);
        return 0;
    }
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

int j_contains(jrun *r, jv box, jv x, bool *out)
{
    int rc = 0;
    jv ignored;
    *out = false;
    switch (box.t) {
    case J_STR:
        if (x.t != J_STR) return j_fail(r, "'in <str>' needs a string, not %s", j_type_name(x));
        *out = x.n == 0 || (x.n <= box.n && memmem(box.s, box.n, x.s, x.n) != NULL);
        return 0;
    case J_DICT:
        if (!j_hashable(x) && x.t != J_UNDEF)
            return j_fail(r, "%s cannot be a key", j_type_name(x));
        *out = j_dict_get(box.dict, x, &ignored);
        return 0;
    case J_LIST:
    case J_TUPLE:
        for (size_t i = 0; i < box.list->n && !*out && rc >= 0; i++)
            rc = j_equal(r, box.list->v[i], x, out);
        return rc;
    case J_GEN: {
        jlist *l;
        if ((rc = j_iter(r, box, &l)) < 0) return rc;
        return j_contains(r, (jv){.t = J_LIST, .list = l}, x, out);
    }
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
        *out = v.list;
        return 0;
    case J_GEN:
        *out = v.list->spent ? j_list(r, 0).list : v.list;
        v.list->spent = true;
        return 0;
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
        if ((rc = j_room(r, v.n * sizeof(jv))) < 0) return rc;
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
        return 0;
    case J_LIST:
    case J_TUPLE:
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

static void repr_char(buf *b, const char *s, int k, uint32_t cp, char quote)
{
    utf8proc_category_t cat =
        k > 0 ? utf8proc_category((utf8proc_int32_t)cp) : UTF8PROC_CATEGORY_CN;
    bool hidden = cat == UTF8PROC_CATEGORY_CC || cat == UTF8PROC_CATEGORY_CF ||
                  cat == UTF8PROC_CATEGORY_CS || cat == UTF8PROC_CATEGORY_CO ||
                  cat == UTF8PROC_CATEGORY_CN || cat == UTF8PROC_CATEGORY_ZL ||
                  cat == UTF8PROC_CATEGORY_ZP || (cat == UTF8PROC_CATEGORY_ZS && cp != ' ');
    if (cp == '\n')
        buf_puts(b, "\\n");
    else if (cp == '\r')
        buf_puts(b, "\\r");
    else if (cp == '\t')
        buf_puts(b, "\\t");
    else if (cp == '\\' || cp == (uint32_t)quote)
        buf_printf(b, "\\%c", (char)cp);
    else if (hidden && cp < 0x100)
        buf_printf(b, "\\x%02x", cp);
    else if (hidden && cp < 0x10000)
        buf_printf(b, "\\u%04x", cp);
    else if (hidden)
        buf_printf(b, "\\U%08x", cp);
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

int j_repr(jrun *r, buf *b, jv v, int depth)
{
    int rc = j_step(r);
    if (rc < 0) return rc;
    if (depth > J_MAX_NEST) return j_fail(r, "values nested too deep to print");
    if (b->len > J_MAX_BYTES) return j_fail(r, "the output is larger than %zu bytes", J_MAX_BYTES);
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
        if (v.safe) buf_puts(b, "Markup(");
        repr_str(b, v);
        if (v.safe) buf_putc(b, ')');
        return 0;
    case J_LIST:
    case J_TUPLE:
    case J_DICT:
        return repr_items(r, b, v, depth);
    case J_NS:
        buf_puts(b, "<Namespace ");
        rc = repr_items(r, b, (jv){.t = J_DICT, .dict = v.dict}, depth);
        buf_puts(b, ">");
        return rc;
    default:
        buf_printf(b, "<%s>", j_type_name(v));
        return 0;
    }
}

int j_print(jrun *r, buf *b, jv v)
{
    if (v.t == J_UNDEF) return 0;
    if (v.t != J_STR) return j_repr(r, b, v, 0);
    if (b->len + v.n > J_MAX_BYTES)
        return j_fail(r, "the output is larger than %zu bytes", J_MAX_BYTES);
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

bool j_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 0x1c && cp <= 0x20) || cp == 0x85 || cp == 0xa0 ||
           cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 ||
           cp == 0x202f || cp == 0x205f || cp == 0x3000;
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

static bool word_char(uint32_t cp)
{
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);
    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

jv j_case(jrun *r, jv s, int how)
{
    buf b = {0};
    bool in_word = false, first = true;
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        char enc[4];
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        if (k <= 0) {
            buf_putc(&b, s.s[i++]);
            continue;
        }
        bool up = how == 1 || (how == 2 && first) || (how >= 3 && !in_word);
        utf8proc_int32_t c = (utf8proc_int32_t)cp;
        if (up && cp == 0xdf) /* the one common letter whose capital is two letters */
            buf_puts(&b, how == 1 ? "SS" : "Ss");
        else
            buf_add(&b, enc,
                    (size_t)utf8_encode((uint32_t)(up ? utf8proc_toupper(c) : utf8proc_tolower(c)),
                                        enc));
        in_word =
            how == 4 ? !(j_space(cp) || (cp < 0x80 && strchr("-({[<", (int)cp))) : word_char(cp);
        first = false;
        i += (size_t)k;
    }
    return j_take(r, &b);
}

/* ---- slices ---- */

static int slice_index(jrun *r, jv v, int64_t *out, bool *given)
{
    *given = v.t != J_NONE;
    if (!*given) return 0;
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
    if (v.t != J_STR && v.t != J_LIST && v.t != J_TUPLE) {
        *out = j_undef(NULL);
        return 0;
    }
    TRY(slice_index(r, a, &lo, &has_lo));
    TRY(slice_index(r, b, &hi, &has_hi));
    TRY(slice_index(r, c, &step, &has_step));
    if (step == 0) return j_fail(r, "a slice's step must not be zero");
    if (step > INT32_MAX) step = INT32_MAX;
    if (step < -INT32_MAX) step = -INT32_MAX;
    TRY(j_length(r, v, &n));
    slice_bounds(n, step, has_lo, &lo, has_hi, &hi);
    if (v.t == J_STR && step == 1) {
        size_t from = hi > lo ? j_char_at(v, (size_t)lo) : 0;
        jv rest = j_str(v.s + from, v.n - from);
        *out = j_str(rest.s, hi > lo ? j_char_at(rest, (size_t)(hi - lo)) : 0);
        return 0;
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
out:
    return rc;
}

/* ---- from JSON ---- */

/* cJSON keeps numbers as doubles: whole ones below 2^53 become integers. */
jv j_from_json(jrun *r, const json *x, int depth)
{
    jv v;
    if (!x || cJSON_IsNull(x) || depth > JSON_MAX_DEPTH) return j_none();
    if (cJSON_IsBool(x)) return j_bool(cJSON_IsTrue(x));
    if (cJSON_IsNumber(x)) {
        double f = x->valuedouble;
        return f == floor(f) && fabs(f) < 9007199254740992.0 ? j_int((int64_t)f) : j_float(f);
    }
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
