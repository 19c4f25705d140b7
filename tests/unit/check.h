/* Shared by all cmocka programs: the includes that cmocka wants, and a few typed checks. */
#ifndef TESTS_CHECK_H
#define TESTS_CHECK_H
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <cmocka.h>
#include "base/err.h"

#define CHECK_OK(expr)                                                                             \
    do {                                                                                           \
        int check_rc = (expr);                                                                     \
        if (check_rc < 0) fail_msg("%s: %d: %s", #expr, check_rc, e.msg);                          \
    } while (0)
#define CHECK_ERR(expr, want, text)                                                                \
    do {                                                                                           \
        int check_rc = (expr);                                                                     \
        if (check_rc != -(want))                                                                   \
            fail_msg("%s: got %d, wanted %d (%s)", #expr, check_rc, -(want), e.msg);               \
        if (!strstr(e.msg, text)) fail_msg("%s: message lacks '%s': %s", #expr, text, e.msg);      \
    } while (0)
#endif
