/* Template text to tokens, with the whitespace rules that transformers sets.
 *
 * Line ends become "\n" and one of them is dropped from the end of the source. Outside of tags
 * everything is one JT_TEXT token up to the next "{{", "{%" or "{#", and the tags shape it:
 *   "{%-"  strips all white space before the tag, "-%}" all after it, in any kind of tag;
 *   otherwise a block or comment that is first on its line loses the spaces before it (lstrip),
 *   and a block or comment loses the one "\n" behind it (trim); "{%+" and "+%}" prevent that.
 * Comments vanish here, and so do raw blocks, whose inside is text.
 *
 * An end mark counts only outside of brackets: `{{ {'a': {}} }}` is one tag. Refused: unclosed
 * tags, comments, strings and brackets, escapes by name, characters that begin no token.
 * The source has no NUL bytes (j_parse), so that strchr may look for its characters. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

typedef struct lexer {
    jtmpl *t;
    const char *s;
    size_t n, pos;
    uint32_t line;
    bool line_starting;
    char stack[J_MAX_PARSE];
    size_t depth;
    jtoken *v;
    size_t n_v, cap;
    err *e;
} lexer;

static int fail(lexer *x, const char *what)
{
    return err_set(x->e, ERR_FORMAT, "%s, line %u: %s", x->t->where, x->line, what);
}

static jtoken *add(lexer *x, int type)
{
    if (x->n_v == x->cap) {
        x->cap = x->cap ? x->cap * 2 : 256;
        x->v = xrealloc(x->v, x->cap * sizeof(jtoken));
    }
    jtoken *k = &x->v[x->n_v++];
    memset(k, 0, sizeof(*k));
    k->t = (uint8_t)type;
    k->line = x->line;
    return k;
}

static bool at(const lexer *x, size_t pos, const char *mark)
{
    size_t k = strlen(mark);
    return pos <= x->n && x->n - pos >= k && !memcmp(x->s + pos, mark, k);
}

/* Bytes of the white space character at pos, 0 when there is none. */
static size_t space_at(const lexer *x, size_t pos)
{
    uint32_t cp;
    if (pos >= x->n) return 0;
    int k = utf8_decode(x->s + pos, x->n - pos, &cp);
    return k > 0 && j_space(cp) ? (size_t)k : 0;
}

static void advance(lexer *x, size_t to)
{
    for (; x->pos < to; x->pos++)
        x->line += x->s[x->pos] == '\n';
}

static void skip_spaces(lexer *x)
{
    for (size_t k; (k = space_at(x, x->pos)) > 0;)
        advance(x, x->pos + k);
}

/* Moves behind an end mark of `len` bytes and does what its sign says. */
static void finish_tag(lexer *x, size_t len, char sign, bool trims)
{
    advance(x, x->pos + len);
    if (sign == '-')
        skip_spaces(x);
    else if (trims && sign != '+' && at(x, x->pos, "\n"))
        advance(x, x->pos + 1);
    x->line_starting = x->pos > 0 && x->s[x->pos - 1] == '\n';
}

/* Emits the text [from,to) before a tag. */
static void emit_text(lexer *x, size_t from, size_t to, char sign, bool variable)
{
    jv text = j_str(x->s + from, to - from);
    if (sign == '-') {
        text = j_strip(text, NULL, 0, false, true);
    } else if (sign != '+' && !variable) {
        size_t start = text.n;
        while (start > 0 && text.s[start - 1] != '\n')
            start--;
        jv rest = j_strip(j_str(text.s + start, text.n - start), NULL, 0, true, false);
        if ((start > 0 || x->line_starting) && rest.n == 0) text.n = start;
    }
    if (text.n == 0) return;
    jtoken *k = add(x, JT_TEXT);
    k->s = text.s;
    k->n = text.n;
}

static bool is_digit(const lexer *x, size_t p)
{
    return p < x->n && x->s[p] >= '0' && x->s[p] <= '9';
}

/* Copies digits and single underscores between them; returns the position behind. */
static size_t take_digits(const lexer *x, size_t p, buf *b)
{
    while (is_digit(x, p) || (p < x->n && x->s[p] == '_' && is_digit(x, p + 1))) {
        if (x->s[p] != '_') buf_putc(b, x->s[p]);
        p++;
    }
    return p;
}

static int parse_int(lexer *x, const char *digits, size_t k, uint64_t base, jtoken *tok)
{
    uint64_t v = 0;
    while (k > 1 && digits[0] == '0') {
        digits++;
        k--;
    }
    for (size_t i = 0; i < k; i++) {
        int c = digits[i];
        uint64_t d = (uint64_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
        if (d >= base) return fail(x, "a digit that does not fit the number's base");
        if (v > (INT64_MAX - d) / base && base == 10) { /* printed, never computed with */
            tok->s = arena_strndup(x->t->a, digits, k);
            tok->n = k;
            return 0;
        }
        if (v > (INT64_MAX - d) / base) return fail(x, "an integer above the limit of 64 bits");
        v = v * base + d;
    }
    tok->i = (int64_t)v;
    return 0;
}

static bool digit_of(char c, uint64_t base)
{
    return base == 16 ? isxdigit((unsigned char)c) != 0 : c >= '0' && c < (char)('0' + base);
}

/* Behind 0x, 0o or 0b: digits of the base, single underscores before them. No digits: "0" alone. */
static int lex_based(lexer *x, uint64_t base)
{
    size_t p = x->pos + 2;
    buf b = {0};
    while (p < x->n) {
        size_t d = x->s[p] == '_' && p + 1 < x->n ? p + 1 : p;
        if (!digit_of(x->s[d], base)) break;
        buf_putc(&b, x->s[d]);
        p = d + 1;
    }
    x->pos = b.len ? p : x->pos + 1;
    int rc = parse_int(x, b.len ? b.data : "0", b.len ? b.len : 1, base, add(x, JT_INT));
    buf_free(&b);
    return rc;
}

static int lex_number(lexer *x)
{
    size_t p = x->pos;
    char second = p + 1 < x->n ? x->s[p + 1] : ' ';
    if (x->s[p] == '0' && strchr("xX", second)) return lex_based(x, 16);
    if (x->s[p] == '0' && strchr("oO", second)) return lex_based(x, 8);
    if (x->s[p] == '0' && strchr("bB", second)) return lex_based(x, 2);
    bool after_dot = x->n_v && x->v[x->n_v - 1].t == JT_DOT, is_float = false;
    buf b = {0};
    p = take_digits(x, p, &b);
    if (!after_dot && p < x->n && x->s[p] == '.' && is_digit(x, p + 1)) {
        buf_putc(&b, '.');
        p = take_digits(x, p + 1, &b);
        is_float = true;
    }
    if (!after_dot && p < x->n && (x->s[p] == 'e' || x->s[p] == 'E')) {
        size_t q = p + 1;
        if (q < x->n && (x->s[q] == '+' || x->s[q] == '-')) q++;
        if (is_digit(x, q)) {
            buf_add(&b, x->s + p, q - p);
            p = take_digits(x, q, &b);
            is_float = true;
        }
    }
    if (!is_float && b.data[0] == '0' && strspn(b.data, "0") < b.len) { /* "012" is 0 and then 12 */
        size_t zeros = strspn(b.data, "0");
        p = x->pos;
        for (size_t k = 0; k < zeros; p++)
            k += x->s[p] == '0';
        b.len = zeros;
        b.data[zeros] = 0;
    }
    jtoken *tok = add(x, is_float ? JT_FLOAT : JT_INT);
    int rc = 0;
    if (is_float)
        tok->f = strtod(b.data, NULL);
    else
        rc = parse_int(x, b.data, b.len, 10, tok);
    buf_free(&b);
    x->pos = p;
    return rc;
}

static size_t read_hex(const char *s, size_t n, size_t want, uint32_t *out)
{
    uint32_t v = 0;
    if (n < want) return 0;
    for (size_t i = 0; i < want; i++) {
        char c = s[i];
        if (c >= '0' && c <= '9')
            v = v * 16 + (uint32_t)(c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            v = v * 16 + (uint32_t)((c | 32) - 'a' + 10);
        else
            return 0;
    }
    *out = v;
    return want;
}

/* One escape behind a backslash, as Python's string literals have them; returns bytes used, or a
 * negative number for what Python refuses. Jinja sees what is not ASCII as an escape already, so
 * that a backslash before it makes that visible. */
static int unescape(const char *s, size_t n, buf *b)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = s[0], enc[4];
    uint32_t cp = 0, low;
    const char *hit = strchr(from, c);
    if (c == '\n') return 1;
    if (hit) {
        buf_putc(b, to[hit - from]);
        return 1;
    }
    if (c >= '0' && c <= '7') {
        int k = 0;
        while (k < 3 && (size_t)k < n && s[k] >= '0' && s[k] <= '7')
            cp = cp * 8 + (uint32_t)(s[k++] - '0');
        buf_add(b, enc, (size_t)utf8_encode(cp, enc));
        return k;
    }
    size_t want = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (c == 'N' || (want && !read_hex(s + 1, n - 1, want, &cp))) return -1;
    if (want) {
        size_t used = 1 + want;
        if (c == 'u' && cp >= 0xd800 && cp < 0xdc00 && n >= used + 6 && s[used] == '\\' &&
            s[used + 1] == 'u' && read_hex(s + used + 2, 4, 4, &low) && low >= 0xdc00 &&
            low < 0xe000) {
            cp = 0x10000 + ((cp - 0xd800) << 10) + (low - 0xdc00);
            used += 6;
        }
        if (cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000)) return -1;
        buf_add(b, enc, (size_t)utf8_encode(cp, enc));
        return (int)used;
    }
    buf_putc(b, '\\'); /* no escape: the backslash stands for itself */
    if ((unsigned char)c < 0x80) return 0;
    int k = utf8_decode(s, n, &cp);
    buf_printf(b, cp < 0x100 ? "x%02x" : cp < 0x10000 ? "u%04x" : "U%08x", cp);
    return k > 0 ? k : 1;
}

static int lex_string(lexer *x)
{
    char quote = x->s[x->pos];
    size_t p = x->pos + 1;
    buf b = {0};
    while (p < x->n && x->s[p] != quote) {
        int used = 0;
        if (x->s[p] != '\\' || p + 1 >= x->n) {
            buf_putc(&b, x->s[p++]);
            continue;
        }
        if ((used = unescape(x->s + p + 1, x->n - p - 1, &b)) < 0) {
            buf_free(&b);
            return fail(x, "an escape in a string that is not valid or not supported");
        }
        p += 1 + (size_t)used;
    }
    if (p >= x->n) {
        buf_free(&b);
        return fail(x, "a string that is not closed");
    }
    jtoken *k = add(x, JT_STR);
    k->s = arena_strndup(x->t->a, b.data ? b.data : "", b.len);
    k->n = b.len;
    buf_free(&b);
    advance(x, p + 1);
    return 0;
}

static bool name_byte(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           (unsigned char)c >= 0x80;
}

static int lex_operator(lexer *x)
{
    static const struct {
        const char *s;
        uint8_t t;
    } ops[] = {{"//", JT_FLOORDIV}, {"**", JT_POW},     {"==", JT_EQ},      {"!=", JT_NE},
               {"<=", JT_LE},       {">=", JT_GE},      {"+", JT_ADD},      {"-", JT_SUB},
               {"*", JT_MUL},       {"/", JT_DIV},      {"%", JT_MOD},      {"~", JT_TILDE},
               {"(", JT_LPAREN},    {")", JT_RPAREN},   {"[", JT_LBRACKET}, {"]", JT_RBRACKET},
               {"{", JT_LBRACE},    {"}", JT_RBRACE},   {".", JT_DOT},      {",", JT_COMMA},
               {":", JT_COLON},     {"|", JT_PIPE},     {"=", JT_ASSIGN},   {"<", JT_LT},
               {">", JT_GT},        {";", JT_SEMICOLON}};
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        if (!at(x, x->pos, ops[i].s)) continue;
        uint8_t t = ops[i].t;
        if (t == JT_LPAREN || t == JT_LBRACKET || t == JT_LBRACE) {
            if (x->depth == J_MAX_PARSE) return fail(x, "brackets nested deeper than the limit");
            x->stack[x->depth++] = (char)(t + 1);
        } else if (t == JT_RPAREN || t == JT_RBRACKET || t == JT_RBRACE) {
            if (x->depth == 0 || x->stack[--x->depth] != (char)t)
                return fail(x, "a closing bracket that matches no open one");
        }
        add(x, t);
        x->pos += strlen(ops[i].s);
        return 0;
    }
    return fail(x, "a character that does not belong into an expression");
}

/* Sign of an end mark "-}}", "}}", "+%}" at pos; 0 when there is none. *len = its length. */
static char end_mark(const lexer *x, const char *mark, bool plus, size_t *len)
{
    char c = x->pos < x->n ? x->s[x->pos] : 0;
    *len = 2;
    if (at(x, x->pos, mark)) return ' ';
    *len = 3;
    if ((c == '-' || (plus && c == '+')) && at(x, x->pos + 1, mark)) return c;
    return 0;
}

/* The inside of a tag, from behind its begin mark to behind its end mark. */
static int lex_tag(lexer *x, bool block)
{
    int rc = 0;
    x->depth = 0;
    for (;;) {
        skip_spaces(x);
        if (x->pos >= x->n) return fail(x, "a tag that is not closed");
        size_t len;
        char sign = x->depth ? 0 : end_mark(x, block ? "%}" : "}}", block, &len);
        char c = x->s[x->pos];
        if (sign) {
            add(x, block ? JT_BLOCK_END : JT_VAR_END);
            finish_tag(x, len, sign, block);
            return 0;
        }
        if (is_digit(x, x->pos)) {
            rc = lex_number(x);
        } else if (name_byte(c)) {
            jtoken *k = add(x, JT_NAME);
            k->s = x->s + x->pos;
            while (x->pos < x->n && name_byte(x->s[x->pos]))
                x->pos++;
            k->n = (size_t)(x->s + x->pos - k->s);
        } else if (c == '"' || c == '\'') {
            rc = lex_string(x);
        } else {
            rc = lex_operator(x);
        }
        if (rc < 0) return rc;
    }
}

/* Is `word` with an end mark behind it at pos? *end = position of the mark. */
static bool tag_is(const lexer *x, size_t pos, const char *word, size_t *end)
{
    for (size_t k; (k = space_at(x, pos)) > 0;)
        pos += k;
    if (!at(x, pos, word)) return false;
    pos += strlen(word);
    for (size_t k; (k = space_at(x, pos)) > 0;)
        pos += k;
    *end = pos;
    return at(x, pos, "%}") || at(x, pos, "-%}") || at(x, pos, "+%}");
}

static char sign_at(const lexer *x, size_t pos)
{
    return pos < x->n && (x->s[pos] == '-' || x->s[pos] == '+') ? x->s[pos] : ' ';
}

/* From the end mark of {% raw %} to behind {% endraw %}. */
static int lex_raw(lexer *x, size_t mark)
{
    advance(x, mark);
    char sign = sign_at(x, x->pos);
    finish_tag(x, sign == ' ' ? 2 : 3, sign, false);
    for (size_t p = x->pos; p < x->n; p++) {
        if (!at(x, p, "{%")) continue;
        char before = sign_at(x, p + 2);
        size_t end;
        if (!tag_is(x, p + (before == ' ' ? 2 : 3), "endraw", &end)) continue;
        emit_text(x, x->pos, p, before, false);
        advance(x, end);
        char after = sign_at(x, end);
        finish_tag(x, after == ' ' ? 2 : 3, after, true);
        return 0;
    }
    return fail(x, "a raw block that is not closed");
}

static int lex_comment(lexer *x)
{
    size_t from = x->pos;
    for (size_t p = from; p < x->n; p++) {
        if (!at(x, p, "#}")) continue;
        char sign = p > from ? sign_at(x, p - 1) : ' ';
        advance(x, p);
        finish_tag(x, 2, sign, true);
        return 0;
    }
    return fail(x, "a comment that is not closed");
}

static int lex_all(lexer *x)
{
    int rc = 0;
    while (x->pos < x->n) {
        size_t p = x->pos;
        while (p < x->n && !at(x, p, "{{") && !at(x, p, "{%") && !at(x, p, "{#"))
            p++;
        if (p >= x->n) {
            jtoken *k = add(x, JT_TEXT);
            k->s = x->s + x->pos;
            k->n = x->n - x->pos;
            break;
        }
        char kind = x->s[p + 1], sign = sign_at(x, p + 2);
        size_t raw_end;
        emit_text(x, x->pos, p, sign, kind == '{');
        advance(x, p + (sign == ' ' ? 2 : 3));
        if (kind == '#') {
            rc = lex_comment(x);
        } else if (kind == '%' && tag_is(x, x->pos, "raw", &raw_end) && !at(x, raw_end, "+%}")) {
            rc = lex_raw(x, raw_end);
        } else {
            add(x, kind == '%' ? JT_BLOCK_BEGIN : JT_VAR_BEGIN);
            rc = lex_tag(x, kind == '%');
        }
        if (rc < 0) return rc;
    }
    add(x, JT_EOF);
    return 0;
}

/* The source with "\n" line ends and the last one dropped, in the arena. */
static const char *normalize(jtmpl *t, const char *text, size_t n, size_t *n_out)
{
    char *s = arena_alloc(t->a, n + 1);
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '\r') {
            s[k++] = '\n';
            if (i + 1 < n && text[i + 1] == '\n') i++;
        } else {
            s[k++] = text[i];
        }
    }
    if (k && s[k - 1] == '\n') k--;
    s[k] = 0;
    *n_out = k;
    return s;
}

int j_lex(jtmpl *t, const char *text, size_t n, jtoken **out, size_t *n_out, err *e)
{
    lexer x = {.t = t, .line = 1, .line_starting = true, .e = e};
    x.s = normalize(t, text, n, &x.n);
    int rc = lex_all(&x);
    if (rc < 0) {
        free(x.v);
        return rc;
    }
    *out = x.v;
    *n_out = x.n_v;
    return 0;
}
