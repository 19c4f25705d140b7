/* Regular expressions of pre-tokenizers, by PCRE2 with its JIT.
 *
 * The Hugging Face library matches with Oniguruma. Where the two differ on the patterns in use, the
 * pattern is rewritten before it is compiled: \s and \S become the White_Space set written out
 * (PCRE2 counts U+180E as space, Oniguruma does not), \h, a hexadecimal digit there, is spelt out,
 * \uHHHH becomes \x{HHHH}, (?m), which lets the dot match line ends there, becomes (?s); ^ and $
 * hold at every line. Sets in sets and intersections, [a-z[0-9]] and [\p{L}&&[^\p{Han}]], which
 * PCRE2 takes for plain characters, become groups: (?:[a-z]|[0-9]), (?:(?=[\p{L}])[^\p{Han}]).
 * Characters assigned after PCRE2's Unicode are the caller's business (tok__stand_in). Subjects are
 * valid UTF-8, so that matching skips PCRE2's own check. Back-tracking is bounded by MATCH_LIMIT: a
 * pattern that explodes ends with an error, not with a hang. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <ctype.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include "text/tok_internal.h"

#define MATCH_LIMIT 500000000u
#define MAX_SETS    16 /* sets in sets */
#define SPACES                                                                                     \
    "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"            \
    "\\x{205f}\\x{3000}"

/* \w of Oniguruma: letters, marks, digits, connectors, and what else it calls a word. Outside of a
 * set it also takes some digits of Latin-1 that it does not take inside one. */
#define WORDS                                                                                      \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}"                                         \
    "\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"
#define ALL_WORDS WORDS "\\xb2\\xb3\\xb9\\xbc-\\xbe"

struct tok_regex {
    pcre2_code *code;
    bool jit, literal;
};

struct tok_match {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* \p{Han}: Oniguruma means characters of the script, PCRE2 those that it also uses (commas, digits
 * in circles …) unless it is told "sc:". Names of categories have one or two letters. Bytes taken.
 */
static size_t script_name(buf *out, const char *p, size_t n)
{
    size_t i = 2, k;
    if (n < 6 || (p[0] != 'p' && p[0] != 'P') || p[1] != '{') return 0;
    i += p[i] == '^';
    for (k = i; k < n && (((p[k] | 32) >= 'a' && (p[k] | 32) <= 'z') || p[k] == '_');)
        k++;
    if (k - i < 3 || k >= n || p[k] != '}') return 0;
    char *one = xasprintf("\\p{sc:%.*s}", (int)(k - i), p + i);
    int code;
    PCRE2_SIZE at;
    pcre2_code *c = pcre2_compile((PCRE2_SPTR)one, strlen(one), PCRE2_UTF, &code, &at, NULL);
    free(one);
    if (!c) return 0;
    pcre2_code_free(c);
    buf_printf(out, "\\%.*ssc:%.*s}", (int)i, p, (int)(k - i), p + i);
    return k + 1;
}

/* The escape that begins at p[0] = '\\', as it is inside or outside of a set. Bytes taken. */
static size_t escape(buf *out, const char *p, size_t n, bool in_set)
{
    if (n < 2) {
        buf_putc(out, '\\');
        return 1;
    }
    size_t taken = script_name(out, p + 1, n - 1), hex = 2;
    if (taken) return 1 + taken;
    while (hex < n && hex < 6 && isxdigit((unsigned char)p[hex]))
        hex++;
    if (p[1] == 's') {
        buf_puts(out, in_set ? SPACES : "[" SPACES "]");
    } else if (p[1] == 'w') {
        buf_puts(out, in_set ? WORDS : "[" ALL_WORDS "]");
    } else if (p[1] == 'W' && !in_set) {
        buf_puts(out, "[^" ALL_WORDS "]");
    } else if (p[1] == 'S' && !in_set) {
        buf_puts(out, "[^" SPACES "]");
    } else if (p[1] == 'h') {
        buf_puts(out, in_set ? "0-9a-fA-F" : "[0-9a-fA-F]");
    } else if (p[1] == 'H') {
        buf_puts(out, in_set ? "\\x00-/:-@G-`g-\\x{10ffff}" : "[^0-9a-fA-F]");
    } else if (p[1] == 'v') {
        buf_puts(out, "\\x0b");
    } else if (p[1] == 'u' && hex == 6) {
        buf_printf(out, "\\x{%.4s}", p + 2);
        return 6;
    } else {
        buf_add(out, p, 2);
    }
    return 2;
}

/* A class of POSIX in a set, "[:punct:]". */
static void posix(buf *out, const char *p, size_t n)
{
    if (n == 9 && !memcmp(p, "[:punct:]", 9))
        buf_puts(out, "\\p{P}\\p{S}");
    else if (n == 9 && !memcmp(p, "[:alpha:]", 9))
        buf_puts(out, "\\p{Alphabetic}");
    else
        buf_add(out, p, n);
}

/* One operand of a set: characters and ranges, and sets inside it. */
typedef struct operand {
    buf plain, sets; /* sets: alternatives, one behind the other, each with a '|' behind */
} operand;

/* Appends the operand as something that matches one character, and empties it. */
static void end_operand(buf *out, operand *o)
{
    buf_puts(out, "(?:");
    if (o->sets.len) buf_add(out, o->sets.data, o->sets.len);
    if (o->plain.len)
        buf_printf(out, "[%s]", o->plain.data);
    else
        buf_puts(out, "(?!)");
    buf_puts(out, ")");
    buf_clear(&o->plain);
    buf_clear(&o->sets);
}

/* A set, p[0] = '['. One without sets in it and without && is copied. Bytes taken; a set that does
 * not end is copied too, for PCRE2 to refuse. */
static size_t set(buf *out, const char *p, size_t n, int depth)
{
    operand o = {0};
    buf ands = {0};
    size_t i = 1, from;
    bool negated = i < n && p[i] == '^', groups = false;
    i += negated;
    from = i;
    buf_puts(&o.plain, "");
    buf_puts(&ands, "");
    while (i < n && (p[i] != ']' || i == from)) {
        const char *end = i + 1 < n && p[i] == '[' && p[i + 1] == ':'
                              ? memmem(p + i + 2, n - i - 2, ":]", 2)
                              : NULL;
        if (p[i] == '\\' && i + 1 < n && p[i + 1] == 'W') {
            groups = true;
            buf_puts(&o.sets, "[^" WORDS "]|");
            i += 2;
        } else if (p[i] == '\\') {
            i += escape(&o.plain, p + i, n - i, true);
        } else if (end) {
            size_t k = (size_t)(end + 2 - (p + i));
            posix(&o.plain, p + i, k);
            i += k;
        } else if (p[i] == '[' && depth < MAX_SETS) {
            groups = true;
            i += set(&o.sets, p + i, n - i, depth + 1);
            buf_putc(&o.sets, '|');
        } else if (p[i] == '&' && i + 1 < n && p[i + 1] == '&') {
            groups = true;
            buf_puts(&ands, "(?=");
            end_operand(&ands, &o);
            buf_puts(&ands, ")");
            i += 2;
        } else {
            if (p[i] == '[' || (p[i] == '^' && !o.plain.len)) buf_putc(&o.plain, '\\');
            buf_putc(&o.plain, p[i++]);
        }
    }
    if (!groups) {
        buf_printf(out, negated ? "[^%s" : "[%s", o.plain.data);
        if (i < n) buf_putc(out, ']');
    } else {
        buf_puts(out, negated ? "(?:(?!" : "(?:");
        buf_add(out, ands.data, ands.len);
        end_operand(out, &o);
        buf_puts(out, negated ? ")(?s:.))" : ")");
    }
    buf_free(&o.plain);
    buf_free(&o.sets);
    buf_free(&ands);
    return i < n ? i + 1 : n;
}

/* Options of a group, p[0] = '(': "(?im-x:" and its like. Bytes taken, 0 if there are none. */
static size_t options(buf *out, const char *p, size_t n)
{
    size_t k = 2;
    if (n < 4 || p[1] != '?') return 0;
    while (k < n && memchr("imx-", p[k], 4))
        k++;
    if (k == 2 || k >= n || (p[k] != ':' && p[k] != ')')) return 0;
    for (size_t i = 0; i <= k; i++)
        buf_putc(out, i > 1 && p[i] == 'm' ? 's' : p[i]);
    return k + 1;
}

/* Copies the pattern from Oniguruma's language to PCRE2's. */
static void translate(buf *out, const char *p, size_t n)
{
    for (size_t i = 0, k; i < n; i += k) {
        k = p[i] == '\\'  ? escape(out, p + i, n - i, false)
            : p[i] == '[' ? set(out, p + i, n - i, 0)
            : p[i] == '(' ? options(out, p + i, n - i)
                          : 0;
        if (k) continue;
        buf_putc(out, p[i]);
        k = 1;
        if (p[i] == '{' && i + 2 < n && p[i + 1] == ',' && isdigit((unsigned char)p[i + 2]))
            buf_putc(out, '0'); /* a{,2} */
    }
}

static int compile(tok_regex **out, const char *p, size_t n, uint32_t extra, const char *where,
                   err *e)
{
    int code = 0;
    PCRE2_SIZE at = 0;
    uint32_t flags = PCRE2_UTF | extra;
    pcre2_code *c = pcre2_compile((PCRE2_SPTR)p, n, flags, &code, &at, NULL);
    if (!c) {
        PCRE2_UCHAR text[160];
        pcre2_get_error_message(code, text, sizeof text);
        return err_set(e, ERR_FORMAT, "%s: regular expression '%.200s' fails at byte %zu: %s",
                       where, p, (size_t)at, (const char *)text);
    }
    tok_regex *r = xcalloc(1, sizeof *r);
    r->code = c;
    r->literal = extra & PCRE2_LITERAL;
    r->jit = pcre2_jit_compile(c, PCRE2_JIT_COMPLETE) == 0;
    *out = r;
    return 0;
}

int tok__regex_open(tok_regex **out, const char *pattern, size_t n, const char *where, err *e)
{
    buf b = {0};
    *out = NULL;
    buf_puts(&b, "");
    translate(&b, pattern, n);
    int rc = compile(out, b.data, b.len, PCRE2_UCP | PCRE2_MULTILINE, where, e);
    buf_free(&b);
    return rc;
}

int tok__regex_literal(tok_regex **out, const char *text, size_t n, const char *where, err *e)
{
    *out = NULL;
    return compile(out, text, n, PCRE2_LITERAL, where, e);
}

bool tok__regex_is_literal(const tok_regex *r)
{
    return r->literal;
}

void tok__regex_close(tok_regex *r)
{
    if (!r) return;
    pcre2_code_free(r->code);
    free(r);
}

tok_match *tok__match_make(void)
{
    tok_match *m = xcalloc(1, sizeof *m);
    m->data = pcre2_match_data_create(1, NULL);
    m->context = pcre2_match_context_create(NULL);
    m->stack = pcre2_jit_stack_create(32 << 10, 4 << 20, NULL);
    pcre2_set_match_limit(m->context, MATCH_LIMIT);
    pcre2_jit_stack_assign(m->context, NULL, m->stack);
    return m;
}

void tok__match_drop(tok_match *m)
{
    if (!m) return;
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    pcre2_jit_stack_free(m->stack);
    free(m);
}

int tok__regex_next(const tok_regex *r, tok_match *m, const char *s, size_t n, size_t from,
                    size_t *lo, size_t *hi, err *e)
{
    PCRE2_SPTR p = (PCRE2_SPTR)s;
    int rc = r->jit ? pcre2_jit_match(r->code, p, n, from, PCRE2_NO_UTF_CHECK, m->data, m->context)
                    : pcre2_match(r->code, p, n, from, PCRE2_NO_UTF_CHECK, m->data, m->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its frames on the heap */
        rc = pcre2_match(r->code, p, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, m->data,
                         m->context);
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc < 0) {
        PCRE2_UCHAR text[160];
        pcre2_get_error_message(rc, text, sizeof text);
        return err_set(e, ERR_LIMIT, "tokenizer: the pre-tokenizer's pattern gave up: %s",
                       (const char *)text);
    }
    PCRE2_SIZE *v = pcre2_get_ovector_pointer(m->data);
    *lo = v[0];
    *hi = v[1] < v[0] ? v[0] : v[1]; /* \K may put the start behind the end */
    return 1;
}
