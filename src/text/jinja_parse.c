/* Tokens to tree, with Jinja's grammar and precedence (loosest first):
 *   a if b else c | or | and | not | == != < <= > >= in not-in | + - | ~ | * / // % | ** |
 *   unary - +, then primary, then any of .name [index] (call), then any of |filter and "is test".
 *
 * Operands of the nodes:
 *   ATTR a.sym          ITEM a[b]            SLICE a[b:c:d] (NULL = left out)
 *   CALL a(args)        FILTER a|sym(args)   TEST a is sym(args); a NULL = input of the block
 *   COND b if a else c  BIN a bin b          CONCAT kids       COMPARE a (ops[i] kids[i])...
 *   PRINT a   IF a: b else c (c may be IF)   FOR a in b if c: d, else kids[0], flag recursive
 *   SET a = b  SETBLOCK a = filters c of body b   MACRO sym(args.names = args.v): d
 *   CALLBLOCK a with macro b   FILTERBLOCK filters a of body b   WITH kids = args.v: d
 *   SCOPE kids (a list of statements; the parent decides whether names are local to it)
 *
 * Statements are in jinja_stmt.c. Refused with the line: what the grammar does not know, and
 * nesting beyond J_MAX_PARSE. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_parse.h"

static int unary(jparser *p, bool with_filter, jnode **out);

/* ---- symbols ---- */

static uint32_t hash_name(const char *s, size_t n)
{
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (uint8_t)s[i]) * 16777619u;
    return h;
}

const jsym *j_sym_find(const jtmpl *t, const char *s, size_t n)
{
    for (const jsym *y = t->buckets[hash_name(s, n) & 255]; y; y = y->next)
        if (y->n == n && !memcmp(y->name, s, n)) return y;
    return NULL;
}

jsym *j_intern(jtmpl *t, const char *s, size_t n)
{
    jsym **bucket = &t->buckets[hash_name(s, n) & 255];
    for (jsym *y = *bucket; y; y = y->next)
        if (y->n == n && !memcmp(y->name, s, n)) return y;
    jsym *y = arena_alloc(t->a, sizeof(*y));
    y->name = arena_strndup(t->a, s, n);
    y->n = n;
    y->id = t->n_syms++;
    y->next = *bucket;
    return *bucket = y;
}

/* ---- tokens ---- */

const jtoken *jp__cur(const jparser *p)
{
    return &p->v[p->pos];
}

const jtoken *jp__peek(const jparser *p)
{
    return &p->v[p->pos + 1 < p->n ? p->pos + 1 : p->n - 1];
}

void jp__next(jparser *p)
{
    if (p->pos + 1 < p->n) p->pos++;
}

int jp__fail(jparser *p, const char *what)
{
    const jtoken *k = jp__cur(p);
    bool show = k->s && k->n > 0 && k->n < 40;
    return err_set(p->e, ERR_FORMAT, "%s, line %u: %s%s%.*s%s", p->t->where, k->line, what,
                   k->t == JT_EOF ? ", found the end of the template"
                   : show         ? ", found '"
                                  : "",
                   show ? (int)k->n : 0, show ? k->s : "", show ? "'" : "");
}

bool jp__is_name(const jtoken *k, const char *word)
{
    size_t n = strlen(word);
    return k->t == JT_NAME && k->n == n && !memcmp(k->s, word, n);
}

bool jp__skip_name(jparser *p, const char *word)
{
    if (!jp__is_name(jp__cur(p), word)) return false;
    jp__next(p);
    return true;
}

bool jp__skip(jparser *p, int type)
{
    if (jp__cur(p)->t != type) return false;
    jp__next(p);
    return true;
}

int jp__expect(jparser *p, int type, const char *what)
{
    return jp__skip(p, type) ? 0 : jp__fail(p, what);
}

int jp__deep(jparser *p)
{
    char text[80];
    snprintf(text, sizeof(text), "nested deeper than the limit of %d", J_MAX_PARSE);
    return jp__fail(p, text);
}

int jp__enter(jparser *p)
{
    return ++p->depth > J_MAX_PARSE ? jp__deep(p) : 0;
}

jnode *jp__make(jparser *p, int op)
{
    jnode *x = arena_alloc(p->t->a, sizeof(*x));
    x->op = (uint8_t)op;
    x->line = jp__cur(p)->line;
    return x;
}

void jp__put(jnodes *l, void *x)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 8;
        l->v = xrealloc(l->v, l->cap * sizeof(void *));
    }
    l->v[l->n++] = x;
}

void *jp__settle(jparser *p, jnodes *l)
{
    void *v = arena_alloc(p->t->a, (l->n + 1) * sizeof(void *));
    if (l->n) memcpy(v, l->v, l->n * sizeof(void *));
    free(l->v);
    l->v = NULL;
    return v;
}

void jp__settle_kids(jparser *p, jnodes *l, jnode *x)
{
    x->n_kids = l->n;
    x->kids = jp__settle(p, l);
}

static jnode *constant(jparser *p, jv v)
{
    jnode *x = jp__make(p, JX_CONST);
    x->val = v;
    return x;
}

static jnode *binary(jparser *p, int op, int bin, jnode *a, jnode *b)
{
    jnode *x = jp__make(p, op);
    x->bin = (uint8_t)bin;
    x->a = a;
    x->b = b;
    x->line = a->line;
    return x;
}

/* ---- expressions ---- */

/* Behind "(": arguments up to and with ")". */
static int arguments(jparser *p, jargs *out)
{
    int rc = 0;
    jnodes v = {0}, names = {0};
    uint8_t star[J_MAX_ARGS] = {0};
    while (jp__cur(p)->t != JT_RPAREN) {
        jnode *x;
        jsym *name = NULL;
        if (v.n == J_MAX_ARGS) TRY(jp__fail(p, "more arguments than the limit of 32"));
        if (v.n) TRY(jp__expect(p, JT_COMMA, "expected ',' between arguments"));
        if (jp__cur(p)->t == JT_RPAREN) break;
        if (jp__skip(p, JT_MUL)) {
            star[v.n] = 1;
        } else if (jp__skip(p, JT_POW)) {
            star[v.n] = 2;
        } else if (jp__cur(p)->t == JT_NAME && jp__peek(p)->t == JT_ASSIGN) {
            name = j_intern(p->t, jp__cur(p)->s, jp__cur(p)->n);
            jp__next(p);
            jp__next(p);
        } else if (names.n && names.v[names.n - 1]) {
            TRY(jp__fail(p, "a positional argument behind a named one"));
        }
        TRY(jp__expression(p, true, &x));
        jp__put(&v, x);
        jp__put(&names, name);
    }
    jp__next(p);
    out->n = v.n;
    out->star = arena_alloc(p->t->a, J_MAX_ARGS);
    memcpy(out->star, star, J_MAX_ARGS);
out:
    out->v = jp__settle(p, &v);
    out->names = jp__settle(p, &names);
    return rc;
}

static int list_literal(jparser *p, jnode **out)
{
    int rc = 0;
    jnodes l = {0};
    jnode *x = jp__make(p, JX_LIST);
    jp__next(p);
    while (jp__cur(p)->t != JT_RBRACKET) {
        jnode *item;
        if (l.n) TRY(jp__expect(p, JT_COMMA, "expected ',' in a list"));
        if (jp__cur(p)->t == JT_RBRACKET) break;
        TRY(jp__expression(p, true, &item));
        jp__put(&l, item);
    }
    jp__next(p);
    *out = x;
out:
    jp__settle_kids(p, &l, x);
    return rc;
}

static int dict_literal(jparser *p, jnode **out)
{
    int rc = 0;
    jnodes l = {0};
    jnode *x = jp__make(p, JX_DICT);
    jp__next(p);
    while (jp__cur(p)->t != JT_RBRACE) {
        jnode *item;
        if (l.n) TRY(jp__expect(p, JT_COMMA, "expected ',' in a dictionary"));
        if (jp__cur(p)->t == JT_RBRACE) break;
        TRY(jp__expression(p, true, &item));
        jp__put(&l, item);
        TRY(jp__expect(p, JT_COLON, "expected ':' behind a dictionary's key"));
        TRY(jp__expression(p, true, &item));
        jp__put(&l, item);
    }
    jp__next(p);
    *out = x;
out:
    jp__settle_kids(p, &l, x);
    return rc;
}

static int name_or_word(jparser *p, jnode **out)
{
    const jtoken *k = jp__cur(p);
    if (jp__is_name(k, "true") || jp__is_name(k, "True"))
        *out = constant(p, j_bool(true));
    else if (jp__is_name(k, "false") || jp__is_name(k, "False"))
        *out = constant(p, j_bool(false));
    else if (jp__is_name(k, "none") || jp__is_name(k, "None"))
        *out = constant(p, j_none());
    else {
        if (jp__is_name(k, "caller")) p->uses |= J_USES_CALLER;
        if (jp__is_name(k, "kwargs")) p->uses |= J_USES_KWARGS;
        if (jp__is_name(k, "varargs")) p->uses |= J_USES_VARARGS;
        *out = jp__make(p, JX_NAME);
        (*out)->sym = j_intern(p->t, k->s, k->n);
    }
    jp__next(p);
    return 0;
}

/* One string literal, or several beside each other, which join. */
static int string_literal(jparser *p, jnode **out)
{
    buf b = {0};
    *out = jp__make(p, JX_CONST);
    for (; jp__cur(p)->t == JT_STR; jp__next(p))
        buf_add(&b, jp__cur(p)->s, jp__cur(p)->n);
    (*out)->val = j_str(arena_strndup(p->t->a, b.data ? b.data : "", b.len), b.len);
    buf_free(&b);
    return 0;
}

static int primary(jparser *p, jnode **out)
{
    int rc;
    const jtoken *k = jp__cur(p);
    switch (k->t) {
    case JT_NAME:
        return name_or_word(p, out);
    case JT_STR:
        return string_literal(p, out);
    case JT_INT:
        *out = constant(p, k->s ? (jv){.t = J_BIG, .s = k->s, .n = k->n} : j_int(k->i));
        jp__next(p);
        return 0;
    case JT_FLOAT:
        *out = constant(p, j_float(k->f));
        jp__next(p);
        return 0;
    case JT_LPAREN:
        jp__next(p);
        rc = jp__tuple(p, true, false, true, out);
        return rc < 0 ? rc : jp__expect(p, JT_RPAREN, "expected ')'");
    case JT_LBRACKET:
        return list_literal(p, out);
    case JT_LBRACE:
        return dict_literal(p, out);
    default:
        return jp__fail(p, "expected an expression");
    }
}

/* Behind "[": an index or a slice up to and with "]". */
static int subscript(jparser *p, jnode *a, jnode **out)
{
    int rc = 0, colons = 0;
    jnode *part[3] = {0}, *x = jp__make(p, JX_ITEM);
    jnodes l = {0};
    while (jp__cur(p)->t != JT_RBRACKET) {
        if (jp__cur(p)->t == JT_COLON && colons < 2) {
            colons++;
            jp__next(p);
        } else if (jp__cur(p)->t == JT_COMMA && part[0] && !colons) {
            jp__put(&l, part[0]);
            part[0] = NULL;
            jp__next(p);
        } else if (!part[colons]) {
            TRY(jp__expression(p, true, &part[colons]));
        } else {
            TRY(jp__fail(p, "expected ']'"));
        }
    }
    if (!colons && !part[0] && !l.n) TRY(jp__fail(p, "expected an index"));
    if (colons && l.n) TRY(jp__fail(p, "slices of several dimensions are not supported"));
    jp__next(p);
    x->a = a;
    x->b = part[0];
    if (colons) {
        x->op = JX_SLICE;
        x->c = part[1];
        x->d = part[2];
    } else if (l.n) {
        jnode *key = jp__make(p, JX_TUPLE);
        if (part[0]) jp__put(&l, part[0]);
        jp__settle_kids(p, &l, key);
        x->b = key;
    }
    *out = x;
out:
    free(l.v);
    return rc;
}

static int call(jparser *p, jnode **x)
{
    jnode *y = jp__make(p, JX_CALL);
    y->a = *x;
    jp__next(p);
    *x = y;
    return arguments(p, &y->args);
}

static int postfix(jparser *p, jnode **x)
{
    int rc = 0;
    for (;;) {
        jnode *y;
        if (jp__skip(p, JT_DOT)) {
            const jtoken *k = jp__cur(p);
            y = jp__make(p, k->t == JT_INT ? JX_ITEM : JX_ATTR);
            y->a = *x;
            if (k->t == JT_INT)
                y->b = constant(p, j_int(k->i));
            else if (k->t == JT_NAME)
                y->sym = j_intern(p->t, k->s, k->n);
            else
                return jp__fail(p, "expected a name behind '.'");
            jp__next(p);
            *x = y;
        } else if (jp__skip(p, JT_LBRACKET)) {
            if ((rc = subscript(p, *x, &y)) < 0) return rc;
            *x = y;
        } else if (jp__cur(p)->t == JT_LPAREN) {
            if ((rc = call(p, x)) < 0) return rc;
        } else {
            return 0;
        }
    }
}

/* A dotted name of a filter or test. */
static int dotted(jparser *p, jsym **out)
{
    buf b = {0};
    do {
        if (jp__cur(p)->t != JT_NAME) {
            buf_free(&b);
            return jp__fail(p, "expected the name of a filter or test");
        }
        if (b.len) buf_putc(&b, '.');
        buf_add(&b, jp__cur(p)->s, jp__cur(p)->n);
        jp__next(p);
    } while (jp__skip(p, JT_DOT));
    *out = j_intern(p->t, b.data, b.len);
    buf_free(&b);
    return 0;
}

int jp__filter(jparser *p, jnode **x)
{
    int rc;
    jnode *y = jp__make(p, JX_FILTER);
    y->a = *x;
    if ((rc = dotted(p, &y->sym)) < 0) return rc;
    y->row = j_find_filter(y->sym->name, y->sym->n);
    if (jp__skip(p, JT_LPAREN) && (rc = arguments(p, &y->args)) < 0) return rc;
    *x = y;
    return 0;
}

static int test(jparser *p, jnode **x)
{
    int rc;
    jnode *y = jp__make(p, JX_TEST);
    y->a = *x;
    y->flag = jp__skip_name(p, "not");
    if ((rc = dotted(p, &y->sym)) < 0) return rc;
    y->row = j_find_test(y->sym->name, y->sym->n);
    const jtoken *k = jp__cur(p);
    bool starts = k->t == JT_NAME || k->t == JT_STR || k->t == JT_INT || k->t == JT_FLOAT ||
                  k->t == JT_LBRACKET || k->t == JT_LBRACE;
    if (jp__is_name(k, "else") || jp__is_name(k, "or") || jp__is_name(k, "and")) starts = false;
    *x = y;
    if (jp__skip(p, JT_LPAREN)) return arguments(p, &y->args);
    if (!starts) return 0;
    /* Any other word is read as an argument, as Jinja does: only else, or and and end a test. */
    if (jp__is_name(k, "is")) return jp__fail(p, "tests with 'is' cannot be chained");
    y->args.v = arena_alloc(p->t->a, sizeof(jnode *));
    y->args.names = arena_alloc(p->t->a, sizeof(jsym *));
    y->args.star = arena_alloc(p->t->a, 1);
    y->args.n = 1;
    rc = primary(p, &y->args.v[0]);
    return rc < 0 ? rc : postfix(p, &y->args.v[0]);
}

static int filters_and_tests(jparser *p, jnode **x)
{
    int rc = 0;
    while (rc >= 0) {
        if (jp__skip(p, JT_PIPE))
            rc = jp__filter(p, x);
        else if (jp__skip_name(p, "is"))
            rc = test(p, x);
        else if (jp__cur(p)->t == JT_LPAREN)
            rc = call(p, x);
        else
            break;
    }
    return rc;
}

static int unary(jparser *p, bool with_filter, jnode **out)
{
    int rc = 0;
    jnode *x;
    TRY(jp__enter(p));
    if (jp__cur(p)->t == JT_SUB || jp__cur(p)->t == JT_ADD) {
        x = jp__make(p, jp__cur(p)->t == JT_SUB ? JX_NEG : JX_POS);
        jp__next(p);
        TRY(unary(p, false, &x->a));
    } else {
        TRY(primary(p, &x));
    }
    TRY(postfix(p, &x));
    if (with_filter) TRY(filters_and_tests(p, &x));
    *out = x;
out:
    p->depth--;
    return rc;
}

static int power(jparser *p, jnode **out)
{
    int rc = unary(p, true, out);
    while (rc >= 0 && jp__skip(p, JT_POW)) {
        jnode *b;
        if ((rc = unary(p, true, &b)) >= 0) *out = binary(p, JX_BIN, JT_POW, *out, b);
    }
    return rc;
}

static int product(jparser *p, jnode **out)
{
    int rc = power(p, out);
    while (rc >= 0) {
        int op = jp__cur(p)->t;
        jnode *b;
        if (op != JT_MUL && op != JT_DIV && op != JT_FLOORDIV && op != JT_MOD) return 0;
        jp__next(p);
        if ((rc = power(p, &b)) >= 0) *out = binary(p, JX_BIN, op, *out, b);
    }
    return rc;
}

static int concat(jparser *p, jnode **out)
{
    int rc = 0;
    jnodes l = {0};
    jnode *x;
    TRY(product(p, &x));
    if (jp__cur(p)->t == JT_TILDE) {
        jnode *all = jp__make(p, JX_CONCAT);
        jp__put(&l, x);
        while (jp__skip(p, JT_TILDE)) {
            TRY(product(p, &x));
            jp__put(&l, x);
        }
        jp__settle_kids(p, &l, all);
        x = all;
    }
    *out = x;
out:
    free(l.v);
    return rc;
}

static int sum(jparser *p, jnode **out)
{
    int rc = concat(p, out);
    while (rc >= 0) {
        int op = jp__cur(p)->t;
        jnode *b;
        if (op != JT_ADD && op != JT_SUB) return 0;
        jp__next(p);
        if ((rc = concat(p, &b)) >= 0) *out = binary(p, JX_BIN, op, *out, b);
    }
    return rc;
}

/* The comparison operator here, consumed; 0 when there is none. */
static int compare_op(jparser *p)
{
    int t = jp__cur(p)->t;
    if (t >= JT_EQ && t <= JT_GE) {
        jp__next(p);
        return t;
    }
    if (jp__skip_name(p, "in")) return JT_IN;
    if (jp__is_name(jp__cur(p), "not") && jp__is_name(jp__peek(p), "in")) {
        jp__next(p);
        jp__next(p);
        return JT_NOT_IN;
    }
    return 0;
}

static int compare(jparser *p, jnode **out)
{
    int rc = 0, op;
    jnodes l = {0};
    buf ops = {0};
    jnode *x;
    TRY(sum(p, &x));
    jnode *all = jp__make(p, JX_COMPARE);
    all->a = x;
    while ((op = compare_op(p)) != 0) {
        buf_putc(&ops, (char)op);
        TRY(sum(p, &x));
        jp__put(&l, x);
    }
    x = all->a;
    if (l.n) {
        all->ops = arena_alloc(p->t->a, ops.len);
        memcpy(all->ops, ops.data, ops.len);
        jp__settle_kids(p, &l, all);
        x = all;
    }
    *out = x;
out:
    buf_free(&ops);
    free(l.v);
    return rc;
}

static int negation(jparser *p, jnode **out)
{
    int rc = 0;
    if (!jp__is_name(jp__cur(p), "not")) return compare(p, out);
    jnode *x = jp__make(p, JX_NOT);
    TRY(jp__enter(p));
    jp__next(p);
    TRY(negation(p, &x->a));
    *out = x;
out:
    p->depth--;
    return rc;
}

static int conjunction(jparser *p, jnode **out)
{
    int rc = negation(p, out);
    while (rc >= 0 && jp__skip_name(p, "and")) {
        jnode *b;
        if ((rc = negation(p, &b)) >= 0) *out = binary(p, JX_AND, 0, *out, b);
    }
    return rc;
}

static int disjunction(jparser *p, jnode **out)
{
    int rc = conjunction(p, out);
    while (rc >= 0 && jp__skip_name(p, "or")) {
        jnode *b;
        if ((rc = conjunction(p, &b)) >= 0) *out = binary(p, JX_OR, 0, *out, b);
    }
    return rc;
}

int jp__expression(jparser *p, bool with_cond, jnode **out)
{
    int rc = 0;
    TRY(jp__enter(p));
    TRY(disjunction(p, out));
    while (with_cond && jp__is_name(jp__cur(p), "if")) {
        jnode *x = jp__make(p, JX_COND);
        jp__next(p);
        x->b = *out;
        TRY(disjunction(p, &x->a));
        if (jp__skip_name(p, "else")) TRY(jp__expression(p, true, &x->c));
        *out = x;
    }
out:
    p->depth--;
    return rc;
}

static bool tuple_ends(const jparser *p, bool for_iter)
{
    int t = jp__cur(p)->t;
    return t == JT_VAR_END || t == JT_BLOCK_END || t == JT_RPAREN ||
           (for_iter && jp__is_name(jp__cur(p), "recursive"));
}

/* `a` or `a, b, ...`; "()" is a tuple only inside parentheses. */
int jp__tuple(jparser *p, bool with_cond, bool for_iter, bool in_parens, jnode **out)
{
    int rc = 0;
    bool comma = false;
    jnodes l = {0};
    jnode *x, *all = jp__make(p, JX_TUPLE);
    while (!tuple_ends(p, for_iter)) {
        TRY(jp__expression(p, with_cond, &x));
        jp__put(&l, x);
        if (!jp__skip(p, JT_COMMA)) break;
        comma = true;
    }
    if (!comma && l.n == 1) {
        *out = l.v[0];
    } else if (!comma && !in_parens) {
        TRY(jp__fail(p, "expected an expression"));
    } else {
        jp__settle_kids(p, &l, all);
        *out = all;
    }
out:
    free(l.v);
    return rc;
}
