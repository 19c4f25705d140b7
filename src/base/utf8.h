/* UTF-8 helpers. */
#ifndef BASE_UTF8_H
#define BASE_UTF8_H
#include "base/mem.h"
/* Decodes one code point; returns bytes used (1..4), or 0 if the bytes are not valid UTF-8
 * (overlong, surrogate, > U+10FFFF, truncated). */
int utf8_decode(const char *s, size_t n, uint32_t *cp);
/* Returns bytes written (1..4); what is not a code point is written as U+FFFD. */
int utf8_encode(uint32_t cp, char out[4]);
/* Offset of the first invalid byte, or n when all is valid. */
size_t utf8_valid_prefix(const char *s, size_t n);
/* Length of the longest prefix that ends on a complete code point, given that an incomplete
 * sequence may still be completed later (at most 3 trailing bytes are held back). */
size_t utf8_complete_prefix(const char *s, size_t n);
/* Appends s with each invalid byte replaced by U+FFFD, as Python's errors="replace" does. */
void utf8_add_lossy(buf *b, const char *s, size_t n);
#endif
