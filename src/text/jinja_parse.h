/* What the two halves of the parser share: jinja_parse.c (tokens, expressions) and jinja_stmt.c. */
#ifndef TEXT_JINJA_PARSE_H
#define TEXT_JINJA_PARSE_H
#include "text/jinja_internal.h"

typedef struct jparser {
    jtmpl *t;
    const jtoken *v;
    size_t n, pos;
    int depth;    /* nesting, up to J_MAX_PARSE */
    int loops;    /* loops around this place, for break and continue */
    uint8_t uses; /* J_USES_*: what the macro around this place names */
    err *e;
} jparser;

typedef struct jnodes { /* a growing list of pointers while its length is unknown */
    void **v;
    size_t n, cap;
} jnodes;

const jtoken *jp__cur(const jparser *p);
const jtoken *jp__peek(const jparser *p);
void jp__next(jparser *p);
int jp__fail(jparser *p, const char *what);
int jp__deep(jparser *p); /* nested deeper than the limit */
bool jp__is_name(const jtoken *k, const char *word);
bool jp__skip_name(jparser *p, const char *word);
bool jp__skip(jparser *p, int type);
int jp__expect(jparser *p, int type, const char *what);
int jp__enter(jparser *p); /* counts nesting; the caller takes it back also when this fails */
jnode *jp__make(jparser *p, int op);
void jp__put(jnodes *l, void *x);
void *jp__settle(jparser *p, jnodes *l); /* the pointers in the arena; the list is freed */
void jp__settle_kids(jparser *p, jnodes *l, jnode *x);

int jp__expression(jparser *p, bool with_cond, jnode **out);
int jp__tuple(jparser *p, bool with_cond, bool for_iter, bool in_parens, jnode **out);
int jp__filter(jparser *p, jnode **x); /* behind "|": *x becomes the filter over *x */
#endif
