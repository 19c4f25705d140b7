/* Control tokens in the text of messages, taken literally.
 *
 * Every special token that is written in a string of the messages (or of the tools) is replaced by
 * a mark before the template is rendered: U+FDD0, its number, U+FDD1, code points that Unicode
 * keeps out of texts. Behind the template the marks become the token's text again, and where they
 * stood special tokens are not sought. Roles and types of parts are left alone: templates compare
 * them.
 *
 * A token could still come about from a piece of the template and a piece of a message side by
 * side. So the messages are rendered once more with every word of their contents blotted out: if
 * the special tokens of both renderings are not the same, the template is refused. */
#include "text/literal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"

#define OPEN  "\xEF\xB7\x90" /* U+FDD0 */
#define CLOSE "\xEF\xB7\x91"

typedef struct marks {
    const tokenizer *t;
    bool prompt, continued; /* how to render */
    bool blot;              /* contents become x's */
    char **text;
    size_t n, cap;
    err *e;
} marks;

int literal_parse(const char *text, bool *literal, err *e)
{
    *literal = !strcmp(text, "literal");
    if (*literal || !strcmp(text, "honour")) return 0;
    return err_set(e, ERR_USAGE, "control tokens in text can be 'honour' or 'literal', not '%.40s'",
                   text);
}

/* ---- before the template ----------------------------------------------------------------------
 */

static void mark_text(marks *m, const char *s, buf *out)
{
    size_t n = strlen(s), at = 0, lo, hi;
    buf_puts(out, "");
    while (tokenizer_find_special(m->t, s, n, at, &lo, &hi)) {
        buf_add(out, s + at, lo - at);
        buf_printf(out, OPEN "%zu" CLOSE, m->n);
        if (m->n == m->cap) {
            m->cap = m->cap ? m->cap * 2 : 16;
            m->text = xrealloc(m->text, m->cap * sizeof *m->text);
        }
        m->text[m->n++] = xstrndup(s + lo, hi - lo);
        at = hi;
    }
    buf_add(out, s + at, n - at);
}

static void blot_text(const char *s, buf *out)
{
    buf_puts(out, "");
    for (; *s; s++)
        if (*s == ' ' || (*s >= '\t' && *s <= '\r'))
            buf_putc(out, *s);
        else if (((unsigned char)*s & 0xC0) != 0x80)
            buf_putc(out, 'x');
}

static int change_string(marks *m, json *j, bool content)
{
    buf b = {0};
    if (strstr(j->valuestring, OPEN) || strstr(j->valuestring, CLOSE))
        return err_set(m->e, ERR_VALUE,
                       "a text holds U+FDD0 or U+FDD1, which mark literal control tokens");
    if (content && m->blot)
        blot_text(j->valuestring, &b);
    else
        mark_text(m, j->valuestring, &b);
    cJSON_SetValuestring(j, b.data);
    buf_free(&b);
    return 0;
}

static bool is_content(const char *key)
{
    static const char *const keys[] = {"content", "reasoning_content", "reasoning", "thinking"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!strcmp(key, keys[i])) return true;
    return false;
}

/* Depth is bounded by json_parse. */
static int change(marks *m, json *j, bool content)
{
    int rc = 0;
    if (cJSON_IsString(j)) return change_string(m, j, content);
    for (json *c = j ? j->child : NULL; c && rc == 0; c = c->next) {
        const char *key = cJSON_IsObject(j) ? c->string : "";
        if (!strcmp(key, "role") || !strcmp(key, "type")) continue;
        rc = change(m, c, content || is_content(key));
    }
    return rc;
}

/* ---- behind it --------------------------------------------------------------------------------
 */

typedef struct literal_text {
    buf text;
    size_t *ranges, n, cap;
} literal_text;

static void add_range(literal_text *l, size_t lo, size_t hi)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 16;
        l->ranges = xrealloc(l->ranges, 2 * l->cap * sizeof *l->ranges);
    }
    l->ranges[2 * l->n] = lo;
    l->ranges[2 * l->n + 1] = hi;
    l->n++;
}

/* Marks become text again; one that the template has broken is an error. */
static int unmark(const marks *m, const char *s, literal_text *l)
{
    size_t n = strlen(OPEN);
    bool escaped = strcasestr(s, "\\ufdd"); /* by tojson */
    buf_puts(&l->text, "");
    for (const char *p; (p = strstr(s, OPEN)); s = p) {
        char *end;
        unsigned long k = strtoul(p + n, &end, 10);
        if (end == p + n || k >= m->n || strncmp(end, CLOSE, n) != 0) break;
        buf_add(&l->text, s, (size_t)(p - s));
        size_t lo = l->text.len;
        buf_puts(&l->text, m->text[k]);
        add_range(l, lo, l->text.len);
        p = end + n;
    }
    if (strstr(s, OPEN) || strstr(s, CLOSE) || escaped)
        return err_set(m->e, ERR_UNSUPPORTED,
                       "the chat template takes the messages' text apart, so that literal control "
                       "tokens cannot be told from its own");
    buf_puts(&l->text, s);
    return 0;
}

static int render(marks *m, const chat_template *c, const json *messages, const json *extra,
                  ids *out)
{
    json *msgs = cJSON_Duplicate(messages, 1), *more = extra ? cJSON_Duplicate(extra, 1) : NULL;
    literal_text l = {0};
    buf b = {0};
    int rc;
    const char *bos = tokenizer_bos_text(m->t), *eos = tokenizer_eos_text(m->t);
    TRY(change(m, msgs, false));
    TRY(change(m, more, false));
    TRY(m->continued ? chat_render_continued(c, msgs, more, bos, eos, &b, m->e)
                     : chat_render(c, msgs, more, m->prompt, bos, eos, &b, m->e));
    TRY(unmark(m, b.data ? b.data : "", &l));
    TRY(tokenizer_encode_around(m->t, l.text.data, l.text.len, l.ranges, l.n, out, m->e));
out:
    buf_free(&b);
    buf_free(&l.text);
    free(l.ranges);
    json_drop(msgs);
    json_drop(more);
    for (size_t i = 0; i < m->n; i++)
        free(m->text[i]);
    m->n = 0;
    return rc < 0 ? rc : 0;
}

static int32_t next_special(const tokenizer *t, const ids *l, size_t *i)
{
    while (*i < l->n && !tokenizer_is_special(t, l->v[*i]))
        ++*i;
    return *i < l->n ? l->v[(*i)++] : -1;
}

static bool same_specials(const tokenizer *t, const ids *a, const ids *b)
{
    for (size_t i = 0, k = 0;;) {
        int32_t x = next_special(t, a, &i), y = next_special(t, b, &k);
        if (x != y) return false;
        if (x < 0) return true;
    }
}

int literal_chat_ids(const chat_template *c, const tokenizer *t, const json *messages,
                     const json *extra, bool add_generation_prompt, bool continued, ids *out,
                     err *e)
{
    marks m = {.t = t, .prompt = add_generation_prompt, .continued = continued, .e = e};
    ids got = {0}, blotted = {0};
    int rc;
    TRY(render(&m, c, messages, extra, &got));
    m.blot = true;
    TRY(render(&m, c, messages, extra, &blotted));
    if (!same_specials(t, &got, &blotted)) {
        rc = err_set(e, ERR_UNSUPPORTED,
                     "the chat template writes other control tokens for other words, so that those "
                     "of the messages' text cannot be told from its own");
        goto out;
    }
    for (size_t i = 0; i < got.n; i++)
        ids_push(out, got.v[i]);
    rc = 0;
out:
    free(m.text);
    ids_free(&got);
    ids_free(&blotted);
    return rc;
}
