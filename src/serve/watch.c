/* A suspended connection is not read, so libmicrohttpd cannot see that its client left. This thread
 * sleeps on an epoll set of those sockets and waits for hang-ups only (EPOLLRDHUP: closed or
 * half-closed). Sets name a call by serial, never by pointer: a serial that is no longer in the
 * server's list is ignored, so the socket may close at any time. One-shot: one notice per call. */
#include "serve/serve_int.h"
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void client_left(struct server *s, uint64_t serial)
{
    pthread_mutex_lock(&s->lock);
    call *c = s->calls;
    while (c && c->serial != serial)
        c = c->next;
    if (c) {
        pthread_mutex_lock(&c->lock);
        c->refs++;
        pthread_mutex_unlock(&c->lock);
    }
    pthread_mutex_unlock(&s->lock);
    if (!c) return;
    serve__call_abandon(c, false);
    serve__call_unref(c);
}

static void *watch_run(void *arg)
{
    struct server *s = arg;
    struct epoll_event ev[32];
    for (;;) {
        int n = epoll_wait(s->watch_fd, ev, 32, -1);
        if (n < 0 && errno != EINTR) return NULL;
        for (int i = 0; i < n; i++) {
            if (ev[i].data.u64 == 0) return NULL;
            client_left(s, ev[i].data.u64);
        }
    }
}

int serve__watch_open(struct server *s, err *e)
{
    s->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->watch_fd < 0 || s->wake_fd < 0) return err_errno(e, errno, "epoll");
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = 0};
    if (epoll_ctl(s->watch_fd, EPOLL_CTL_ADD, s->wake_fd, &ev) < 0)
        return err_errno(e, errno, "epoll_ctl");
    int rc = pthread_create(&s->watcher, NULL, watch_run, s);
    if (rc) return err_errno(e, rc, "pthread_create");
    s->watching = true;
    return 0;
}

void serve__watch_close(struct server *s)
{
    if (s->watching) {
        uint64_t one = 1;
        if (write(s->wake_fd, &one, sizeof one) == (ssize_t)sizeof one)
            pthread_join(s->watcher, NULL);
    }
    if (s->watch_fd >= 0) close(s->watch_fd);
    if (s->wake_fd >= 0) close(s->wake_fd);
    s->watching = false;
    s->watch_fd = s->wake_fd = -1;
}

void serve__watch_add(struct server *s, call *c)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c->conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    c->fd = info ? info->connect_fd : -1;
    if (c->fd < 0) return;
    struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = c->serial};
    if (epoll_ctl(s->watch_fd, EPOLL_CTL_ADD, c->fd, &ev) < 0) c->fd = -1;
}

void serve__watch_remove(struct server *s, call *c)
{
    if (c->fd >= 0) epoll_ctl(s->watch_fd, EPOLL_CTL_DEL, c->fd, NULL);
    c->fd = -1;
}
