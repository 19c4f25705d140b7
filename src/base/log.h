/* Log and progress, always on stderr; results belong on stdout. */
#ifndef BASE_LOG_H
#define BASE_LOG_H
#include <stdint.h>
#include <stdbool.h>
#include "base/err.h"
enum { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };
void log_set_level(int level);
int log_level(void);
void log_msg(int level, const char *fmt, ...) PRINTF(2, 3);
#define log_error(...) log_msg(LOG_ERROR, __VA_ARGS__)
#define log_warn(...)  log_msg(LOG_WARN, __VA_ARGS__)
#define log_info(...)  log_msg(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_msg(LOG_DEBUG, __VA_ARGS__)

/* A bar on a terminal; elsewhere one line every 10 s. Silent under --quiet (level < INFO). */
typedef struct progress {
    const char *what;
    uint64_t total, done;
    double start_s, last_s;
    bool tty, shown;
} progress;
void progress_start(progress *p, const char *what, uint64_t total);
void progress_step(progress *p, uint64_t done, const char *note); /* note may be NULL */
void progress_end(progress *p);
#endif
