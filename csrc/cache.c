/* The keys that a session keeps of a layer, in floats of 32 or 16 bits. */
#include <string.h>
#include "core.h"

int64_t clb_cache_row_bytes(const clb_cache *cache) {
    return cache->width * (cache->format == CLB_F16 ? 2 : 4);
}

void clb_cache_put(const clb_kernels *k, const clb_cache *cache, int64_t position,
                   const float *key) {
    uint8_t *row = cache->rows + position * clb_cache_row_bytes(cache);
    if (cache->format == CLB_F16) k->to_f16(key, cache->width, row);
    else memcpy(row, key, (size_t)clb_cache_row_bytes(cache));
}

void clb_cache_widen(const clb_kernels *k, const clb_cache *cache, int64_t first, int64_t n,
                     float *out) {
    const clb_matrix stored = {.format = CLB_F16, .cols = cache->width, .data = cache->rows,
                               .row_bytes = clb_cache_row_bytes(cache)};
    k->dequantize(&stored, first, n, out);
}
