/* Template source to tokens, set up as transformers sets up Jinja2: trim_blocks and lstrip_blocks on,
 * one trailing newline dropped, line ends made "\n".
 *
 * - after a block or comment tag the first newline goes, unless the tag ends in "+%}"
 * - before a block or comment tag that stands first on its line, the indentation goes, unless the tag
 *   begins with "+"
 * - "-" on either side removes all white space there
 * The text of a token points into the normalized source, except strings with escapes. */
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja.h"

typedef struct lexer {
    jj_template *t;
    const char *s;
    size_t n, at;
    int line;
    bool line_start;    /* what was read last ended with a newline */
    jtoken *v;
    size_t n_tok, cap;
    err *e;
} lexer;

static int fail(lexer *x, const char *what)
{
    return err_set(x->e, ERR_FORMAT, "%s: line %d: %s", x->t->where, x->line, what);
}

static jtoken *push(lexer *x, int type)
{
    if (x->n_tok == x->cap) {
        x->cap = x->cap ? x->cap * 2 : 256;
        x->v = xrealloc(x->v, x->cap * sizeof *x->v);
    }
    jtoken *k = &x->v[x->n_tok++];
    *k = (jtoken){.type = (uint8_t)type, .line = x->line};
    return k;
}

static bool space_at(const lexer *x, size_t i, size_t *k)
{
    uint32_t cp;
    int m = i < x->n ? utf8_decode(x->s + i, x->n - i, &cp) : 0;
    *k = (size_t)m;
    return m && js_is_space(cp);
}

static void advance(lexer *x, size_t to)
{
    for (; x->at < to; x->at++)
        if (x->s[x->at] == '\n') x->line++;
}

static void skip_space(lexer *x)
{
    size_t k;
    while (space_at(x, x->at, &k))
        advance(x, x->at + k);
}

/* Length of text[0, n) without the white space at its end. */
static size_t rstrip(const char *s, size_t n)
{
    while (n) {
        size_t i = n - 1;
        uint32_t cp;
        while (i && n - i < 4 && ((unsigned char)s[i] & 0xC0) == 0x80)
            i--;
        if (!utf8_decode(s + i, n - i, &cp) || !js_is_space(cp)) break;
        n = i;
    }
    return n;
}

/* Text before a tag at `end`; sign is the character behind the opening brace pair. */
static void push_data(lexer *x, size_t end, char sign, bool is_variable)
{
    const char *p = x->s + x->at;
    size_t n = end - x->at, keep = n;
    if (sign == '-') {
        keep = rstrip(p, n);
    } else if (sign != '+' && !is_variable) {
        size_t line = n;
        while (line && p[line - 1] != '\n')
            line--;
        if ((line || x->line_start) && n > line) {
            size_t s = rstrip(p, n);
            if (s <= line) keep = line;
        }
    }
    if (keep) {
        jtoken *k = push(x, JT_DATA);
        k->s = p;
        k->n = keep;
    }
    advance(x, end);
}

/* The end of a tag has been read up to x->at: drop what follows by the sign before it. */
static void after_tag(lexer *x, char sign, bool trims_newline)
{
    x->line_start = false;
    size_t from = x->at;
    if (sign == '-') skip_space(x);
    else if (sign != '+' && trims_newline && x->at < x->n && x->s[x->at] == '\n')
        advance(x, x->at + 1);
    if (x->at > from) x->line_start = x->s[x->at - 1] == '\n';
}

static int comment(lexer *x)
{
    const char *p = x->s + x->at;
    size_t lo = 2;
    if (x->at + 2 < x->n && (p[2] == '-' || p[2] == '+')) lo = 3;
    for (size_t i = lo; x->at + i + 1 < x->n; i++) {
        if (p[i] != '#' || p[i + 1] != '}') continue;
        char sign = i > lo ? p[i - 1] : 0;
        advance(x, x->at + i + 2);
        after_tag(x, sign, true);
        return 0;
    }
    return fail(x, "missing end of comment tag");
}

/* Reads "{%[-+]? name [-+]?%}" at i; returns its length and the signs, or 0. */
static size_t bare_tag(const lexer *x, size_t i, const char *name, char *open, char *close)
{
    size_t at = i + 2, k, m = strlen(name);
    *open = *close = 0;
    if (i + 2 > x->n || memcmp(x->s + i, "{%", 2) != 0) return 0;
    if (at < x->n && (x->s[at] == '-' || x->s[at] == '+')) *open = x->s[at++];
    while (space_at(x, at, &k))
        at += k;
    if (x->n - at < m || memcmp(x->s + at, name, m) != 0) return 0;
    at += m;
    while (space_at(x, at, &k))
        at += k;
    if (at < x->n && (x->s[at] == '-' || x->s[at] == '+')) *close = x->s[at++];
    if (x->n - at < 2 || memcmp(x->s + at, "%}", 2) != 0) return 0;
    return at + 2 - i;
}

/* {% raw %} … {% endraw %}: x->at is behind the opening tag. */
static int raw(lexer *x)
{
    char open, close;
    for (size_t i = x->at; i + 1 < x->n; i++) {
        size_t len = x->s[i] == '{' ? bare_tag(x, i, "endraw", &open, &close) : 0;
        if (!len) continue;
        push_data(x, i, open, false);
        advance(x, i + len);
        after_tag(x, close, true);
        return 0;
    }
    return fail(x, "missing end of raw block");
}

/* ---- inside tags ------------------------------------------------------------------------------ */

static void hex_escape(const char *p, size_t n, size_t digits, size_t *used, buf *out)
{
    uint32_t v = 0;
    size_t i = 0;
    for (; i < digits && i < n; i++) {
        char c = p[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0) break;
        v = v << 4 | (uint32_t)d;
    }
    char u[4];
    *used = i;
    buf_add(out, u, (size_t)utf8_encode(v, u));
}

static void one_escape(const char *p, size_t n, size_t *used, buf *out)
{
    static const char from[] = "ntrabfv\\'\"", to[] = "\n\t\r\a\b\f\v\\'\"";
    const char *hit = strchr(from, p[0]);
    size_t k = 0;
    *used = 1;
    if (p[0] && hit) {
        buf_putc(out, to[hit - from]);
    } else if (p[0] == '\n') {
        return;
    } else if (p[0] == 'x' || p[0] == 'u' || p[0] == 'U') {
        hex_escape(p + 1, n - 1, p[0] == 'x' ? 2 : p[0] == 'u' ? 4 : 8, &k, out);
        *used += k;
    } else if (p[0] >= '0' && p[0] <= '7') {
        uint32_t v = 0;
        for (*used = 0; *used < 3 && *used < n && p[*used] >= '0' && p[*used] <= '7'; ++*used)
            v = v * 8 + (uint32_t)(p[*used] - '0');
        char u[4];
        buf_add(out, u, (size_t)utf8_encode(v, u));
    } else {
        buf_putc(out, '\\');
        buf_putc(out, p[0]);
    }
}

static int string(lexer *x)
{
    char quote = x->s[x->at];
    size_t i = x->at + 1;
    bool escaped = false;
    while (i < x->n && x->s[i] != quote) {
        if (x->s[i] == '\\') {
            escaped = true;
            i++;
        }
        i++;
    }
    if (i >= x->n) return fail(x, "a string is not closed");
    jtoken *k = push(x, JT_STRING);
    const char *p = x->s + x->at + 1;
    size_t n = i - x->at - 1;
    k->s = p;
    k->n = n;
    if (escaped) {
        buf b = {0};
        for (size_t j = 0; j < n;) {
            size_t used = 1;
            if (p[j] == '\\' && j + 1 < n) {
                one_escape(p + j + 1, n - j - 1, &used, &b);
                used++;
            } else {
                buf_putc(&b, p[j]);
            }
            j += used;
        }
        k->s = arena_strndup(x->t->a, b.data ? b.data : "", b.len);
        k->n = b.len;
        buf_free(&b);
    }
    advance(x, i + 1);
    return 0;
}

static int number(lexer *x)
{
    char text[64];
    size_t n = 0, i = x->at;
    bool is_float = false;
    for (; i < x->n; i++) {
        char c = x->s[i];
        bool digit = c >= '0' && c <= '9';
        if (c == '_') continue;
        if (c == '.' && !is_float && i + 1 < x->n && x->s[i + 1] >= '0' && x->s[i + 1] <= '9')
            is_float = true;
        else if ((c == 'e' || c == 'E') && i + 1 < x->n &&
                 ((x->s[i + 1] >= '0' && x->s[i + 1] <= '9') ||
                  ((x->s[i + 1] == '-' || x->s[i + 1] == '+') && i + 2 < x->n &&
                   x->s[i + 2] >= '0' && x->s[i + 2] <= '9'))) {
            is_float = true;
            if (n + 2 >= sizeof text) return fail(x, "a number is too long");
            text[n++] = c;
            c = x->s[++i];
        } else if (!digit) {
            break;
        }
        if (n + 1 >= sizeof text) return fail(x, "a number is too long");
        text[n++] = c;
    }
    text[n] = 0;
    if (!is_float && n > 18) return fail(x, "an integer is too large");
    jtoken *k = push(x, is_float ? JT_FLOAT : JT_INT);
    k->f = strtod(text, NULL);
    k->i = is_float ? 0 : strtoll(text, NULL, 10);
    advance(x, i);
    return 0;
}

static bool name_char(unsigned char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c >= 0x80;
}

static int operator_token(lexer *x)
{
    static const char *const two[] = {"==", "!=", "<=", ">=", "//", "**"};
    const char *p = x->s + x->at;
    for (size_t i = 0; x->at + 1 < x->n && i < sizeof two / sizeof *two; i++)
        if (p[0] == two[i][0] && p[1] == two[i][1]) {
            push(x, JT_OP)->op = JOP(p[0], p[1]);
            advance(x, x->at + 2);
            return 0;
        }
    if (!strchr("+-*/%~[](){}<>=.:|,;", p[0]) || !p[0]) {
        char what[64] = "unexpected character";
        if (p[0] > 32) {
            memcpy(what + 20, " ' '", 5);
            what[22] = p[0];
        }
        return fail(x, what);
    }
    push(x, JT_OP)->op = (uint16_t)p[0];
    advance(x, x->at + 1);
    return 0;
}

/* Does the tag end here? *sign gets the character before the closing pair. */
static bool tag_end(const lexer *x, bool variable, char *sign, size_t *len)
{
    const char *p = x->s + x->at, *end = variable ? "}}" : "%}";
    size_t left = x->n - x->at, k = 0;
    *sign = 0;
    if (left > 2 && (p[0] == '-' || (p[0] == '+' && !variable))) *sign = p[k++];
    if (left < k + 2 || memcmp(p + k, end, 2) != 0) return false;
    *len = k + 2;
    return true;
}

static int inside_tag(lexer *x, bool variable)
{
    int open_braces = 0;
    for (;;) {
        char sign;
        size_t len;
        int rc = 0;
        skip_space(x);
        if (x->at >= x->n) return fail(x, "a tag is not closed");
        if (!open_braces && tag_end(x, variable, &sign, &len)) {
            push(x, variable ? JT_VAR_END : JT_BLOCK_END);
            advance(x, x->at + len);
            after_tag(x, sign, !variable);
            return 0;
        }
        unsigned char c = (unsigned char)x->s[x->at];
        if (c == '"' || c == '\'') {
            rc = string(x);
        } else if (c >= '0' && c <= '9') {
            rc = number(x);
        } else if (name_char(c)) {
            jtoken *k = push(x, JT_NAME);
            size_t i = x->at;
            while (i < x->n && name_char((unsigned char)x->s[i]))
                i++;
            k->s = x->s + x->at;
            k->n = i - x->at;
            advance(x, i);
        } else {
            if (strchr("([{", c)) open_braces++;
            else if (strchr(")]}", c) && --open_braces < 0)
                return fail(x, "a closing bracket has no opening one");
            rc = operator_token(x);
        }
        if (rc < 0) return rc;
    }
}

static int lex_all(lexer *x)
{
    while (x->at < x->n) {
        size_t i = x->at;
        while (i + 1 < x->n && !(x->s[i] == '{' && strchr("{%#", x->s[i + 1]) && x->s[i + 1]))
            i++;
        if (i + 1 >= x->n) {
            jtoken *k = push(x, JT_DATA);
            k->s = x->s + x->at;
            k->n = x->n - x->at;
            break;
        }
        char kind = x->s[i + 1], sign = i + 2 < x->n ? x->s[i + 2] : 0, open, close;
        bool variable = kind == '{';
        push_data(x, i, sign, variable);
        int rc;
        if (kind == '#') {
            rc = comment(x);
        } else {
            size_t len = variable ? 0 : bare_tag(x, x->at, "raw", &open, &close);
            if (len) {
                advance(x, x->at + len);
                after_tag(x, close, false);
                rc = raw(x);
            } else {
                push(x, variable ? JT_VAR_BEGIN : JT_BLOCK_BEGIN);
                advance(x, x->at + 2 + (sign == '-' || (sign == '+')));
                rc = inside_tag(x, variable);
            }
        }
        if (rc < 0) return rc;
    }
    push(x, JT_EOF);
    return 0;
}

int jj_lex(jj_template *t, jtoken **out, size_t *n, err *e)
{
    lexer x = {.t = t, .s = t->source, .n = t->source_n, .line = 1, .line_start = true, .e = e};
    int rc = lex_all(&x);
    if (rc < 0) {
        free(x.v);
        return rc;
    }
    *out = x.v;
    *n = x.n_tok;
    return 0;
}
