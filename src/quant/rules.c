/* Rules that name modules: an exact name, "re:" and a regular expression, or a class name.
 *
 * The expression is matched as Python's re.match does: anchored at the start of the module name
 * only, so "re:.*mlp" also takes "model.layers.0.mlp.gate_proj" and "re:lm" takes "lm_head". An
 * exact name never takes the children of a module. Class names are "Linear" and its relatives: the
 * checkpoint does not say classes, so such a rule takes every module that is asked about. An
 * expression that needs more than a bounded number of steps counts as not matching. */
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
        return err_set(e, ERR_USAGE, "rule '%s': %s at byte %zu of the expression", r->text,
                       (const char *)msg, (size_t)at);
    }
    r->limits = pcre2_match_context_create(NULL);
    if (!r->limits) return err_set(e, ERR_NOMEM, "rule '%s': out of memory", r->text);
    pcre2_set_match_limit(r->limits, STEP_LIMIT);
    return 0;
}

int quant_rule_make(quant_rule **out, const char *text, err *e)
{
    quant_rule *r = xcalloc(1, sizeof *r);
    int rc = 0;
    r->text = xstrdup(text);
    if (!strncmp(text, "re:", 3)) {
        r->kind = QUANT_RULE_REGEX;
        rc = compile(r, text + 3, e);
    } else if (class_name(text, &r->any)) {
        r->kind = QUANT_RULE_CLASS;
    } else if (!*text) {
        rc = err_set(e, ERR_USAGE, "ignore rule: empty text; give a module name or re:EXPRESSION");
    }
    if (rc < 0) {
        quant_rule_drop(r);
        return rc;
    }
    *out = r;
    return 0;
}

quant_rule_kind quant_rule_kind_of(const quant_rule *r)
{
    return r->kind;
}

bool quant_rule_match(const quant_rule *r, const char *module)
{
    if (r->kind == QUANT_RULE_CLASS) return r->any;
    if (r->kind == QUANT_RULE_NAME) return !strcmp(r->text, module);
    pcre2_match_data *m = pcre2_match_data_create(1, NULL);
    if (!m) return false;
    int n = pcre2_match(r->re, (PCRE2_SPTR)module, PCRE2_ZERO_TERMINATED, 0, 0, m, r->limits);
    pcre2_match_data_free(m);
    return n >= 0;
}

void quant_rule_drop(quant_rule *r)
{
    if (!r) return;
    if (r->re) pcre2_code_free(r->re);
    if (r->limits) pcre2_match_context_free(r->limits);
    free(r->text);
    free(r);
}
