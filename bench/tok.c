/* The tokenizer alone, one thread: load time and speed, in processor time, which other work on the
 * machine disturbs less than the clock on the wall.
 *
 *   tok                              a short run over this project's own texts
 *   tok TOKENIZER.json FILE ...      MB/s over each file as one document
 *   tok -                            driven by tok.py, one command a line on standard input:
 *     open PATH     loads tokenizer.json           -> seconds
 *     docs PATH     texts to encode: u32 length, bytes, and so on (little endian)
 *                                                  -> documents bytes
 *     encode        all of them, one after another -> seconds ids
 *     ids PATH      as encode; writes per document a u32 count and the ids -> ids */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/file.h"
#include "text/tokenizer.h"

#define MAX_FILE ((size_t)1 << 30)

typedef struct state {
    tokenizer *t;
    buf docs;
    ids out;
} state;

static double cpu_seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static int open_tokenizer(state *s, const char *path, double *seconds, err *e)
{
    buf text = {0};
    tokenizer_close(s->t);
    s->t = NULL;
    double start = cpu_seconds();
    int rc = file_read_all(&text, path, MAX_FILE, e);
    if (rc >= 0) rc = tokenizer_open(&s->t, text.data, text.len, "", 0, path, e);
    *seconds = cpu_seconds() - start;
    buf_free(&text);
    return rc;
}

/* Next document at *at; false at the end. */
static bool next_doc(const buf *docs, size_t *at, const char **p, uint32_t *n)
{
    if (*at + sizeof *n > docs->len) return false;
    memcpy(n, docs->data + *at, sizeof *n);
    *p = docs->data + *at + sizeof *n;
    *at += sizeof *n + *n;
    return *at <= docs->len;
}

static int encode(state *s, FILE *f, double *seconds, size_t *total, err *e)
{
    const char *p;
    uint32_t n;
    double start = cpu_seconds();
    *total = 0;
    for (size_t at = 0; next_doc(&s->docs, &at, &p, &n);) {
        s->out.n = 0;
        int rc = tokenizer_encode(s->t, p, n, false, &s->out, e);
        if (rc < 0) return rc;
        *total += s->out.n;
        uint32_t count = (uint32_t)s->out.n;
        if (f && (fwrite(&count, sizeof count, 1, f) != 1 ||
                  fwrite(s->out.v, sizeof *s->out.v, s->out.n, f) != s->out.n))
            return err_set(e, ERR_IO, "ids: cannot write");
    }
    *seconds = cpu_seconds() - start;
    return 0;
}

static int write_ids(state *s, const char *path, size_t *total, err *e)
{
    double unused;
    FILE *f = fopen(path, "wb");
    if (!f) return err_set(e, ERR_IO, "%s: cannot write", path);
    int rc = encode(s, f, &unused, total, e);
    if (fclose(f) != 0 && rc >= 0) rc = err_set(e, ERR_IO, "%s: cannot write", path);
    return rc;
}

static int command(state *s, const char *line, err *e)
{
    double seconds = 0;
    size_t total = 0, n = 0;
    int rc = 0;
    if (!strncmp(line, "open ", 5)) {
        if ((rc = open_tokenizer(s, line + 5, &seconds, e)) >= 0) printf("%.9f\n", seconds);
    } else if (!strncmp(line, "docs ", 5)) {
        const char *p;
        uint32_t len;
        buf_clear(&s->docs);
        if ((rc = file_read_all(&s->docs, line + 5, MAX_FILE, e)) < 0) return rc;
        for (size_t at = 0; next_doc(&s->docs, &at, &p, &len); total += len)
            n++;
        printf("%zu %zu\n", n, total);
    } else if (!s->t) {
        return err_set(e, ERR_BADSTATE, "no tokenizer is open");
    } else if (!strcmp(line, "encode")) {
        if ((rc = encode(s, NULL, &seconds, &total, e)) >= 0) printf("%.9f %zu\n", seconds, total);
    } else if (!strncmp(line, "ids ", 4)) {
        if ((rc = write_ids(s, line + 4, &total, e)) >= 0) printf("%zu\n", total);
    } else {
        return err_set(e, ERR_USAGE, "unknown command '%.40s'", line);
    }
    return rc;
}

static int serve(state *s, err *e)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int rc = 0;
    while (rc >= 0 && (n = getline(&line, &cap, stdin)) > 0) {
        line[strcspn(line, "\n")] = 0;
        rc = command(s, line, e);
        fflush(stdout);
    }
    free(line);
    return rc;
}

static int file_speed(state *s, const char *path, err *e)
{
    buf text = {0};
    double seconds = 0, best = 0;
    size_t total = 0;
    int rc = file_read_all(&text, path, MAX_FILE, e);
    uint32_t n = (uint32_t)text.len;
    buf_clear(&s->docs);
    buf_add(&s->docs, &n, sizeof n);
    if (rc >= 0) buf_add(&s->docs, text.data, text.len);
    for (int i = 0; i < 5 && rc >= 0; i++) {
        rc = encode(s, NULL, &seconds, &total, e);
        if (!i || seconds < best) best = seconds;
    }
    if (rc >= 0)
        printf("%s: %zu bytes, %zu ids, %.1f MB/s\n", path, text.len, total,
               (double)text.len / best / 1e6);
    buf_free(&text);
    return rc;
}

int main(int argc, char **argv)
{
    static char *own[] = {"", "models/millet-7m/tokenizer.json", "docs/PITFALLS.md",
                          "src/text/tokenizer.c"};
    state s = {0};
    err e = {0};
    double seconds = 0;
    int rc;
    if (argc == 2 && !strcmp(argv[1], "-")) {
        rc = serve(&s, &e);
    } else {
        int n = argc < 3 ? 4 : argc;
        char **arg = argc < 3 ? own : argv;
        rc = open_tokenizer(&s, arg[1], &seconds, &e);
        if (rc >= 0) printf("%s: loaded in %.3f s\n", arg[1], seconds);
        for (int i = 2; i < n && rc >= 0; i++)
            rc = file_speed(&s, arg[i], &e);
    }
    if (rc < 0) fprintf(stderr, "%s\n", e.msg);
    tokenizer_close(s.t);
    buf_free(&s.docs);
    ids_free(&s.out);
    return rc < 0;
}
