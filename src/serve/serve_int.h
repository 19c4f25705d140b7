/* Private to the serve room: the request's life inside the server.
 *
 * Three structs, three lifetimes:
 *   server    the daemon: listening socket, watch thread, list of running calls
 *   exchange  one HTTP request: its body, its reply (owned by the HTTP thread)
 *   call      one generation request: choices running in the engine. It outlives its exchange while
 *             the engine still has choices of it; a reference count decides.
 *
 * Threads: the HTTP thread (libmicrohttpd's) parses, formats and writes; the engine thread only
 * appends copies of events to call.head and resumes the connection; the watch thread only notices
 * closed sockets and cancels. Lock order: server.lock, then call.lock; no engine_* function is ever
 * called with a lock held. */
#ifndef SERVE_SERVE_INT_H
#define SERVE_SERVE_INT_H
#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include "base/version.h"
#include "serve/serve.h"

#define SERVE_VERSION       TARE_VERSION
#define SERVE_MAX_CHOICES   4096 /* prompts x n of one request */
#define SERVE_MAX_N         128
#define SERVE_WINDOW        32      /* choices of one request inside the engine at a time */
#define SERVE_MAX_VALUES    4000000 /* JSON values of one body: cJSON takes 64 bytes for each */
#define SERVE_RETRY_AFTER_S 1

/* ---- faults: what the client gets instead of an answer -----------------------------------------
 */
typedef struct fault {
    int status;       /* 0 = none */
    const char *code; /* OpenAI's string code, or NULL: the status as a number */
    char param[96];   /* field at fault, "" = none */
    char msg[1024];
} fault;
int serve__fault_set(fault *f, int status, const char *param, const char *fmt, ...) PRINTF(4, 5);
int serve__fault_err(fault *f, const char *param, const err *e);
void serve__fault_write(const fault *f, buf *out); /* {"error":{…}} */

/* ---- server -------------------------------------------------------------------------------------
 */
struct call;
struct server {
    engine *en;
    serve_opts o;
    char **names;
    int n_names;
    char *key;
    char fingerprint[32];
    char model_path[256];
    int64_t created, max_len, vocab;
    size_t max_token_bytes; /* longest token: bounds how few ids a text can become */
    struct MHD_Daemon *daemon;
    int listen_fd, port, watch_fd, wake_fd;
    pthread_t watcher;
    bool watching;
    pthread_mutex_t lock;
    struct call *calls; /* those with a connection, under lock */
    uint64_t next_serial;
    int64_t n_calls;
    atomic_bool draining, stopping;
    size_t body_bytes;               /* bodies held now; HTTP thread only */
    _Atomic uint64_t http_counts[6]; /* replies by status / 100 */
    _Atomic uint64_t refused_busy, client_gone;
};

/* ---- exchange -----------------------------------------------------------------------------------
 */
struct route;
typedef struct exchange {
    struct server *s;
    struct MHD_Connection *conn;
    const struct route *route;
    char *rest; /* of a prefix route: what follows the prefix */
    buf body;
    size_t dropped; /* body bytes read and thrown away after a fault */
    fault early;    /* decided before the body was read */
    char request_id[128];
    struct call *call;
    double start_s;
} exchange;

typedef enum MHD_Result route_fn(exchange *x);
typedef struct route {
    const char *method, *path;
    bool prefix;    /* matches anything that continues the path */
    bool open;      /* answers without the API key */
    bool generates; /* refused while draining */
    route_fn *run;
    const char *help;
} route;
extern const route serve__routes[];
extern const int serve__n_routes;
/* NULL when nothing matches; *allowed then gets the method that the path does take, or NULL. */
const route *serve__route_find(const char *method, const char *path, const char **rest,
                               const char **allowed);

int serve__http_open(struct server *s, bool v6, err *e);

/* http.c: replies. Both take the bytes over from `body` and leave it empty. */
enum MHD_Result serve__reply(exchange *x, int status, const char *type, buf *body);
enum MHD_Result serve__reply_json(exchange *x, int status, buf *body);
enum MHD_Result serve__reply_fault(exchange *x, const fault *f);
enum MHD_Result serve__reply_stream(exchange *x, struct call *c);
void serve__body_release(exchange *x);

/* ---- requests (req_parse.c, req_chat.c) ---------------------------------------------------------
 */
typedef struct gen_prompt {
    ids ids;
    buf text;       /* what echo returns */
    int64_t n_lead; /* ids that the tokenizer put before the text (BOS) */
} gen_prompt;

typedef struct gen_request {
    bool chat, stream, include_usage, continuous_usage, echo;
    bool token_ids_as_text, return_token_ids;
    char *model; /* the served name the reply shows */
    int64_t n;
    int64_t logprobs;   /* -1 = none, else how many alternatives */
    int64_t max_tokens; /* -1 = not given */
    gen_prompt *prompts;
    int64_t n_prompts;
    req_params p; /* template of every choice; pointers into this struct */
    int32_t *stop_ids, *bias_ids;
    float *bias;
    json *body; /* owns the stop strings */
} gen_request;

/* Parses a whole body; 0, or -1 with *f set. r must be zeroed; free it in both cases. */
int serve__parse_chat(const struct server *s, const buf *body, gen_request *r, fault *f);
int serve__parse_completion(const struct server *s, const buf *body, gen_request *r, fault *f);
void serve__gen_request_free(gen_request *r);
/* The fields that both kinds have; r->body must be parsed. */
int serve__parse_common(const struct server *s, const buf *body, gen_request *r, fault *f);
/* Lengths against the context, once the prompts are there. default_tokens < 0: what is left. */
int serve__parse_lengths(const struct server *s, gen_request *r, int64_t default_tokens, fault *f);
/* Parses JSON that must be an object, within the bounds on size and nesting. */
int serve__parse_body(const buf *body, json **out, fault *f);
/* The served name for "model", or 404. */
int serve__parse_model(const struct server *s, const json *body, const char **name, fault *f);
int serve__encode_text(const struct server *s, const char *text, size_t n, bool special,
                       bool literal, const char *param, ids *out, fault *f);
/* Field control_tokens_in_text, or the server's setting. */
int serve__parse_literal(const struct server *s, const json *body, bool *literal, fault *f);
/* Ids from a JSON array, each checked against the vocabulary. */
int serve__parse_ids(const struct server *s, const json *arr, const char *param, ids *out,
                     fault *f);
/* Messages checked, rendered by the template, encoded. */
int serve__chat_ids(const struct server *s, const json *body, ids *out, fault *f);
/* Typed fields: 1 present, 0 absent or null, -1 with *f set. */
int serve__field_int(const json *obj, const char *key, int64_t lo, int64_t hi, int64_t *out,
                     fault *f);
int serve__field_num(const json *obj, const char *key, double lo, double hi, double *out, fault *f);
int serve__field_bool(const json *obj, const char *key, bool *out, fault *f);
int serve__field_str(const json *obj, const char *key, const char **out, fault *f);
/* Number text of a top-level key in JSON that was already validated: doubles lose integers past
 * 2^53. NULL if the key is not there as a plain number. */
const char *serve__raw_number(const char *text, size_t n, const char *key, size_t *len);
size_t serve__count_values(const char *text, size_t n);

/* ---- calls (call.c) -----------------------------------------------------------------------------
 */
typedef struct gen_event { /* a copy of an engine_event, one allocation */
    struct gen_event *next;
    int choice;
    event_kind kind;
    int32_t token, stop_id;
    bool has_logprobs;
    finish_reason reason;
    int64_t prompt_tokens, cached_tokens, output_tokens;
    size_t n_logprobs, text_len;
    token_logprob *logprobs;
    char *text, *stop_text; /* stop_text NULL = none */
    int err_code;
    char *err_msg;
} gen_event;

typedef struct gen_choice {
    struct call *c;
    int index, prompt;
    /* under c->lock */
    uint64_t id;
    bool submitted, finished;
    /* HTTP thread only */
    bool done, opened; /* opened: role chunk or echo was sent */
    buf text;
    ids tokens; /* generated, kept when the reply lists ids */
    token_logprob *lps, *plps;
    size_t n_lps, cap_lps, n_plps, cap_plps;
    detok offsets;
    bool offsets_on;
    int64_t chars; /* characters of the text so far, for text_offset */
    finish_reason reason;
    int32_t stop_id;
    char *stop_text;
    int64_t prompt_tokens, cached_tokens, output_tokens;
} gen_choice;

typedef struct api_shape {
    const char *id_prefix, *object;
    /* Appends SSE events for a token or the end of one choice. */
    void (*on_event)(struct call *c, gen_choice *ch, const gen_event *ev);
    void (*whole)(struct call *c, buf *out); /* the unstreamed reply */
} api_shape;

typedef struct call {
    struct server *s;
    const api_shape *shape;
    gen_request r;
    char id[48];
    int64_t created;
    gen_choice *choices;
    int n_choices, n_submitted, n_done;
    fault f; /* first failure of any choice */
    buf out; /* stream: bytes to send */
    size_t out_pos;
    bool closed; /* stream: last byte is in `out` */
    /* list of the server, under server.lock */
    struct call *next, **link;
    uint64_t serial;
    int fd;
    /* shared with the engine and watch threads */
    pthread_mutex_t lock;
    int refs;
    bool suspended, gone, stopped; /* gone: client left; stopped: the server ends */
    int n_inside;                  /* submitted and not finished */
    gen_event *head, **tail;
    struct MHD_Connection *conn;
} call;

/* Takes the request over. */
call *serve__call_make(struct server *s, exchange *x, const api_shape *shape, gen_request *r);
/* Hands choices to the engine as far as they fit. -1 with c->f when the first does not. */
int serve__call_pump(call *c);
/* Formats what arrived; true when everything is done (or c->f is set). */
bool serve__call_drain(call *c);
/* Suspends the connection unless something arrived meanwhile; false = drain again. */
bool serve__call_suspend(call *c);
bool serve__call_is_gone(call *c);
void serve__call_abandon(call *c, bool stopped); /* cancels all; resumes the connection */
void serve__call_detach(call *c);                /* the exchange ends: drops its reference */
void serve__call_unref(call *c);
typedef int request_parser(const struct server *s, const buf *body, gen_request *r, fault *f);
enum MHD_Result serve__call_run(exchange *x, const api_shape *shape, request_parser *parse);

/* watch.c: notices clients that left while their connection is suspended. */
int serve__watch_open(struct server *s, err *e);
void serve__watch_close(struct server *s);
void serve__watch_add(struct server *s, call *c);
void serve__watch_remove(struct server *s, call *c);

/* ---- shapes (sse.c, logprobs.c) -----------------------------------------------------------------
 */
void serve__sse_event(buf *out, const buf *one_line);
void serve__sse_fault(buf *out, const fault *f);
void serve__sse_done(buf *out);
void serve__jw_logprob(jw *w, float lp); /* never -inf: -9999.0 */
void serve__token_text(const call *c, int32_t id, buf *out);
/* completions: {tokens,token_logprobs,top_logprobs,text_offset}; offsets advance with the choice.
 * prompt: the first n_lead tokens have no text. */
void serve__logprobs_completion(call *c, gen_choice *ch, jw *w, bool with_prompt,
                                const token_logprob *lps, size_t n);
void serve__logprobs_chat(const call *c, jw *w, const token_logprob *lps, size_t n);
void serve__usage_write(const call *c, jw *w);
const char *serve__finish_name(finish_reason r);
void serve__usage_chunk_write(const call *c,
                              jw *w); /* what a chunk says of usage: it, null, nothing */
void serve__stop_reason_write(const call *c, const gen_choice *ch, jw *w);
void serve__envelope_write(const call *c, jw *w); /* opens the object: id object created model … */

extern const api_shape serve__chat_shape, serve__completion_shape;
route_fn serve__chat, serve__completions, serve__models, serve__model, serve__tokenize,
    serve__detokenize, serve__tokenizer_info, serve__health, serve__version, serve__metrics,
    serve__server_info, serve__index;
#endif
