/* Any bytes as a tokenizer and a text: the input is tokenizer.json or a SentencePiece model, then a
 * line "%%", then the text. What opens must encode or refuse the text, also literally, decode what
 * it encoded, and stream the same text (but for broken byte tokens). A text of "CONFIG\n%%\nTEXT"
 * brings a tokenizer_config.json. */
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const tokenizer *t, const char *text, size_t n)
{
    err e = {0};
    ids l = {0};
    buf whole = {0}, streamed = {0};
    detok d;
    int rc = tokenizer_encode_literal(t, text, n, true, &l, &e);
    if (rc < 0 && (!e.msg[0] || l.n)) abort();
    l.n = 0;
    rc = tokenizer_encode(t, text, n, true, &l, &e);
    if (rc < 0 && (!e.msg[0] || l.n)) abort();
    ids_push(&l, -1);
    ids_push(&l, 1 << 30);
    tokenizer_decode(t, l.v, l.n, (n & 1) != 0, &whole);
    if (utf8_valid_prefix(whole.data, whole.len) != whole.len) abort();
    detok_init(&d, t, (n & 1) != 0);
    for (size_t i = 0; i < l.n; i++) {
        detok_push(&d, l.v[i], &streamed);
        if (utf8_valid_prefix(streamed.data, streamed.len) != streamed.len) abort();
    }
    detok_flush(&d, &streamed);
    detok_free(&d);
    for (size_t i = 0; i < l.n && i < 64; i++) {
        buf_clear(&streamed);
        tokenizer_token_bytes(t, l.v[i], &streamed);
    }
    ids_free(&l);
    buf_free(&whole);
    buf_free(&streamed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char split[] = "\n%%\n";
    const char *p = size ? memmem(data, size, split, 4) : NULL, *s = (const char *)data;
    size_t n = p ? (size_t)(p - s) : size;
    const char *text = p ? p + 4 : "Hello  <s>12 \xC3\xA9";
    size_t m = p ? size - n - 4 : strlen(text);
    const char *config = "", *q = m ? memmem(text, m, split, 4) : NULL;
    size_t n_config = q ? (size_t)(q - text) : 0;
    if (q) {
        config = text;
        m -= n_config + 4;
        text = q + 4;
    }
    tokenizer *t = NULL;
    err e = {0};
    if (tokenizer_open(&t, s, n, config, n_config, "fuzz", &e) < 0) {
        if (!e.msg[0] || t) abort();
        return 0;
    }
    use(t, text, m);
    tokenizer_close(t);
    return 0;
}
