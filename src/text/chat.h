/* Chat templates: a Jinja subset, set up as transformers does it (trim_blocks, lstrip_blocks, one
 * trailing newline dropped, raise_exception, tojson, strftime_now). Rendering is bounded in steps,
 * depth and output; errors carry line and reason. */
#ifndef TEXT_CHAT_H
#define TEXT_CHAT_H
#include "base/json.h"

typedef struct chat_template chat_template;
int chat_template_open(chat_template **out, const char *text, size_t n, const char *where, err *e);
void chat_template_close(chat_template *t);
/* messages: JSON array as in the OpenAI API (content string, null or text parts; roles;
 * tool_calls). extra: JSON object merged into the context (chat_template_kwargs, tools, bos_token
 * …) or NULL. An error raised by the template is ERR_VALUE with its text. */
int chat_render(const chat_template *t, const json *messages, const json *extra,
                bool add_generation_prompt, const char *bos, const char *eos, buf *out, err *e);
/* Bare rendering for tests: context is the whole variable object. */
int chat_render_raw(const chat_template *t, const json *context, buf *out, err *e);
/* strftime_now counts from this moment, in UTC, instead of the local clock: for tests. */
void chat_template_fix_clock(chat_template *t, int64_t unix_seconds);
#endif
