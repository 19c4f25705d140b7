/* The vocabulary of a tokenizer: strings and their ids, both ways.
 *
 * Strings lie one behind the other in one blob (NUL after each); off[id] and len[id] find them. The
 * way back is open addressing with linear probing over 64-bit slots: the upper half of the hash,
 * then id + 1. The table is kept at most half full. Ids above TOK_MAX_ID, negative ids and an id
 * given to two different strings are refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "text/tok_internal.h"

uint64_t tok__hash(const void *p, size_t n)
{
    return XXH3_64bits(p, n);
}

static void rehash(tok_vocab *v, size_t slots)
{
    free(v->slot);
    v->slot = xcalloc(slots, sizeof *v->slot);
    v->mask = slots - 1;
    for (size_t id = 0; id < v->n; id++) {
        if (v->off[id] == UINT32_MAX) continue;
        uint64_t h = tok__hash(v->blob.data + v->off[id], v->len[id]);
        size_t i = (size_t)h & v->mask;
        while (v->slot[i])
            i = (i + 1) & v->mask;
        v->slot[i] = (h >> 32 << 32) | (id + 1);
    }
}

void tok__vocab_reserve(tok_vocab *v, size_t strings)
{
    size_t slots = 64;
    while (slots < strings * 2)
        slots *= 2;
    if (!v->slot || slots > v->mask + 1) rehash(v, slots);
}

static uint64_t *find_slot(const tok_vocab *v, const char *s, size_t n, uint64_t h)
{
    size_t i = (size_t)h & v->mask;
    for (; v->slot[i]; i = (i + 1) & v->mask) {
        if (v->slot[i] >> 32 != h >> 32) continue;
        size_t id = (uint32_t)v->slot[i] - 1;
        if (v->len[id] == n && !memcmp(v->blob.data + v->off[id], s, n)) break;
    }
    return &v->slot[i];
}

int32_t tok__vocab_find(const tok_vocab *v, const char *s, size_t n)
{
    if (!v->slot) return -1;
    uint64_t slot = *find_slot(v, s, n, tok__hash(s, n));
    return slot ? (int32_t)((uint32_t)slot - 1) : -1;
}

void tok__vocab_find_many(const tok_vocab *v, const char *const *s, const size_t *len, size_t n,
                          int32_t *id)
{
    uint64_t h[TOK_MANY];
    size_t at[TOK_MANY];
    for (size_t i = 0; i < n; i++) {
        h[i] = tok__hash(s[i], len[i]);
        __builtin_prefetch(&v->slot[h[i] & v->mask]);
    }
    for (size_t i = 0; i < n; i++) {
        uint64_t slot = v->slot[h[i] & v->mask];
        at[i] = slot ? (uint32_t)slot - 1 : 0;
        __builtin_prefetch(&v->off[at[i]]);
        __builtin_prefetch(&v->len[at[i]]);
    }
    for (size_t i = 0; i < n; i++)
        if (v->off[at[i]] != UINT32_MAX) __builtin_prefetch(v->blob.data + v->off[at[i]]);
    for (size_t i = 0; i < n; i++) {
        uint64_t slot = *find_slot(v, s[i], len[i], h[i]);
        id[i] = slot ? (int32_t)((uint32_t)slot - 1) : -1;
    }
}

static void grow_ids(tok_vocab *v, size_t id)
{
    if (id >= v->cap) {
        size_t cap = v->cap ? v->cap * 2 : 256;
        while (cap <= id)
            cap *= 2;
        v->off = xrealloc(v->off, cap * sizeof *v->off);
        v->len = xrealloc(v->len, cap * sizeof *v->len);
        memset(v->off + v->cap, 0xff, (cap - v->cap) * sizeof *v->off);
        v->cap = cap;
    }
    if (id >= v->n) v->n = id + 1;
}

int tok__vocab_add(tok_vocab *v, const char *s, size_t n, int64_t id, const char *where, err *e)
{
    if (id < 0 || id >= TOK_MAX_ID)
        return err_set(e, ERR_VALUE,
                       "%s: token '%.80s' has id %lld; ids must lie between 0 and %lld", where, s,
                       (long long)id, (long long)TOK_MAX_ID - 1);
    if (v->blob.len + n + 1 >= UINT32_MAX)
        return err_set(e, ERR_LIMIT, "%s: the strings of the vocabulary exceed 4 GiB", where);
    tok__vocab_reserve(v, v->used + 1);
    uint64_t h = tok__hash(s, n), *slot = find_slot(v, s, n, h);
    size_t old;
    const char *other = tok__vocab_name(v, (int32_t)id, &old);
    if (other && (old != n || memcmp(other, s, n) != 0))
        return err_set(e, ERR_FORMAT,
                       "%s: id %lld belongs to both '%.80s' and '%.80s'; give one of them another",
                       where, (long long)id, other, s);
    if (*slot)
        v->off[(uint32_t)*slot - 1] = UINT32_MAX; /* same string twice: the last id counts */
    else
        v->used++;
    grow_ids(v, (size_t)id);
    v->off[id] = (uint32_t)v->blob.len;
    v->len[id] = (uint32_t)n;
    buf_add(&v->blob, s, n);
    buf_putc(&v->blob, 0);
    *slot = (h >> 32 << 32) | ((uint64_t)id + 1);
    return 0;
}

int tok__vocab_add_last(tok_vocab *v, const char *s, size_t n, int64_t id, const char *where,
                        err *e)
{
    int32_t old = tok__vocab_find(v, s, n);
    uint32_t off = old >= 0 ? v->off[old] : 0;
    int rc = tok__vocab_add(v, s, n, id, where, e);
    if (rc >= 0 && old >= 0) v->off[old] = off;
    return rc;
}

void tok__byte_ids(const tok_vocab *v, int32_t id[256])
{
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", i);
        id[i] = tok__vocab_find(v, name, 6);
    }
}

int tok__vocab_load(tok_vocab *out, const json *j, const char *model, const char *where, err *e)
{
    const json *v = json_get(j, "vocab");
    size_t n = 0;
    if (!cJSON_IsObject(v))
        return err_set(e, ERR_MISSING, "%s: model %s needs the object 'vocab'", where, model);
    for (const json *c = v->child; c; c = c->next)
        n++;
    if (!n)
        return err_set(e, ERR_MISSING,
                       "%s: 'vocab' of model %s is empty; convert the tokenizer again", where,
                       model);
    tok__vocab_reserve(out, n + 1);
    for (const json *c = v->child; c; c = c->next) {
        double d = c->valuedouble;
        if (!cJSON_IsNumber(c) || d < 0 || d >= (double)TOK_MAX_ID || d != (double)(int64_t)d)
            return err_set(e, ERR_FORMAT,
                           "%s: id of token '%.80s' must be an integer between 0 and %lld", where,
                           c->string, (long long)TOK_MAX_ID - 1);
        int rc = tok__vocab_add(out, c->string, strlen(c->string), (int64_t)d, where, e);
        if (rc < 0) return rc;
    }
    return 0;
}

const char *tok__vocab_name(const tok_vocab *v, int32_t id, size_t *n)
{
    if (id < 0 || (size_t)id >= v->n || v->off[id] == UINT32_MAX) return NULL;
    if (n) *n = v->len[id];
    return v->blob.data + v->off[id];
}

void tok__vocab_drop(tok_vocab *v)
{
    buf_free(&v->blob);
    free(v->off);
    free(v->len);
    free(v->slot);
    *v = (tok_vocab){0};
}
