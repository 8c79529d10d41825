/* Memory that begins where processors read it fastest. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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
    if (whole) madvise(memory, (size_t)whole, MADV_HUGEPAGE);
    return memory;
}
