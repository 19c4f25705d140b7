/* Runs a Python program that a model wrote: a child process with limits, no network, no children.
 */
#ifndef EVAL_SANDBOX_H
#define EVAL_SANDBOX_H
#include "base/mem.h"

typedef struct sandbox sandbox;
typedef struct sandbox_result {
    bool passed, timed_out;
    char detail[160]; /* "passed", "time limit", last line of the error */
} sandbox_result;
/* Finds python3 and probes what the kernel enforces. ERR_NOTCOMPARABLE when there is no python3. */
int sandbox_open(sandbox **out, double seconds, err *e);
void sandbox_close(sandbox *s);
/* passed = the program ran to its last line. data (or NULL) lies beside it as tests.json. */
int sandbox_run(sandbox *s, const char *program, size_t n, const char *data, sandbox_result *r,
                err *e);
const char *sandbox_limits(const sandbox *s); /* one line: what is enforced */
bool sandbox_offline(const sandbox *s);       /* the probe could open no connection */
#endif
