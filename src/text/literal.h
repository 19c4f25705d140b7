/* Chat prompts in which special tokens that stand in the messages' text are plain text, while those
 * that the template writes keep their meaning. */
#ifndef TEXT_LITERAL_H
#define TEXT_LITERAL_H
#include "text/chat.h"
#include "text/tokenizer.h"

/* What a request or an option says about control tokens in text: true for "literal", false for
 * "honour"; anything else is ERR_USAGE. */
int literal_parse(const char *text, bool *literal, err *e);
/* Ids of the rendered messages (chat_render, or chat_render_continued), nothing added.
 * ERR_UNSUPPORTED where it cannot be told who wrote a token: special tokens that are sought in
 * normalized text, and templates that make other special tokens of other words. ERR_VALUE for text
 * that holds U+FDD0 or U+FDD1. */
int literal_chat_ids(const chat_template *c, const tokenizer *t, const json *messages,
                     const json *extra, bool add_generation_prompt, bool continued, ids *out,
                     err *e);
#endif
