/* tare tokenize and detokenize: the same tokenizer that every other command uses. */
#include "cli/options.h"
#include "base/utf8.h"
#include "ckpt/ckpt.h"
#include "text/literal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* *n_ids: one past the highest id that the model knows; 0 if its config does not say. */
static int open_tokenizer(const char *model, tokenizer **t, int64_t *n_ids, err *e)
{
    int rc = 0;
    ckpt *c = NULL;
    char *where = NULL;
    buf js = {0}, cfg = {0};
    TRY(ckpt_open(&c, model, e));
    *n_ids = ckpt_cfg(c)->vocab_size;
    TRY(ckpt_tokenizer_json(c, &js, e));
    TRY(ckpt_tokenizer_config(c, &cfg, e));
    if (!js.len) {
        rc = err_set(e, ERR_MISSING, "%s: no tokenizer.json and no tokenizer.model here",
                     ckpt_path(c));
        goto out;
    }
    where = ckpt_tokenizer_where(c);
    TRY(tokenizer_open(t, js.data, js.len, cfg.data ? cfg.data : "", cfg.len, where, e));
out:
    free(where);
    buf_free(&js);
    buf_free(&cfg);
    ckpt_close(c);
    return rc;
}

static int read_stdin(buf *b, err *e)
{
    char chunk[65536];
    ssize_t n;
    while ((n = read(0, chunk, sizeof chunk)) > 0) {
        buf_add(b, chunk, (size_t)n);
        if (b->len > (1u << 30)) return err_set(e, ERR_LIMIT, "standard input: more than 1 GiB");
    }
    return n < 0 ? err_set(e, ERR_IO, "standard input: read failed") : 0;
}

int cmd_tokenize(const opts *o, err *e)
{
    int rc = 0;
    tokenizer *t = NULL;
    buf text = {0}, out = {0};
    ids v = {0};
    const char *model;
    int64_t n_ids = 0;
    bool literal;
    TRY(opts_model(o, &model, e));
    TRY(literal_parse(o->v[OPT_control_tokens].s, &literal, e));
    int arg = o->v[OPT_model].given ? 0 : 1;
    TRY(open_tokenizer(model, &t, &n_ids, e));
    if (o->n_args > arg)
        buf_puts(&text, o->args[arg]);
    else
        TRY(read_stdin(&text, e));
    size_t ok = utf8_valid_prefix(text.data ? text.data : "", text.len);
    if (ok != text.len) {
        rc = err_set(e, ERR_FORMAT, "text: byte %zu is not valid UTF-8", ok);
        goto out;
    }
    TRY((literal ? tokenizer_encode_literal : tokenizer_encode)(
        t, text.data ? text.data : "", text.len, !o->v[OPT_no_special].given, &v, e));
    jw w;
    jw_init(&w, &out, 0);
    if (o->v[OPT_json].given) {
        jw_obj(&w);
        jw_ki64(&w, "count", (int64_t)v.n);
        jw_key(&w, "tokens");
    }
    jw_arr(&w);
    for (size_t i = 0; i < v.n; i++)
        jw_i64(&w, v.v[i]);
    jw_end_arr(&w);
    if (o->v[OPT_json].given) jw_end_obj(&w);
    buf_putc(&out, '\n');
    cli_print(&out);
    rc = 0;
out:
    tokenizer_close(t);
    ids_free(&v);
    buf_free(&text);
    buf_free(&out);
    return rc;
}

int cmd_detokenize(const opts *o, err *e)
{
    int rc = 0;
    tokenizer *t = NULL;
    json *root = NULL;
    buf out = {0};
    ids v = {0};
    const char *model;
    int64_t n_ids = 0;
    TRY(opts_model(o, &model, e));
    int arg = o->v[OPT_model].given ? 0 : 1;
    if (o->n_args <= arg) {
        rc = err_set(e, ERR_USAGE, "no file of token ids given: `tare detokenize MODEL IDS.json`");
        goto out;
    }
    TRY(json_parse_file(&root, o->args[arg], e));
    TRY(open_tokenizer(model, &t, &n_ids, e));
    if (!cJSON_IsArray(root)) {
        rc = err_set(e, ERR_FORMAT, "%s: expected a JSON list of token ids", o->args[arg]);
        goto out;
    }
    double end = n_ids > 0 ? (double)n_ids : 2147483648.0;
    for (const json *x = root->child; x; x = x->next) {
        double d = x->valuedouble;
        if (!cJSON_IsNumber(x) || d < 0 || d >= end || d != floor(d)) {
            rc = err_set(e, ERR_FORMAT, "%s: entry %zu is not a token id (0 to %.0f)", o->args[arg],
                         v.n, end - 1);
            goto out;
        }
        ids_push(&v, (int32_t)x->valuedouble);
    }
    tokenizer_decode(t, v.v, v.n, false, &out);
    if (o->v[OPT_json].given) {
        buf j = {0};
        jw w;
        jw_init(&w, &j, 0);
        jw_obj(&w);
        jw_key(&w, "text");
        jw_strn(&w, out.data ? out.data : "", out.len);
        jw_end_obj(&w);
        buf_putc(&j, '\n');
        cli_print(&j);
        buf_free(&j);
    } else {
        buf_putc(&out, '\n');
        cli_print(&out);
    }
    rc = 0;
out:
    tokenizer_close(t);
    json_drop(root);
    ids_free(&v);
    buf_free(&out);
    return rc;
}
