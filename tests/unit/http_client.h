/* A blocking HTTP client over loopback for tests: one request, the whole reply, five seconds. */
#ifndef TESTS_HTTP_CLIENT_H
#define TESTS_HTTP_CLIENT_H
#include <arpa/inet.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/mem.h"

typedef struct reply {
    int status;
    buf head, body; /* body without chunk framing */
} reply;

static void reply_free(reply *r)
{
    buf_free(&r->head);
    buf_free(&r->body);
}

static int client_open(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval t = {5, 0};
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static void client_send(int fd, const char *data, size_t n)
{
    while (n) {
        ssize_t k = send(fd, data, n, MSG_NOSIGNAL);
        if (k <= 0) return;
        data += k;
        n -= (size_t)k;
    }
}

static void unchunk(const char *p, const char *end, buf *out)
{
    while (p < end) {
        char *q;
        size_t n = strtoul(p, &q, 16);
        if (q == p || q + 2 > end || n > (size_t)(end - q - 2)) return;
        buf_add(out, q + 2, n);
        p = q + 2 + n + 2;
    }
}

/* Until the server closes; asks for "Connection: close" are the caller's business. */
static void client_read(int fd, reply *r)
{
    buf all = {0};
    char tmp[16384];
    ssize_t n;
    while ((n = recv(fd, tmp, sizeof tmp, 0)) > 0)
        buf_add(&all, tmp, (size_t)n);
    buf_putc(&all, 0);
    all.len--;
    char *end = strstr(all.data, "\r\n\r\n");
    if (end) {
        buf_add(&r->head, all.data, (size_t)(end - all.data));
        r->status = (int)strtol(all.data + 9, NULL, 10);
        if (strcasestr(r->head.data, "transfer-encoding: chunked"))
            unchunk(end + 4, all.data + all.len, &r->body);
        else
            buf_add(&r->body, end + 4, all.len - (size_t)(end + 4 - all.data));
    }
    if (!r->body.data) buf_puts(&r->body, "");
    if (!r->head.data) buf_puts(&r->head, "");
    buf_free(&all);
}

static void client_request(int fd, const char *method, const char *path, const char *headers,
                           const char *body, size_t n)
{
    buf b = {0};
    buf_printf(&b, "%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s", method, path,
               headers);
    if (body) buf_printf(&b, "Content-Type: application/json\r\nContent-Length: %zu\r\n", n);
    buf_puts(&b, "\r\n");
    if (body) buf_add(&b, body, n);
    client_send(fd, b.data, b.len);
    buf_free(&b);
}

static reply http(int port, const char *method, const char *path, const char *headers,
                  const char *body)
{
    reply r = {0};
    int fd = client_open(port);
    client_request(fd, method, path, headers, body, body ? strlen(body) : 0);
    client_read(fd, &r);
    close(fd);
    return r;
}
#endif
