/* Statements: the tags {% … %} and the text between them become a tree in the template's arena. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "text/jinja.h"

struct jname {
    struct jname *next;
    size_t n;
    char s[];
};
#define N_BUCKETS 256

static const jtoken *tok(const jparser *p)
{
    return &p->tok[p->at];
}

jnode *jj__node(jparser *p, int type)
{
    jnode *n = arena_alloc(p->t->a, sizeof *n);
    n->type = (uint8_t)type;
    n->line = tok(p)->line;
    return n;
}

int jj__fail(jparser *p, const char *fmt, ...)
{
    char what[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return err_set(p->e, ERR_FORMAT, "%s: line %d: %s", p->t->where, tok(p)->line, what);
}

int jj__enter(jparser *p)
{
    if (++p->depth <= JJ_MAX_PARSE) return 0;
    p->depth--;
    return jj__fail(p, "nested deeper than %d levels", JJ_MAX_PARSE);
}

const char *jj__intern(jparser *p, const char *s, size_t n)
{
    size_t h = 5381;
    for (size_t i = 0; i < n; i++)
        h = h * 33 ^ (unsigned char)s[i];
    struct jname **at = &p->names[h % N_BUCKETS];
    for (struct jname *k = *at; k; k = k->next)
        if (k->n == n && !memcmp(k->s, s, n)) return k->s;
    struct jname *k = arena_alloc(p->t->a, sizeof *k + n + 1);
    memcpy(k->s, s, n);
    k->n = n;
    k->next = *at;
    *at = k;
    return k->s;
}

bool jj__is_op(const jparser *p, uint16_t op)
{
    return tok(p)->type == JT_OP && tok(p)->op == op;
}

bool jj__is_name(const jparser *p, const char *name)
{
    const jtoken *k = tok(p);
    return k->type == JT_NAME && k->n == strlen(name) && !memcmp(k->s, name, k->n);
}

bool jj__take_op(jparser *p, uint16_t op)
{
    bool yes = jj__is_op(p, op);
    p->at += yes;
    return yes;
}

bool jj__take_name(jparser *p, const char *name)
{
    bool yes = jj__is_name(p, name);
    p->at += yes;
    return yes;
}

int jj__want_op(jparser *p, uint16_t op)
{
    if (jj__take_op(p, op)) return 0;
    char second[2] = {(char)(op >> 8), 0};
    return jj__fail(p, "expected '%c%s'", op & 0xff, second);
}

int jj__want_name(jparser *p, const char **out)
{
    if (tok(p)->type != JT_NAME) return jj__fail(p, "expected a name");
    *out = jj__intern(p, tok(p)->s, tok(p)->n);
    p->at++;
    return 0;
}

/* The old array stays in the arena: doubling wastes at most as much again. */
void jj__push(jparser *p, jlistb *l, jnode *x)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 4;
        jnode **v = arena_alloc(p->t->a, cap * sizeof(jnode *));
        if (l->n) memcpy(v, l->v, l->n * sizeof(jnode *));
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = x;
}

static int want_block_end(jparser *p)
{
    if (tok(p)->type != JT_BLOCK_END) return jj__fail(p, "expected the end of the tag");
    p->at++;
    return 0;
}

/* ---- bodies ----------------------------------------------------------------------------------- */

static int statement(jparser *p, jnode **out);

/* Statements up to a tag whose name is one of the ends ("endif elif else"); that tag's name is left
 * as the current token. */
static int body(jparser *p, jnode **out, const char *const *ends)
{
    jlistb l = {0};
    int rc = jj__enter(p);
    if (rc < 0) return rc;
    jnode *b = *out = jj__node(p, JN_BLOCK);
    for (;;) {
        const jtoken *k = tok(p);
        jnode *n = NULL;
        if (k->type == JT_EOF) {
            rc = ends ? jj__fail(p, "the template ends where {%% %s %%} is expected", ends[0]) : 0;
            break;
        }
        if (k->type == JT_DATA) {
            n = jj__node(p, JN_DATA);
            n->val = jv_ref(k->s, k->n);
            p->at++;
        } else if (k->type == JT_VAR_BEGIN) {
            p->at++;
            n = jj__node(p, JN_OUTPUT);
            if ((rc = jj__tuple(p, &n->a, true, NULL)) < 0) break;
            if (tok(p)->type != JT_VAR_END) {
                rc = jj__fail(p, "expected the end of the expression");
                break;
            }
            p->at++;
        } else {
            p->at++;
            bool end = false;
            for (size_t i = 0; ends && ends[i]; i++)
                end = end || jj__is_name(p, ends[i]);
            if (end) break;
            if ((rc = statement(p, &n)) < 0) break;
        }
        jj__push(p, &l, n);
    }
    b->list = l.v;
    b->n = l.n;
    p->depth--;
    return rc;
}

/* Body up to {% end %}, that tag included. */
static int body_until(jparser *p, jnode **out, const char *end)
{
    const char *const ends[] = {end, NULL};
    int rc = want_block_end(p);
    if (rc == 0) rc = body(p, out, ends);
    if (rc == 0) {
        p->at++;
        rc = want_block_end(p);
    }
    return rc;
}

/* A body inside which filters are checked at once and which is a scope of its own. */
static int inner_body(jparser *p, jnode **out, const char *end)
{
    bool soft = p->soft;
    p->soft = false;
    int rc = body_until(p, out, end);
    p->soft = soft;
    return rc;
}

/* ---- assignment targets ----------------------------------------------------------------------- */

static int one_target(jparser *p, jnode **out)
{
    int rc;
    if (jj__take_op(p, '(')) {
        jlistb l = {0};
        jnode *t = *out = jj__node(p, JN_TUPLE);
        do {
            jnode *x;
            if (l.n && jj__is_op(p, ')')) break;
            if ((rc = one_target(p, &x)) < 0) return rc;
            jj__push(p, &l, x);
        } while (jj__take_op(p, ','));
        t->list = l.v;
        t->n = l.n;
        return jj__want_op(p, ')');
    }
    if ((rc = jj__enter(p)) < 0) return rc;
    jnode *n = *out = jj__node(p, JN_NAME);
    rc = jj__want_name(p, &n->name);
    if (rc == 0 && jj__take_op(p, '.')) {
        jnode *attr = jj__node(p, JN_ATTR);
        attr->a = n;
        rc = jj__want_name(p, &attr->name);
        *out = attr;
    }
    p->depth--;
    return rc;
}

static int target(jparser *p, jnode **out)
{
    int rc = one_target(p, out);
    if (rc < 0 || !jj__is_op(p, ',')) return rc;
    jlistb l = {0};
    jj__push(p, &l, *out);
    while (jj__take_op(p, ',')) {
        jnode *x;
        if (tok(p)->type != JT_NAME && !jj__is_op(p, '(')) break;
        if ((rc = one_target(p, &x)) < 0) return rc;
        jj__push(p, &l, x);
    }
    jnode *t = *out = jj__node(p, JN_TUPLE);
    t->list = l.v;
    t->n = l.n;
    return 0;
}

/* ---- statements ------------------------------------------------------------------------------- */

static int parse_for(jparser *p, jnode **out)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    static const char *const after_else[] = {"endfor", NULL};
    jnode *n = *out = jj__node(p, JN_FOR);
    bool soft = p->soft, in_loop = p->in_loop;
    int rc;
    TRY(target(p, &n->a));
    if (!jj__take_name(p, "in")) {
        rc = jj__fail(p, "expected 'in'");
        goto out;
    }
    TRY(jj__tuple(p, &n->b, false, "recursive"));
    p->soft = false;
    if (jj__take_name(p, "if")) TRY(jj__expr(p, &n->c, true));
    n->flag = jj__take_name(p, "recursive");
    TRY(want_block_end(p));
    p->in_loop = true;
    jlistb l = {0};
    jnode *b = NULL;
    TRY(body(p, &b, ends));
    jj__push(p, &l, b);
    p->in_loop = in_loop;
    if (jj__take_name(p, "else")) {
        TRY(want_block_end(p));
        TRY(body(p, &b, after_else));
        jj__push(p, &l, b);
    }
    p->at++;
    n->list = l.v;
    n->n = l.n;
    rc = want_block_end(p);
out:
    p->soft = soft;
    p->in_loop = in_loop;
    return rc;
}

/* list: condition, body, condition, body … [else body] */
static int parse_if(jparser *p, jnode **out)
{
    static const char *const ends[] = {"endif", "elif", "else", NULL};
    static const char *const after_else[] = {"endif", NULL};
    jnode *n = *out = jj__node(p, JN_IF), *x;
    jlistb l = {0};
    bool soft = p->soft;
    int rc;
    p->soft = true;
    do {
        TRY(jj__tuple(p, &x, false, NULL));
        jj__push(p, &l, x);
        TRY(want_block_end(p));
        TRY(body(p, &x, ends));
        jj__push(p, &l, x);
    } while (jj__take_name(p, "elif"));
    if (jj__take_name(p, "else")) {
        TRY(want_block_end(p));
        TRY(body(p, &x, after_else));
        jj__push(p, &l, x);
    }
    p->at++;
    rc = want_block_end(p);
    n->list = l.v;
    n->n = l.n;
out:
    p->soft = soft;
    return rc;
}

static int parse_set(jparser *p, jnode **out)
{
    jnode *n = *out = jj__node(p, JN_SET);
    int rc = target(p, &n->a);
    if (rc < 0) return rc;
    if (jj__take_op(p, '=')) {
        rc = jj__tuple(p, &n->b, true, NULL);
        return rc < 0 ? rc : want_block_end(p);
    }
    n->type = JN_SETBLOCK;
    if (jj__is_op(p, '|') && (rc = jj__filters(p, &n->c, false)) < 0) return rc;
    return inner_body(p, &n->b, "endset");
}

/* "(" a, b=1 ")" into list: names as JN_ARG with the default in a */
static int parse_signature(jparser *p, jnode *n)
{
    jlistb l = {0};
    int rc = jj__want_op(p, '(');
    bool defaults = false;
    while (rc == 0 && !jj__take_op(p, ')')) {
        if (l.n && (rc = jj__want_op(p, ',')) < 0) break;
        if (jj__take_op(p, ')')) break;
        jnode *a = jj__node(p, JN_ARG);
        if ((rc = jj__want_name(p, &a->name)) < 0) break;
        if (jj__take_op(p, '=')) {
            defaults = true;
            rc = jj__expr(p, &a->a, true);
        } else if (defaults) {
            rc = jj__fail(p, "an argument without default follows one with default");
        }
        jj__push(p, &l, a);
    }
    n->list = l.v;
    n->n = l.n;
    return rc;
}

static int parse_macro(jparser *p, jnode **out)
{
    jnode *n = *out = jj__node(p, JN_MACRO);
    bool in_loop = p->in_loop;
    int rc = jj__want_name(p, &n->name);
    if (rc == 0) rc = parse_signature(p, n);
    p->in_loop = false;
    if (rc == 0) rc = inner_body(p, &n->b, "endmacro");
    p->in_loop = in_loop;
    return rc;
}

static int parse_call(jparser *p, jnode **out)
{
    jnode *n = *out = jj__node(p, JN_CALLBLOCK);
    int rc = 0;
    n->name = jj__intern(p, "caller", 6);
    if (jj__is_op(p, '(')) rc = parse_signature(p, n);
    if (rc == 0) rc = jj__expr(p, &n->a, true);
    if (rc == 0 && n->a->type != JN_CALL) rc = jj__fail(p, "expected a call");
    return rc < 0 ? rc : inner_body(p, &n->b, "endcall");
}

static int parse_filter_block(jparser *p, jnode **out)
{
    jnode *n = *out = jj__node(p, JN_FILTERBLOCK);
    int rc = jj__filters(p, &n->c, true);
    return rc < 0 ? rc : inner_body(p, &n->b, "endfilter");
}

/* list: target, value, target, value … */
static int parse_with(jparser *p, jnode **out)
{
    jnode *n = *out = jj__node(p, JN_WITH);
    jlistb l = {0};
    int rc = 0;
    while (tok(p)->type != JT_BLOCK_END) {
        jnode *t, *v;
        if (l.n && (rc = jj__want_op(p, ',')) < 0) return rc;
        if ((rc = one_target(p, &t)) < 0 || (rc = jj__want_op(p, '=')) < 0 ||
            (rc = jj__expr(p, &v, true)) < 0)
            return rc;
        jj__push(p, &l, t);
        jj__push(p, &l, v);
    }
    n->list = l.v;
    n->n = l.n;
    return inner_body(p, &n->b, "endwith");
}

/* {% generation %}: marks what the assistant wrote, for training; renders its body. */
static int parse_generation(jparser *p, jnode **out)
{
    jnode *n = *out = jj__node(p, JN_SCOPE);
    return inner_body(p, &n->b, "endgeneration");
}

static int parse_do(jparser *p, jnode **out)
{
    jnode *n = *out = jj__node(p, JN_DO);
    int rc = jj__tuple(p, &n->a, true, NULL);
    return rc < 0 ? rc : want_block_end(p);
}

static int parse_break(jparser *p, jnode **out)
{
    *out = jj__node(p, p->tok[p->at - 1].s[0] == 'b' ? JN_BREAK : JN_CONTINUE);
    if (!p->in_loop) return jj__fail(p, "break and continue need a loop around them");
    return want_block_end(p);
}

static const struct tag {
    const char *name;
    int (*parse)(jparser *p, jnode **out);
} tags[] = {
    {"for", parse_for},       {"if", parse_if},
    {"set", parse_set},       {"macro", parse_macro},
    {"call", parse_call},     {"filter", parse_filter_block},
    {"with", parse_with},     {"generation", parse_generation},
    {"break", parse_break},   {"continue", parse_break},
    {"do", parse_do},
};

static int statement(jparser *p, jnode **out)
{
    if (tok(p)->type != JT_NAME) return jj__fail(p, "expected the name of a tag");
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++)
        if (jj__take_name(p, tags[i].name)) {
            int rc = jj__enter(p);
            if (rc < 0) return rc;
            rc = tags[i].parse(p, out);
            p->depth--;
            return rc;
        }
    return jj__fail(p, "tag '%.*s' is not supported here", (int)(tok(p)->n < 40 ? tok(p)->n : 40),
                    tok(p)->s);
}

int jj_parse(jj_template *t, const jtoken *v, size_t n, err *e)
{
    struct jname *names[N_BUCKETS] = {0};
    jparser p = {.t = t, .tok = v, .n = n, .names = names, .e = e};
    return body(&p, &t->root, NULL);
}
