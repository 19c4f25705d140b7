/* Private to kv: what the radix tree asks of the pool. */
#ifndef KV_POOL_INTERNAL_H
#define KV_POOL_INTERNAL_H
#include "kv/kv.h"
int32_t kv__refs(const kv_pool *p, int group, int32_t page);
/* The tree takes and gives back its one reference on a page. */
void kv__tree_ref(kv_pool *p, int group, int32_t page);
void kv__tree_unref(kv_pool *p, int group, int32_t page);
#endif
