/* SentencePiece .model files: a ModelProto in protobuf's wire format, read by hand.
 *
 *   message  = (key value)*, key = varint(field << 3 | wire type)
 *   wire type 0 varint, 1 eight bytes, 2 varint length and bytes, 5 four bytes; others are refused
 *   ModelProto     1 pieces*, 2 trainer_spec, 3 normalizer_spec, 5 denormalizer_spec
 *   SentencePiece  1 piece, 2 score (float), 3 type (tok_internal.h)
 *   TrainerSpec    3 model_type (1 unigram, 2 BPE), 24 treat_whitespace_as_suffix, 35
 * byte_fallback, 44 unk_surface, 46 bos_piece, 47 eos_piece, 48 pad_piece NormalizerSpec 2
 * precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces
 *
 * Unknown fields are passed over. Every length is held against what is left of the enclosing
 * message. Encoding follows SentencePiece, not the conversions of it: the longest rule of the
 * character map, one prefix for each text between control tokens (only for the first one if
 * tokenizer_config.json says "legacy": false), scores in float. Control tokens, which SentencePiece
 * itself never finds in a text, are added tokens: they are found unless the text is literal. */
#include <stdlib.h>
#include <string.h>
#include "base/utf8.h"
#include "text/tok_internal.h"

#define MAX_PIECE_BYTES 8000 /* as SentencePiece */
#define SPACE_MARK      "\xE2\x96\x81"

/* ---- wire format ------------------------------------------------------------------------------
 */

typedef struct wire {
    const unsigned char *p, *end;
} wire;

typedef struct field {
    uint64_t number, varint; /* varint: also the bits of fixed values */
    int type;
    wire bytes; /* of type 2 */
} field;

static bool read_varint(wire *w, uint64_t *out)
{
    *out = 0;
    for (int shift = 0; shift < 70 && w->p < w->end; shift += 7) {
        unsigned char b = *w->p++;
        if (shift < 64) *out |= (uint64_t)(b & 0x7F) << shift;
        if (!(b & 0x80)) return true;
    }
    return false;
}

static bool read_fixed(wire *w, int bytes, uint64_t *out)
{
    *out = 0;
    if (w->end - w->p < bytes) return false;
    for (int i = 0; i < bytes; i++)
        *out |= (uint64_t)*w->p++ << 8 * i;
    return true;
}

/* 1 a field, 0 the end, negative error. */
static int next_field(wire *w, field *f, const char *where, err *e)
{
    uint64_t key;
    bool ok = true;
    if (w->p == w->end) return 0;
    if (!read_varint(w, &key)) goto bad;
    *f = (field){.number = key >> 3, .type = (int)(key & 7)};
    switch (f->type) {
    case 0:
        ok = read_varint(w, &f->varint);
        break;
    case 1:
        ok = read_fixed(w, 8, &f->varint);
        break;
    case 2:
        ok = read_varint(w, &f->varint) && f->varint <= (uint64_t)(w->end - w->p);
        if (ok) f->bytes = (wire){w->p, w->p + f->varint};
        if (ok) w->p += f->varint;
        break;
    case 5:
        ok = read_fixed(w, 4, &f->varint);
        break;
    default:
        ok = false;
    }
    if (ok && f->number) return 1;
bad:
    return err_set(e, ERR_FORMAT,
                   "%s: not a SentencePiece model: a field is cut off or of a wire type that its "
                   "format does not use",
                   where);
}

/* ---- the message ------------------------------------------------------------------------------
 */

typedef struct spm {
    tok_pieces pieces;
    size_t cap;
    int model_type;
    bool suffix, prefix, trim, escape;
    wire charsmap, unk_surface, bos, eos, pad;
    bool denormalizes;
} spm;

static int read_piece(spm *m, wire w, const char *where, err *e)
{
    field f;
    int rc;
    tok_piece p = {.s = "", .type = TOK_PIECE_NORMAL};
    while ((rc = next_field(&w, &f, where, e)) > 0) {
        uint32_t bits = (uint32_t)f.varint;
        if (f.number == 1 && f.type == 2) {
            p.s = (const char *)f.bytes.p;
            p.len = (size_t)f.varint;
        } else if (f.number == 2 && f.type == 5) {
            memcpy(&p.score, &bits, 4);
        } else if (f.number == 3 && f.type == 0) {
            p.type = f.varint > 100 ? 100 : (int)f.varint;
        }
    }
    if (rc < 0) return rc;
    size_t i = m->pieces.n;
    if (i >= (size_t)TOK_MAX_ID)
        return err_set(e, ERR_LIMIT, "%s: more than %lld pieces", where, (long long)TOK_MAX_ID);
    if (!p.len || p.len >= MAX_PIECE_BYTES)
        return err_set(e, ERR_FORMAT, "%s: piece %zu has %zu bytes; expected 1 to %d", where, i,
                       p.len, MAX_PIECE_BYTES - 1);
    if (p.type < TOK_PIECE_NORMAL || p.type > TOK_PIECE_BYTE)
        return err_set(e, ERR_FORMAT, "%s: piece %zu has type %d; expected 1 to 6", where, i,
                       p.type);
    if (!(p.score - p.score == 0))
        return err_set(e, ERR_FORMAT, "%s: the score of piece %zu is not finite", where, i);
    if (i == m->cap) {
        m->cap = m->cap ? m->cap * 2 : 1024;
        m->pieces.v = xrealloc(m->pieces.v, m->cap * sizeof *m->pieces.v);
    }
    m->pieces.v[m->pieces.n++] = p;
    return 0;
}

static int read_trainer(spm *m, wire w, const char *where, err *e)
{
    field f;
    int rc;
    while ((rc = next_field(&w, &f, where, e)) > 0) {
        if (f.number == 3 && f.type == 0) m->model_type = f.varint > 100 ? 100 : (int)f.varint;
        if (f.number == 24 && f.type == 0) m->suffix = f.varint != 0;
        if (f.number == 35 && f.type == 0) m->pieces.byte_fallback = f.varint != 0;
        if (f.number == 44 && f.type == 2) m->unk_surface = f.bytes;
        if (f.number == 46 && f.type == 2) m->bos = f.bytes;
        if (f.number == 47 && f.type == 2) m->eos = f.bytes;
        if (f.number == 48 && f.type == 2) m->pad = f.bytes;
    }
    return rc;
}

static int read_normalizer(spm *m, wire w, const char *where, err *e)
{
    field f;
    int rc;
    while ((rc = next_field(&w, &f, where, e)) > 0) {
        if (f.number == 2 && f.type == 2) m->charsmap = f.bytes;
        if (f.number == 3 && f.type == 0) m->prefix = f.varint != 0;
        if (f.number == 4 && f.type == 0) m->trim = f.varint != 0;
        if (f.number == 5 && f.type == 0) m->escape = f.varint != 0;
    }
    return rc;
}

static int read_denormalizer(spm *m, wire w, const char *where, err *e)
{
    field f;
    int rc;
    while ((rc = next_field(&w, &f, where, e)) > 0)
        if (f.number == 2 && f.type == 2 && f.varint) m->denormalizes = true;
    return rc;
}

static int read_model(spm *m, wire w, const char *where, err *e)
{
    field f;
    int rc;
    while ((rc = next_field(&w, &f, where, e)) > 0) {
        if (f.type != 2) continue;
        rc = f.number == 1   ? read_piece(m, f.bytes, where, e)
             : f.number == 2 ? read_trainer(m, f.bytes, where, e)
             : f.number == 3 ? read_normalizer(m, f.bytes, where, e)
             : f.number == 5 ? read_denormalizer(m, f.bytes, where, e)
                             : 0;
        if (rc < 0) return rc;
    }
    return rc;
}

/* ---- checks that SentencePiece makes too ------------------------------------------------------
 */

static int check_model(const spm *m, const char *where, err *e)
{
    if (!m->pieces.n)
        return err_set(e, ERR_FORMAT, "%s: not a SentencePiece model: it has no pieces", where);
    if (m->model_type != 1 && m->model_type != 2)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: SentencePiece model type %d (%s) is not supported; supported are "
                       "unigram and BPE",
                       where, m->model_type,
                       m->model_type == 3   ? "word"
                       : m->model_type == 4 ? "char"
                                            : "unknown");
    if (m->denormalizes)
        return err_set(e, ERR_UNSUPPORTED, "%s: a SentencePiece denormalizer is not supported",
                       where);
    return 0;
}

static int check_piece(spm *m, tok_vocab *v, size_t i, bool seen[256], const char *where, err *e)
{
    const tok_piece *p = &m->pieces.v[i];
    int byte = tok__byte_token(p->s, p->len);
    if (p->len == 1 && !p->s[0] && p->type == TOK_PIECE_UNUSED) return 0; /* a filler */
    if (memchr(p->s, 0, p->len) || utf8_valid_prefix(p->s, p->len) != p->len)
        return err_set(e, ERR_FORMAT, "%s: piece %zu is not UTF-8 text without NUL", where, i);
    if (tok__vocab_find(v, p->s, p->len) >= 0)
        return err_set(e, ERR_FORMAT, "%s: piece %zu is there twice", where, i);
    if (p->type == TOK_PIECE_UNKNOWN) {
        if (m->pieces.unk >= 0)
            return err_set(e, ERR_FORMAT, "%s: pieces %d and %zu are both the unknown one", where,
                           (int)m->pieces.unk, i);
        m->pieces.unk = (int32_t)i;
    }
    if (p->type == TOK_PIECE_BYTE) {
        if (byte < 0 || !m->pieces.byte_fallback)
            return err_set(e, ERR_FORMAT, "%s: byte piece %zu %s", where, i,
                           byte < 0 ? "is not written <0xNN>" : "without byte_fallback");
        seen[byte] = true;
    }
    char name[MAX_PIECE_BYTES];
    memcpy(name, p->s, p->len);
    name[p->len] = 0;
    return tok__vocab_add(v, name, p->len, (int64_t)i, where, e);
}

static int check_pieces(spm *m, tok_vocab *v, const char *where, err *e)
{
    bool seen[256] = {0};
    size_t bytes = 0;
    m->pieces.unk = -1;
    tok__vocab_reserve(v, m->pieces.n + 1);
    for (size_t i = 0; i < m->pieces.n; i++) {
        int rc = check_piece(m, v, i, seen, where, e);
        if (rc < 0) return rc;
    }
    for (int i = 0; i < 256; i++)
        bytes += seen[i];
    if (m->pieces.byte_fallback && bytes < 256)
        return err_set(e, ERR_FORMAT, "%s: byte_fallback with %zu of 256 byte pieces", where,
                       bytes);
    if (m->pieces.unk < 0 && !m->pieces.byte_fallback)
        return err_set(e, ERR_FORMAT, "%s: no piece is the unknown one", where);
    return 0;
}

/* ---- normalizer -------------------------------------------------------------------------------
 */

/* What the text at s becomes and how many bytes of it: a user-defined piece stays, then the longest
 * rule counts, else one character stays. */
static size_t normal_prefix(const tok_stage *s, const char *p, size_t n, const char **to,
                            size_t *n_to)
{
    int32_t unused;
    uint32_t cp;
    size_t k = s->lexicon ? tok__lexicon_longest(s->lexicon, p, n, &unused) : 0;
    if (!k && s->map && (k = tok__charsmap_find(s->map, p, n, true, to, n_to))) return k;
    if (!k) k = (size_t)tok__cp(p, n, &cp);
    *to = p;
    *n_to = k;
    return k;
}

static void trim_end(buf *b, const char *space)
{
    size_t m = strlen(space);
    while (b->len >= m && !memcmp(b->data + b->len - m, space, m))
        b->len -= m;
    b->data[b->len] = 0;
}

static int run_normalizer(const tok_stage *s, tok_work *w, err *e)
{
    const char *space = s->split ? SPACE_MARK : " ", *to, *p = w->text.data;
    size_t n = w->text.len, i = 0, n_to;
    bool prefix = s->prefix_space && (w->at_start || !s->individual), after_space = s->clean;
    (void)e;
    while (s->clean && i < n) {
        size_t k = normal_prefix(s, p + i, n - i, &to, &n_to);
        if (n_to != 1 || *to != ' ') break;
        i += k;
    }
    prefix = prefix && i < n; /* none to nothing but spaces */
    buf_clear(&w->other);
    buf_puts(&w->other, prefix && !s->right ? space : "");
    while (i < n) {
        i += normal_prefix(s, p + i, n - i, &to, &n_to);
        for (; after_space && n_to && *to == ' '; n_to--)
            to++;
        for (size_t k = 0; k < n_to; k++)
            if (to[k] == ' ')
                buf_puts(&w->other, space);
            else
                buf_putc(&w->other, to[k]);
        if (n_to) after_space = s->clean && to[n_to - 1] == ' ';
    }
    if (s->clean) trim_end(&w->other, space);
    if (prefix && s->right) buf_puts(&w->other, space);
    buf b = w->text;
    w->text = w->other;
    w->other = b;
    return 0;
}

static const tok_stage_kind normalizer_kind = {.type = "SentencePiece",
                                               .normalize = run_normalizer};

/* ---- decoder ----------------------------------------------------------------------------------
 */

typedef struct decoding {
    const tok_stage *s;
    tok_strings *in, out;
    size_t text;        /* bytes of text so far */
    bool front, marked; /* a space mark may still be dropped; the piece before was one */
} decoding;

static void push_text(decoding *d, const char *p, size_t n)
{
    buf_add(&d->out.bytes, p, n);
    d->text += n;
}

/* A run of byte pieces: characters where they are UTF-8, U+FFFD for each other byte. */
static size_t decode_bytes(decoding *d, size_t i)
{
    buf run = {0};
    for (; i < d->in->sp.n; i++) {
        int b = tok__byte_token(d->in->bytes.data + d->in->sp.v[i].off, d->in->sp.v[i].len);
        if (b < 0) break;
        buf_putc(&run, (char)b);
    }
    for (size_t k = 0; k < run.len;) {
        uint32_t cp;
        int m = d->in->raw_bytes ? 1 : utf8_decode(run.data + k, run.len - k, &cp);
        push_text(d, m ? run.data + k : "\xEF\xBF\xBD", m ? (size_t)m : 3);
        k += m ? (size_t)m : 1;
    }
    buf_free(&run);
    return i;
}

static void decode_piece(decoding *d, const char *p, size_t n)
{
    const tok_stage *s = d->s;
    size_t m = strlen(SPACE_MARK);
    if (d->marked || d->text) d->front = false;
    d->marked = false;
    if (s->text && n == strlen(s->text) && !memcmp(p, s->text, n)) {
        push_text(d, s->content, strlen(s->content));
        return;
    }
    if (d->front && (s->prefix_space || s->clean) && n >= m && !memcmp(p, SPACE_MARK, m)) {
        p += m;
        n -= m;
        d->marked = !s->clean;
    }
    while (n) {
        const char *hit = memmem(p, n, SPACE_MARK, m);
        size_t k = hit ? (size_t)(hit - p) : n;
        push_text(d, p, k);
        if (hit) push_text(d, " ", 1);
        k += hit ? m : 0;
        p += k;
        n -= k;
    }
}

static void run_decoder(const tok_stage *s, tok_strings *l)
{
    decoding d = {.s = s, .in = l, .front = true};
    d.out.raw_bytes = l->raw_bytes;
    buf_puts(&d.out.bytes, "");
    for (size_t i = 0; i < l->sp.n;) {
        tok_span v = l->sp.v[i];
        size_t at = d.out.bytes.len, next = decode_bytes(&d, i);
        if (next == i) {
            decode_piece(&d, l->bytes.data + v.off, v.len);
            next++;
        }
        tok__span_push(&d.out.sp, at, d.out.bytes.len - at);
        i = next;
    }
    buf_free(&l->bytes);
    free(l->sp.v);
    *l = d.out;
}

static const tok_stage_kind decoder_kind = {.type = "SentencePiece", .decode = run_decoder};

/* ---- whole ------------------------------------------------------------------------------------
 */

static char *text_of(wire w, const char *fallback)
{
    size_t n = (size_t)(w.end - w.p);
    bool good = n && !memchr(w.p, 0, n) && utf8_valid_prefix((const char *)w.p, n) == n;
    return good ? xstrndup((const char *)w.p, n) : xstrdup(fallback);
}

static int make_normalizer(tokenizer *t, spm *m, err *e)
{
    tok_stage *s = t->norm = xcalloc(1, sizeof *s);
    tok_entry *list = xcalloc(m->pieces.n, sizeof *list);
    size_t n = 0, bytes = (size_t)(m->charsmap.end - m->charsmap.p);
    s->kind = &normalizer_kind;
    s->prefix_space = m->prefix;
    s->clean = m->trim;
    s->split = m->escape;
    s->right = m->suffix;
    for (size_t i = 0; i < m->pieces.n; i++)
        if (m->pieces.v[i].type == TOK_PIECE_USER)
            list[n++] = (tok_entry){m->pieces.v[i].s, m->pieces.v[i].len, (int32_t)i};
    if (n) m->pieces.user = s->lexicon = tok__lexicon_make(list, n);
    free(list);
    return bytes ? tok__charsmap_open(&s->map, m->charsmap.p, bytes, t->where, e) : 0;
}

static void make_decoder(tokenizer *t, const spm *m)
{
    tok_stage *s = t->dec = xcalloc(1, sizeof *s);
    s->kind = &decoder_kind;
    s->prefix_space = m->prefix;
    s->clean = m->trim;
    s->content = text_of(m->unk_surface, " \xE2\x81\x87 ");
    if (m->pieces.unk >= 0)
        s->text = xstrdup(tok__vocab_name(&t->model.vocab, m->pieces.unk, NULL));
}

static int add_controls(tokenizer *t, const spm *m, err *e)
{
    for (size_t i = 0; i < m->pieces.n; i++) {
        int type = m->pieces.v[i].type;
        if (type != TOK_PIECE_CONTROL && type != TOK_PIECE_UNKNOWN) continue;
        int rc = tok__added_special(t, tok__vocab_name(&t->model.vocab, (int32_t)i, NULL), e);
        if (rc < 0) return rc;
    }
    return 0;
}

int tok__spm_load(tokenizer *t, const void *bytes, size_t n, err *e)
{
    spm m = {.model_type = 1, .prefix = true, .trim = true, .escape = true};
    wire w = {bytes, (const unsigned char *)bytes + n};
    int rc;
    TRY(read_model(&m, w, t->where, e));
    TRY(check_model(&m, t->where, e));
    TRY(check_pieces(&m, &t->model.vocab, t->where, e));
    TRY(make_normalizer(t, &m, e));
    make_decoder(t, &m);
    if (m.model_type == 1)
        tok__unigram_from_pieces(&t->model, &m.pieces);
    else
        tok__spmbpe_from_pieces(&t->model, &m.pieces);
    TRY(add_controls(t, &m, e));
    t->is_spm = true;
    t->spm_bos = text_of(m.bos, "<s>");
    t->spm_eos = text_of(m.eos, "</s>");
    t->spm_bpe = m.model_type == 2;
    rc = 0;
out:
    free(m.pieces.v);
    return rc < 0 ? rc : 0;
}
