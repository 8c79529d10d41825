/* Inside the residency: experts.c leases slots, loads.c fills them, pilot.c fills spare ones. */
#ifndef CLB_RESIDENCY_H
#define CLB_RESIDENCY_H
#include "experts.h"
#include "reader.h"
#include "slots.h"

/* Reads in flight at most, of one drive and of all: enough for its full rate, few enough that
   experts arrive one after the other and the first is computed while the next ones are read. */
enum { CLB_READS = 6, CLB_ALL_READS = CLB_READS * CLB_DRIVES };

typedef struct clb_flight { /* what becomes of a read */
    clb_slots *pool;
    int64_t needed; /* bytes that must arrive */
    int32_t slot, shard, drive;
} clb_flight;

typedef struct clb_trust { /* in guesses of one rank: rank 0 is the surest of a layer */
    float worth;       /* mean of the latest: +1 for one that was asked for, else -1 */
    int64_t gap, next; /* while it is not worth it: hints between two tries, and the next one */
} clb_trust;

typedef struct clb_pilot { /* guesses about the next layer's experts */
    int32_t mode;
    int32_t stage[CLB_PILOT_SLOTS];   /* slots of the main pool, pinned by the pilot */
    int32_t rank[CLB_PILOT_SLOTS];    /* of the guess in each */
    clb_trust trust[CLB_PILOT_SLOTS]; /* by rank */
    int64_t hints; /* layers it was asked about */
    int64_t quiet; /* of those, the latest without an expert to read */
    int32_t *fed;  /* [layers][fed_count] guesses given from outside, surest first */
    int64_t fed_count;
} clb_pilot;

typedef struct clb_pending { /* a slot whose reads are not all in flight yet */
    clb_slots *pool;
    int32_t slot, extent;
    int64_t offset; /* next byte of that extent */
    clb_extents places;
} clb_pending;

struct clb_residency {
    int32_t io;
    int64_t mtp_layer;
    clb_slots pools[2]; /* main layers; the MTP layer, whose experts may be larger */
    int32_t *where;     /* [layer_count][experts] slot or CLB_NONE */
    uint8_t *populated; /* [layer_count][experts] mapped pages asked for once */
    double *heat;       /* [layer_count][experts] uses, the older the less */
    double use;         /* what one more use counts; it grows with every token */
    clb_reader *reader;
    clb_read reads[CLB_ALL_READS];
    clb_flight flights[CLB_ALL_READS];
    int32_t free_reads[CLB_ALL_READS], free_count;
    int32_t reads_in_flight[CLB_DRIVES]; /* of each drive */
    int64_t bytes_in_flight[CLB_DRIVES];
    int32_t last_drive; /* of the latest read */
    int64_t mirror_bytes, repeated_reads; /* since a session counted them */
    clb_pending *queue; /* [slots] ring of slots still to be put in flight */
    int64_t queue_head, queue_tail, queue_size;
    clb_pilot pilot;
    clb_error fault;    /* why a read failed, until the step that needs the expert tells it */
};

static inline bool clb_is_mapped(const clb_residency *r) {
    return r->io == CLB_IO_MMAP || r->io == CLB_IO_MMAP_TIGHT;
}

static inline clb_slots *clb_pool_of(clb_residency *r, int64_t layer) {
    return &r->pools[layer == r->mtp_layer];
}

static inline int32_t *clb_where(const clb_model *m, int64_t layer, int64_t expert) {
    return &m->residency->where[layer * m->config.experts + expert];
}

static inline double *clb_heat(const clb_model *m, int64_t layer, int64_t expert) {
    return &m->residency->heat[layer * m->config.experts + expert];
}

/* ---- loads.c ------------------------------------------------------------------------------- */

/* Begins to fill slot i with an expert; the slot must be held by nobody. */
void clb_load_start(clb_model *m, clb_slots *pool, int32_t i, int32_t layer, int32_t expert);
/* Puts as many of the waiting pieces in flight as the reader has room for. */
void clb_load_pump(clb_model *m);
/* Takes in what has arrived; waits for one read when asked. False: nothing is left to wait for. */
bool clb_load_take_in(clb_model *m, bool wait);
bool clb_load_idle(const clb_residency *r); /* nothing is in flight or waiting */

/* ---- pilot.c ------------------------------------------------------------------------------- */

/* A spare slot that holds (or is reading) the expert trades places with the victim of a miss.
   Returns the slot, or CLB_NONE. */
int32_t clb_pilot_adopt(clb_model *m, int32_t layer, int32_t expert);

#endif
