/* JSON lines. Owns one FILE and one line buffer; memory is one line at a time, so a file of any
 * size is read in the space of its longest line. Every complaint begins with path:line, because
 * that is what a person opens in an editor. Refused: a line over JSONL_MAX_LINE_BYTES, bytes that
 * are not UTF-8, anything but an object. A byte order mark and CRLF ends are accepted. */
#include "eval/jsonl.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/file.h"

int jsonl_open(jsonl *j, const char *path, err *e)
{
    *j = (jsonl){.path = path};
    if (file_is_dir(path))
        return err_set(e, ERR_FORMAT, "%s: is a folder; give one .jsonl file, or --tasks DIR",
                       path);
    j->file = fopen(path, "rb");
    return j->file ? 0 : err_errno(e, errno, "%s: cannot open the task file", path);
}

void jsonl_close(jsonl *j)
{
    if (j->file) fclose(j->file);
    free(j->text);
    *j = (jsonl){0};
}

static size_t trim(char **s, ssize_t n, bool first_line)
{
    size_t len = (size_t)n;
    if (first_line && len >= 3 && !memcmp(*s, "\xEF\xBB\xBF", 3)) {
        *s += 3;
        len -= 3;
    }
    while (len && strchr(" \t\r\n", (*s)[len - 1]) && (*s)[len - 1])
        len--;
    while (len && (**s == ' ' || **s == '\t')) {
        (*s)++;
        len--;
    }
    return len;
}

/* getline with a bound: 1 = a line, 0 = end. */
static int read_line(jsonl *j, size_t *n, err *e)
{
    int c;
    size_t len = 0;
    while ((c = getc_unlocked((FILE *)j->file)) != EOF) {
        if (len + 2 > j->cap) {
            j->cap = j->cap ? 2 * j->cap : 4096;
            j->text = xrealloc(j->text, j->cap);
        }
        j->text[len++] = (char)c;
        if (c == '\n') break;
        if (len > JSONL_MAX_LINE_BYTES)
            return err_set(e, ERR_LIMIT, "%s:%lld: line is longer than %u bytes", j->path,
                           (long long)j->line + 1, JSONL_MAX_LINE_BYTES);
    }
    if (ferror((FILE *)j->file)) return err_errno(e, errno, "%s: read failed", j->path);
    if (!len) return 0;
    j->text[len] = 0;
    *n = len;
    return 1;
}

int jsonl_next(jsonl *j, json **out, err *e)
{
    size_t n = 0;
    int got;
    while ((got = read_line(j, &n, e)) == 1) {
        char where[512], *s = j->text;
        j->line++;
        size_t len = trim(&s, (ssize_t)n, j->line == 1);
        if (!len) continue;
        snprintf(where, sizeof where, "%s:%lld", j->path, (long long)j->line);
        int rc = json_parse(out, s, len, where, e);
        if (rc < 0) return rc;
        if (cJSON_IsObject(*out)) return 1;
        json_drop(*out);
        *out = NULL;
        return err_set(e, ERR_FORMAT, "%s: expected a JSON object, found something else", where);
    }
    return got;
}
