/* The filter pprint: Python's pprint.pformat with its defaults, 80 columns and sorted keys.
 *
 * A value whose repr fits into what is left of the line is written so; else a dictionary, list or
 * tuple gives each item a line of its own, one column further in, and a string is cut behind its
 * line ends and white space. `allowance` is what closing brackets will still need on the line. */
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

#define COLUMNS 80

typedef struct pp {
    jrun *r;
    buf *b;
} pp;

/* Keys in order; of two types that do not compare, the types' names decide. */
static int key_before(jrun *r, jv a, jv b, bool *out)
{
    bool numbers = (j_is_num(a) || a.t == J_BIG) && (j_is_num(b) || b.t == J_BIG);
    if (numbers || (a.t == b.t && (a.t == J_STR || a.t == J_TUPLE))) return j_less(r, a, b, out);
    if (a.t == b.t) {
        *out = false;
        return 0;
    }
    const char *x = a.t == J_NONE ? "NoneType" : j_type_name(a);
    const char *y = b.t == J_NONE ? "NoneType" : j_type_name(b);
    *out = strcmp(x, y) < 0;
    return 0;
}

/* The value with the keys of all its dictionaries sorted. */
static int sorted_value(jrun *r, jv v, int depth, jv *out)
{
    int rc = 0;
    *out = v;
    TRY(j_step(r));
    if (depth > J_MAX_NEST)
        return j_limit(r, "values nested deeper than the limit of %d", J_MAX_NEST);
    if (v.t == J_LIST || v.t == J_TUPLE) {
        *out = j_list(r, v.list->n);
        out->t = v.t;
        for (size_t i = 0; i < v.list->n; i++) {
            jv x;
            TRY(sorted_value(r, v.list->v[i], depth + 1, &x));
            j_push(r, out->list, x);
        }
    } else if (v.t == J_DICT) {
        *out = j_dict(r);
        size_t n = v.dict->n, *order = j_alloc(r, (n + 1) * sizeof(*order));
        for (size_t i = 0; i < n; i++) {
            size_t at = i;
            bool before = true;
            for (; at > 0 && before; at -= before) {
                TRY(j_step(r));
                TRY(key_before(r, v.dict->keys[i], v.dict->keys[order[at - 1]], &before));
                if (before) order[at] = order[at - 1];
            }
            order[at] = i;
        }
        for (size_t i = 0; i < n; i++) {
            jv x;
            TRY(sorted_value(r, v.dict->vals[order[i]], depth + 1, &x));
            j_dict_set(r, out->dict, v.dict->keys[order[i]], x);
        }
    }
out:
    return rc;
}

static int repr_of(pp *p, jv v, jv *out)
{
    buf b = {0};
    int rc = j_repr(p->r, &b, v, 0);
    if (rc >= 0)
        *out = j_take(p->r, &b);
    else
        buf_free(&b);
    return rc;
}

static int64_t width_of(jv repr)
{
    return (int64_t)j_chars(repr);
}

static void new_line(pp *p, int64_t indent)
{
    buf_putc(p->b, '\n');
    for (int64_t i = 0; i < indent; i++)
        buf_putc(p->b, ' ');
}

/* The pieces "word and the space behind it" of one line, joined while they fit. */
static int cut_line(pp *p, jv line, bool last, int64_t width, int64_t allowance, jlist *chunks)
{
    int rc = 0;
    jv rep, current = j_str(line.s, 0);
    for (size_t at = 0; at < line.n;) {
        size_t end = at;
        for (int phase = 0; phase < 2; phase++) {
            while (end < line.n) {
                uint32_t cp;
                int k = utf8_decode(line.s + end, line.n - end, &cp);
                if (k <= 0 || j_space(cp) != (phase == 1)) break;
                end += (size_t)k;
            }
        }
        if (end == line.n && last) width -= allowance;
        jv candidate = j_str(current.s, current.n + (end - at));
        TRY(repr_of(p, candidate, &rep));
        if (width_of(rep) > width) {
            if (current.n) {
                TRY(repr_of(p, current, &rep));
                j_push(p->r, chunks, rep);
            }
            current = j_str(line.s + at, end - at);
        } else {
            current = candidate;
        }
        at = end;
    }
    if (current.n) {
        TRY(repr_of(p, current, &rep));
        j_push(p->r, chunks, rep);
    }
out:
    return rc;
}

static int put_str(pp *p, jv s, int64_t indent, int64_t allowance, int level)
{
    int rc = 0;
    jv lines, rep = j_none(), chunks = j_list(p->r, 0), keep = j_bool(true);
    jcall call = {.n = 1, .v = &keep};
    TRY(j_find_method(s, "splitlines", 10, &(bool){false})->fn(p->r, s, &call, &lines));
    if (level == 1) {
        indent++;
        allowance++;
    }
    for (size_t i = 0; i < lines.list->n; i++) {
        bool last = i + 1 == lines.list->n;
        int64_t width = COLUMNS - indent;
        TRY(repr_of(p, lines.list->v[i], &rep));
        if (width_of(rep) <= width - (last ? allowance : 0))
            j_push(p->r, chunks.list, rep);
        else
            TRY(cut_line(p, lines.list->v[i], last, width, allowance, chunks.list));
    }
    if (chunks.list->n == 1) {
        buf_add(p->b, rep.s, rep.n);
        return 0;
    }
    if (level == 1) buf_putc(p->b, '(');
    for (size_t i = 0; i < chunks.list->n; i++) {
        if (i) new_line(p, indent);
        buf_add(p->b, chunks.list->v[i].s, chunks.list->v[i].n);
    }
    if (level == 1) buf_putc(p->b, ')');
out:
    return rc;
}

static int put(pp *p, jv v, int64_t indent, int64_t allowance, int level);

static int put_items(pp *p, jv v, int64_t indent, int64_t allowance, int level)
{
    int rc = 0;
    bool dict = v.t == J_DICT;
    size_t n = dict ? v.dict->n : v.list->n;
    const char *end = dict ? "}" : v.t == J_LIST ? "]" : n == 1 ? ",)" : ")";
    buf_putc(p->b, dict ? '{' : v.t == J_LIST ? '[' : '(');
    indent++;
    allowance += (int64_t)strlen(end);
    for (size_t i = 0; i < n; i++) {
        int64_t used = 0;
        if (i) {
            buf_putc(p->b, ',');
            new_line(p, indent);
        }
        if (dict) {
            jv rep;
            TRY(repr_of(p, v.dict->keys[i], &rep));
            buf_add(p->b, rep.s, rep.n);
            buf_puts(p->b, ": ");
            used = width_of(rep) + 2;
        }
        TRY(put(p, dict ? v.dict->vals[i] : v.list->v[i], indent + used, i + 1 == n ? allowance : 1,
                level));
    }
    buf_puts(p->b, end);
out:
    return rc;
}

static int put(pp *p, jv v, int64_t indent, int64_t allowance, int level)
{
    jv rep;
    int rc = repr_of(p, v, &rep);
    if (rc < 0 || (rc = j_room(p->r, p->b->len)) < 0) return rc;
    if (width_of(rep) > COLUMNS - indent - allowance) {
        if (v.t == J_STR && v.n && !v.safe) return put_str(p, v, indent, allowance, level + 1);
        if (v.t == J_DICT || v.t == J_LIST || v.t == J_TUPLE)
            return put_items(p, v, indent, allowance, level + 1);
    }
    buf_add(p->b, rep.s, rep.n);
    return 0;
}

int j_pprint(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    buf b = {0};
    pp p = {.r = r, .b = &b};
    (void)c;
    TRY(sorted_value(r, v, 0, &v));
    TRY(put(&p, v, 0, 0, 0));
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}
