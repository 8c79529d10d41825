#include "slots.h"
#include <stdlib.h>
#include <sys/mman.h>
#include "system.h"

enum { GAP = 1 << 16 }; /* parts closer than this are one read */

/* ---- where an expert's bytes go in a slot --------------------------------------------------- */

static int64_t down_to_page(int64_t n) { return n / CLB_PAGE * CLB_PAGE; }

static bool before(const clb_place *a, const clb_place *b) {
    return a->shard != b->shard ? a->shard < b->shard : a->offset < b->offset;
}

clb_extents clb_extents_of(const clb_expert *e) {
    const clb_place *order[CLB_EXPERT_PARTS];
    clb_extents out = {.count = 0};
    int n = 0;
    for (int i = 0; i < CLB_EXPERT_PARTS; i++) {
        if (e->part[i].bytes == 0) continue;
        int j = n++;
        for (; j > 0 && before(&e->part[i], order[j - 1]); j--) order[j] = order[j - 1];
        order[j] = &e->part[i];
    }
    for (int i = 0; i < n; i++) {
        int64_t end = order[i]->offset + order[i]->bytes;
        clb_extent *x = out.count ? &out.at[out.count - 1] : NULL;
        if (!x || x->shard != order[i]->shard || order[i]->offset > x->needed + GAP) {
            x = &out.at[out.count++];
            *x = (clb_extent){.shard = order[i]->shard, .first = down_to_page(order[i]->offset)};
        }
        if (end > x->needed) x->needed = end;
    }
    for (int i = 0; i < out.count; i++) {
        out.at[i].last = clb_round_up(out.at[i].needed, CLB_PAGE);
        out.at[i].out = out.bytes;
        out.bytes += out.at[i].last - out.at[i].first;
    }
    return out;
}

const uint8_t *clb_part_address(const clb_extents *x, const clb_place *part,
                                const uint8_t *slot) {
    for (int i = 0; i < x->count; i++)
        if (x->at[i].shard == part->shard && part->offset >= x->at[i].first &&
            part->offset < x->at[i].last)
            return slot + x->at[i].out + (part->offset - x->at[i].first);
    return NULL;
}

/* ---- memory --------------------------------------------------------------------------------- */

int32_t clb_slots_open(clb_slots *p, int64_t slot_bytes, int64_t count, int64_t spare,
                       clb_error *error) {
    int64_t bytes;
    p->slot_bytes = slot_bytes;
    p->count = count;
    p->spare = spare;
    p->newest = p->oldest = CLB_NONE;
    if (count == 0) return CLB_OK;
    if (!clb_mul(count + spare, slot_bytes, &bytes) || count + spare > INT32_MAX)
        return clb_fail(error, CLB_INVALID, "%lld expert slots overflow", (long long)count);
    p->mapped = bytes + CLB_HUGE_PAGE;
    void *memory = mmap(NULL, (size_t)p->mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) p->memory = memory;
    p->slots = calloc((size_t)(count + spare), sizeof *p->slots);
    if (!p->memory || !p->slots)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory for %lld expert slots of %lld bytes",
                        (long long)count, (long long)slot_bytes);
    madvise(memory, (size_t)p->mapped, MADV_HUGEPAGE);
    for (int64_t i = 0; i < count + spare; i++)
        p->slots[i] = (clb_slot){.layer = CLB_NONE, .expert = CLB_NONE};
    return CLB_OK;
}

void clb_slots_close(clb_slots *p) {
    if (p->memory) munmap(p->memory, (size_t)p->mapped);
    free(p->slots);
}

/* ---- recency -------------------------------------------------------------------------------- */

void clb_slots_unlink(clb_slots *p, int32_t i) {
    clb_slot *s = &p->slots[i];
    if (s->newer != CLB_NONE) p->slots[s->newer].older = s->older;
    else p->newest = s->older;
    if (s->older != CLB_NONE) p->slots[s->older].newer = s->newer;
    else p->oldest = s->newer;
}

void clb_slots_link(clb_slots *p, int32_t i) {
    p->slots[i].older = p->newest;
    p->slots[i].newer = CLB_NONE;
    if (p->newest != CLB_NONE) p->slots[p->newest].newer = i;
    else p->oldest = i;
    p->newest = i;
}

void clb_slots_touch(clb_slots *p, int32_t i) {
    if (p->newest == i) return;
    clb_slots_unlink(p, i);
    clb_slots_link(p, i);
}

void clb_slots_age(clb_slots *p, int32_t i) {
    if (p->oldest == i) return;
    clb_slots_unlink(p, i);
    p->slots[i].newer = p->oldest;
    p->slots[i].older = CLB_NONE;
    p->slots[p->oldest].older = i;
    p->oldest = i;
}

int32_t clb_slots_take(clb_slots *p) {
    int32_t i = p->oldest;
    if (p->filled < p->count) {
        clb_slots_link(p, p->filled);
        return p->filled++;
    }
    while (i != CLB_NONE && (p->slots[i].pins || p->slots[i].reads_left)) i = p->slots[i].newer;
    if (i != CLB_NONE) clb_slots_touch(p, i);
    return i;
}
