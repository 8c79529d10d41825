/* Which routed experts are in memory. Slots hold whole experts; the one used least, and least
   lately, makes room. With mapped files there are no slots: the page cache decides. */
#ifndef CLB_EXPERTS_H
#define CLB_EXPERTS_H
#include "core.h"

typedef struct clb_lease { /* one expert of a batch: pinned until released */
    int32_t layer, expert;
    int32_t slot;   /* -1: mapped */
    bool ready;
    clb_matrix gate, up, down;
} clb_lease;

typedef struct clb_run { /* pairs [first, last) of a layer share one expert */
    int64_t first, last;
    bool done;
} clb_run;

int32_t clb_residency_new(clb_model *m, int32_t io, int64_t slots, int64_t mtp_slots, int32_t pilot,
                          clb_error *error);
void clb_residency_free(clb_residency *r);
/* Slots one batch may lease at once in this layer; INT64_MAX when mapped. */
int64_t clb_residency_room(const clb_residency *r, int64_t layer);
/* Pins leases[n] of one layer and puts the reads of all that are not in memory in flight. */
int32_t clb_residency_lease(clb_model *m, clb_lease *leases, int64_t n, clb_counters *counters,
                            clb_error *error);
/* Marks the leases that became ready; with `block`, waits until at least one more is. */
int32_t clb_residency_wait(clb_model *m, clb_lease *leases, int64_t n, bool block,
                           clb_counters *counters, clb_error *error);
/* Takes in what has arrived and puts more in flight; never waits, so call it between kernels. */
void clb_residency_poll(clb_model *m);
void clb_residency_release(clb_model *m, clb_lease *leases, int64_t n);
/* Counts the uses of a layer's experts by a row of the last step. */
void clb_residency_count(clb_session *s, int64_t layer, int64_t row);
/* Counts all uses of the last step: those of rows that were kept, in token order. */
void clb_residency_commit(clb_session *s);

/* pilot.c: after a layer, guesses the next sparse layer's experts and reads those that are missing
   into spare slots, when the disk has nothing else to do. */
void clb_pilot_hint(clb_pass *p, int64_t layer);

#endif
