/* Statements, and the whole template: {% ... %} tags and the text between them to the tree that
 * jinja_parse.c describes.
 *
 * A body ends at one of its end words ("endif", "elif", ...), which is consumed while the tag's
 * own "%}" is left to whoever asked for the body. Macros, call blocks and generation blocks are
 * functions in Jinja, so a loop around them is out of reach for break and continue. Refused:
 * include, import and extends (a chat template is one text), tags that nobody knows. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_parse.h"

static int body(jparser *p, const char *const *ends, jnode **out);

static bool is_constant(const jtoken *k)
{
    static const char *const words[] = {"true", "false", "none", "True", "False", "None"};
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (jp__is_name(k, words[i])) return true;
    return false;
}

static int one_target(jparser *p, bool with_attr, jnode **out);

/* Behind "(": names to assign to, up to and with ")". */
static int target_tuple(jparser *p, bool with_attr, jnode **out)
{
    int rc = 0;
    jnodes l = {0};
    jnode *all = jp__make(p, JX_TUPLE), *x;
    TRY(jp__enter(p));
    while (jp__cur(p)->t != JT_RPAREN) {
        TRY(one_target(p, with_attr, &x));
        jp__put(&l, x);
        if (!jp__skip(p, JT_COMMA)) break;
    }
    TRY(jp__expect(p, JT_RPAREN, "expected ')'"));
    *out = all;
out:
    jp__settle_kids(p, &l, all);
    p->depth--;
    return rc;
}

static int one_target(jparser *p, bool with_attr, jnode **out)
{
    const jtoken *k = jp__cur(p);
    if (jp__skip(p, JT_LPAREN)) return target_tuple(p, with_attr, out);
    if (k->t != JT_NAME) return jp__fail(p, "expected a name to assign to");
    if (is_constant(k)) return jp__fail(p, "a constant cannot be assigned to");
    if (p->loops && jp__is_name(k, "loop"))
        return jp__fail(p, "'loop' cannot be assigned to in a loop");
    jnode *x = jp__make(p, JX_NAME);
    x->sym = j_intern(p->t, k->s, k->n);
    jp__next(p);
    if (with_attr && jp__skip(p, JT_DOT)) {
        jnode *y = jp__make(p, JX_ATTR);
        if (jp__cur(p)->t != JT_NAME) return jp__fail(p, "expected a name behind '.'");
        y->a = x;
        y->sym = j_intern(p->t, jp__cur(p)->s, jp__cur(p)->n);
        jp__next(p);
        x = y;
    }
    *out = x;
    return 0;
}

static int target(jparser *p, bool with_attr, jnode **out)
{
    int rc = one_target(p, with_attr, out);
    if (rc < 0 || jp__cur(p)->t != JT_COMMA) return rc;
    jnodes l = {0};
    jnode *all = jp__make(p, JX_TUPLE), *x;
    jp__put(&l, *out);
    while (rc >= 0 && jp__skip(p, JT_COMMA)) {
        if (jp__cur(p)->t == JT_ASSIGN || jp__is_name(jp__cur(p), "in")) break;
        if ((rc = one_target(p, with_attr, &x)) >= 0) jp__put(&l, x);
    }
    jp__settle_kids(p, &l, all);
    *out = all;
    return rc;
}

/* Ends the tag that is open, reads statements up to one of the end words. */
static int block(jparser *p, const char *const *ends, jnode **out)
{
    int rc = jp__expect(p, JT_BLOCK_END, "expected '%}'");
    return rc < 0 ? rc : body(p, ends, out);
}

/* The same for a body that loops around it cannot be left from. */
static int closed_block(jparser *p, const char *end_word, jnode **out)
{
    const char *ends[] = {end_word, NULL};
    int loops = p->loops;
    p->loops = 0;
    int rc = block(p, ends, out);
    p->loops = loops;
    return rc;
}

static bool ended_with(const jparser *p, const char *word)
{
    return jp__is_name(&p->v[p->pos - 1], word);
}

static int stmt_if(jparser *p, jnode **out)
{
    static const char *const mid[] = {"elif", "else", "endif", NULL}, *const end[] = {"endif",
                                                                                      NULL};
    int rc = 0;
    jnode *first = jp__make(p, JS_IF), *x = first;
    for (;;) {
        TRY(jp__tuple(p, false, false, false, &x->a));
        TRY(block(p, mid, &x->b));
        if (!ended_with(p, "elif")) break;
        x->c = jp__make(p, JS_IF);
        x = x->c;
    }
    if (ended_with(p, "else")) TRY(block(p, end, &x->c));
    *out = first;
out:
    return rc;
}

static int stmt_for(jparser *p, jnode **out)
{
    static const char *const mid[] = {"endfor", "else", NULL}, *const end[] = {"endfor", NULL};
    int rc = 0;
    jnode *x = jp__make(p, JS_FOR);
    TRY(target(p, false, &x->a));
    if (!jp__skip_name(p, "in")) TRY(jp__fail(p, "expected 'in'"));
    TRY(jp__tuple(p, false, true, false, &x->b));
    if (jp__skip_name(p, "if")) TRY(jp__expression(p, true, &x->c));
    x->flag = jp__skip_name(p, "recursive");
    p->loops++;
    rc = block(p, mid, &x->d);
    p->loops--;
    TRY(rc);
    if (ended_with(p, "else")) {
        x->kids = arena_alloc(p->t->a, sizeof(jnode *));
        x->n_kids = 1;
        TRY(block(p, end, &x->kids[0]));
    }
    *out = x;
out:
    return rc;
}

static int stmt_set(jparser *p, jnode **out)
{
    static const char *const end[] = {"endset", NULL};
    int rc = 0;
    jnode *x = jp__make(p, JS_SET);
    TRY(target(p, true, &x->a));
    if (jp__skip(p, JT_ASSIGN)) {
        TRY(jp__tuple(p, true, false, false, &x->b));
    } else {
        x->op = JS_SETBLOCK;
        while (jp__skip(p, JT_PIPE))
            TRY(jp__filter(p, &x->c));
        TRY(block(p, end, &x->b));
    }
    *out = x;
out:
    return rc;
}

/* Behind "(": parameters with their defaults up to and with ")". */
static int signature(jparser *p, jnode *m)
{
    int rc = 0;
    jnodes v = {0}, names = {0};
    while (jp__cur(p)->t != JT_RPAREN) {
        jnode *x, *value = NULL;
        if (v.n == J_MAX_ARGS) TRY(jp__fail(p, "too many parameters"));
        if (v.n) TRY(jp__expect(p, JT_COMMA, "expected ',' between parameters"));
        TRY(one_target(p, false, &x));
        if (x->op != JX_NAME) TRY(jp__fail(p, "expected a parameter's name"));
        if (jp__skip(p, JT_ASSIGN))
            TRY(jp__expression(p, true, &value));
        else if (v.n && v.v[v.n - 1])
            TRY(jp__fail(p, "a parameter without default behind one with a default"));
        jp__put(&v, value);
        jp__put(&names, x->sym);
    }
    jp__next(p);
    m->args.n = v.n;
out:
    m->args.v = jp__settle(p, &v);
    m->args.names = jp__settle(p, &names);
    return rc;
}

/* A macro's body; what it names beside its parameters is noted in m->bin. */
static int macro_body(jparser *p, jnode *m, const char *end_word)
{
    uint8_t outer = p->uses;
    p->uses = 0;
    int rc = closed_block(p, end_word, &m->d);
    m->bin = p->uses;
    p->uses |= outer;
    for (size_t i = 0; i < m->args.n; i++) { /* a parameter of that name is just a parameter */
        const jsym *s = m->args.names[i];
        if (!strcmp(s->name, "caller")) m->bin &= (uint8_t)~J_USES_CALLER;
        if (!strcmp(s->name, "kwargs")) m->bin &= (uint8_t)~J_USES_KWARGS;
        if (!strcmp(s->name, "varargs")) m->bin &= (uint8_t)~J_USES_VARARGS;
    }
    return rc;
}

static int macro_rest(jparser *p, jnode *m, const char *end_word)
{
    int rc = signature(p, m);
    return rc < 0 ? rc : macro_body(p, m, end_word);
}

static int stmt_macro(jparser *p, jnode **out)
{
    int rc = 0;
    jnode *x = jp__make(p, JS_MACRO);
    if (jp__cur(p)->t != JT_NAME) return jp__fail(p, "expected the macro's name");
    x->sym = j_intern(p->t, jp__cur(p)->s, jp__cur(p)->n);
    jp__next(p);
    TRY(jp__expect(p, JT_LPAREN, "expected '(' behind the macro's name"));
    TRY(macro_rest(p, x, "endmacro"));
    *out = x;
out:
    return rc;
}

static int stmt_call(jparser *p, jnode **out)
{
    int rc = 0;
    jnode *x = jp__make(p, JS_CALLBLOCK);
    x->b = jp__make(p, JS_MACRO);
    x->b->sym = j_intern(p->t, "caller", 6);
    if (jp__skip(p, JT_LPAREN)) TRY(signature(p, x->b));
    TRY(jp__expression(p, true, &x->a));
    if (x->a->op != JX_CALL) TRY(jp__fail(p, "a call block needs a call"));
    TRY(macro_body(p, x->b, "endcall"));
    *out = x;
out:
    return rc;
}

static int stmt_filter(jparser *p, jnode **out)
{
    static const char *const end[] = {"endfilter", NULL};
    int rc = 0;
    jnode *x = jp__make(p, JS_FILTERBLOCK);
    do
        TRY(jp__filter(p, &x->a));
    while (jp__skip(p, JT_PIPE));
    TRY(block(p, end, &x->b));
    *out = x;
out:
    return rc;
}

static int stmt_with(jparser *p, jnode **out)
{
    static const char *const end[] = {"endwith", NULL};
    int rc = 0;
    jnodes l = {0}, values = {0};
    jnode *x = jp__make(p, JS_WITH);
    while (jp__cur(p)->t != JT_BLOCK_END) {
        jnode *a, *b;
        if (l.n) TRY(jp__expect(p, JT_COMMA, "expected ','"));
        TRY(one_target(p, false, &a));
        TRY(jp__expect(p, JT_ASSIGN, "expected '='"));
        TRY(jp__expression(p, true, &b));
        jp__put(&l, a);
        jp__put(&values, b);
    }
    x->args.n = values.n;
    TRY(block(p, end, &x->d));
    *out = x;
out:
    jp__settle_kids(p, &l, x);
    x->args.v = jp__settle(p, &values);
    return rc;
}

/* transformers' mark of the model's own turns: its body is rendered as it is. */
static int stmt_generation(jparser *p, jnode **out)
{
    *out = jp__make(p, JS_WITH);
    p->t->marks_generation = true;
    return closed_block(p, "endgeneration", &(*out)->d);
}

/* A block sees what the template's top level sees, not the loops and macros around it. */
static int stmt_block(jparser *p, jnode **out)
{
    int rc = 0;
    jnode *x = *out = jp__make(p, JS_BLOCK);
    const jtoken *k = jp__cur(p);
    if (k->t != JT_NAME) return jp__fail(p, "expected the block's name");
    jp__next(p);
    if (jp__skip_name(p, "scoped")) x->op = JS_WITH;
    if (jp__is_name(jp__cur(p), "required"))
        return jp__fail(p, "required blocks are not supported");
    TRY(closed_block(p, "endblock", &x->d));
    const jtoken *end = jp__cur(p);
    if (end->t == JT_NAME && end->n == k->n && !memcmp(end->s, k->s, k->n)) jp__next(p);
out:
    return rc;
}

static int stmt_autoescape(jparser *p, jnode **out)
{
    static const char *const end[] = {"endautoescape", NULL};
    jnode *x = *out = jp__make(p, JS_AUTOESCAPE);
    int rc = jp__expression(p, true, &x->a);
    return rc < 0 ? rc : block(p, end, &x->d);
}

static int stmt_print(jparser *p, jnode **out)
{
    *out = jp__make(p, JS_PRINT);
    return jp__tuple(p, true, false, false, &(*out)->a);
}

static int stmt_jump(jparser *p, int op, jnode **out)
{
    if (p->loops == 0) return jp__fail(p, "'break' and 'continue' belong into a loop");
    *out = jp__make(p, op);
    return 0;
}

static int statement(jparser *p, jnode **out)
{
    static const struct {
        const char *word;
        int (*fn)(jparser *p, jnode **out);
    } rows[] = {{"if", stmt_if},
                {"for", stmt_for},
                {"set", stmt_set},
                {"macro", stmt_macro},
                {"call", stmt_call},
                {"filter", stmt_filter},
                {"with", stmt_with},
                {"print", stmt_print},
                {"generation", stmt_generation},
                {"block", stmt_block},
                {"autoescape", stmt_autoescape}};
    if (jp__cur(p)->t != JT_NAME) return jp__fail(p, "expected a statement's name");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (jp__skip_name(p, rows[i].word)) return rows[i].fn(p, out);
    if (jp__skip_name(p, "break")) return stmt_jump(p, JS_BREAK, out);
    if (jp__skip_name(p, "continue")) return stmt_jump(p, JS_CONTINUE, out);
    const jtoken *k = jp__cur(p);
    char text[120];
    snprintf(text, sizeof(text), "the statement '%.*s' is not supported",
             (int)(k->n < 40 ? k->n : 40), k->s);
    return jp__fail(p, text);
}

static bool ends_here(const jtoken *k, const char *const *ends)
{
    for (; ends && *ends; ends++)
        if (jp__is_name(k, *ends)) return true;
    return false;
}

/* One piece of a body: text, a value to print, or a statement. */
static int piece(jparser *p, jnode **out)
{
    int rc = 0;
    const jtoken *k = jp__cur(p);
    jp__next(p);
    if (k->t == JT_TEXT) {
        *out = jp__make(p, JS_TEXT);
        (*out)->line = k->line;
        (*out)->val = j_str(k->s, k->n);
    } else if (k->t == JT_VAR_BEGIN) {
        TRY(stmt_print(p, out));
        TRY(jp__expect(p, JT_VAR_END, "expected '}}'"));
    } else {
        TRY(statement(p, out));
        TRY(jp__expect(p, JT_BLOCK_END, "expected '%}'"));
    }
out:
    return rc;
}

/* Pieces up to an end word, or with ends NULL to the end of the template. */
static int body(jparser *p, const char *const *ends, jnode **out)
{
    int rc = 0;
    jnodes l = {0};
    jnode *all = jp__make(p, JS_SCOPE), *x;
    TRY(jp__enter(p));
    while (jp__cur(p)->t != JT_EOF) {
        if (jp__cur(p)->t == JT_BLOCK_BEGIN && ends_here(jp__peek(p), ends)) break;
        TRY(piece(p, &x));
        jp__put(&l, x);
    }
    if (ends) {
        if (jp__cur(p)->t == JT_EOF) TRY(jp__fail(p, "a block is not closed"));
        jp__next(p);
        jp__next(p);
    }
    *out = all;
out:
    jp__settle_kids(p, &l, all);
    p->depth--;
    return rc;
}

/* ---- names of filters and tests ---- */

static int check_names(jparser *p, const jnode *x, bool soft, int depth);

static int check_all(jparser *p, jnode *const *v, size_t n, bool soft, int depth)
{
    int rc = 0;
    for (size_t i = 0; rc >= 0 && i < n; i++)
        if (v[i]) rc = check_names(p, v[i], soft, depth);
    return rc;
}

/* Jinja refuses unknown names when it compiles, but inside of `if` only when they are used; what
 * has names of its own (a loop, a macro, ...) starts anew. */
static int check_names(jparser *p, const jnode *x, bool soft, int depth)
{
    int rc = 0;
    if (depth > J_MAX_DEPTH)
        return err_set(p->e, ERR_FORMAT, "%s, line %u: nested deeper than the limit of %d",
                       p->t->where, x->line, J_MAX_DEPTH);
    for (; x && x->op == JS_IF; x = x->c) {
        const jnode *both[] = {x->a, x->b};
        for (int i = 0; i < 2; i++)
            if ((rc = check_names(p, both[i], true, depth + 1)) < 0) return rc;
        soft = true;
    }
    if (!x) return 0;
    bool names = x->op == JX_FILTER || x->op == JX_TEST;
    if (names && !x->row && !soft)
        return err_set(p->e, ERR_FORMAT, "%s, line %u: there is no %s '%.60s'", p->t->where,
                       x->line, x->op == JX_FILTER ? "filter" : "test", x->sym->name);
    bool inner = x->op == JS_MACRO || x->op == JS_WITH || x->op == JS_BLOCK ||
                 x->op == JS_AUTOESCAPE || x->op == JS_FOR || x->op == JS_SETBLOCK ||
                 x->op == JS_FILTERBLOCK;
    if (x->op == JX_COND) soft = true;
    const jnode *part[] = {x->a, x->b, x->c, x->d};
    for (int i = 0; i < 4; i++) {
        bool own = inner && !(x->op == JS_FOR && i == 1);
        if (part[i] && (rc = check_names(p, part[i], soft && !own, depth + 1)) < 0) return rc;
    }
    rc = check_all(p, x->kids, x->n_kids, soft && !inner, depth + 1);
    return rc < 0 ? rc : check_all(p, x->args.v, x->args.n, soft && x->op != JS_MACRO, depth + 1);
}

/* ---- names that the top level sets before it reads them ---- */

static void note(jnode *x, uint8_t use)
{
    jsym *s = x->op == JS_MACRO || x->op == JX_NAME ? x->sym : NULL;
    if (s && s->use == J_SYM_NEW) s->use = use;
    for (size_t i = 0; x->op == JX_TUPLE && i < x->n_kids; i++)
        note(x->kids[i], use);
    if (x->op == JX_ATTR) note(x->a, J_SYM_READ);
}

static void note_reads(jnode *x)
{
    if (!x) return;
    if (x->op == JX_NAME) note(x, J_SYM_READ);
    jnode *part[] = {x->a, x->b, x->c, x->d};
    for (int i = 0; i < 4; i++)
        note_reads(part[i]);
    for (size_t i = 0; i < x->n_kids; i++)
        note_reads(x->kids[i]);
    for (size_t i = 0; i < x->args.n; i++)
        note_reads(x->args.v[i]);
}

/* Jinja makes a variable of each name that the top level sets. Where it is set first and read later
 * (in the order of the text, and not under a condition), macros and loops see that variable,
 * undefined until then, and never the context's value of that name. */
static void note_uses(jnode *body, bool maybe)
{
    uint8_t set = maybe ? J_SYM_READ : J_SYM_SET;
    for (size_t i = 0; i < body->n_kids; i++) {
        jnode *x = body->kids[i];
        switch (x->op) {
        case JS_PRINT:
        case JS_CALLBLOCK:
        case JS_FILTERBLOCK:
            note_reads(x->a);
            break;
        case JS_SET:
            note_reads(x->b);
            note(x->a, set);
            break;
        case JS_SETBLOCK:
            note(x->a, set);
            break;
        case JS_MACRO:
            note(x, set);
            break;
        case JS_FOR:
            note_reads(x->b);
            break;
        case JS_WITH:
            for (size_t k = 0; k < x->args.n; k++)
                note_reads(x->args.v[k]);
            break;
        case JS_IF:
            for (; x && x->op == JS_IF; x = x->c) {
                note_reads(x->a);
                note_uses(x->b, true);
            }
            if (x) note_uses(x, true);
            break;
        default:
            break;
        }
    }
}

int j_parse(jtmpl *t, const char *text, size_t n, err *e)
{
    jtoken *v = NULL;
    jparser p = {.t = t, .e = e};
    if (n > J_MAX_SOURCE)
        return err_set(e, ERR_FORMAT, "%s: the chat template has %zu bytes, more than %zu",
                       t->where, n, J_MAX_SOURCE);
    if (memchr(text, 0, n) || utf8_valid_prefix(text, n) != n)
        return err_set(e, ERR_FORMAT, "%s: the chat template is not UTF-8 text", t->where);
    int rc = j_lex(t, text, n, &v, &p.n, e);
    if (rc < 0) return rc;
    p.v = v;
    rc = body(&p, NULL, &t->body);
    if (rc >= 0) rc = check_names(&p, t->body, false, 0);
    if (rc >= 0) note_uses(t->body, false);
    free(v);
    return rc;
}
