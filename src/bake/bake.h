/* Offline quantization: read → quantize → write → reopen and verify, one layer resident at a time.
 */
#ifndef BAKE_BAKE_H
#define BAKE_BAKE_H
#include "base/json.h"
#include "num/qspec.h"

typedef struct bake_opts {
    const char *model, *out;
    const char *scheme;
    const char *algo; /* "rtn" */
    const char *to;   /* dialect to write; NULL or "" = the first that has words for the scheme */
    const char *const *ignore;
    int n_ignore; /* exact or re: names, added to the defaults */
    bool overwrite, strict;
    uint64_t max_shard_bytes;
    int threads;
} bake_opts;
typedef struct bake_module {
    char name[160];
    char spec[96];
    double snr_db;
    uint64_t bytes;
} bake_module;
typedef struct bake_report {
    char out[512], scheme[160];
    double seconds;
    uint64_t peak_rss_bytes; /* highest RssAnon */
    double snr_min_db, snr_median_db;
    char snr_min_module[160];
    uint64_t bytes_in, bytes_out;
    bake_module *modules;
    int n_modules;
    char **notes;
    int n_notes; /* kept modules, pattern counts, warnings */
} bake_report;
int bake_quantize(const bake_opts *o, bake_report *r, err *e);
void bake_report_free(bake_report *r);

typedef struct convert_opts {
    const char *in, *out;
    const char *to;         /* "plain" */
    const char *dtype;      /* "bf16" "f32" "f16" */
    const char *gptq_zeros; /* "v1" or "v2"; NULL = as the checkpoint's label says */
    bool overwrite;
    uint64_t max_shard_bytes;
} convert_opts;
int bake_convert(const convert_opts *o, bake_report *r, err *e);

/* What a checkpoint is, as JSON (keys of `inspect`): never loads weights. */
int bake_inspect(const char *model, jw *out, err *e);
#endif
