/* Error values: code and one sentence. Messages are cut at a character border, never in the middle
 * of a UTF-8 sequence, and bytes that are not UTF-8 become '?', because they end up in JSON and
 * terminals. */
#include "base/err.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/utf8.h"

static const struct {
    const char *name, *text;
    int http;
} rows[ERR_COUNT] = {
    {"OK", "no error", 200},
#define ERR(name, http, text) {#name, text, http},
#include "base/errors.def"
#undef ERR
};

/* Makes msg valid UTF-8 in place. Names come from files and arguments: a control character in one
 * must not reach a terminal. */
static void clean(char *msg)
{
    size_t n = strlen(msg), i = 0;
    while ((i += utf8_valid_prefix(msg + i, n - i)) < n)
        msg[i] = '?';
    for (i = 0; i < n; i++)
        if (((unsigned char)msg[i] < 0x20 && msg[i] != '\n' && msg[i] != '\t') || msg[i] == 0x7f)
            msg[i] = '?';
}

int err_set(err *e, int code, const char *fmt, ...)
{
    if (!e) return -code;
    char tmp[sizeof e->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(tmp, sizeof tmp, fmt, ap);
    va_end(ap);
    clean(tmp);
    e->code = code;
    memcpy(e->msg, tmp, sizeof tmp);
    return -code;
}

int err_wrap(err *e, const char *fmt, ...)
{
    if (!e) return -ERR_FAIL;
    char head[sizeof e->msg], tmp[2 * sizeof e->msg + 4];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    snprintf(tmp, sizeof tmp, "%s: %s", head, e->msg);
    tmp[sizeof e->msg - 1] = 0; /* the head names the place: the tail is cut */
    clean(tmp);
    memcpy(e->msg, tmp, sizeof e->msg);
    return -(e->code ? e->code : ERR_FAIL);
}

int err_errno(err *e, int errnum, const char *fmt, ...)
{
    char head[800];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    switch (errnum) {
    case ENOENT:
    case ENOTDIR:
        return err_set(e, ERR_NOTFOUND, "%s: no such file or folder; check the path", head);
    case ENOSPC:
    case EDQUOT:
        return err_set(e, ERR_IO, "%s: no space left on the device; free some or write elsewhere",
                       head);
    case EFBIG:
        return err_set(e, ERR_IO, "%s: file too large (file size limit reached)", head);
    case ENOMEM:
        return err_set(e, ERR_NOMEM, "%s: out of memory", head);
    case EACCES:
    case EPERM:
        return err_set(e, ERR_IO, "%s: permission denied", head);
    case EEXIST:
        return err_set(e, ERR_EXISTS, "%s: exists already", head);
    default:
        return err_set(e, ERR_IO, "%s: %s", head, strerror(errnum));
    }
}

const char *err_name(int code)
{
    return code >= 0 && code < ERR_COUNT ? rows[code].name : "FAIL";
}
const char *err_text(int code)
{
    return code >= 0 && code < ERR_COUNT ? rows[code].text : "operation failed";
}
int err_http(int code)
{
    return code >= 0 && code < ERR_COUNT ? rows[code].http : 500;
}

void err_clear(err *e)
{
    if (e) *e = (err){0};
}
