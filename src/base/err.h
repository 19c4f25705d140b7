/* Errors are values. A fallible function returns 0 (or a count) on success and a negative ERR_*
 * on failure, and writes one complete sentence into *e: file, tensor or key, what was expected,
 * what was found, what to do. The innermost function that knows the facts calls err_set; callers
 * may prefix context with err_wrap. `e` may be NULL. No library function exits the process. */
#ifndef BASE_ERR_H
#define BASE_ERR_H

enum {
    ERR_OK = 0,
#define ERR(name, http, text) ERR_##name,
#include "base/errors.def"
#undef ERR
    ERR_COUNT
};

typedef struct err {
    int code;       /* ERR_*, positive; 0 = no error */
    char msg[1024]; /* UTF-8, NUL-terminated, never contains raw client bytes that are not UTF-8 */
} err;

#define PRINTF(f, a) __attribute__((format(printf, f, a)))

/* Sets code and message, returns -code. A message already there is replaced. */
int err_set(err *e, int code, const char *fmt, ...) PRINTF(3, 4);
/* Puts "prefix: " before the message that is there, keeps the code; returns -code. */
int err_wrap(err *e, const char *fmt, ...) PRINTF(2, 3);
/* err_set with ": strerror(errnum)" appended; ENOSPC, ENOMEM, ENOENT get their own remedy. */
int err_errno(err *e, int errnum, const char *fmt, ...) PRINTF(3, 4);
const char *err_name(int code); /* "FORMAT" */
const char *err_text(int code); /* "malformed data" */
int err_http(int code);         /* HTTP status */
void err_clear(err *e);

/* Jump to `out:` on failure; needs `int rc` in scope. */
#define TRY(expr)                                                                                  \
    do {                                                                                           \
        if ((rc = (expr)) < 0) goto out;                                                           \
    } while (0)

#endif
