/* JSON lines, one object a line, read one line at a time. */
#ifndef EVAL_JSONL_H
#define EVAL_JSONL_H
#include "base/json.h"

#define JSONL_MAX_LINE_BYTES (64u << 20)

typedef struct jsonl {
    void *file;       /* FILE */
    const char *path; /* borrowed */
    int64_t line;     /* of the object that jsonl_next gave last, from 1 */
    char *text;
    size_t cap;
} jsonl;
int jsonl_open(jsonl *j, const char *path, err *e);
/* 1 = *out holds an object (json_drop it), 0 = end of file. Blank lines are skipped; what is not a
 * JSON object is ERR_FORMAT that begins with path:line. */
int jsonl_next(jsonl *j, json **out, err *e);
void jsonl_close(jsonl *j);
#endif
