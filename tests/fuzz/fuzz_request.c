/* Bodies of generation requests: the first byte chooses the kind, the rest is the body. The parser
 * must refuse or accept, never crash, and what it accepts must keep the bounds that the engine
 * relies on. The engine is the fake one of the unit tests. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../unit/fake_engine.h"
#include "serve/serve_int.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static server *srv;

static void must(bool good)
{
    if (!good) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (!srv) {
        err e = {0};
        serve_opts o = {.host = "127.0.0.1"};
        must(serve_open(&srv, fake_open(1, 1, 0), &o, &e) == 0);
    }
    if (n < 1) return 0;
    buf body = {0};
    gen_request r = {0};
    fault f = {0};
    buf_add(&body, data + 1, n - 1);
    int rc = data[0] & 1 ? serve__parse_chat(srv, &body, &r, &f)
                         : serve__parse_completion(srv, &body, &r, &f);
    if (rc < 0) {
        must(f.status >= 400 && f.status < 500 && f.msg[0]);
        buf out = {0};
        serve__fault_write(&f, &out);
        must(out.len < 8192);
        buf_free(&out);
    } else {
        must(r.n >= 1 && r.n_prompts >= 1 && r.n * r.n_prompts <= SERVE_MAX_CHOICES);
        must(r.p.n_stops <= REQ_MAX_STOPS && r.logprobs <= REQ_MAX_TOP);
        for (int64_t i = 0; i < r.n_prompts; i++) {
            must(r.prompts[i].ids.n >= 1 && r.prompts[i].ids.n <= FAKE_LEN);
            for (size_t k = 0; k < r.prompts[i].ids.n; k++)
                must(r.prompts[i].ids.v[k] >= 0 && r.prompts[i].ids.v[k] < FAKE_VOCAB);
            must(r.max_tokens <= FAKE_LEN - (int64_t)r.prompts[i].ids.n);
        }
    }
    serve__gen_request_free(&r);
    buf_free(&body);
    return 0;
}
