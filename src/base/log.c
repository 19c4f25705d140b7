/* Log lines and progress on stderr: stdout belongs to results. A terminal gets a bar redrawn at
 * most ten times a second, anything else one line every ten seconds; below LOG_INFO nothing is
 * drawn. */
#include "base/log.h"
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/thread.h"

static _Atomic int level_now = LOG_INFO;

void log_set_level(int level)
{
    atomic_store(&level_now, level);
}
int log_level(void)
{
    return atomic_load(&level_now);
}

void log_msg(int level, const char *fmt, ...)
{
    static const char *const names[] = {"error: ", "warning: ", "", "debug: "};
    if (level > log_level()) return;
    char line[4096];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "tare: %s%s\n", names[level], line);
}

static void show(progress *p, uint64_t done, const char *note)
{
    double total = p->total ? (double)p->total : 1, part = (double)done / total;
    double s = clock_seconds() - p->start_s;
    if (p->tty) {
        char bar[31];
        int n = (int)(part * 30 + 0.5);
        for (int i = 0; i < 30; i++)
            bar[i] = i < n ? '#' : '.';
        bar[30] = 0;
        fprintf(stderr, "\r%s [%s] %3.0f %% %.0f s %.40s\033[K", p->what, bar, 100 * part, s,
                note ? note : "");
    } else {
        fprintf(stderr, "tare: %s: %.0f %% after %.0f s%s%s\n", p->what, 100 * part, s,
                note ? ", " : "", note ? note : "");
    }
    p->shown = true;
}

void progress_start(progress *p, const char *what, uint64_t total)
{
    *p =
        (progress){.what = what, .total = total, .start_s = clock_seconds(), .tty = isatty(2) != 0};
    p->last_s = p->start_s;
}

void progress_step(progress *p, uint64_t done, const char *note)
{
    p->done = done;
    if (log_level() < LOG_INFO) return;
    double now = clock_seconds();
    if (now - p->last_s < (p->tty ? 0.1 : 10.0)) return;
    p->last_s = now;
    show(p, done, note);
}

void progress_end(progress *p)
{
    if (!p->shown) return;
    if (p->tty)
        fprintf(stderr, "\r\033[K");
    else
        show(p, p->total, "done");
}
