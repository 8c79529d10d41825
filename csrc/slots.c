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
    if (count == 0) return CLB_OK;
    if (!clb_mul(count + spare, slot_bytes, &bytes) || count + spare > INT32_MAX)
        return clb_fail(error, CLB_INVALID, "%lld expert slots overflow", (long long)count);
    p->mapped = bytes + CLB_HUGE_PAGE;
    void *memory = mmap(NULL, (size_t)p->mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) p->memory = memory;
    p->slots = calloc((size_t)(count + spare), sizeof *p->slots);
    p->heap = malloc((size_t)count * sizeof *p->heap);
    if (!p->memory || !p->slots || !p->heap)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory for %lld expert slots of %lld bytes",
                        (long long)count, (long long)slot_bytes);
    clb_ask_huge_pages(memory, p->mapped);
    for (int64_t i = 0; i < count + spare; i++)
        p->slots[i] = (clb_slot){
            .layer = CLB_NONE, .expert = CLB_NONE, .place = CLB_NONE, .pins = i >= count};
    return CLB_OK;
}

void clb_slots_close(clb_slots *p) {
    if (p->memory) munmap(p->memory, (size_t)p->mapped);
    free(p->slots);
    free(p->heap);
}

/* ---- a heap of the slots that nobody holds, by heat ------------------------------------------ */

static bool colder(const clb_slots *p, int32_t a, int32_t b) {
    const clb_slot *x = &p->slots[a], *y = &p->slots[b];
    return x->heat != y->heat ? x->heat < y->heat : x->touched > y->touched;
}

static void put(clb_slots *p, int32_t place, int32_t i) {
    p->heap[place] = i;
    p->slots[i].place = place;
}

/* Slot i goes to `place`, or as far up or down from there as its heat asks for. */
static void settle(clb_slots *p, int32_t place, int32_t i) {
    for (int32_t up; place > 0 && colder(p, i, p->heap[up = (place - 1) / 2]); place = up)
        put(p, place, p->heap[up]);
    for (int32_t down; (down = 2 * place + 1) < p->heap_count; place = down) {
        down += down + 1 < p->heap_count && colder(p, p->heap[down + 1], p->heap[down]);
        if (!colder(p, p->heap[down], i)) break;
        put(p, place, p->heap[down]);
    }
    put(p, place, i);
}

static void leave_heap(clb_slots *p, int32_t i) {
    int32_t place = p->slots[i].place, last;
    if (place == CLB_NONE) return;
    p->slots[i].place = CLB_NONE;
    last = p->heap[--p->heap_count];
    if (last != i) settle(p, place, last);
}

static void join_heap(clb_slots *p, int32_t i) {
    const clb_slot *s = &p->slots[i];
    if (s->pins || s->reads_left || s->place != CLB_NONE) return;
    p->heap_count++;
    settle(p, p->heap_count - 1, i);
}

void clb_slots_heat(clb_slots *p, int32_t i, double heat) {
    clb_slot *s = &p->slots[i];
    s->heat = heat;
    s->touched = ++p->clock;
    if (s->place != CLB_NONE) settle(p, s->place, i);
}

void clb_slots_cool(clb_slots *p, double by) {
    int32_t n = p->heap_count;
    for (int64_t i = 0; i < p->count + p->spare; i++) p->slots[i].heat /= by;
    for (p->heap_count = 0; p->heap_count < n;) { /* the least became as cold as each other */
        int32_t place = p->heap_count++;
        settle(p, place, p->heap[place]);
    }
}

void clb_slots_pin(clb_slots *p, int32_t i) {
    p->slots[i].pins++;
    leave_heap(p, i);
}

void clb_slots_unpin(clb_slots *p, int32_t i) {
    p->slots[i].pins--;
    join_heap(p, i);
}

void clb_slots_read(clb_slots *p, int32_t i) {
    p->slots[i].reads_left--;
    join_heap(p, i);
}

int32_t clb_slots_take(clb_slots *p) {
    if (p->filled < p->count) return p->filled++;
    if (p->heap_count == 0) return CLB_NONE;
    int32_t i = p->heap[0];
    leave_heap(p, i);
    return i;
}
