/* Rules that name modules, in the notations of the dialects.
 *
 * A regular expression is matched as Python's re.match does: anchored at the start of the module
 * name only, so "re:.*mlp" also takes "model.layers.0.mlp.gate_proj" and "re:lm" takes "lm_head".
 * An exact name never takes the children of a module; a component rule does, and a substring rule
 * takes whatever holds its text. A glob covers the whole name, dots included, as Python's fnmatch.
 * Class names are "Linear" and its relatives: the checkpoint does not say classes, so such a rule
 * takes every module that is asked about. An expression that needs more than a bounded number of
 * steps counts as not matching. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include "quant/quant_int.h"

#define STEP_LIMIT 1000000

struct quant_rule {
    quant_rule_kind kind;
    char *text;
    bool any; /* class rule that takes linear modules */
    pcre2_code *re;
    pcre2_match_context *limits;
};

/* "Linear", "ColumnParallelLinear": a bare CamelCase word that ends in Linear. */
static bool class_name(const char *s, bool *linear)
{
    size_t n = strlen(s);
    if (!n || strpbrk(s, "._") || s[0] < 'A' || s[0] > 'Z') return false;
    *linear = n >= 6 && !strcmp(s + n - 6, "Linear");
    return true;
}

static int compile(quant_rule *r, const char *pattern, err *e)
{
    int code;
    PCRE2_SIZE at;
    r->re = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED | PCRE2_UTF,
                          &code, &at, NULL);
    if (!r->re) {
        PCRE2_UCHAR msg[128];
        pcre2_get_error_message(code, msg, sizeof msg);
        return err_set(e, ERR_USAGE, "rule 're:%s': %s at byte %zu of the expression", r->text,
                       (const char *)msg, (size_t)at);
    }
    r->limits = pcre2_match_context_create(NULL);
    if (!r->limits) return err_set(e, ERR_NOMEM, "rule '%s': out of memory", r->text);
    pcre2_set_match_limit(r->limits, STEP_LIMIT);
    return 0;
}

int quant_rule_make_as(quant_rule **out, quant_rule_kind kind, const char *text, err *e)
{
    if (!*text) return err_set(e, ERR_USAGE, "a rule with empty text; give a name or a pattern");
    quant_rule *r = xcalloc(1, sizeof *r);
    r->text = xstrdup(text);
    r->kind = kind;
    if (kind == QUANT_RULE_CLASS) class_name(text, &r->any);
    int rc = kind == QUANT_RULE_REGEX ? compile(r, text, e) : 0;
    if (rc < 0)
        quant_rule_drop(r);
    else
        *out = r;
    return rc;
}

int quant_rule_make(quant_rule **out, const char *text, err *e)
{
    bool linear;
    if (!strncmp(text, "re:", 3)) return quant_rule_make_as(out, QUANT_RULE_REGEX, text + 3, e);
    return quant_rule_make_as(out, class_name(text, &linear) ? QUANT_RULE_CLASS : QUANT_RULE_NAME,
                              text, e);
}

quant_rule_kind quant_rule_kind_of(const quant_rule *r)
{
    return r->kind;
}

/* Whether c is in the set that opens at p[0] = '['; *end goes behind its ']'. A set that is never
 * closed is no set: false with *end NULL. */
static bool in_set(const char *p, char c, const char **end)
{
    bool not = p[1] == '!', hit = false;
    const char *s = p + 1 + not, *close = *s ? strchr(s + 1, ']') : NULL;
    *end = close ? close + 1 : NULL;
    for (; close && s < close; s++) {
        if (s[1] == '-' && s + 2 < close) {
            hit |= c >= s[0] && c <= s[2];
            s += 2;
        } else {
            hit |= c == *s;
        }
    }
    return close && hit != not ;
}

/* One pattern element against one character; NULL = no match. */
static const char *glob_one(const char *p, char c)
{
    const char *end;
    if (*p == '?') return p + 1;
    if (*p == '[') {
        bool hit = in_set(p, c, &end);
        if (end) return hit ? end : NULL;
    }
    return *p == c ? p + 1 : NULL;
}

/* The last star takes one more character whenever the rest does not fit: linear in practice, at
 * worst pattern times name. */
static bool glob(const char *p, const char *s)
{
    const char *star = NULL, *back = NULL, *next;
    while (*s) {
        if (*p == '*') {
            star = ++p;
            back = s;
        } else if (*p && (next = glob_one(p, *s)) != NULL) {
            p = next;
            s++;
        } else if (star) {
            p = star;
            s = ++back;
        } else {
            return false;
        }
    }
    while (*p == '*')
        p++;
    return !*p;
}

static bool component(const char *text, const char *name)
{
    size_t n = strlen(text);
    for (const char *p = name; (p = strstr(p, text)) != NULL; p++)
        if ((p == name || p[-1] == '.') && (!p[n] || p[n] == '.')) return true;
    return false;
}

static bool regex(const quant_rule *r, const char *module)
{
    pcre2_match_data *m = pcre2_match_data_create(1, NULL);
    if (!m) return false;
    int n = pcre2_match(r->re, (PCRE2_SPTR)module, PCRE2_ZERO_TERMINATED, 0, 0, m, r->limits);
    pcre2_match_data_free(m);
    return n >= 0;
}

bool quant_rule_match(const quant_rule *r, const char *module)
{
    switch (r->kind) {
    case QUANT_RULE_NAME:
        return !strcmp(r->text, module);
    case QUANT_RULE_REGEX:
        return regex(r, module);
    case QUANT_RULE_GLOB:
        return glob(r->text, module);
    case QUANT_RULE_COMPONENT:
        return component(r->text, module);
    case QUANT_RULE_SUBSTRING:
        return strstr(module, r->text) != NULL;
    case QUANT_RULE_CLASS:
        break;
    }
    return r->any;
}

void quant_rule_drop(quant_rule *r)
{
    if (!r) return;
    if (r->re) pcre2_code_free(r->re);
    if (r->limits) pcre2_match_context_free(r->limits);
    free(r->text);
    free(r);
}
