/* The HTTP side of one request: what libmicrohttpd calls, and how replies leave.
 *
 * A request passes three stages: headers (route, key, declared length are judged; a fault found
 * here is kept and answered after the body was read and dropped, so that the client can read the
 * reply), body (bounded per request and over all requests), run (the route's function). A
 * generation request then suspends its connection and is run again whenever the engine has
 * something for it.
 *
 * All of this happens on the daemon's one thread; no lock is needed for an exchange. */
#include "serve/serve_int.h"
#include "base/log.h"
#include "base/thread.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#define STREAM_BLOCK_BYTES 32768
#define BODY_TOTAL_FACTOR  4            /* bodies held at once, in units of the largest allowed */
#define DROP_MAX_BYTES     (1ull << 30) /* of a refused body that are still read */

/* ---- replies ------------------------------------------------------------------------------------
 */

static void add_common(exchange *x, struct MHD_Response *resp, int status)
{
    if (x->request_id[0]) MHD_add_response_header(resp, "x-request-id", x->request_id);
    if (status == 429 || status == 503) {
        char text[16];
        snprintf(text, sizeof text, "%d", SERVE_RETRY_AFTER_S);
        MHD_add_response_header(resp, "Retry-After", text);
    } else if (status >= 500) {
        MHD_add_response_header(resp, "x-should-retry", "false");
    }
    if (status == 401) MHD_add_response_header(resp, "WWW-Authenticate", "Bearer");
    if (atomic_load(&x->s->draining)) MHD_add_response_header(resp, "Connection", "close");
    atomic_fetch_add(&x->s->http_counts[status / 100 % 6], 1);
    log_debug("%s %s: %d in %.1f ms", x->request_id, x->route ? x->route->path : "-", status,
              (clock_seconds() - x->start_s) * 1e3);
}

static enum MHD_Result queue(exchange *x, struct MHD_Response *resp, int status)
{
    add_common(x, resp, status);
    enum MHD_Result ok = MHD_queue_response(x->conn, (unsigned)status, resp);
    MHD_destroy_response(resp);
    return ok;
}

enum MHD_Result serve__reply(exchange *x, int status, const char *type, buf *body)
{
    if (!body->data) buf_puts(body, "");
    struct MHD_Response *resp =
        MHD_create_response_from_buffer(body->len, body->data, MHD_RESPMEM_MUST_FREE);
    if (!resp) {
        buf_free(body);
        return MHD_NO;
    }
    *body = (buf){0};
    MHD_add_response_header(resp, "Content-Type", type);
    return queue(x, resp, status);
}

enum MHD_Result serve__reply_json(exchange *x, int status, buf *body)
{
    return serve__reply(x, status, "application/json", body);
}

enum MHD_Result serve__reply_fault(exchange *x, const fault *f)
{
    buf b = {0};
    if (f->status == 429) atomic_fetch_add(&x->s->refused_busy, 1);
    serve__fault_write(f, &b);
    return serve__reply_json(x, f->status, &b);
}

static ssize_t read_stream(void *arg, uint64_t pos, char *to, size_t max)
{
    (void)pos;
    call *c = arg;
    for (;;) {
        if (serve__call_is_gone(c)) return MHD_CONTENT_READER_END_WITH_ERROR;
        serve__call_drain(c);
        size_t have = c->out.len - c->out_pos;
        if (have) {
            size_t n = have < max ? have : max;
            memcpy(to, c->out.data + c->out_pos, n);
            c->out_pos += n;
            if (c->out_pos == c->out.len) {
                buf_clear(&c->out);
                c->out_pos = 0;
            }
            return (ssize_t)n;
        }
        if (c->closed) return MHD_CONTENT_READER_END_OF_STREAM;
        if (serve__call_suspend(c)) return 0;
    }
}

enum MHD_Result serve__reply_stream(exchange *x, call *c)
{
    struct MHD_Response *resp = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, read_stream, c, NULL);
    if (!resp) return MHD_NO;
    MHD_add_response_header(resp, "Content-Type", "text/event-stream");
    MHD_add_response_header(resp, "Cache-Control", "no-cache");
    MHD_add_response_header(resp, "X-Accel-Buffering", "no");
    return queue(x, resp, 200);
}

/* ---- headers ------------------------------------------------------------------------------------
 */

/* The caller's id if it is printable, else one of our own: logs and replies carry the same. */
static void take_request_id(exchange *x)
{
    const char *given = MHD_lookup_connection_value(x->conn, MHD_HEADER_KIND, "X-Request-Id");
    size_t n = given ? strlen(given) : 0;
    bool good = n > 0 && n < sizeof x->request_id;
    for (size_t i = 0; good && i < n; i++)
        good = given[i] > 32 && given[i] < 127;
    if (good) {
        memcpy(x->request_id, given, n + 1);
        return;
    }
    uint8_t r[16];
    if (getrandom(r, sizeof r, 0) != (ssize_t)sizeof r) memset(r, 0, sizeof r);
    memcpy(x->request_id, "req-", 4);
    for (int i = 0; i < 16; i++)
        snprintf(x->request_id + 4 + 2 * i, 3, "%02x", r[i]);
}

/* Compares in time that depends on the length only. */
static bool same_key(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b);
    unsigned diff = na != nb;
    for (size_t i = 0; i < nb; i++)
        diff |= (unsigned)((unsigned char)a[na ? i % na : 0] ^ (unsigned char)b[i]);
    return diff == 0;
}

static bool authorized(const exchange *x)
{
    if (!x->s->key || (x->route && x->route->open)) return true;
    const char *h = MHD_lookup_connection_value(x->conn, MHD_HEADER_KIND, "Authorization");
    return h && !strncasecmp(h, "Bearer ", 7) && same_key(h + 7, x->s->key);
}

static void judge_headers(exchange *x, const char *url, const char *method)
{
    const char *rest, *allowed;
    x->route = serve__route_find(method, url, &rest, &allowed);
    if (x->route && x->route->prefix) x->rest = xstrdup(rest);
    if (!authorized(x)) {
        serve__fault_set(
            &x->early, 401, "",
            "This server wants an API key: send the header 'Authorization: Bearer KEY' "
            "with the key it was started with.");
        x->early.code = "invalid_api_key";
    } else if (!x->route && allowed) {
        serve__fault_set(&x->early, 405, "", "This path takes %s, not %.16s.", allowed, method);
    } else if (!x->route) {
        serve__fault_set(&x->early, 404, "",
                         "There is no such path here; GET / lists those there are.");
    } else if (x->route->generates && atomic_load(&x->s->draining)) {
        serve__fault_set(&x->early, 503, "",
                         "The server is shutting down and takes no new requests.");
    }
}

/* 0 = none declared (or chunked). */
static unsigned long long declared_length(exchange *x)
{
    const char *h = MHD_lookup_connection_value(x->conn, MHD_HEADER_KIND, "Content-Length");
    return h ? strtoull(h, NULL, 10) : 0;
}

static void too_large(exchange *x)
{
    serve__fault_set(&x->early, 413, "",
                     "The request body is larger than %lld bytes, the limit here.",
                     (long long)x->s->o.max_body_bytes);
}

static exchange *exchange_make(struct server *s, struct MHD_Connection *conn, const char *url,
                               const char *method)
{
    exchange *x = xcalloc(1, sizeof *x);
    x->s = s;
    x->conn = conn;
    x->start_s = clock_seconds();
    take_request_id(x);
    judge_headers(x, url, method);
    if (!x->early.status && declared_length(x) > (unsigned long long)s->o.max_body_bytes)
        too_large(x);
    return x;
}

/* ---- body ---------------------------------------------------------------------------------------
 */

void serve__body_release(exchange *x)
{
    x->s->body_bytes -= x->body.len;
    buf_free(&x->body);
}

static enum MHD_Result body_take(exchange *x, const char *data, size_t n)
{
    size_t limit = (size_t)x->s->o.max_body_bytes;
    if (!x->early.status && n > limit - x->body.len) too_large(x);
    if (!x->early.status && x->s->body_bytes + n > limit * BODY_TOTAL_FACTOR)
        serve__fault_set(&x->early, 503, "", "Too many large requests are being read at once.");
    if (!x->early.status) {
        buf_add(&x->body, data, n);
        x->s->body_bytes += n;
        return MHD_YES;
    }
    if (x->body.len) serve__body_release(x);
    x->dropped += n;
    return x->dropped > DROP_MAX_BYTES ? MHD_NO : MHD_YES;
}

/* A client that waits for "100 Continue", or announces more than we would read, is told at once. */
static bool answer_before_body(exchange *x)
{
    if (!x->early.status) return false;
    return MHD_lookup_connection_value(x->conn, MHD_HEADER_KIND, "Expect") ||
           declared_length(x) > DROP_MAX_BYTES;
}

/* ---- what the daemon calls ----------------------------------------------------------------------
 */

static enum MHD_Result on_request(void *arg, struct MHD_Connection *conn, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *n_data, void **state)
{
    (void)version;
    struct server *s = arg;
    exchange *x = *state;
    if (!x) {
        *state = x = exchange_make(s, conn, url, method);
        return answer_before_body(x) ? serve__reply_fault(x, &x->early) : MHD_YES;
    }
    if (*n_data) {
        enum MHD_Result ok = body_take(x, data, *n_data);
        *n_data = 0;
        return ok;
    }
    if (x->early.status) return serve__reply_fault(x, &x->early);
    return x->route->run(x);
}

static void on_completed(void *arg, struct MHD_Connection *conn, void **state,
                         enum MHD_RequestTerminationCode how)
{
    (void)arg, (void)conn, (void)how;
    exchange *x = *state;
    if (!x) return;
    if (x->call) serve__call_detach(x->call);
    serve__body_release(x);
    free(x->rest);
    free(x);
    *state = NULL;
}

static void on_log(void *arg, const char *fmt, va_list ap) __attribute__((format(printf, 2, 0)));
static void on_log(void *arg, const char *fmt, va_list ap)
{
    (void)arg;
    char line[512];
    vsnprintf(line, sizeof line, fmt, ap);
    line[strcspn(line, "\n")] = 0;
    log_debug("http: %s", line);
}

int serve__http_open(struct server *s, bool v6, err *e)
{
    /* poll and not epoll: libmicrohttpd's epoll is edge-triggered and misses a hang-up that arrives
     * together with the last bytes, which leaves the socket open until its timeout. */
    unsigned flags = MHD_USE_POLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG |
                     (v6 ? MHD_USE_IPv6 : 0);
    s->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, s, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL,
        MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL,
        MHD_OPTION_CONNECTION_LIMIT, 1000u, MHD_OPTION_CONNECTION_TIMEOUT, 120u,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)131072, MHD_OPTION_END);
    if (!s->daemon) return err_set(e, ERR_FAIL, "the HTTP daemon could not start");
    return 0;
}
