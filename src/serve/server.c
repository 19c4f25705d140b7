/* The server's life: socket, threads, drain, signals.
 *
 * The socket is bound here and not by libmicrohttpd, so that a port in use is named. Closing goes
 * in an order that leaves nobody waiting: stop new work, mark every call stopped (which resumes its
 * connection: the daemon must not be stopped while one is suspended), stop the daemon, then the
 * watch thread. Calls that the engine still holds are freed by their last event.
 *
 * Signals arrive by a pipe: the handler writes one byte, whichever thread it interrupts. */
#include "serve/serve_int.h"
#include "base/log.h"
#include "base/thread.h"
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- socket -------------------------------------------------------------------------------------
 */

static int bind_one(const struct addrinfo *ai)
{
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -errno;
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, ai->ai_addr, ai->ai_addrlen) == 0 && listen(fd, 256) == 0) return fd;
    int why = errno;
    close(fd);
    return -why;
}

static int bound_port(int fd)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    char port[16];
    if (getsockname(fd, (struct sockaddr *)&a, &n) < 0 ||
        getnameinfo((struct sockaddr *)&a, n, NULL, 0, port, sizeof port, NI_NUMERICSERV))
        return 0;
    return (int)strtol(port, NULL, 10);
}

static int open_socket(struct server *s, bool *v6, err *e)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    char port[16];
    snprintf(port, sizeof port, "%d", s->o.port);
    int rc = getaddrinfo(s->o.host, port, &hints, &list);
    if (rc)
        return err_set(e, ERR_IO,
                       "--host %s: %s; give an address of this machine, such as 127.0.0.1",
                       s->o.host, gai_strerror(rc));
    int fd = -EADDRNOTAVAIL;
    for (const struct addrinfo *ai = list; ai && fd < 0; ai = ai->ai_next) {
        fd = bind_one(ai);
        *v6 = ai->ai_family == AF_INET6;
    }
    freeaddrinfo(list);
    if (fd == -EADDRINUSE)
        return err_set(
            e, ERR_IO,
            "port %d on %s is taken by another program; choose one with --port, or 0 for "
            "any that is free",
            s->o.port, s->o.host);
    if (fd < 0) return err_errno(e, -fd, "cannot listen on port %d of %s", s->o.port, s->o.host);
    s->listen_fd = fd;
    s->port = bound_port(fd);
    return 0;
}

/* ---- open and close -----------------------------------------------------------------------------
 */

static void take_options(struct server *s, engine *en, const serve_opts *o)
{
    engine_info info;
    engine_get_info(en, &info);
    s->o = *o;
    if (!s->o.host || !*s->o.host) s->o.host = "127.0.0.1";
    if (s->o.max_body_bytes <= 0) s->o.max_body_bytes = 64ll << 20;
    snprintf(s->model_path, sizeof s->model_path, "%s", info.model);
    s->n_names = o->n_names > 0 ? o->n_names : 1;
    s->names = xcalloc((size_t)s->n_names, sizeof *s->names);
    for (int i = 0; i < s->n_names; i++)
        s->names[i] = xstrdup(o->n_names > 0 ? o->names[i] : info.model);
    s->key = o->api_key && *o->api_key ? xstrdup(o->api_key) : NULL;
    char text[512];
    int n = snprintf(text, sizeof text, "%s|%s|%s|%s", info.architecture, info.spec,
                     info.activation, info.kv_dtype);
    if (n < 0) n = 0;
    if (n > (int)sizeof text - 1) n = (int)sizeof text - 1;
    snprintf(s->fingerprint, sizeof s->fingerprint, "tare-%s-%08x", SERVE_VERSION,
             (unsigned)XXH32(text, (size_t)n, 0));
}

static void measure_tokens(struct server *s)
{
    const tokenizer *t = engine_tokenizer(s->en);
    buf b = {0};
    s->max_token_bytes = 1;
    for (int64_t i = 0; t && i < tokenizer_size(t); i++) {
        buf_clear(&b);
        tokenizer_token_bytes(t, (int32_t)i, &b);
        if (b.len > s->max_token_bytes) s->max_token_bytes = b.len;
    }
    buf_free(&b);
}

int serve_open(server **out, engine *en, const serve_opts *o, err *e)
{
    int rc = 0;
    bool v6 = false;
    server *s = xcalloc(1, sizeof *s);
    s->en = en;
    s->listen_fd = s->watch_fd = s->wake_fd = -1;
    s->next_serial = 1;
    s->created = (int64_t)time(NULL);
    s->max_len = engine_max_len(en);
    s->vocab = engine_vocab(en);
    pthread_mutex_init(&s->lock, NULL);
    take_options(s, en, o);
    measure_tokens(s);
    TRY(open_socket(s, &v6, e));
    TRY(serve__watch_open(s, e));
    TRY(serve__http_open(s, v6, e));
    *out = s;
    return 0;
out:
    serve_close(s);
    return rc;
}

int serve_port(const server *s)
{
    return s->port;
}

void serve_drain(server *s)
{
    atomic_store(&s->draining, true);
}

int64_t serve_running(server *s)
{
    pthread_mutex_lock(&s->lock);
    int64_t n = s->n_calls;
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* Every call is told once; those that begin later see s->stopping and refuse. */
static void stop_calls(server *s)
{
    atomic_store(&s->stopping, true);
    for (uint64_t below = UINT64_MAX;;) {
        call *c = NULL;
        pthread_mutex_lock(&s->lock);
        for (call *i = s->calls; i; i = i->next)
            if (i->serial < below && (!c || i->serial > c->serial)) c = i;
        if (c) {
            pthread_mutex_lock(&c->lock);
            c->refs++;
            pthread_mutex_unlock(&c->lock);
            below = c->serial;
        }
        pthread_mutex_unlock(&s->lock);
        if (!c) return;
        serve__call_abandon(c, true);
        serve__call_unref(c);
    }
}

void serve_close(server *s)
{
    if (!s) return;
    atomic_store(&s->draining, true);
    if (s->daemon) {
        stop_calls(s);
        for (int i = 0; i < 100 && serve_running(s) > 0; i++) {
            struct timespec t = {0, 10 * 1000 * 1000};
            nanosleep(&t, NULL);
        }
        MHD_stop_daemon(s->daemon); /* closes the listening socket */
    } else if (s->listen_fd >= 0) {
        close(s->listen_fd);
    }
    serve__watch_close(s);
    for (int i = 0; i < s->n_names; i++)
        free(s->names[i]);
    free(s->names);
    free(s->key);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* ---- run until a signal -------------------------------------------------------------------------
 */

static int signal_pipe[2] = {-1, -1};

static void on_signal(int sig)
{
    int saved = errno;
    char c = (char)sig;
    if (write(signal_pipe[1], &c, 1) < 0) errno = saved;
    errno = saved;
}

static int signals_open(struct sigaction old[3], err *e)
{
    if (pipe2(signal_pipe, O_CLOEXEC | O_NONBLOCK) < 0) return err_errno(e, errno, "pipe");
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    struct sigaction ign = {.sa_handler = SIG_IGN};
    sigemptyset(&a.sa_mask);
    sigemptyset(&ign.sa_mask);
    sigaction(SIGTERM, &a, &old[0]);
    sigaction(SIGINT, &a, &old[1]);
    sigaction(SIGPIPE, &ign, &old[2]);
    return 0;
}

static void signals_close(const struct sigaction old[3])
{
    sigaction(SIGTERM, &old[0], NULL);
    sigaction(SIGINT, &old[1], NULL);
    sigaction(SIGPIPE, &old[2], NULL);
    close(signal_pipe[0]);
    close(signal_pipe[1]);
    signal_pipe[0] = signal_pipe[1] = -1;
}

/* True when a signal came within ms (-1 = wait for one). */
static bool signal_wait(int ms)
{
    struct pollfd p = {.fd = signal_pipe[0], .events = POLLIN};
    char c;
    int n = poll(&p, 1, ms);
    return n > 0 && read(signal_pipe[0], &c, 1) == 1;
}

static void drain_and_wait(server *s)
{
    double limit = s->o.drain_seconds > 0 ? s->o.drain_seconds : 0;
    double end = clock_seconds() + limit;
    serve_drain(s);
    log_info("shutting down: %lld running requests may finish within %.0f s",
             (long long)serve_running(s), limit);
    while (serve_running(s) > 0 && clock_seconds() < end)
        if (signal_wait(20)) {
            log_info("second signal: stopping at once");
            return;
        }
}

static void say_json(const server *s, bool v6)
{
    char url[320];
    buf b = {0};
    jw w;
    snprintf(url, sizeof url, "http://%s%s%s:%d", v6 ? "[" : "", s->o.host, v6 ? "]" : "", s->port);
    jw_init(&w, &b, 0);
    jw_obj(&w);
    jw_kstr(&w, "url", url);
    jw_ki64(&w, "port", s->port);
    jw_ki64(&w, "pid", getpid());
    jw_end_obj(&w);
    buf_putc(&b, '\n');
    fwrite(b.data, 1, b.len, stdout);
    fflush(stdout);
    buf_free(&b);
}

int serve_run(engine *en, const serve_opts *o, err *e)
{
    server *s = NULL;
    struct sigaction old[3];
    int rc = signals_open(old, e);
    if (rc < 0) return rc;
    TRY(serve_open(&s, en, o, e));
    bool v6 = strchr(s->o.host, ':') != NULL;
    fprintf(stderr, "listening on http://%s%s%s:%d\n", v6 ? "[" : "", s->o.host, v6 ? "]" : "",
            s->port);
    fflush(stderr);
    if (s->o.json) say_json(s, v6);
    while (!signal_wait(-1)) {
    }
    drain_and_wait(s);
    rc = 0;
out:
    serve_close(s);
    signals_close(old);
    return rc;
}
