/* TTFT and TPOT as one client sees them: a fixed set of prompts, one after another, medians.
 *
 * Six prompts of 128 tokens cut from one text (each at another place), 32 tokens greedy after each;
 * the first warms up and is not counted. A salt of its own keeps each out of the prefix cache.
 *     TTFT = submit to first token          TPOT = (last token - first token) / (tokens - 1) */
#include "eval/local.h"
#include <stdlib.h>
#include <string.h>

#define RUNS          6
#define PROMPT_TOKENS 128
#define OUTPUT_TOKENS 32

static const char text[] =
    "A balance compares what is known with what is not. Long before springs and cells of quartz, a "
    "merchant laid brass on one pan and grain on the other, and waited for the beam to settle. The "
    "vessel that held the grain had a weight of its own, and an honest merchant took it away "
    "first: "
    "this is the tare. Nobody buys the basket. When the load is heavy the basket hardly matters; "
    "when the load is saffron it is most of what the scale shows. So the first thing to learn "
    "about "
    "any weight is how much of it is needed, and the second is what is lost by leaving some out. ";

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n)
{
    if (!n) return 0;
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

static int base_ids(engine *en, ids *out, err *e)
{
    const tokenizer *t = engine_tokenizer(en);
    if (t) return tokenizer_encode(t, text, sizeof text - 1, false, out, e);
    for (int32_t i = 0; i < PROMPT_TOKENS; i++)
        ids_push(out, (int32_t)((i * 7 + 3) % engine_vocab(en)));
    return 0;
}

int eval__speed(engine *en, double *ttft_ms, double *tpot_ms, err *e)
{
    int rc, n = 0;
    double ttft[RUNS], tpot[RUNS];
    ids all = {0}, prompt = {0};
    *ttft_ms = *tpot_ms = 0;
    int64_t n_prompt = PROMPT_TOKENS, n_out = OUTPUT_TOKENS, room = engine_max_len(en);
    if (n_prompt + n_out > room) {
        n_prompt = room * 3 / 4;
        n_out = room - n_prompt;
    }
    TRY(base_ids(en, &all, e));
    if (!all.n || n_prompt < 1 || n_out < 2) goto out;
    for (int run = 0; run < RUNS; run++) {
        req_params p;
        gen_result g = {0};
        req_params_default(&p);
        prompt.n = 0;
        for (int64_t i = 0; i < n_prompt; i++)
            ids_push(&prompt, all.v[(size_t)(i + run * 17) % all.n]);
        p.prompt = prompt.v;
        p.n_prompt = n_prompt;
        p.max_tokens = n_out;
        p.sample.temperature = 0;
        p.want = WANT_TOKENS;
        p.ignore_eos = true;
        p.cache_salt = 0x5eed0000u + (uint64_t)run;
        rc = engine_generate(en, &p, &g, e);
        if (rc == 0 && run > 0) {
            ttft[n] = 1000 * g.ttft_s;
            tpot[n++] = g.output_tokens > 1
                            ? 1000 * (g.total_s - g.ttft_s) / (double)(g.output_tokens - 1)
                            : 0;
        }
        gen_result_free(&g);
        if (rc < 0) goto out;
    }
    *ttft_ms = median(ttft, n);
    *tpot_ms = median(tpot, n);
    rc = 0;
out:
    ids_free(&all);
    ids_free(&prompt);
    return rc;
}
