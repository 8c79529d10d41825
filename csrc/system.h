/* What the system gives: pages, direct reads, a clock. */
#ifndef CLB_SYSTEM_H
#define CLB_SYSTEM_H
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#ifndef O_DIRECT
#define O_DIRECT 0 /* not Linux: direct reads are then ordinary ones */
#endif

enum {
    CLB_PAGE = 4096, /* O_DIRECT's unit, in file and memory */
    CLB_HUGE_PAGE = 2 << 20,
};

/* Huge pages for [memory, memory + bytes), where the system has them to give. */
static inline void clb_ask_huge_pages(void *memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(memory, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

static inline int64_t clb_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
