/* Any bytes as a GGUF: refused with a message, or opened and read whole: rows, tokenizer, template.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/log.h"
#include "ckpt/ckpt.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(ckpt *c)
{
    err e = {0};
    buf b = {0};
    for (size_t i = 0; i < ckpt_n_tensors(c) && i < 16; i++) {
        const ckpt_tensor *t = ckpt_tensor_at(c, i);
        int64_t rows = t->n_dims == 2 ? t->shape[0] : 1, cols = t->shape[t->n_dims - 1];
        if (t->n_dims > 2 || cols > 1 << 16) continue;
        float *out = xmalloc((size_t)cols * sizeof *out);
        if (ckpt_load_rows(c, t, rows - 1, rows, out, &e) < 0 && !e.msg[0]) abort();
        free(out);
    }
    if (ckpt_tokenizer_json(c, &b, &e) >= 0) {
        json *j;
        if (json_parse(&j, b.data, b.len, "made", &e) < 0) abort();
        json_drop(j);
    }
    buf_clear(&b);
    if (ckpt_tokenizer_config(c, &b, &e) < 0 && !e.msg[0]) abort();
    if (ckpt_chat_template(c, &b, &e) < 0 && !e.msg[0]) abort();
    buf_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    err e = {0};
    ckpt *c;
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
        /* The name must end in .gguf for ckpt_open. */
        char from[64];
        snprintf(from, sizeof from, "/proc/%d/fd/%d", (int)getpid(), fd);
        snprintf(path, sizeof path, "/tmp/tare-fuzz-%d.gguf", (int)getpid());
        unlink(path);
        if (symlink(from, path) < 0) abort();
        log_set_level(LOG_ERROR);
    }
    if (ftruncate(fd, 0) < 0 || pwrite(fd, data, size, 0) != (ssize_t)size) abort();
    if (ckpt_open(&c, path, &e) < 0) {
        if (!e.msg[0] || c) abort();
        return 0;
    }
    use(c);
    ckpt_close(c);
    return 0;
}
