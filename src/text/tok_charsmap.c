/* The precompiled character map of SentencePiece: rewriting rules of a normalizer.
 *
 *   u32 LE   bytes of the trie
 *   u32 LE[] the trie, a double array ("Darts"): unit 0 is the root; from a unit at position p the
 *            byte c leads to position p ^ offset ^ c, whose label must be c; a unit with the leaf
 *            bit has its value in the unit at p ^ offset
 *   bytes    the texts that rules write, NUL after each; a value is an offset into them
 *
 * label: the low 8 bits and bit 31; leaf: bit 8; offset: bits 10 up, shifted by 8 more if bit 9 is
 * set; value: the low 31 bits. A unit outside the array is no match, an offset outside the texts or
 * inside a character is no rule: a damaged map rewrites less, it never reads beyond its end. */
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/tok_internal.h"

struct tok_charsmap {
    uint32_t *unit;
    size_t n_unit;
    char *text;
    size_t n_text;
};

static uint32_t read_u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

int tok__charsmap_open(tok_charsmap **out, const void *blob, size_t n, const char *where, err *e)
{
    const unsigned char *p = blob;
    uint32_t bytes = n >= 8 ? read_u32(p) : 0;
    *out = NULL;
    if (bytes < 4 || bytes > n - 4)
        return err_set(e, ERR_FORMAT,
                       "%s: precompiled_charsmap of %zu bytes says that its trie has %lu", where, n,
                       (unsigned long)bytes);
    const char *text = (const char *)p + 4 + bytes;
    size_t n_text = n - 4 - bytes;
    if (n_text && utf8_valid_prefix(text, n_text) != n_text)
        return err_set(e, ERR_FORMAT, "%s: the texts of precompiled_charsmap are not UTF-8", where);
    tok_charsmap *m = xcalloc(1, sizeof *m);
    m->n_unit = bytes / 4;
    m->unit = xmalloc(m->n_unit * sizeof *m->unit);
    for (size_t i = 0; i < m->n_unit; i++)
        m->unit[i] = read_u32(p + 4 + 4 * i);
    m->text = xstrndup(text, n_text);
    m->n_text = n_text;
    *out = m;
    return 0;
}

void tok__charsmap_close(tok_charsmap *m)
{
    if (!m) return;
    free(m->unit);
    free(m->text);
    free(m);
}

static size_t offset_of(uint32_t unit)
{
    return (size_t)(unit >> 10) << ((unit & (1u << 9)) >> 6);
}

static bool text_at(const tok_charsmap *m, size_t at, const char **to, size_t *n_to)
{
    if (at > m->n_text || (at < m->n_text && ((unsigned char)m->text[at] & 0xC0) == 0x80))
        return false;
    *to = m->text + at;
    const char *end = memchr(*to, 0, m->n_text - at);
    *n_to = end ? (size_t)(end - *to) : m->n_text - at;
    return true;
}

size_t tok__charsmap_find(const tok_charsmap *m, const char *s, size_t n, bool longest,
                          const char **to, size_t *n_to)
{
    size_t at = offset_of(m->unit[0]), found = 0;
    for (size_t i = 0; i < n && s[i]; i++) {
        at ^= (unsigned char)s[i];
        if (at >= m->n_unit) break;
        uint32_t unit = m->unit[at];
        if ((unit & 0x800000FFu) != (unsigned char)s[i]) break;
        at ^= offset_of(unit);
        if (!(unit >> 8 & 1) || at >= m->n_unit) continue;
        if (text_at(m, m->unit[at] & 0x7FFFFFFFu, to, n_to)) found = i + 1;
        if (!longest) break;
    }
    return found;
}

/* As the Hugging Face library applies a map: by grapheme clusters. A cluster of less than six bytes
 * whose beginning has a rule is replaced whole by what the shortest rule writes, and the rest of
 * the cluster is lost; otherwise each of its characters is looked up by itself. */
void tok__charsmap_graphemes(const tok_charsmap *m, const char *s, size_t n, buf *out)
{
    for (size_t i = 0, end; i < n; i = end) {
        const char *to;
        size_t n_to;
        end = i + tok__grapheme(s + i, n - i);
        if (end - i < 6 && tok__charsmap_find(m, s + i, end - i, false, &to, &n_to)) {
            buf_add(out, to, n_to);
            continue;
        }
        for (size_t k = i, len; k < end; k += len) {
            uint32_t cp;
            len = (size_t)tok__cp(s + k, end - k, &cp);
            if (tok__charsmap_find(m, s + k, len, false, &to, &n_to))
                buf_add(out, to, n_to);
            else
                buf_add(out, s + k, len);
        }
    }
}

/* ---- base64, as tokenizer.json writes the map -------------------------------------------------
 */

static int sextet(char c)
{
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

int tok__charsmap_base64(tok_charsmap **out, const char *text, const char *where, err *e)
{
    buf b = {0};
    uint32_t bits = 0;
    size_t n = strlen(text), i = 0;
    int have = 0;
    *out = NULL;
    while (n && text[n - 1] == '=')
        n--;
    for (; i < n; i++) {
        int v = sextet(text[i]);
        if (v < 0) break;
        bits = bits << 6 | (uint32_t)v;
        if ((have += 6) < 8) continue;
        have -= 8;
        buf_putc(&b, (char)(bits >> have & 0xFF));
    }
    int rc = i < n ? err_set(e, ERR_FORMAT, "%s: precompiled_charsmap is not base64 at byte %zu",
                             where, i)
                   : tok__charsmap_open(out, b.data ? b.data : "", b.len, where, e);
    buf_free(&b);
    return rc;
}
