/* Slots that hold whole experts: where the bytes go, and which slot is emptied next. */
#ifndef CLB_SLOTS_H
#define CLB_SLOTS_H
#include "core.h"

enum { CLB_NONE = -1 };

typedef struct clb_extent { /* one aligned stretch of a shard that holds parts of an expert */
    int32_t shard;
    int64_t first, last; /* bytes, multiples of CLB_PAGE; last may lie past the end of the file */
    int64_t needed;      /* the last byte a part needs, plus one */
    int64_t out;         /* where `first` goes in the slot */
} clb_extent;

typedef struct clb_extents {
    clb_extent at[CLB_EXPERT_PARTS];
    int32_t count;
    int64_t bytes; /* of the slot */
} clb_extents;

typedef struct clb_slot {
    int32_t layer, expert;    /* CLB_NONE: empty */
    int32_t pins, reads_left; /* held while either is not 0 */
    int32_t place;            /* in the heap; CLB_NONE: held, or never used */
    bool failed;
    double heat;     /* of two slots the colder is emptied first; */
    int64_t touched; /* of two as cold as each other, the one whose heat was set last */
} clb_slot;

typedef struct clb_slots { /* slots of one size */
    uint8_t *memory;
    int64_t slot_bytes, count, mapped;
    int64_t spare;      /* more slots, which the pilot holds */
    clb_slot *slots;    /* [count + spare] */
    int64_t clock;      /* heats set so far */
    int32_t filled;     /* slots that were ever used */
    int32_t *heap;      /* [count] of those, the ones that nobody holds; the coldest at 0 */
    int32_t heap_count;
} clb_slots;

clb_extents clb_extents_of(const clb_expert *expert);
/* Where a part of the expert lies in a slot laid out by these extents. */
const uint8_t *clb_part_address(const clb_extents *places, const clb_place *part,
                                const uint8_t *slot);

int32_t clb_slots_open(clb_slots *slots, int64_t slot_bytes, int64_t count, int64_t spare,
                       clb_error *error);
void clb_slots_close(clb_slots *slots);
void clb_slots_heat(clb_slots *slots, int32_t i, double heat);
void clb_slots_cool(clb_slots *slots, double by); /* divides all heats */
void clb_slots_pin(clb_slots *slots, int32_t i);
void clb_slots_unpin(clb_slots *slots, int32_t i);
void clb_slots_read(clb_slots *slots, int32_t i); /* one of reads_left is done */
/* A slot to fill: one never used, else the coldest that nobody holds; CLB_NONE when all are held.
   It is not in the heap: pin it, or give it reads_left. */
int32_t clb_slots_take(clb_slots *slots);

#endif
