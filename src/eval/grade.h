/* Answers out of model text, and whether they are right. Pure functions. */
#ifndef EVAL_GRADE_H
#define EVAL_GRADE_H
#include "base/mem.h"

/* A decimal number as its digits, so that 70000, 70,000 and 70000.0 are equal and nothing is lost
 * to binary fractions: [-]digits[.digits], no leading or trailing zeros; "0" has no sign. */
typedef struct number {
    char text[64];
} number;
/* Finds the first / last number of s. false = none. */
bool grade_first_number(const char *s, size_t n, number *out);
bool grade_last_number(const char *s, size_t n, number *out);
bool grade_number_equal(const number *a, const number *b);

/* The answer part of a text: what follows the first "####" up to the end of its line, else the
 * whole text; white space stripped. *marked tells which. Points into s. */
void grade_answer_part(const char *s, size_t n, const char **part, size_t *len, bool *marked);

typedef struct grade {
    bool correct, unparsed;
    char answer[128]; /* what was parsed, cut to fit */
} grade;
/* Compares a finished answer with the reference (`… #### n` or plain). Numbers compare as numbers:
 * after "####" the first number counts, without the mark the last one. A reference that is no
 * number is compared as text: stripped, one trailing period dropped. */
void grade_generate(const char *text, size_t n, const char *reference, grade *out);

/* Program text out of a model's answer: the first fenced block if there is one, else everything. */
void grade_code_block(const char *text, size_t n, buf *out);
#endif
