/* The template language inside chat.c: a Jinja subset with the meaning of Python values.
 *
 * Source text -> tokens (jinja_lex.c) -> tree (jinja_parse.c), both living in the template's arena
 * and never changed afterwards, so that threads may render one template at the same time. A render
 * (jrun) owns everything that it makes: one arena for values and scopes, one output buffer, and
 * the budgets. Values are immutable, except namespaces, so nothing but a namespace can hold itself.
 *
 * Limits: steps (nodes evaluated, elements visited, and one for 16 bytes of a string that is looked
 * through, for 2 where characters are told apart), depth (of the tree, of calls and of nested
 * values), bytes (of all values made). Whatever multiplies sizes (`*`, range, replace, join) asks
 * j_room before it allocates; the rest is checked at the next step. What ends by a limit says
 * "limit", and r->over keeps lazy values from hiding it.
 *
 * Errors are values: every function that can fail returns a negative ERR_* and has set r->e.
 * What a template gets wrong or raises itself is ERR_VALUE. */
#ifndef TEXT_JINJA_INTERNAL_H
#define TEXT_JINJA_INTERNAL_H
#include "base/json.h"

#define J_MAX_DEPTH  600                 /* nested evaluation: expressions, blocks, calls */
#define J_MAX_PARSE  120                 /* nesting of the source */
#define J_MAX_NEST   200                 /* nested values in printing and comparing */
#define J_MAX_STEPS  20000000            /* of one render */
#define J_MAX_BYTES  ((size_t)256 << 20) /* values of one render */
#define J_MAX_SOURCE ((size_t)4 << 20)   /* template text */
#define J_MAX_ARGS   32                  /* arguments of one call */

/* ---- values ---- */
enum jtype {
    J_UNDEF,
    J_NONE,
    J_BOOL,
    J_INT,
    J_FLOAT,
    J_STR,
    J_LIST,
    J_TUPLE,
    J_DICT,
    J_NS,
    J_FUNC,
    J_LOOP,
    J_GEN,
    J_CYCLER, /* list->at = its place */
    J_BIG,    /* an integer beyond 64 bits: printed and compared, never computed with */
    J_SEQ     /* a range, or what keys(), values() and items() give */
};

enum jkind { J_PLAIN, J_RANGE, J_KEYS, J_VALUES, J_ITEMS, J_GROUP }; /* of a jlist */

typedef struct jlist jlist;
typedef struct jdict jdict;
typedef struct jfunc jfunc;
typedef struct jloop jloop;

typedef struct jv {
    uint8_t t;
    bool safe; /* J_STR: came through `safe` or `escape`; joining it escapes the other side */
    size_t n;  /* bytes of a string, digits of a J_BIG */
    union {
        bool b;
        int64_t i;
        double f;
        const char *s; /* J_STR: n bytes of UTF-8; J_UNDEF: the name that was missing, or NULL */
        jlist *list;   /* J_LIST, J_TUPLE, J_SEQ, J_GEN (of map, select, ...: visited once) */
        jdict *dict;   /* J_DICT, J_NS */
        jfunc *fn;
        jloop *loop;
    };
} jv;

struct jlist {
    size_t n, cap;
    size_t at;        /* of a J_GEN: items before it are spent */
    uint8_t kind;     /* jkind: of a J_SEQ; J_GROUP is a tuple of groupby */
    int64_t range[3]; /* start, stop, step of a J_RANGE */
    const char *fail; /* of a J_GEN: what goes wrong behind its last item, or NULL */
    jv *v;
};

struct jdict { /* insertion order; hash index once it is large */
    size_t n, cap;
    jv *keys, *vals;
    uint32_t *index; /* open addressing, entry+1; NULL while small */
    size_t index_cap;
};

/* ---- tree ---- */
typedef struct jnode jnode;
typedef struct jsym { /* an interned name; equality is that of pointers */
    const char *name;
    size_t n;
    uint32_t id;
    uint8_t use; /* J_SYM_*: what the template's top level does with it first */
    struct jsym *next;
} jsym;

enum { J_SYM_NEW, J_SYM_READ, J_SYM_SET };
enum { J_USES_CALLER = 1, J_USES_KWARGS = 2, J_USES_VARARGS = 4 };

enum jop {
    /* expressions */
    JX_CONST,
    JX_NAME,
    JX_LIST,
    JX_TUPLE,
    JX_DICT,
    JX_ATTR,
    JX_ITEM,
    JX_SLICE,
    JX_CALL,
    JX_FILTER,
    JX_TEST,
    JX_NOT,
    JX_NEG,
    JX_POS,
    JX_AND,
    JX_OR,
    JX_COND,
    JX_BIN,
    JX_CONCAT,
    JX_COMPARE,
    /* statements */
    JS_TEXT,
    JS_PRINT,
    JS_IF,
    JS_FOR,
    JS_SET,
    JS_SETBLOCK,
    JS_MACRO,
    JS_CALLBLOCK,
    JS_FILTERBLOCK,
    JS_WITH,
    JS_BLOCK,
    JS_AUTOESCAPE,
    JS_SCOPE,
    JS_BREAK,
    JS_CONTINUE
};

typedef struct jargs { /* of a call, filter or test; names[i] NULL = positional */
    size_t n;
    jnode **v;
    jsym **names;
    uint8_t *star; /* 1 = *x, 2 = **x */
} jargs;

struct jnode {
    uint8_t op;
    uint8_t bin; /* jtok of an operator; of a macro J_USES_* */
    bool flag;   /* JS_FOR recursive; JX_TEST negated */
    uint32_t line;
    jsym *sym;            /* name, attribute, macro, filter or test */
    jv val;               /* JX_CONST, JS_TEXT */
    jnode *a, *b, *c, *d; /* operands; see jinja_parse.c for each op */
    jnode **kids;         /* lists, bodies, compare operands */
    uint8_t *ops;         /* JX_COMPARE operators */
    size_t n_kids;
    jargs args;
    const void *row; /* registry row of a filter or test, NULL = unknown (fails when evaluated) */
};

/* ---- tokens ---- */
enum jtok {
    JT_EOF,
    JT_TEXT,
    JT_VAR_BEGIN,
    JT_VAR_END,
    JT_BLOCK_BEGIN,
    JT_BLOCK_END,
    JT_NAME,
    JT_STR,
    JT_INT,
    JT_FLOAT,
    JT_ADD,
    JT_SUB,
    JT_MUL,
    JT_DIV,
    JT_FLOORDIV,
    JT_MOD,
    JT_POW,
    JT_TILDE,
    JT_LPAREN,
    JT_RPAREN,
    JT_LBRACKET,
    JT_RBRACKET,
    JT_LBRACE,
    JT_RBRACE,
    JT_DOT,
    JT_COMMA,
    JT_COLON,
    JT_PIPE,
    JT_ASSIGN,
    JT_EQ,
    JT_NE,
    JT_LT,
    JT_LE,
    JT_GT,
    JT_GE,
    JT_SEMICOLON,
    JT_IN,
    JT_NOT_IN
};

typedef struct jtoken {
    uint8_t t;
    uint32_t line;
    const char *s; /* text, name or decoded string */
    size_t n;
    int64_t i;
    double f;
} jtoken;

typedef struct jtmpl { /* a parsed template */
    arena *a;
    const char *where;
    jnode *body; /* JS_SCOPE */
    jsym *buckets[256];
    uint32_t n_syms;
    bool clock_fixed; /* strftime_now counts from here, in UTC */
    int64_t clock;
    bool marks_generation; /* the text has {% generation %} blocks */
} jtmpl;

int j_lex(jtmpl *t, const char *text, size_t n, jtoken **out, size_t *n_out, err *e);
int j_parse(jtmpl *t, const char *text, size_t n, err *e);
jsym *j_intern(jtmpl *t, const char *s, size_t n);
const jsym *j_sym_find(const jtmpl *t, const char *s, size_t n);

/* ---- a render ---- */
typedef struct jbind {
    const jsym *sym;
    jv v;
    struct jbind *next;
} jbind;

typedef struct jscope {
    jbind *first;
    struct jscope *up;
    bool barrier; /* unused names are looked for above all the same; marks a macro's frame */
} jscope;

typedef struct jrun {
    const jtmpl *t;
    arena *a;
    err *e;
    buf *out; /* where statements write now */
    jscope *scope;
    jscope *root;
    jv *globals; /* by symbol id: context and built-in functions; J_UNDEF = absent */
    jv input;    /* what the innermost filter of a filter block works on */
    uint64_t steps, max_steps;
    size_t bytes, max_bytes;
    struct {
        char *p;
        size_t n, cap;
    } tails[4]; /* strings that grow: see append in jinja_eval.c */
    unsigned next_tail;
    bool over;       /* the error is that of a limit: nothing may hide it */
    bool autoescape; /* inside {% autoescape true %} */
    int depth;
    uint32_t line;
} jrun;

/* Arguments at run time. */
typedef struct jcall {
    size_t n, n_kw;
    const jv *v;        /* positional */
    const jv *kw_names; /* strings */
    const jv *kw;
} jcall;

typedef int j_native(jrun *r, jv self, const jcall *c, jv *out);

typedef struct j_row j_row;

struct jfunc {
    const char *name;
    const j_row *row; /* of a built-in, which works on self; or a macro: */
    jv self;
    const jnode *macro;
    jscope *scope;
    bool autoescape; /* where the macro was written */
};

struct jloop {
    jlist *items;
    size_t index;
    int64_t depth0;
    const jnode *node; /* recursive loops call themselves */
    jscope *scope;
    jv last_changed;
    bool has_changed;
};

struct j_row { /* filters, tests, functions and methods are tables of these */
    const char *name;
    j_native *fn;
    uint8_t min, max;   /* arguments besides the value */
    const char *params; /* "a,b": may be given by name; NULL = none may; "*" = any */
};

int jinja_render(const jtmpl *t, const json *context, uint64_t max_steps, size_t max_bytes,
                 buf *out, err *e);

/* jinja_eval.c */
int j_fail(jrun *r, const char *fmt, ...) PRINTF(2, 3);
int j_limit(jrun *r, const char *fmt, ...) PRINTF(2, 3); /* says "limit" in its text */
int j_work(jrun *r, size_t bytes); /* steps for looking through so many bytes */
/* Steps for so many bytes that are taken apart one by one; the next j_step tells. */
void j_slow(jrun *r, size_t bytes);
int j_step(jrun *r);
int j_room(jrun *r, size_t bytes);
void *j_alloc(jrun *r, size_t bytes);
int j_eval(jrun *r, const jnode *x, jv *out);
int j_call(jrun *r, jv f, const jcall *c, jv *out);
int j_filter(jrun *r, const char *name, size_t n, jv v, const jcall *c, jv *out);
int j_test(jrun *r, const char *name, size_t n, jv v, const jcall *c, bool *out);
int j_attr(jrun *r, jv v, const char *name, size_t n, jv *out); /* x.name */
int j_item(jrun *r, jv v, jv key, jv *out);                     /* x[key] */
int j_binary(jrun *r, uint8_t op, jv a, jv b, jv *out);

/* jinja_value.c */
jv j_undef(const char *name);
jv j_none(void);
jv j_bool(bool b);
jv j_int(int64_t i);
jv j_float(double f);
jv j_str(const char *s, size_t n); /* borrowed bytes */
jv j_strz(const char *s);          /* borrowed */
jv j_copy(jrun *r, const char *s, size_t n);
jv j_take(jrun *r, buf *b); /* copies into the arena and frees b */
jv j_list(jrun *r, size_t cap);
void j_push(jrun *r, jlist *l, jv v);
jv j_dict(jrun *r);
void j_dict_set(jrun *r, jdict *d, jv key, jv v);
bool j_dict_get(const jdict *d, jv key, jv *out);
bool j_dict_gets(const jdict *d, const char *s, size_t n, jv *out);
bool j_hashable(jv v);
bool j_truth(jv v);
bool j_is_num(jv v);
bool j_is_str(jv v, const char *s);
bool j_is_int(jv v); /* J_INT or J_BOOL */
const char *j_type_name(jv v);
jv j_int_text(jrun *r, const char *s, size_t n); /* J_INT or J_BIG of decimal digits */
jv j_range(jrun *r, int64_t start, int64_t stop, int64_t step);
int j_equal(jrun *r, jv a, jv b, bool *out);
int j_less(jrun *r, jv a, jv b, bool *out); /* a < b, TypeError is an error */
int j_contains(jrun *r, jv box, jv x, bool *out);
int j_iter(jrun *r, jv v, jlist **out); /* what a for loop would visit */
int j_to_str(jrun *r, jv v, jv *out);   /* str(v) */
int j_print(jrun *r, buf *b, jv v);     /* appends str(v) */
int j_repr(jrun *r, buf *b, jv v, int depth);
void j_print_float(buf *b, double f);
int j_length(jrun *r, jv v, int64_t *out);
size_t j_chars(jv s);             /* code points of a string */
size_t j_char_at(jv s, size_t i); /* byte offset of code point i */
int j_slice(jrun *r, jv v, jv lo, jv hi, jv step, jv *out);
jv j_from_json(jrun *r, const json *x, int depth);
jv j_strip(jv s, const char *set, size_t n_set, bool left, bool right); /* set NULL = spaces */
jv j_ascii(jrun *r, jv s); /* what is not ASCII as \xNN, \uNNNN, \UNNNNNNNN */

/* jinja_unicode.c */
enum { J_LOWER, J_UPPER, J_CAPITALIZE, J_TITLE, J_FOLD, J_SWAP };
enum {
    J_IS_SPACE,
    J_IS_ALPHA,
    J_IS_DECIMAL,
    J_IS_DIGIT,
    J_IS_NUMERIC,
    J_IS_ALNUM,
    J_IS_WORD,
    J_IS_ASCII,
    J_IS_PRINTABLE
};
bool j_space(uint32_t cp); /* str.isspace of one character */
bool j_is(uint32_t cp, int what);
bool j_all(jv s, int what); /* of every character, and there is one */
bool j_identifier(jv s);
bool j_cased_as(jv s, int how); /* islower, isupper, istitle */
jv j_case(jrun *r, jv s, int how);

/* jinja_format.c */
int j_percent(jrun *r, jv s, jv value, jv *out);              /* s % value */
int j_format_value(jrun *r, buf *b, jv v, jv spec);           /* format(v, spec) */
int j_str_format(jrun *r, jv s, const jcall *c, jv *out);     /* s.format(...) */
int j_str_format_map(jrun *r, jv s, const jcall *c, jv *out); /* s.format_map(d) */

/* arguments by position or name; missing leaves *out alone and returns false */
bool j_arg(const jcall *c, size_t pos, const char *name, jv *out);
int j_arg_int(jrun *r, const jcall *c, size_t pos, const char *name, int64_t *out);

/* registries */
const j_row *j_find_filter(const char *name, size_t n);
const j_row *j_find_test(const char *name, size_t n);
const j_row *j_find_method(jv v, const char *name, size_t n, bool *blocked);
extern const j_row j_globals[];      /* ends with name NULL */
extern const j_row j_filters_text[]; /* ends with name NULL: the filters of jinja_filters_text.c */
bool j_flag(const jcall *c, size_t pos, const char *name, bool otherwise);
int j_escape(jrun *r, jv v, jv *out); /* a safe string stays as it is */
int j_join(jrun *r, jv sep, jlist *l, jv *out);
int j_sort_order(jrun *r, const jv *keys, bool down, size_t n, size_t **out);
int j_tojson(jrun *r, jv self, const jcall *c, jv *out);
int j_pprint(jrun *r, jv v, const jcall *c, jv *out);
int j_check_args(jrun *r, const j_row *row, const char *kind, const jcall *c);
#endif
