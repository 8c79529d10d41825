/* Memory that begins where processors read it fastest. */
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "system.h"

enum { LINE = 64 }; /* a vector that crosses two cache lines takes two loads */

/* Only calloc gives zeroes in pages that are not committed before they are written. Its result is
   aligned by hand: the block's address is kept just before ours. */
void *clb_zeroed(int64_t bytes) {
    uint8_t *block = calloc(1, (size_t)bytes + 2 * LINE);
    if (!block) return NULL;
    uint8_t *line = block + 2 * LINE - (uintptr_t)block % LINE;
    memcpy(line - sizeof block, &block, sizeof block);
    return line;
}

void clb_zeroed_free(void *memory) {
    void *block;
    if (!memory) return;
    memcpy(&block, (uint8_t *)memory - sizeof block, sizeof block);
    free(block);
}

void *clb_paged(int64_t bytes) {
    void *memory;
    int64_t whole = bytes / CLB_HUGE_PAGE * CLB_HUGE_PAGE; /* the rest in small pages: no waste */
    if (posix_memalign(&memory, whole ? CLB_HUGE_PAGE : CLB_PAGE, (size_t)bytes)) return NULL;
    if (whole) clb_ask_huge_pages(memory, whole);
    return memory;
}

void *clb_take(clb_taken *taken, int64_t count, int64_t width, int64_t item) {
    int64_t n;
    if (!clb_mul(count, width, &n) || !clb_mul(n, item, &n)) {
        taken->failed = true;
        return NULL;
    }
    void *p = clb_zeroed(n);
    if (!p) taken->failed = true;
    else taken->bytes += n;
    return p;
}

float *clb_take_floats(clb_taken *taken, int64_t count, int64_t width) {
    return clb_take(taken, count, width, (int64_t)sizeof(float));
}

int32_t clb_fail_memory(const clb_taken *taken, int64_t context, clb_error *error) {
    return clb_fail(error, CLB_NO_MEMORY, "out of memory: a context of %lld needs more than %lld "
                    "bytes; ask for a smaller one", (long long)context, (long long)taken->bytes);
}
