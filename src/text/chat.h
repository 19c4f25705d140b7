/* Chat templates: Jinja2 3.1 as transformers 5 sets it up (immutable sandbox, trim_blocks,
 * lstrip_blocks, loopcontrols, one trailing newline dropped, raise_exception, strftime_now, tojson
 * without HTML escapes, `generation` blocks, which are rendered as their body).
 *
 * Limits of one render, each an error that names it: 20,000,000 steps, 600 nested evaluations (120
 * in the source), 200 nested values, 256 MiB of values, 4 MiB of source, 32 arguments a call,
 * ranges of 100,000 numbers, formats of 100,000 characters, arithmetic of 64 bits (larger integers
 * are passed through exactly). Refused by name: include, import, extends and other tags, the
 * filters urlize and random, the function lipsum, bytes (encode), complex numbers. Errors carry
 * line and reason.
 *
 * An opened template is not changed by rendering: threads may share it. */
#ifndef TEXT_CHAT_H
#define TEXT_CHAT_H
#include "base/json.h"

typedef struct chat_template chat_template;
int chat_template_open(chat_template **out, const char *text, size_t n, const char *where, err *e);
void chat_template_close(chat_template *t);
/* A second text for requests with tools (transformers' template named "tool_use"). */
int chat_template_add_tools(chat_template *t, const char *text, size_t n, const char *where,
                            err *e);
/* The source as it was opened; of the text for requests with tools, NULL when there is none. */
const char *chat_template_text(const chat_template *t);
const char *chat_template_tools_text(const chat_template *t);

/* messages: JSON array as in the OpenAI API (content string, null or text parts; roles;
 * tool_calls). extra: JSON object merged into the context (chat_template_kwargs, tools, bos_token
 * …) or NULL. As in transformers, keys of a message that are null count as missing, and reasoning
 * (reasoning_content, thinking, reasoning) is found under the names that templates read. An error
 * raised by the template is ERR_VALUE with its text. */
int chat_render(const chat_template *t, const json *messages, const json *extra,
                bool add_generation_prompt, const char *bos, const char *eos, buf *out, err *e);
/* continue_final_message: no generation prompt, and the text ends right after the last message's
 * content, whose white space at the end stays when the template keeps it. A last message without
 * text, and a template that does not repeat it, are ERR_VALUE. */
int chat_render_continued(const chat_template *t, const json *messages, const json *extra,
                          const char *bos, const char *eos, buf *out, err *e);
/* Bare rendering for tests: context is the whole variable object. */
int chat_render_raw(const chat_template *t, const json *context, buf *out, err *e);
/* strftime_now counts from this moment, in UTC, instead of the local clock: for tests. */
void chat_template_fix_clock(chat_template *t, int64_t unix_seconds);
#endif
