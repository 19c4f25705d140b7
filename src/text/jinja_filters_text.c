/* The filters that work on text: case, trimming, escaping, wrapping, shortening.
 *
 * Whatever is filtered becomes a string first (Jinja's soft_str), but for the few filters that call
 * a method of the value: indent, truncate and wordwrap take strings only. wordwrap is Python's
 * textwrap with its rules for hyphens and dashes. striptags knows numeric character references
 * and the named ones of `entities` below. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/jinja_internal.h"

static int case_of(jrun *r, jv v, int how, jv *out)
{
    jv s;
    int rc = j_to_str(r, v, &s);
    if (rc >= 0) *out = j_case(r, s, how);
    return rc;
}

static int f_lower(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return case_of(r, v, J_LOWER, out);
}

static int f_upper(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return case_of(r, v, J_UPPER, out);
}

static int f_capitalize(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return case_of(r, v, J_CAPITALIZE, out);
}

static size_t first_char(jv s)
{
    uint32_t cp;
    int k = s.n ? utf8_decode(s.s, s.n, &cp) : 0;
    return k > 0 ? (size_t)k : s.n ? 1 : 0;
}

/* Words begin behind runs of space and -({[<; a run counts as a piece of its own. */
static bool begins_words(const char *s, size_t n)
{
    uint32_t cp;
    return utf8_decode(s, n, &cp) > 0 && (j_space(cp) || (cp < 0x80 && strchr("-({[<", (int)cp)));
}

static int f_title(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, piece;
    buf b = {0};
    int rc = j_to_str(r, v, &s);
    (void)c;
    for (size_t at = 0; rc >= 0 && at < s.n;) {
        size_t end = at, k;
        bool kind = begins_words(s.s + at, s.n - at);
        for (; end < s.n && begins_words(s.s + end, s.n - end) == kind; end += k)
            k = first_char(j_str(s.s + end, s.n - end));
        k = first_char(j_str(s.s + at, s.n - at));
        piece = j_case(r, j_str(s.s + at, k), J_UPPER);
        buf_add(&b, piece.s, piece.n);
        piece = j_case(r, j_str(s.s + at + k, end - at - k), J_LOWER);
        buf_add(&b, piece.s, piece.n);
        at = end;
        rc = j_step(r);
    }
    if (rc >= 0) *out = j_copy(r, b.data, b.len);
    buf_free(&b);
    return rc;
}

static int f_trim(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, set = j_none();
    int rc = j_to_str(r, v, &s);
    if (rc < 0) return rc;
    j_arg(c, 0, "chars", &set);
    if (set.t != J_STR && set.t != J_NONE) return j_fail(r, "filter 'trim' takes a string");
    *out = j_strip(s, set.t == J_STR ? set.s : NULL, set.t == J_STR ? set.n : 0, true, true);
    return 0;
}

static int f_string(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return j_to_str(r, v, out);
}

static int f_safe(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = j_to_str(r, v, out);
    (void)c;
    if (rc >= 0) out->safe = true;
    return rc;
}

/* ---- escaping ---- */

int j_escape(jrun *r, jv v, jv *out)
{
    jv s;
    buf b = {0};
    int rc = j_to_str(r, v, &s);
    if (rc < 0) return rc;
    *out = s;
    if (v.t == J_STR && v.safe) return 0;
    for (size_t i = 0; i < s.n; i++) {
        const char *to = s.s[i] == '&'    ? "&amp;"
                         : s.s[i] == '<'  ? "&lt;"
                         : s.s[i] == '>'  ? "&gt;"
                         : s.s[i] == '"'  ? "&#34;"
                         : s.s[i] == '\'' ? "&#39;"
                                          : NULL;
        if (to)
            buf_puts(&b, to);
        else
            buf_putc(&b, s.s[i]);
    }
    *out = j_take(r, &b);
    out->safe = true;
    return j_step(r);
}

static int f_escape(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    return j_escape(r, v, out);
}

static int f_forceescape(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)c;
    v.safe = false;
    return j_escape(r, v, out);
}

static void url_byte(buf *b, char ch, bool query)
{
    if (isalnum((unsigned char)ch) || (ch && strchr("_.-~", ch)) || (ch == '/' && !query))
        buf_putc(b, ch);
    else if (ch == ' ' && query)
        buf_putc(b, '+');
    else
        buf_printf(b, "%%%02X", (uint8_t)ch);
}

static int url_text(jrun *r, buf *b, jv v, bool query)
{
    jv s;
    int rc = j_to_str(r, v, &s);
    if (rc >= 0) j_slow(r, s.n);
    for (size_t i = 0; rc >= 0 && i < s.n; i++)
        url_byte(b, s.s[i], query);
    return rc < 0 ? rc : j_step(r);
}

static int f_urlencode(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    buf b = {0};
    jlist *l;
    (void)c;
    bool pairs = v.t != J_STR && (v.t == J_DICT || v.t == J_LIST || v.t == J_TUPLE ||
                                  v.t == J_SEQ || v.t == J_GEN || v.t == J_UNDEF);
    if (!pairs) {
        TRY(url_text(r, &b, v, false));
    } else {
        if (v.t == J_DICT) TRY(j_filter(r, "items", 5, v, &(jcall){0}, &v));
        TRY(j_iter(r, v, &l));
        for (size_t i = 0; i < l->n; i++) {
            jlist *pair;
            TRY(j_iter(r, l->v[i], &pair));
            if (pair->n != 2) TRY(j_fail(r, "filter 'urlencode' needs pairs"));
            if (i) buf_putc(&b, '&');
            TRY(url_text(r, &b, pair->v[0], true));
            buf_putc(&b, '=');
            TRY(url_text(r, &b, pair->v[1], true));
        }
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

static int f_xmlattr(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    buf b = {0};
    bool space = j_flag(c, 0, "autospace", true);
    if (v.t != J_DICT) return j_fail(r, "filter 'xmlattr' needs a mapping");
    for (size_t i = 0; i < v.dict->n; i++) {
        jv key = v.dict->keys[i], x = v.dict->vals[i];
        if (x.t == J_NONE || x.t == J_UNDEF) continue;
        if (key.t != J_STR) TRY(j_fail(r, "an attribute's name must be a string"));
        for (size_t k = 0; k < key.n; k++)
            if (strchr(" \t\n\r\f\v/>=", key.s[k]))
                TRY(j_fail(r, "an attribute's name with a character that is not allowed"));
        TRY(j_escape(r, key, &key));
        TRY(j_escape(r, x, &x));
        if (b.len || space) buf_putc(&b, ' ');
        buf_add(&b, key.s, key.n);
        buf_puts(&b, "=\"");
        buf_add(&b, x.s, x.n);
        buf_putc(&b, '"');
    }
    *out = j_copy(r, b.data, b.len);
    out->safe = r->autoescape;
out:
    buf_free(&b);
    return rc;
}

static const struct {
    const char *name, *text;
} entities[] = {{"amp;", "&"},  {"lt;", "<"},          {"gt;", ">"},        {"quot;", "\""},
                {"apos;", "'"}, {"nbsp;", "\xC2\xA0"}, {"amp", "&"},        {"lt", "<"},
                {"gt", ">"},    {"quot", "\""},        {"nbsp", "\xC2\xA0"}};

/* The character reference behind "&"; returns its length, 0 when there is none. */
static size_t reference(const char *s, size_t n, buf *b)
{
    char enc[4];
    if (n && s[0] == '#') {
        bool hex = n > 1 && (s[1] | 32) == 'x';
        size_t at = hex ? 2 : 1, from = at;
        uint32_t cp = 0;
        for (; at < n && (hex ? isxdigit((unsigned char)s[at]) : isdigit((unsigned char)s[at]));
             at++) {
            uint32_t d = (uint32_t)(s[at] <= '9' ? s[at] - '0' : (s[at] | 32) - 'a' + 10);
            if (cp < 0x200000) cp = cp * (hex ? 16 : 10) + d;
        }
        if (at == from) return 0;
        if (cp >= 0x20 && cp < 0x7f)
            buf_putc(b, (char)cp);
        else
            buf_add(b, enc, (size_t)utf8_encode(cp && cp < 0x110000 ? cp : 0xfffd, enc));
        return at + (at < n && s[at] == ';');
    }
    for (size_t i = 0; i < sizeof(entities) / sizeof(entities[0]); i++) {
        size_t k = strlen(entities[i].name);
        if (k > n || memcmp(s, entities[i].name, k) != 0) continue;
        buf_puts(b, entities[i].text);
        return k;
    }
    return 0;
}

static jv without_tags(jrun *r, jv s)
{
    buf b = {0};
    size_t at = 0;
    for (;;) {
        const char *open = at < s.n ? memchr(s.s + at, '<', s.n - at) : NULL, *end = NULL;
        size_t start = open ? (size_t)(open - s.s) : s.n;
        if (open && s.n - start >= 4 && !memcmp(open, "<!--", 4)) {
            end = memmem(open + 4, s.n - start - 4, "-->", 3);
            if (end) end += 3;
        } else if (open) {
            end = memchr(open, '>', s.n - start);
            if (end) end++;
        }
        if (!end) break;
        buf_add(&b, s.s + at, start - at);
        at = (size_t)(end - s.s);
    }
    buf_add(&b, s.s + at, s.n - at);
    return j_take(r, &b);
}

static int f_striptags(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, words;
    buf b = {0};
    int rc = 0;
    (void)c;
    TRY(j_to_str(r, v, &s));
    s = without_tags(r, j_str(s.s, s.n));
    TRY(j_find_method(s, "split", 5, &(bool){false})->fn(r, s, &(jcall){0}, &words));
    TRY(j_join(r, j_strz(" "), words.list, &s));
    for (size_t i = 0; i < s.n;) {
        size_t k = s.s[i] == '&' ? reference(s.s + i + 1, s.n - i - 1, &b) : 0;
        if (!k) buf_putc(&b, s.s[i]);
        i += k + 1;
    }
    *out = j_copy(r, b.data, b.len);
out:
    buf_free(&b);
    return rc;
}

/* ---- replacing, filling ---- */

static int by_method(jrun *r, jv s, const char *name, const jv *args, size_t n, jv *out)
{
    jcall call = {.n = n, .v = args};
    int rc = j_work(r, s.n);
    return rc < 0 ? rc : j_find_method(s, name, strlen(name), &(bool){false})->fn(r, s, &call, out);
}

static int f_replace(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, a = j_none(), b = j_none(), count = j_none();
    int rc = 0;
    TRY(j_to_str(r, v, &s));
    if (!j_arg(c, 0, "old", &a) || !j_arg(c, 1, "new", &b))
        return j_fail(r, "filter 'replace' takes what to replace and the new text");
    TRY(j_to_str(r, a, &a));
    TRY(j_to_str(r, b, &b));
    if (r->autoescape && (a.safe || (b.safe && !s.safe))) TRY(j_escape(r, s, &s));
    if (!r->autoescape) s.safe = a.safe = b.safe = false;
    j_arg(c, 2, "count", &count);
    jv args[3] = {a, b, count};
    TRY(by_method(r, s, "replace", args, count.t == J_NONE ? 2 : 3, out));
out:
    return rc;
}

static int f_center(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, width = j_int(80);
    int rc = j_to_str(r, v, &s);
    j_arg(c, 0, "width", &width);
    return rc < 0 ? rc : by_method(r, s, "center", &width, 1, out);
}

static int lines_of(jrun *r, jv s, jlist **out)
{
    jv l;
    int rc = by_method(r, s, "splitlines", NULL, 0, &l);
    if (rc >= 0) *out = l.list;
    return rc;
}

static int indentation(jrun *r, const jcall *c, jv *out)
{
    jv width = j_int(4);
    j_arg(c, 0, "width", &width);
    if (width.t != J_STR) return j_binary(r, JT_MUL, j_strz(" "), width, out);
    *out = width;
    return 0;
}

/* Lines after the first get the indent, empty ones only with `blank`. */
static int f_indent(jrun *r, jv v, const jcall *c, jv *out)
{
    jv pad, s = v;
    int rc = 0;
    jlist *lines;
    buf b = {0};
    bool first = j_flag(c, 1, "first", false), blank = j_flag(c, 2, "blank", false);
    if (v.t != J_STR) return j_fail(r, "filter 'indent' needs a string, found %s", j_type_name(v));
    TRY(indentation(r, c, &pad));
    if (s.safe) TRY(j_escape(r, pad, &pad));
    TRY(j_binary(r, JT_ADD, j_str(s.s, s.n), j_strz("\n"), &s));
    TRY(lines_of(r, s, &lines));
    size_t total;
    if (!mem_mul(pad.n, lines->n, &total)) total = SIZE_MAX;
    TRY(j_room(r, total));
    for (size_t i = 0; i < lines->n; i++) {
        if (i) buf_putc(&b, '\n');
        if (i == 0 ? first : blank || lines->v[i].n) buf_add(&b, pad.s, pad.n);
        buf_add(&b, lines->v[i].s, lines->v[i].n);
    }
    *out = j_copy(r, b.data, b.len);
    out->safe = v.safe;
out:
    buf_free(&b);
    return rc;
}

static int f_wordcount(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s;
    int64_t n = 0;
    bool in_word = false;
    int rc = j_to_str(r, v, &s);
    (void)c;
    if (rc < 0) return rc;
    j_slow(r, s.n);
    for (size_t i = 0; i < s.n;) {
        uint32_t cp = 0;
        int k = utf8_decode(s.s + i, s.n - i, &cp);
        bool w = k > 0 && j_is(cp, J_IS_WORD);
        n += w && !in_word;
        in_word = w;
        i += (size_t)(k > 0 ? k : 1);
    }
    *out = j_int(n);
    return 0;
}

static int f_truncate(jrun *r, jv v, const jcall *c, jv *out)
{
    int64_t length = 255, leeway = 5, n;
    jv end = j_strz("..."), ignored;
    int rc = 0;
    if (j_arg(c, 3, "leeway", &ignored) && ignored.t != J_NONE)
        TRY(j_arg_int(r, c, 3, "leeway", &leeway));
    TRY(j_arg_int(r, c, 0, "length", &length));
    j_arg(c, 2, "end", &end);
    bool kill = j_flag(c, 1, "killwords", false);
    if (end.t != J_STR) return j_fail(r, "filter 'truncate': 'end' must be a string");
    int64_t tail = (int64_t)j_chars(end);
    if (length < tail || leeway < 0)
        return j_fail(r, "filter 'truncate': a length below that of '%.20s'", end.s);
    TRY(j_length(r, v, &n));
    *out = v;
    if (n <= length || n - length <= leeway) return 0;
    if (v.t != J_STR) return j_fail(r, "filter 'truncate' needs a string");
    jv head = j_str(v.s, j_char_at(v, (size_t)(length - tail)));
    head.safe = v.safe;
    const char *space = kill || !head.n ? NULL : memrchr(head.s, ' ', head.n);
    if (space) head.n = (size_t)(space - head.s);
    TRY(j_binary(r, JT_ADD, head, end, out));
out:
    return rc < 0 ? rc : 0;
}

static int f_filesizeformat(jrun *r, jv v, const jcall *c, jv *out)
{
    static const char *const units[] = {"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"};
    bool binary = j_flag(c, 0, "binary", false);
    double base = binary ? 1024 : 1000, unit = base;
    jv f;
    buf b = {0};
    int rc = j_filter(r, "float", 5, v, &(jcall){.n = 1, .v = (jv[]){j_none()}}, &f);
    if (rc < 0) return rc;
    if (f.t != J_FLOAT) return j_fail(r, "filter 'filesizeformat' needs a number");
    if (f.f != f.f || f.f - f.f != 0) return j_fail(r, "filter 'filesizeformat': no finite number");
    if (f.f == 1) {
        buf_puts(&b, "1 Byte");
    } else if (f.f < base) {
        buf_printf(&b, "%.0f Bytes", f.f < 0 ? -(double)(uint64_t)(-f.f) : (double)(uint64_t)f.f);
    } else {
        size_t i = 0;
        for (unit = base * base; i < 7 && f.f >= unit; i++)
            unit *= base;
        buf_printf(&b, "%.1f %c%s%s", base * f.f / unit,
                   binary ? toupper(units[i][0]) : units[i][0], binary ? "i" : "", units[i] + 1);
    }
    *out = j_take(r, &b);
    return 0;
}

/* "...".format with %: positional arguments, or named ones as a mapping. */
static int f_format(jrun *r, jv v, const jcall *c, jv *out)
{
    jv s, args = j_list(r, c->n), named = j_dict(r);
    int rc = j_to_str(r, v, &s);
    if (rc < 0) return rc;
    if (c->n && c->n_kw) return j_fail(r, "filter 'format' takes positions or names, not both");
    for (size_t i = 0; i < c->n; i++)
        j_push(r, args.list, c->v[i]);
    for (size_t i = 0; i < c->n_kw; i++)
        j_dict_set(r, named.dict, c->kw_names[i], c->kw[i]);
    args.t = J_TUPLE;
    return j_binary(r, JT_MOD, s, c->n_kw ? named : args, out);
}

/* ---- wrapping ---- */

typedef struct wrap {
    jrun *r;
    const uint32_t *cp; /* characters of one line, and where each begins */
    const size_t *at;
    size_t n;
    int64_t width;
    bool long_words, hyphens;
    const char *text;
    jv sep;
    buf *out;
    bool any; /* a line of this paragraph is out */
} wrap;

static bool wrap_space(uint32_t cp)
{
    return cp == ' ' || (cp >= 9 && cp <= 13);
}

static bool letter(const wrap *w, size_t i)
{
    return i < w->n && j_is(w->cp[i], J_IS_WORD) && !j_is(w->cp[i], J_IS_DECIMAL);
}

/* Two dashes or more at i, between the characters of words. */
static size_t em_dash(const wrap *w, size_t i)
{
    size_t end = i;
    while (end < w->n && w->cp[end] == '-')
        end++;
    if (i == 0 || end < i + 2 || end == w->n || !j_is(w->cp[end], J_IS_WORD)) return 0;
    uint32_t before = w->cp[i - 1];
    bool word = j_is(before, J_IS_WORD) || (before < 0x80 && strchr("!\"'&.,?", (int)before));
    return word ? end : 0;
}

static bool hyphen_break(const wrap *w, size_t e)
{
    if (e >= w->n || w->cp[e] != '-' || e < 2) return false;
    bool before = (letter(w, e - 2) && letter(w, e - 1)) ||
                  (e >= 3 && letter(w, e - 3) && w->cp[e - 2] == '-' && letter(w, e - 1));
    size_t k = e + 2 < w->n && w->cp[e + 2] == '-' ? e + 3 : e + 2;
    return before && letter(w, e + 1) && (letter(w, e + 2) || letter(w, k));
}

/* Where the chunk that begins at i ends. */
static size_t chunk_end(const wrap *w, size_t i)
{
    size_t e = i;
    if (wrap_space(w->cp[i])) {
        while (e < w->n && wrap_space(w->cp[e]))
            e++;
        return e;
    }
    if (w->hyphens && w->cp[i] == '-' && (e = em_dash(w, i)) > 0) return e;
    for (e = i + 1; e < w->n && !wrap_space(w->cp[e]); e++) {
        if (!w->hyphens) continue;
        if (hyphen_break(w, e)) return e + 1;
        if (w->cp[e] == '-' && em_dash(w, e)) return e;
    }
    return e;
}

static bool blank(const wrap *w, size_t from, size_t to)
{
    for (; from < to; from++)
        if (!j_space(w->cp[from])) return false;
    return true;
}

/* How much of a too long chunk goes into the room that is left. */
static size_t cut_long(const wrap *w, size_t from, size_t to, int64_t room)
{
    size_t end = from + (size_t)room;
    if (end > to) end = to;
    for (size_t i = end; w->hyphens && i-- > from + 1;) {
        if (w->cp[i] != '-') continue;
        for (size_t k = from; k < i; k++)
            if (w->cp[k] != '-') return i + 1;
        break;
    }
    return end;
}

static void put_line(wrap *w, size_t from, size_t to)
{
    if (from == to) return;
    if (w->any) buf_add(w->out, w->sep.s, w->sep.n);
    buf_add(w->out, w->text + w->at[from], w->at[to] - w->at[from]);
    w->any = true;
}

/* One line of the text to lines of the width: chunks as long as they fit, long ones cut. */
static int wrap_line(wrap *w)
{
    int rc = 0;
    for (size_t at = 0, rest = 0; at < w->n;) { /* rest: end of a chunk that was cut, or 0 */
        size_t end = rest ? rest : chunk_end(w, at), from, last;
        TRY(j_step(w->r));
        if (w->any && blank(w, at, end)) {
            at = end;
            rest = 0;
            if (at == w->n) break;
            end = chunk_end(w, at);
        }
        from = last = at;
        while (at < w->n && (int64_t)(end - from) <= w->width) {
            last = at;
            at = end;
            rest = 0;
            if (at < w->n) end = chunk_end(w, at);
        }
        if (at < w->n && (int64_t)(end - at) > w->width) {
            if (w->long_words) {
                last = at;
                at = cut_long(w, at, end, w->width - (int64_t)(at - from));
                rest = at < end ? end : 0;
            } else if (at == from) {
                last = at;
                at = end;
                rest = 0;
            }
        } else if (at < w->n) {
            rest = end;
        }
        put_line(w, from, last < at && blank(w, last, at) ? last : at);
    }
out:
    return rc;
}

static int wrap_paragraph(wrap *w, jv line)
{
    size_t n = j_chars(line), i = 0;
    uint32_t *cp = j_alloc(w->r, (n + 1) * sizeof(*cp));
    size_t *at = j_alloc(w->r, (n + 1) * sizeof(*at));
    for (size_t p = 0; p < line.n && i < n; i++) {
        at[i] = p;
        int k = utf8_decode(line.s + p, line.n - p, &cp[i]);
        p += (size_t)(k > 0 ? k : 1);
    }
    at[n] = line.n;
    w->cp = cp;
    w->at = at;
    w->n = n;
    w->text = line.s;
    w->any = false;
    return wrap_line(w);
}

static int f_wordwrap(jrun *r, jv v, const jcall *c, jv *out)
{
    int rc = 0;
    buf b = {0};
    jlist *lines;
    wrap w = {.r = r, .width = 79, .sep = j_none(), .out = &b};
    if (v.t != J_STR) return j_fail(r, "filter 'wordwrap' needs a string");
    TRY(j_arg_int(r, c, 0, "width", &w.width));
    w.long_words = j_flag(c, 1, "break_long_words", true);
    j_arg(c, 2, "wrapstring", &w.sep);
    w.hyphens = j_flag(c, 3, "break_on_hyphens", true);
    if (w.sep.t == J_NONE) w.sep = j_strz("\n");
    if (w.sep.t != J_STR) return j_fail(r, "filter 'wordwrap': 'wrapstring' must be a string");
    TRY(lines_of(r, j_str(v.s, v.n), &lines));
    if (w.width <= 0 && lines->n) return j_fail(r, "filter 'wordwrap' needs a positive width");
    for (size_t i = 0; i < lines->n; i++) {
        if (i) buf_add(&b, w.sep.s, w.sep.n);
        TRY(j_room(r, b.len + lines->v[i].n * (12 + w.sep.n)));
        TRY(wrap_paragraph(&w, lines->v[i]));
    }
    *out = j_copy(r, b.data, b.len);
    rc = 0;
out:
    buf_free(&b);
    return rc < 0 ? rc : 0;
}

static int f_refused(jrun *r, jv v, const jcall *c, jv *out)
{
    (void)v;
    (void)c;
    (void)out;
    return j_fail(r, "the filters 'urlize' and 'random' are not supported");
}

const j_row j_filters_text[] = {
    {"capitalize", f_capitalize, 0, 0, NULL},
    {"center", f_center, 0, 1, "width"},
    {"e", f_escape, 0, 0, NULL},
    {"escape", f_escape, 0, 0, NULL},
    {"filesizeformat", f_filesizeformat, 0, 1, "binary"},
    {"forceescape", f_forceescape, 0, 0, NULL},
    {"format", f_format, 0, J_MAX_ARGS, "*"},
    {"indent", f_indent, 0, 3, "width,first,blank"},
    {"lower", f_lower, 0, 0, NULL},
    {"pprint", j_pprint, 0, 0, NULL},
    {"random", f_refused, 0, 0, NULL},
    {"replace", f_replace, 2, 3, "old,new,count"},
    {"safe", f_safe, 0, 0, NULL},
    {"string", f_string, 0, 0, NULL},
    {"striptags", f_striptags, 0, 0, NULL},
    {"title", f_title, 0, 0, NULL},
    {"tojson", j_tojson, 0, 4, "ensure_ascii,indent,separators,sort_keys"},
    {"trim", f_trim, 0, 1, "chars"},
    {"truncate", f_truncate, 0, 4, "length,killwords,end,leeway"},
    {"upper", f_upper, 0, 0, NULL},
    {"urlencode", f_urlencode, 0, 0, NULL},
    {"urlize", f_refused, 0, 5, "*"},
    {"wordcount", f_wordcount, 0, 0, NULL},
    {"wordwrap", f_wordwrap, 0, 4, "width,break_long_words,wrapstring,break_on_hyphens"},
    {"xmlattr", f_xmlattr, 0, 1, "autospace"},
    {NULL, NULL, 0, 0, NULL}};
