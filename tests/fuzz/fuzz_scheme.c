/* Any text as a scheme: no crash, and what parses has a canonical text that means the same. */
#include <stdlib.h>
#include <string.h>
#include "num/qspec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    err e = {0};
    qspec s, back;
    char *text = xstrndup((const char *)data, size);
    if (qspec_parse(text, &s, &e) < 0) {
        if (!e.msg[0]) abort();
    } else {
        buf b = {0};
        qspec_format(&s, &b);
        if (qspec_parse(b.data, &back, &e) < 0) abort();
        if (!qaxis_equal(&s.w, &back.w) || !qaxis_equal(&s.a, &back.a) ||
            !qaxis_equal(&s.kv, &back.kv))
            abort();
        buf_free(&b);
    }
    free(text);
    return 0;
}
