/* OpenAI-compatible HTTP server over one engine. */
#ifndef SERVE_SERVE_H
#define SERVE_SERVE_H
#include "engine/engine.h"
typedef struct serve_opts {
    const char *host; /* "127.0.0.1" */
    int port;         /* 8000; 0 = any free port, printed */
    const char *const *names;
    int n_names;            /* --served-model-name; default = model path as given */
    const char *api_key;    /* NULL = open */
    double drain_seconds;   /* SIGTERM: running requests may finish, default 30 */
    int64_t max_body_bytes; /* default 64 MiB */
    bool literal;           /* special tokens in texts are plain text unless a request says other */
    bool json;              /* say on stdout, as one JSON object, where it listens */
} serve_opts;
/* Runs until SIGTERM/SIGINT; then refuses new requests, drains, returns 0. A second signal stops at
 * once. The port taken is ERR_IO that names it. */
int serve_run(engine *en, const serve_opts *o, err *e);

/* The pieces of serve_run, for programs that have a life of their own. The engine must outlive the
 * server, and may be closed after serve_close. */
typedef struct server server;
int serve_open(server **out, engine *en, const serve_opts *o, err *e);
int serve_port(const server *s);
void serve_drain(server *s);      /* new generation requests get 503 */
int64_t serve_running(server *s); /* generation requests with a client */
void serve_close(server *s);      /* cancels what runs; NULL is fine */
#endif
