/* The layout "packed": weights in the formats of cuda/format.cuh, of which one copy serves small
 * (up to 8 rows), wide (more), and cuBLASLt (many), for which pieces of it become rows of bf16
 * first: a weight is rounded to bf16 there, where small and wide may keep its scale for the sums.
 * Inputs are bf16; a linear whose input bf16 does not hold goes to another layout, and so does one
 * whose scales the format does not hold to the last digit.
 *
 * Neighbouring shards of the same format and input lie behind one another and are one product. The
 * scale of a whole row is its col_scale; scales of groups that are a multiple of the format's are
 * repeated. Columns of an act-order weight are sorted by group; its input, and one that the
 * checkpoint wants scaled, is rearranged first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kern/gpu/lt.h"
#include "kern/gpu/packed.h"

#define MOST_ROWS 4096 /* of one product of wide */
#define COPY_ROWS 512  /* of an input that is rearranged */
#define LT_ROWS   4096 /* from which unpacking and cuBLASLt are faster than wide */

/* ---- which format -------------------------------------------------------------------------------
 */

/* One scale for each row: it becomes the factor of the row. */
static bool by_row(const qtensor *q)
{
    return !q->g_idx && (!(q->scales || q->zeros) || q->block_k >= q->K);
}

static const char *int4_format(const qtensor *q, bool zeros, small_format *f)
{
    const int64_t group = by_row(q) ? 128 : q->block_k;
    if (group % 32) return "groups are no multiple of 32";
    *f = group % 128 == 0 ? SMALL_INT4_128 : group % 64 == 0 ? SMALL_INT4_64 : SMALL_INT4_32;
    if (zeros) *f = (small_format)(*f + 1);
    return NULL;
}
static const char *e4m3_format(const qtensor *q, small_format *f)
{
    *f = by_row(q) ? SMALL_E4M3 : SMALL_E4M3_BLOCK;
    if (by_row(q)) return NULL;
    bool rows = q->block_n % FORMAT_ROWS == 0 || q->block_n >= q->N;
    return rows && q->block_k % 128 == 0 ? NULL : "FP8 in groups, not in blocks of 16 rows or more";
}
static const char *fp4_format(const qtensor *q, small_format *f)
{
    bool wide = by_row(q) || (q->block_k % 32 == 0 && q->scale_type == NUM_F8_E8M0);
    *f = wide ? SMALL_MXFP4 : SMALL_NVFP4;
    return wide || q->block_k % 16 == 0 ? NULL : "groups are no multiple of 16";
}

static const char *format_of(const qtensor *q, bool zeros, bool expert, small_format *f)
{
    if (q->table || num_infos[q->code].kind == 'T') return "codes of a table";
    if (q->flat) return "blocks cross rows";
    if (q->N % FORMAT_ROWS) return "N is no multiple of 16";
    if (q->K % FORMAT_UNIT && !expert) return "K is no multiple of 128";
    if (q->K % FORMAT_BLOCK) return "K is no multiple of 64";
    if (q->N > INT32_MAX / KERN_MAX_SHARDS || q->K > INT32_MAX) return "too large";
    if (q->scale_cols > q->K) return "more groups than columns";
    if (q->zeros && num_infos[q->zero_type].kind == 'F') return "float zero points";
    if (q->code >= NUM_I2 && q->code <= NUM_I4) return int4_format(q, zeros, f);
    if (q->zeros) return "zero points of codes that are not int4";
    *f = SMALL_INT8;
    if (q->code >= NUM_I5 && q->code <= NUM_I8) {
        if (!by_row(q)) *f = SMALL_INT8_GROUP;
        return by_row(q) || q->block_k % 128 == 0 ? NULL : "groups of int8 are no multiple of 128";
    }
    if (q->code == NUM_F8_E4M3) return e4m3_format(q, f);
    if (q->code == NUM_F4_E2M1) return fp4_format(q, f);
    *f = SMALL_BF16;
    const bool plain = q->code == NUM_BF16 || q->code == NUM_F16 || q->code == NUM_F32;
    return plain && !q->scales ? NULL : "no format has such codes";
}

static bool same_array(const void *a, const void *b, int64_t n)
{
    return a == b || (a && b && !memcmp(a, b, (size_t)n * 4));
}
static bool same_input(const qtensor *a, const qtensor *b)
{
    return same_array(a->g_idx, b->g_idx, a->K) && same_array(a->pre_scale, b->pre_scale, a->K) &&
           qaxis_equal(&a->spec.a, &b->spec.a) && a->input_scale == b->input_scale &&
           a->input_zero == b->input_zero && a->input_global == b->input_global;
}

/* zeros: weights of int4 may have them. */
static const char *plan(const kern_linear_desc *d, bool zeros, packed *p)
{
    int64_t row0 = 0;
    p->n = 0;
    for (int i = 0; i < d->n_shards; i++) {
        const qtensor *q = d->shard[i];
        small_format f;
        const char *why = format_of(q, zeros && q->zeros, d->expert, &f);
        if (why) return why;
        part *last = p->n ? &p->part[p->n - 1] : NULL;
        if (!last || last->format != f || !same_input(d->shard[last->shard0], q)) {
            last = &p->part[p->n++];
            *last = (part){.format = f, .shard0 = i, .row0 = row0};
        }
        last->shards++;
        last->N += q->N;
        row0 += q->N;
    }
    return NULL;
}

/* Does the checkpoint's rule for inputs hold? */
static bool by_rule(const kern_linear_desc *d, const qtensor *q)
{
    return d->act == KERN_ACT_AUTO && qaxis_quantized(&q->spec.a);
}

/* Bits of what a rule leaves: with its scale, or less a factor of rows, bf16 holds it. Experts have
 * no other layout for 8-bit codes on both sides; what scales of groups leave of their inputs is
 * rounded to bf16, as are no other inputs. */
static const char *rule_of(const qtensor *q, bool expert, becomes *out)
{
    const qaxis *a = &q->spec.a;
    const bool integer = num_infos[a->type].kind == 'I';
    *out = VALUES;
    if (a->scale == QS_MX) return NULL;
    if (expert && a->type == NUM_F4_E2M1) return "its input becomes NVFP4, for each expert another";
    *out = SHARED;
    if (a->type == NUM_F4_E2M1)
        return q->input_global > 0 ? NULL : "its input becomes NVFP4 of a scale that is not given";
    *out = CODES;
    if (a->type == q->code && !expert) return "weight and input have the same 8-bit codes";
    if (a->type != NUM_F8_E4M3 && a->type != NUM_I8)
        return "its input becomes codes of no operator";
    if (integer && (a->asym || q->input_zero != 0)) return "its input has a zero point";
    if (a->gran != Q_GROUP) return NULL;
    *out = VALUES;
    return expert ? NULL : "its input has scales of groups";
}

static const char *input_refuse(const kern_linear_desc *d)
{
    becomes ignored;
    if (d->act == KERN_ACT_SPEC || d->act == KERN_ACT_F32) return "its input is f32";
    if (d->act == KERN_ACT_INT8) return "its input is int8";
    for (int i = 0; i < d->n_shards; i++) {
        const qtensor *q = d->shard[i];
        const char *why = by_rule(d, q) ? rule_of(q, d->expert, &ignored) : NULL;
        if (d->expert && (q->g_idx || q->pre_scale)) why = "columns are rearranged for each expert";
        if (why) return why;
    }
    return NULL;
}

static const char *packed_refuse(const gpu_dev *g, const kern_linear_desc *d)
{
    packed p;
    if (!g->facts.emulated && g->facts.sm / 10 != 9) return "made for sm_90";
    if (!g->api->small_entry || !g->api->launch[GPU_OP_small]) return "not in the plug-in";
    if (d->expert && !g->api->launch[GPU_OP_small_experts]) return "not in the plug-in";
    const char *why = input_refuse(d);
    return why ? why : plan(d, true, &p);
}

/* ---- reading a checkpoint's rows ----------------------------------------------------------------
 */

typedef struct reader { /* of one thread: a tile of 16 rows */
    const part *p;
    const format_layout *l;
    const qtensor *q;
    int64_t K, groups;    /* as packed */
    uint8_t *codes, *row; /* [16][K], [K] before columns are sorted: of one or two bytes */
    float *scales, *stored, *kept;
    uint8_t *zeros;
    float col[FORMAT_ROWS];
    const char *bad;
} reader;

static size_t code_bytes(const format_layout *l)
{
    return l->kind == FORMAT_BF16 ? 2 : 1;
}

static void reader_open(reader *r, const part *p, int64_t K)
{
    *r = (reader){.p = p, .l = &format_layouts[p->format], .K = K};
    const size_t k = (size_t)K;
    r->groups = r->l->group ? K / r->l->group : 0;
    r->codes = xmalloc(FORMAT_ROWS * k * code_bytes(r->l));
    r->row = xmalloc(k * code_bytes(r->l));
    r->scales = xmalloc(FORMAT_ROWS * (k / 16 + 1) * sizeof(float));
    r->zeros = xmalloc(FORMAT_ROWS * (k / 16 + 1));
    r->stored = xmalloc((k + 1) * sizeof(float));
    r->kept = xmalloc((k / 16 + 1) * sizeof(float));
}
static void reader_close(reader *r)
{
    free(r->codes);
    free(r->row);
    free(r->scales);
    free(r->zeros);
    free(r->stored);
    free(r->kept);
}

static void unfold_four(const uint8_t *from, int64_t K, uint8_t flip, uint8_t *to)
{
    for (int64_t i = 0; i < K / 2; i++) {
        to[2 * i] = (from[i] & 15) ^ flip;
        to[2 * i + 1] = (uint8_t)(from[i] >> 4) ^ flip;
    }
}

/* Numbers of f16 or f32 that bf16 holds, as those of a model that was bf16 once. */
static void read_plain(reader *r, const uint8_t *from, uint8_t *to)
{
    num_decode_row(r->q->code, from, (size_t)r->q->K, r->stored);
    for (int64_t k = 0; k < r->q->K; k++) {
        const float v = r->stored[k];
        const uint16_t h = num_f32_to_bf16(v);
        if (v == v && num_bf16_to_f32(h) != v) r->bad = "bf16 does not hold its numbers";
        memcpy(to + 2 * k, &h, 2);
    }
}

/* Codes of row n as small_pack wants them. */
static void read_codes(reader *r, int64_t n, uint8_t *to)
{
    const qtensor *q = r->q;
    const uint8_t *from = q->codes + (size_t)n * q->row_bytes;
    const int32_t *perm = r->p->perm;
    const size_t width = code_bytes(r->l);
    uint8_t *raw = perm ? r->row : to;
    if (num_infos[q->code].bits == 4)
        unfold_four(from, q->K, q->code == NUM_I4 ? 8 : 0, raw);
    else if (q->code == NUM_F16 || q->code == NUM_F32)
        read_plain(r, from, raw);
    else if (num_infos[q->code].bits >= 8)
        memcpy(raw, from, (size_t)q->K * width);
    else
        for (int64_t k = 0; k < q->K; k++)
            raw[k] = (uint8_t)(qtensor_code(q, n, k) + (r->l->kind == FORMAT_INT4 ? 8 : 0));
    for (int64_t j = 0; perm && j < q->K; j++)
        memcpy(to + (size_t)j * width, raw + (size_t)perm[j] * width, width);
    memset(to + (size_t)q->K * width, 0, (size_t)(r->K - q->K) * width);
}

/* The grid's row of n, one number for each group of the format. */
static void read_grid(const reader *r, num_dtype type, const void *grid, int64_t n, float *to)
{
    const qtensor *q = r->q;
    const size_t size = num_bytes(type, 1), at = (size_t)(n / q->block_n * q->scale_cols);
    num_decode_row(type, (const uint8_t *)grid + at * size, (size_t)q->scale_cols, r->stored);
    for (int64_t g = 0; g < r->groups; g++) {
        int64_t j = g * r->l->group, k = r->p->perm && j < q->K ? r->p->perm[j] : j;
        to[g] = j >= q->K ? 0 : r->stored[q->g_idx ? q->g_idx[k] : k / q->block_k];
    }
}

static void read_zeros(reader *r, int64_t n, uint8_t *to)
{
    const qtensor *q = r->q;
    if (q->zeros && r->l->zeros) read_grid(r, q->zero_type, q->zeros, n, r->kept);
    for (int64_t g = 0; g < r->groups; g++) {
        float z = q->zeros && r->l->zeros ? r->kept[g] + 8 : 8;
        if (!(z >= 0 && z <= 127)) r->bad = "zero points outside of 0 to 127";
        to[g] = (uint8_t)(z >= 0 && z <= 127 ? z : 0);
    }
}

/* Row n of the shard in hand is row i of the tile. */
static void read_scales(reader *r, int64_t n, int i)
{
    const qtensor *q = r->q;
    float *scales = r->scales + i * r->groups;
    if (by_row(q) || !q->scales) {
        r->col[i] = qtensor_scale(q, n, 0);
        for (int64_t g = 0; g < r->groups; g++)
            scales[g] = 1;
    } else {
        qtensor bare = *q;
        bare.scales = NULL;
        r->col[i] = qtensor_scale(&bare, n, 0); /* the global factor */
        read_grid(r, q->scale_type, q->scales, n, scales);
    }
    read_zeros(r, n, r->zeros + i * r->groups);
}

/* Is a group worth nothing, whatever its scale? */
static bool is_nothing(const reader *r, const uint8_t *codes, int64_t g, int zero)
{
    for (int64_t k = g * r->l->group; k < (g + 1) * r->l->group; k++) {
        uint8_t c = codes[k];
        if (r->l->kind == FORMAT_FP4) c &= 7;
        if (r->l->kind == FORMAT_E4M3) c &= 127;
        if (c != zero) return false;
    }
    return true;
}

/* Whether what is packed of a row is what the checkpoint has. A row with NaN becomes NaN. */
static void check_row(reader *r, int64_t n)
{
    const uint8_t *codes = NULL;
    read_scales(r, n, 0);
    if (r->q->code == NUM_F16 || r->q->code == NUM_F32) read_codes(r, n, r->codes);
    if (!r->groups) return;
    small_kept(r->p->format, r->scales, r->groups, r->kept);
    for (int64_t g = 0; g < r->groups; g++)
        if (r->scales[g] != r->scales[g]) return;
    for (int64_t g = 0; g < r->groups; g++) {
        if (r->kept[g] == r->scales[g]) continue;
        if (!codes) read_codes(r, n, r->codes);
        codes = r->codes;
        if (!is_nothing(r, codes, g, r->l->kind == FORMAT_INT4 ? r->zeros[g] : 0))
            r->bad = "scales have digits that its format has not";
    }
}

/* ---- packing ------------------------------------------------------------------------------------
 */

typedef struct pack_job {
    const kern_linear_desc *d;
    const part *p;
    uint8_t *out; /* NULL: only look at it */
    float *col;
    const char **bad; /* [threads] */
} pack_job;

/* Finds the shard of row n of the part; returns the row in it. */
static int64_t shard_row(const kern_linear_desc *d, const part *p, int64_t n, const qtensor **q)
{
    int i = p->shard0;
    while (n >= d->shard[i]->N)
        n -= d->shard[i++]->N;
    *q = d->shard[i];
    return n;
}

static void pack_rows(const pack_job *j, reader *r, int64_t n0)
{
    int64_t n = shard_row(j->d, j->p, n0, &r->q);
    for (int i = 0; i < FORMAT_ROWS && !j->out && !r->bad; i++)
        check_row(r, n + i);
    if (!j->out) return;
    for (int i = 0; i < FORMAT_ROWS; i++) {
        read_scales(r, n + i, i);
        read_codes(r, n + i, r->codes + (size_t)(i * r->K) * code_bytes(r->l));
    }
    small_pack(j->p->format, r->codes, r->scales, r->zeros, FORMAT_ROWS, r->K,
               j->out + small_packed_bytes(j->p->format, n0, r->K), r->col);
    memcpy(j->col + n0, r->col, sizeof r->col);
}

static void pack_part(void *arg, int index, int n)
{
    const pack_job *j = arg;
    reader r;
    int64_t lo, hi;
    thread_split(j->p->N, FORMAT_ROWS, index, n, &lo, &hi);
    reader_open(&r, j->p, gpu__packed_k(j->d->shard[0]->K));
    for (int64_t at = lo; at < hi && !r.bad; at += FORMAT_ROWS)
        pack_rows(j, &r, at);
    j->bad[index] = r.bad;
    reader_close(&r);
}

static bool has_zeros(const kern_linear_desc *d)
{
    for (int i = 0; i < d->n_shards; i++) {
        const qtensor *q = d->shard[i];
        if (!q->zeros) continue;
        const uint8_t *z = q->zeros;
        const size_t n = num_bytes(q->zero_type, (size_t)(q->scale_rows * q->scale_cols));
        for (size_t b = 0; b < n; b++)
            if (z[b]) return true;
    }
    return false;
}

/* Where rows are rearranged and scaled alone, the rule itself is for op quant. */
static void plan_input(const kern_linear_desc *d, const qtensor *q, part *p)
{
    const qaxis *a = &q->spec.a;
    const bool moved = q->g_idx || q->pre_scale;
    p->input = moved ? VALUES : AS_IT_IS;
    p->act = (gpu_act){.a_type = NUM_NONE, .K = q->K, .Kp = q->K};
    snprintf(p->text, sizeof p->text, "bf16");
    if (!by_rule(d, q)) return;
    buf text = {0};
    qaxis_format(a, &text);
    snprintf(p->text, sizeof p->text, "%s", text.data);
    buf_free(&text);
    rule_of(q, d->expert, &p->input);
    if (p->input == CODES) {
        p->codes.code = a->type == NUM_I8 ? GPU_INT8 : GPU_E4M3;
        p->codes.fixed = a->gran == Q_TENSOR && q->input_scale > 0 ? q->input_scale : 0;
        return;
    }
    p->act.a_type = a->type;
    p->act.a_gran = a->gran;
    p->act.a_scale = a->scale;
    p->act.a_group = a->gran == Q_GROUP ? a->group : 0;
    p->act.in_scale = q->input_scale;
    p->act.in_zero = q->input_zero;
    p->act.in_global = q->input_global;
    if (p->input == SHARED) p->over = 1.0f / q->input_global;
}

/* What becomes of the input, and the order of columns. */
static int settle_input(gpu_dev *g, const kern_linear_desc *d, part *p, err *e)
{
    const qtensor *q = d->shard[p->shard0];
    const size_t bytes = (size_t)q->K * 4;
    int rc = 0;
    void *mem = NULL;
    float factor[COPY_ROWS];
    plan_input(d, q, p);
    if (q->g_idx) {
        err why = {0}; /* whatever it is, "panels" asks no order of columns */
        if (kern__sort_columns(q, &p->perm, d->name ? d->name : "linear", &why) < 0)
            return err_set(e, ERR_UNSUPPORTED, "%s", why.msg);
        TRY(gpu__keep(g, &mem, p->perm, bytes, e));
        p->act.perm = mem;
    }
    if (q->pre_scale) {
        TRY(gpu__keep(g, &mem, q->pre_scale, bytes, e));
        p->act.pre_scale = mem;
    }
    if (p->input == SHARED) {
        for (int i = 0; i < COPY_ROWS; i++)
            factor[i] = 1.0f / p->over;
        TRY(gpu__keep(g, &mem, factor, sizeof factor, e));
        p->row_scale = mem;
    }
out:
    return rc;
}

static size_t whole(size_t n)
{
    return (n + 255) / 256 * 256;
}

static int fill_part(gpu_dev *g, const kern_linear_desc *d, part *p, uint8_t *mem, const char **bad,
                     err *e)
{
    const int threads = team_size(g->host->team);
    pack_job j = {.d = d, .p = p, .bad = bad};
    for (int pass = 0; pass < 2; pass++) {
        team_run(g->host->team, pack_part, &j);
        for (int i = 0; i < threads; i++)
            if (bad[i]) return err_set(e, ERR_UNSUPPORTED, "%s", bad[i]);
        j.out = mem;
        j.col = (float *)(void *)(mem + whole(p->w_bytes));
    }
    return 0;
}

static int make_part(gpu_dev *g, const kern_linear_desc *d, part *p, gpu_linear *l, err *e)
{
    int rc = 0;
    const int64_t K = d->shard[0]->K;
    void *mem = NULL, *dev = NULL;
    const char **bad = xcalloc((size_t)team_size(g->host->team), sizeof *bad);
    p->w_bytes = small_packed_bytes(p->format, p->N, gpu__packed_k(K));
    if (!d->expert) tuned_plans_of_wide(&g->tuned, g->api, p->format, p->N, K, p->plan);
    const size_t total = whole(p->w_bytes) + (size_t)p->N * sizeof(float);
    TRY(settle_input(g, d, p, e));
    TRY(mem_alloc_huge(&mem, total, e));
    TRY(fill_part(g, d, p, mem, bad, e));
    if (d->expert)
        TRY(gpu__keep(g, &dev, NULL, total, e));
    else
        TRY(gpu__device_alloc(g, &dev, total + 64, e));
    p->w = dev;
    TRY(gpu__check(g, "upload", g->api->upload(dev, mem, total, g->stream), e));
    TRY(gpu__check(g, "upload", g->api->sync(g->stream), e));
    p->col = (float *)(void *)(p->w + whole(p->w_bytes));
    l->bytes += total + (p->perm ? (size_t)K * 4 : 0);
out:
    mem_free(mem);
    free(bad);
    return rc;
}

/* ---- room ---------------------------------------------------------------------------------------
 */

static int widen(gpu_dev *g, int64_t rows, int64_t k, err *e)
{
    struct gpu_packed_room *r = &g->packed;
    const int64_t copies = rows < COPY_ROWS ? rows : COPY_ROWS;
    const size_t work = g->api->wide_work_bytes((int)k, (int)rows), x = (size_t)(copies * k) * 2;
    int rc = 0;
    void *scale = NULL;
    TRY(gpu__keep(g, &r->work, NULL, work, e));
    TRY(gpu__keep(g, &r->x, NULL, x, e));
    TRY(gpu__keep(g, &scale, NULL, sizeof(float) * (size_t)copies, e));
    r->scale = scale;
    g->pub.scratch_bytes += work + x;
    r->rows = rows;
    r->x_rows = copies;
    r->k = k;
out:
    return rc;
}

int gpu__packed_reserve(gpu_dev *g, int64_t max_rows, err *e)
{
    struct gpu_packed_room *r = &g->packed;
    const int64_t rows = max_rows < MOST_ROWS ? max_rows : MOST_ROWS;
    if (r->work && rows <= r->rows) return 0;
    if (r->k) return widen(g, rows, r->k, e);
    if (rows > r->rows) r->rows = rows;
    return 0;
}

/* rows are known once a step was reserved: linears that are made then need their room at once. */
static int make_room(gpu_dev *g, int64_t k, err *e)
{
    struct gpu_packed_room *r = &g->packed;
    if (k <= r->k) return 0;
    if (r->rows) return widen(g, r->rows, k, e);
    r->k = k;
    return 0;
}

/* Why there is no product by cuBLASLt; NULL = there is. */
static const char *lt_can(const gpu_dev *dev, const kern_linear_desc *d)
{
    gpu_dev *g = gpu__of(&dev->pub);
    packed p;
    if (d->expert) return "an expert";
    if (!g->api->launch[GPU_OP_unpack] || !g->api->launch[GPU_OP_lt]) return "not in the plug-in";
    const char *why = plan(d, true, &p);
    for (int i = 0; i < p.n && !why; i++)
        why = gpu__lt_plan_pieces(g, p.part[i].N, d->shard[0]->K, d->bias != NULL);
    return why;
}

static int make_pieces(gpu_dev *g, const kern_linear_desc *d, packed *p, err *e)
{
    int64_t N = 0;
    for (int i = 0; i < p->n; i++) {
        gpu__lt_need_pieces(g, p->part[i].N, d->shard[0]->K);
        N += p->part[i].N;
    }
    int rc = d->bias ? gpu__lt_bias(g, d->bias, N, &p->bias_bf16, e) : 0;
    return rc < 0 || !g->packed.rows ? rc : gpu__lt_reserve(g, e);
}

/* What it would take; what steps would need goes to f. */
uint64_t gpu__packed_forecast(gpu_dev *g, const kern_linear_desc *d, kern_forecast *f)
{
    packed p;
    uint64_t n = 0;
    const int64_t K = d->shard[0]->K;
    if (plan(d, true, &p)) return 0;
    const bool pieces = !lt_can(g, d);
    for (int i = 0; i < p.n; i++) {
        part *one = &p.part[i];
        const qtensor *q = d->shard[one->shard0];
        const size_t piece = gpu__lt_piece_bytes(g, one->N, K);
        becomes input = AS_IT_IS;
        if (by_rule(d, q)) rule_of(q, d->expert, &input);
        n += whole(small_packed_bytes(one->format, one->N, gpu__packed_k(K))) +
             (uint64_t)one->N * sizeof(float) + (q->g_idx ? (uint64_t)K * 4 : 0);
        if (pieces && piece > f->piece) f->piece = piece;
        f->copies = f->copies || (d->expert && input != AS_IT_IS);
        if (d->expert && input == VALUES && K > f->plain_experts_k) f->plain_experts_k = K;
    }
    return n;
}

/* ---- the layout ---------------------------------------------------------------------------------
 */

static int packed_make(gpu_dev *g, const kern_linear_desc *d, gpu_linear *l, err *e)
{
    int rc = 0;
    packed *p = xcalloc(1, sizeof *p);
    void *bias = NULL;
    l->own = p;
    /* All experts are of one format: zero points that happen to be none are kept. */
    const char *why = plan(d, d->expert || has_zeros(d), p);
    p->expert = d->expert;
    if (why) return err_set(e, ERR_UNSUPPORTED, "%s", why);
    for (int i = 0; i < p->n; i++)
        TRY(make_part(g, d, &p->part[i], l, e));
    if (d->bias) TRY(gpu__keep(g, &bias, d->bias, sizeof(float) * (size_t)l->N, e));
    p->bias = bias;
    if (!d->expert) TRY(make_room(g, l->K, e));
    if (!lt_can(g, d)) TRY(make_pieces(g, d, p, e));
out:
    return rc;
}

static void packed_drop(gpu_dev *g, void *own)
{
    packed *p = own;
    for (int i = 0; i < p->n; i++) {
        if (p->part[i].w && !p->expert) g->api->free(p->part[i].w);
        mem_free(p->part[i].perm);
    }
    free(p);
}

/* Rows of one tile to where they belong. */
static void unpack_tile(const part *p, const uint8_t *tile, const float *col, int64_t K, float *out)
{
    const format_layout *f = &format_layouts[p->format];
    for (int64_t k = 0; k < K; k++) {
        const uint8_t *unit = tile + (size_t)(k / FORMAT_UNIT) * format_unit_bytes(f);
        const int64_t at = p->perm ? p->perm[k] : k;
        for (int r = 0; r < FORMAT_ROWS; r++) {
            format_cell v = format_read(f, unit, r, (int)(k % FORMAT_UNIT));
            out[r * K + at] = v.code * (v.scale * col[r]);
        }
    }
}

static void packed_unpack(gpu_dev *g, const gpu_linear *l, float *out)
{
    const packed *p = l->own;
    g->api->bind(g->index);
    for (int i = 0; i < p->n; i++) {
        const part *s = &p->part[i];
        const size_t total = whole(s->w_bytes) + (size_t)s->N * sizeof(float);
        uint8_t *mem = xmalloc(total);
        g->api->download(mem, s->w, total, g->stream);
        g->api->sync(g->stream);
        const float *col = (const float *)(const void *)(mem + whole(s->w_bytes));
        for (int64_t n = 0; n < s->N; n += FORMAT_ROWS)
            unpack_tile(s, mem + small_packed_bytes(s->format, n, gpu__packed_k(l->K)), col + n,
                        l->K, out + (s->row0 + n) * l->K);
        free(mem);
    }
}

const char *gpu__packed_format(const gpu_linear *l)
{
    return tuned_format_of_packed(((const packed *)l->own)->part[0].format);
}

static bool packed_tuned(const gpu_linear *l, gpu_tuned_key *out)
{
    const packed *p = l->own;
    const char *format = gpu__packed_format(l);
    *out = (gpu_tuned_key){.row = TUNED_OP_packed, .plan = TUNED_OP_wide};
    snprintf(out->row_format, sizeof out->row_format, "%s", format);
    snprintf(out->plan_format, sizeof out->plan_format, "%s", format);
    return p->n == 1 && !p->expert;
}

static void packed_choice(const gpu_linear *l, int bucket, kern_choice *out)
{
    static const char *const names[SMALL_FORMATS] = {
        [SMALL_INT4_128] = "packed int4 g128",
        [SMALL_INT4_128_ZERO] = "packed int4 g128 with zeros",
        [SMALL_INT4_64] = "packed int4 g64",
        [SMALL_INT4_64_ZERO] = "packed int4 g64 with zeros",
        [SMALL_INT4_32] = "packed int4 g32",
        [SMALL_INT4_32_ZERO] = "packed int4 g32 with zeros",
        [SMALL_E4M3] = "packed fp8",
        [SMALL_E4M3_BLOCK] = "packed fp8 in blocks",
        [SMALL_INT8] = "packed int8",
        [SMALL_INT8_GROUP] = "packed int8 g128",
        [SMALL_BF16] = "packed bf16",
        [SMALL_MXFP4] = "packed mxfp4",
        [SMALL_NVFP4] = "packed nvfp4",
    };
    const packed *p = l->own;
    out->layout = names[p->part[0].format];
    snprintf(out->act, sizeof out->act, "%s", p->part[0].text);
    if (bucket < 2 && !p->expert)
        snprintf(out->plan, sizeof out->plan, "built in: %s",
                 l->dev->api->small_entry(p->part[0].format, (int)p->part[0].N, (int)l->K,
                                          bucket ? SMALL_MAX_M : 1));
}

/* ---- running ------------------------------------------------------------------------------------
 */

typedef struct input {
    const void *x; /* bf16 */
    int64_t ldx;
    const float *row_scale;
} input;

/* M rows as the kernels take them. */
static input take_input(gpu_dev *g, const part *p, gpu_x x, int64_t ldx, int64_t M, int64_t K)
{
    struct gpu_packed_room *r = &g->packed;
    if (M == 1 && ldx % 8) ldx = K;
    if (p->input == AS_IT_IS && gpu__packed_fits(x, ldx)) return (input){x.p, ldx, NULL};
    if (p->input == VALUES || p->input == SHARED || p->act.perm || p->act.pre_scale) {
        gpu_act_run a = {.plan = p->act, .x = x, .ldx = ldx, .M = M, .out = g->act_scratch};
        gpu__push(g, GPU_OP_act_run, &a, sizeof a);
        x = (gpu_x){g->act_scratch, GPU_F32};
        ldx = K;
    }
    if (p->input == CODES) {
        gpu_quant a = {.x = x, .ld = ldx, .T = M, .K = K, .to = p->codes};
        a.to.as_bf16 = true;
        a.to.p = r->x;
        a.to.ld = K;
        a.to.scale = r->scale;
        a.to.scale_row = 1;
        gpu__push(g, GPU_OP_quant, &a, sizeof a);
        return (input){r->x, K, r->scale};
    }
    if (p->input == SHARED) { /* bf16 holds a code times its E4M3; the rounding is taken back */
        gpu_scale a = {x, p->over, M * K};
        gpu__push(g, GPU_OP_scale, &a, sizeof a);
    }
    gpu_copy copy = {.from = x, .to = {r->x, GPU_BF16}, .ldf = ldx, .ldt = K, .n = K, .rows = M};
    gpu__push(g, GPU_OP_copy, &copy, sizeof copy);
    return (input){r->x, K, p->input == SHARED ? p->row_scale : NULL};
}

static void push_small(gpu_dev *g, const packed *own, const part *p, input in, int64_t M, gpu_x y,
                       int64_t ldy, int64_t K)
{
    small_call c = {.format = p->format,
                    .w = p->w,
                    .x = in.x,
                    .y = y.p,
                    .y_bf16 = y.type == GPU_BF16,
                    .row_scale = in.row_scale,
                    .col_scale = p->col,
                    .bias = own->bias ? own->bias + p->row0 : NULL,
                    .ldx = in.ldx,
                    .ldy = ldy,
                    .N = (int)p->N,
                    .K = (int)K,
                    .M = (int)M,
                    .pdl = gpu__packed_early(g)};
    gpu__push(g, GPU_OP_small, &c, sizeof c);
}

static void push_wide(gpu_dev *g, const packed *own, const part *p, input in, int64_t M, gpu_x y,
                      int64_t ldy, int64_t K)
{
    wide_call c = {.format = p->format,
                   .w = p->w,
                   .x = in.x,
                   .work = g->packed.work,
                   .y = y.p,
                   .y_bf16 = y.type == GPU_BF16,
                   .row_scale = in.row_scale,
                   .col_scale = p->col,
                   .bias = own->bias ? own->bias + p->row0 : NULL,
                   .ldx = in.ldx,
                   .ldy = ldy,
                   .N = (int)p->N,
                   .K = (int)K,
                   .M = (int)M,
                   .pdl = gpu__packed_early(g),
                   .plan = g->trial.wide.tokens ? g->trial.wide : p->plan[tuned_at(M)]};
    gpu__push(g, GPU_OP_wide, &c, sizeof c);
}

/* Pieces of at most `most` rows; results that do not lie as wide wants them come from small. */
static void run_part(gpu_dev *g, const gpu_linear *l, const part *p, const float *x, int64_t ldx,
                     int64_t M, float *y, int64_t ldy, bool wide)
{
    const packed *own = l->own;
    const gpu_x in = gpu__x(g, x), out = gpu__x(g, y + p->row0);
    wide = wide && ldy % 4 == 0 && (uintptr_t)out.p % 16 == 0;
    int64_t most = wide ? g->packed.rows : SMALL_MAX_M;
    if ((p->input != AS_IT_IS || !gpu__packed_fits(in, ldx)) && most > g->packed.x_rows)
        most = g->packed.x_rows;
    for (int64_t m = 0; m < M; m += most) {
        const int64_t n = M - m < most ? M - m : most;
        const input piece = take_input(g, p, gpu__x(g, x + m * ldx), ldx, n, l->K);
        const gpu_x to = gpu__x(g, y + m * ldy + p->row0);
        if (wide && n > SMALL_MAX_M)
            push_wide(g, own, p, piece, n, to, ldy, l->K);
        else
            push_small(g, own, p, piece, n, to, ldy, l->K);
    }
}

static bool has_room(gpu_dev *g, const gpu_linear *l)
{
    if (g->packed.work && g->packed.k >= l->K) return true;
    gpu__fail(g, "a product of packed weights before kern_reserve");
    return false;
}

static bool is_aligned(gpu_x x, int64_t ld)
{
    return (uintptr_t)x.p % 16 == 0 && ld * (x.type == GPU_BF16 ? 2 : 4) % 16 == 0;
}

/* Unpacks one piece after the other; each is multiplied into its columns of y. */
static void run_pieces(gpu_dev *g, const gpu_linear *l, const part *p, gpu_x x, int64_t ldx,
                       int64_t M, gpu_x y, int64_t ldy)
{
    const packed *own = l->own;
    const uint16_t *bias_bf16 = own->bias_bf16;
    const int64_t step = gpu__lt_piece_rows(g, p->N, l->K), lane = y.type == GPU_BF16 ? 2 : 4;
    for (int64_t n = 0; n < p->N; n += step) {
        const gpu_unpack u = {.format = p->format,
                              .w = p->w + small_packed_bytes(p->format, n, l->K),
                              .col_scale = p->col + n,
                              .N = p->N - n < step ? p->N - n : step,
                              .K = l->K,
                              .out = gpu__lt_piece(g)};
        const lt_call c = {.kind = LT_BF16,
                           .y_bf16 = y.type == GPU_BF16,
                           .M = M,
                           .N = u.N,
                           .K = l->K,
                           .w = u.out,
                           .x = x.p,
                           .bias = own->bias ? own->bias + p->row0 + n : NULL,
                           .bias_bf16 = bias_bf16 ? bias_bf16 + p->row0 + n : NULL,
                           .y = (char *)y.p + n * lane,
                           .ldx = ldx,
                           .ldy = ldy};
        gpu__push(g, GPU_OP_unpack, &u, sizeof u);
        gpu__lt_push(g, &c);
    }
}

/* Inputs that have to be copied first, for which there is room in pieces only, or that leave a
 * factor of rows, and lanes that do not lie as the library wants them, stay with wide. */
static bool run_part_lt(gpu_dev *g, const gpu_linear *l, const part *p, const float *x, int64_t ldx,
                        int64_t M, float *y, int64_t ldy)
{
    const gpu_x in = gpu__x(g, x), out = gpu__x(g, y + p->row0);
    if (p->input != AS_IT_IS || in.type != GPU_BF16 || ldx % 16 || !is_aligned(in, ldx) ||
        !is_aligned(out, ldy) || !gpu__lt_piece(g))
        return false;
    run_pieces(g, l, p, in, ldx, M, out, ldy);
    return true;
}

static void run(gpu_dev *g, const gpu_linear *l, const float *x, int64_t ldx, int64_t M, float *y,
                int64_t ldy, bool wide)
{
    const packed *p = l->own;
    for (int i = 0; i < p->n && has_room(g, l); i++)
        run_part(g, l, &p->part[i], x, ldx, M, y, ldy, wide);
}

static void run_small(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                      int64_t M, float *y, int64_t ldy)
{
    (void)bucket;
    run(g, l, x, ldx, M, y, ldy, false);
}
static void run_wide(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                     int64_t M, float *y, int64_t ldy)
{
    (void)bucket;
    run(g, l, x, ldx, M, y, ldy, true);
}

static void run_lt(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                   int64_t M, float *y, int64_t ldy)
{
    const packed *p = l->own;
    (void)bucket;
    if (!has_room(g, l)) return;
    for (int i = 0; i < p->n; i++)
        if (!run_part_lt(g, l, &p->part[i], x, ldx, M, y, ldy))
            run_part(g, l, &p->part[i], x, ldx, M, y, ldy, true);
}
static void run_wide_lt(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                        int64_t M, float *y, int64_t ldy)
{
    const int64_t from = g->facts.emulated ? 64 : LT_ROWS; /* tests have few rows */
    (M >= from ? run_lt : run_wide)(g, l, bucket, x, ldx, M, y, ldy);
}

static const char *no_small(const gpu_dev *g, const kern_linear_desc *d)
{
    packed p;
    const char *why = d->expert ? "an expert" : plan(d, true, &p);
    for (int i = 0; !why && i < p.n; i++)
        for (int m = 1; m <= SMALL_MAX_M && !why; m += 7)
            if (!strcmp(
                    g->api->small_entry(p.part[i].format, (int)p.part[i].N, (int)d->shard[0]->K, m),
                    "none"))
                why = "K does not fit shared memory";
    return why;
}
static const char *experts_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    (void)g, (void)bucket;
    return d->expert ? NULL : "made for experts";
}
static void run_alone(gpu_dev *g, const gpu_linear *l, int bucket, const float *x, int64_t ldx,
                      int64_t M, float *y, int64_t ldy)
{
    (void)l, (void)bucket, (void)x, (void)ldx, (void)M, (void)y, (void)ldy;
    gpu__fail(g, "an expert in packed weights runs with the others of its layer only");
}
static const char *small_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    return bucket > 1 ? "more than 8 rows" : no_small(g, d);
}
static const char *pieces_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    (void)bucket;
    return no_small(g, d);
}
static const char *wide_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    static const int some[2][3] = {{9, 32, 64}, {65, 512, MOST_ROWS}};
    packed p;
    if (d->expert) return "an expert";
    if (bucket < 2) return "at most 8 rows";
    if (!g->api->wide_choose || !g->api->launch[GPU_OP_wide]) return "not in the plug-in";
    const char *why = plan(d, true, &p);
    for (int i = 0; i < p.n && !why; i++)
        for (int m = 0; m < 3 && !why; m++)
            if (!g->api
                     ->wide_choose(p.part[i].format, (int)p.part[i].N, (int)d->shard[0]->K,
                                   some[bucket - 2][m])
                     .tokens)
                why = "no kernel for this shape";
    return why;
}

static const char *lt_refuse(const gpu_dev *g, const kern_linear_desc *d, int bucket)
{
    if (bucket < KERN_BUCKETS - 1) return "at most 64 rows";
    const char *why = wide_refuse(g, d, bucket);
    return why ? why : lt_can(g, d);
}

static const gpu_linear_row row_small = {"cuda-small", small_refuse, run_small};
static const gpu_linear_row row_wide_lt = {"cuda-wide-unpack-lt", lt_refuse, run_wide_lt};
static const gpu_linear_row row_wide = {"cuda-wide", wide_refuse, run_wide};
static const gpu_linear_row row_lt = {"cuda-unpack-lt", lt_refuse, run_lt};
static const gpu_linear_row row_pieces = {"cuda-small-by-8", pieces_refuse, run_small};
static const gpu_linear_row row_experts = {"cuda-experts", experts_refuse, run_alone};
static const gpu_linear_row *const rows[] = {&row_small,  &row_wide_lt, &row_wide, &row_lt,
                                             &row_pieces, &row_experts, NULL};

const gpu_layout gpu__layout_packed = {.name = "packed",
                                       .rows = rows,
                                       .refuse = packed_refuse,
                                       .make = packed_make,
                                       .drop = packed_drop,
                                       .unpack = packed_unpack,
                                       .tuned = packed_tuned,
                                       .choice = packed_choice};
