/* Slots that hold whole experts: where the bytes go, and which slot was used last. */
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
    int32_t layer, expert; /* CLB_NONE: empty */
    int32_t newer, older;  /* recency list */
    int32_t pins, reads_left;
    bool failed;
    int64_t loaded_step, used_step;
} clb_slot;

typedef struct clb_slots { /* slots of one size */
    uint8_t *memory;
    int64_t slot_bytes, count, mapped;
    int64_t spare;  /* more slots, outside the recency list: the pilot's */
    clb_slot *slots; /* [count + spare] */
    int32_t filled; /* slots that were ever used; only those are in the recency list */
    int32_t newest, oldest;
} clb_slots;

clb_extents clb_extents_of(const clb_expert *expert);
/* Where a part of the expert lies in a slot laid out by these extents. */
const uint8_t *clb_part_address(const clb_extents *places, const clb_place *part,
                                const uint8_t *slot);

int32_t clb_slots_open(clb_slots *slots, int64_t slot_bytes, int64_t count, int64_t spare,
                       clb_error *error);
void clb_slots_close(clb_slots *slots);
void clb_slots_unlink(clb_slots *slots, int32_t i);
void clb_slots_link(clb_slots *slots, int32_t i); /* as the most recent */
void clb_slots_touch(clb_slots *slots, int32_t i);
void clb_slots_age(clb_slots *slots, int32_t i); /* make it the first to go */
/* A slot to fill, already the most recent: an unused one, else the oldest that nobody holds;
   CLB_NONE when all are held. */
int32_t clb_slots_take(clb_slots *slots);

#endif
