#include "experts.h"
#include <stdlib.h>
#include "residency.h"
#include "system.h"

/* ---- building ------------------------------------------------------------------------------- */

/* Bytes of a slot that takes any expert of the layers [first, last), and how many are sparse. */
static int64_t slot_bytes_of(const clb_model *m, int64_t first, int64_t last, int64_t *sparse) {
    int64_t most = 0;
    *sparse = 0;
    for (int64_t l = first; l < last; l++) {
        if (!m->layers[l].sparse || !m->layers[l].experts) continue;
        ++*sparse;
        for (int64_t e = 0; e < m->config.experts; e++) {
            int64_t need = clb_extents_of(&m->layers[l].experts[e]).bytes;
            if (need > most) most = need;
        }
    }
    return most;
}

int64_t clb_model_slot_bytes(const clb_model *m, int32_t mtp) {
    int64_t layers = m->config.layers, sparse;
    return mtp ? slot_bytes_of(m, layers, m->layer_count, &sparse)
               : slot_bytes_of(m, 0, layers, &sparse);
}

/* A pool for the layers [first, last): `slots`, but no more than they have experts. */
static int32_t open_pool(clb_model *m, clb_slots *p, int64_t first, int64_t last, int64_t slots,
                         int64_t spare, clb_error *error) {
    int64_t sparse, bytes = slot_bytes_of(m, first, last, &sparse);
    if (sparse && slots < 1)
        return clb_fail(error, CLB_INVALID, "%lld expert slots cannot work", (long long)slots);
    return clb_slots_open(p, bytes, clb_least(slots, sparse * m->config.experts),
                          sparse ? spare : 0, error);
}

static int32_t fill_residency(clb_model *m, clb_residency *r, int64_t slots, int64_t mtp_slots,
                              clb_error *error) {
    const clb_config *c = &m->config;
    int64_t all = m->layer_count * c->experts;
    r->mtp_layer = c->layers;
    r->where = malloc((size_t)(all + 1) * sizeof *r->where);
    r->populated = calloc((size_t)all + 1, 1);
    r->heat = calloc((size_t)all + 1, sizeof *r->heat);
    r->use = 1.0;
    if (!r->where || !r->populated || !r->heat)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory for the table of %lld experts",
                        (long long)all);
    for (int64_t i = 0; i < all; i++) r->where[i] = CLB_NONE;
    if (clb_is_mapped(r)) return CLB_OK;
    int32_t code = open_pool(m, &r->pools[0], 0, c->layers, slots,
                             r->pilot.mode ? CLB_PILOT_SLOTS : 0, error);
    if (!code) code = open_pool(m, &r->pools[1], c->layers, m->layer_count, mtp_slots, 0, error);
    if (code) return code;
    r->queue_size = r->pools[0].count + r->pools[1].count + CLB_PILOT_SLOTS + 1;
    for (int32_t i = 0; i < CLB_PILOT_SLOTS; i++)
        r->pilot.stage[i] = (int32_t)r->pools[0].count + i;
    r->queue = malloc((size_t)r->queue_size * sizeof *r->queue);
    r->reader = clb_reader_new(true, r->io == CLB_IO_BUFFERED);
    if (!r->reader) r->reader = clb_reader_new(false, false);
    if (!r->queue || !r->reader)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory or threads for reading experts");
    for (int32_t i = 0; i < CLB_ALL_READS; i++) r->free_reads[i] = i;
    r->free_count = CLB_ALL_READS;
    return CLB_OK;
}

int32_t clb_residency_new(clb_model *m, int32_t io, int64_t slots, int64_t mtp_slots, int32_t pilot,
                          clb_error *error) {
    if (pilot < CLB_PILOT_OFF || pilot > CLB_PILOT_FED)
        return clb_fail(error, CLB_INVALID, "pilot mode %d is unknown", pilot);
    if (io < CLB_IO_MMAP || io > CLB_IO_DIRECT)
        return clb_fail(error, CLB_INVALID, "io mode %d is unknown", io);
    clb_residency *r = calloc(1, sizeof *r);
    if (!r) return clb_fail(error, CLB_NO_MEMORY, "out of memory for the expert slots");
    r->io = io;
    r->pilot.mode = pilot;
    clb_residency *old = m->residency;
    m->residency = r;
    int32_t code = fill_residency(m, r, slots, mtp_slots, error);
    if (code) {
        clb_residency_free(r);
        m->residency = old;
        return code;
    }
    clb_residency_free(old);
    return CLB_OK;
}

void clb_residency_free(clb_residency *r) {
    if (!r) return;
    clb_reader_free(r->reader);
    for (int i = 0; i < 2; i++) clb_slots_close(&r->pools[i]);
    free(r->where);
    free(r->populated);
    free(r->heat);
    free(r->queue);
    free(r->pilot.fed);
    free(r);
}

/* ---- heat ----------------------------------------------------------------------------------- */

/* LRFU (Lee et al., IEEE Trans. Computers 50:12, 2001): each use of an expert adds to its heat, and
   counts half after eight tokens. Instead of all heats shrinking, a use grows.
   A token's uses count once its step is over: an expert read for it is as cold as it was, so that
   those that are used once pass through a few slots and leave the others alone; where all are as
   hot as each other, too, because the last of them to come is the first to go. */
static const double GROWTH = 1.0905077326652577; /* 2^(1/8), with every token */
static const double LATER = 1.0001;  /* with every expert of a warm start: 7,000 are 8 tokens */
static const double LARGE = 0x1p256; /* heats that reach it are divided by it, and so are all */

/* So much more does a use count from now on. */
static void age(clb_model *m, double growth) {
    clb_residency *r = m->residency;
    r->use *= growth;
    if (r->use < LARGE) return;
    for (int64_t i = 0; i < m->layer_count * m->config.experts; i++) r->heat[i] /= LARGE;
    for (int i = 0; i < 2; i++) clb_slots_cool(&r->pools[i], LARGE);
    r->use /= LARGE;
}

static void set_heat(clb_model *m, int64_t layer, int64_t expert, double heat) {
    int32_t slot = *clb_where(m, layer, expert);
    *clb_heat(m, layer, expert) = heat;
    if (slot != CLB_NONE) clb_slots_heat(clb_pool_of(m->residency, layer), slot, heat);
}

void clb_residency_count(clb_session *s, int64_t layer, int64_t row) {
    clb_model *m = s->model;
    const int32_t *experts = s->routes[layer].expert + row * m->config.experts_per_token;
    for (int64_t i = 0; i < m->config.experts_per_token; i++)
        set_heat(m, layer, experts[i], *clb_heat(m, layer, experts[i]) + m->residency->use);
}

/* ---- leases --------------------------------------------------------------------------------- */

int64_t clb_residency_room(const clb_residency *r, int64_t layer) {
    if (clb_is_mapped(r)) return INT64_MAX;
    return r->pools[layer == r->mtp_layer].count;
}

static void address_lease(const clb_expert *e, const clb_slots *p, clb_lease *lease) {
    const uint8_t *memory = p->memory + lease->slot * p->slot_bytes;
    clb_extents places = clb_extents_of(e);
    clb_matrix *w[3] = {&lease->gate, &lease->up, &lease->down};
    for (int i = 0; i < 3; i++) {
        w[i]->data = clb_part_address(&places, &e->part[2 * i], memory);
        if (e->part[2 * i + 1].bytes)
            w[i]->scales = clb_part_address(&places, &e->part[2 * i + 1], memory);
    }
}

static int32_t load_slot(clb_model *m, clb_lease *lease, clb_error *error) {
    clb_slots *p = clb_pool_of(m->residency, lease->layer);
    int32_t i;
    while ((i = clb_slots_take(p)) == CLB_NONE)
        if (!clb_load_take_in(m, true))
            return clb_fail(error, CLB_NO_MEMORY, "layer %d has no free expert slot", lease->layer);
    const clb_slot *out = &p->slots[i];
    if (out->layer != CLB_NONE) *clb_where(m, out->layer, out->expert) = CLB_NONE;
    *clb_where(m, lease->layer, lease->expert) = i;
    clb_slots_heat(p, i, *clb_heat(m, lease->layer, lease->expert));
    clb_load_start(m, p, i, lease->layer, lease->expert);
    m->residency->pilot.quiet = 0; /* experts are missing: guesses may be of use */
    lease->slot = i;
    return CLB_OK;
}

/* Empties a slot whose reads failed, so that the expert is read again. */
static bool forget_failed(clb_model *m, clb_slots *p, int32_t i) {
    clb_slot *s = &p->slots[i];
    if (!s->failed || s->reads_left) return false;
    if (s->layer != CLB_NONE) *clb_where(m, s->layer, s->expert) = CLB_NONE;
    s->layer = s->expert = CLB_NONE;
    s->failed = false;
    clb_slots_heat(p, i, -1.0);
    return true;
}

static int32_t lease_slot(clb_model *m, clb_lease *lease, clb_counters *counters,
                          clb_error *error) {
    clb_slots *p = clb_pool_of(m->residency, lease->layer);
    lease->slot = *clb_where(m, lease->layer, lease->expert);
    if (lease->slot != CLB_NONE && forget_failed(m, p, lease->slot)) lease->slot = CLB_NONE;
    if (lease->slot == CLB_NONE) {
        lease->slot = clb_pilot_adopt(m, lease->layer, lease->expert);
        counters->pilot_useful += lease->slot != CLB_NONE;
    }
    if (lease->slot == CLB_NONE) {
        int32_t code = load_slot(m, lease, error);
        if (code) return code;
        counters->expert_loads++;
        counters->read_bytes += m->layers[lease->layer].expert_bytes;
    }
    clb_slots_pin(p, lease->slot);
    address_lease(&m->layers[lease->layer].experts[lease->expert], p, lease);
    lease->ready = p->slots[lease->slot].reads_left == 0 && !p->slots[lease->slot].failed;
    return CLB_OK;
}

static int32_t populate_matrix(const clb_matrix *w, bool start) {
    if (clb_populate(w->data, w->rows * w->row_bytes, start)) return CLB_IO;
    return w->scales ? clb_populate(w->scales, clb_scale_bytes(w), start) : CLB_OK;
}

/* Mapped: start the reads of all the leases, then wait for each. */
static int32_t lease_mapped(clb_model *m, clb_lease *leases, int64_t n, clb_error *error) {
    clb_residency *r = m->residency;
    for (int start = 1; start >= 0; start--)
        for (int64_t i = 0; i < n; i++) {
            clb_lease *l = &leases[i];
            uint8_t *seen = &r->populated[l->layer * m->config.experts + l->expert];
            if (*seen && r->io == CLB_IO_MMAP) continue;
            if (populate_matrix(&l->gate, start) || populate_matrix(&l->up, start) ||
                populate_matrix(&l->down, start))
                return clb_fail(error, CLB_IO, "reading layer %d, expert %d failed: the disk "
                                "reported an error (see the system log)", l->layer, l->expert);
            if (!start) *seen = 1;
        }
    return CLB_OK;
}

static void count_reads(clb_residency *r, clb_counters *counters) {
    counters->mirror_bytes += r->mirror_bytes;
    counters->repeated_reads += r->repeated_reads;
    r->mirror_bytes = r->repeated_reads = 0;
}

int32_t clb_residency_lease(clb_model *m, clb_lease *leases, int64_t n, clb_counters *counters,
                            clb_error *error) {
    clb_residency *r = m->residency;
    bool mapped = clb_is_mapped(r);
    for (int64_t i = 0; i < n; i++) {
        const clb_expert *e = &m->layers[leases[i].layer].experts[leases[i].expert];
        leases[i].gate = e->gate;
        leases[i].up = e->up;
        leases[i].down = e->down;
        leases[i].slot = CLB_NONE;
        leases[i].ready = mapped;
    }
    if (mapped) return lease_mapped(m, leases, n, error);
    /* Those that are there first: once pinned, they cannot make room for those that are not. */
    for (int missing = 0; missing <= 1; missing++)
        for (int64_t i = 0; i < n; i++) {
            bool there = *clb_where(m, leases[i].layer, leases[i].expert) != CLB_NONE;
            if (leases[i].slot != CLB_NONE || (!there && !missing)) continue;
            int32_t code = lease_slot(m, &leases[i], counters, error);
            if (code) return code;
        }
    clb_load_pump(m);
    count_reads(r, counters);
    return CLB_OK;
}

/* A lease whose reads are done becomes ready; a failed one empties its slot. */
static int32_t check_lease(clb_model *m, clb_lease *lease) {
    clb_slots *p = clb_pool_of(m->residency, lease->layer);
    if (p->slots[lease->slot].reads_left) return CLB_OK;
    if (forget_failed(m, p, lease->slot)) return CLB_IO;
    lease->ready = true;
    return CLB_OK;
}

/* Marks the leases that became ready; how many did, or -1 when one failed. */
static int64_t refresh(clb_model *m, clb_lease *leases, int64_t n) {
    int64_t newly = 0;
    for (int64_t i = 0; i < n; i++) {
        if (leases[i].ready) continue;
        if (check_lease(m, &leases[i])) return -1;
        newly += leases[i].ready;
    }
    return newly;
}

static int32_t report(clb_model *m, clb_error *error) {
    const clb_error *fault = &m->residency->fault;
    return clb_fail(error, CLB_IO, "%s", fault->code ? fault->text : "a read failed");
}

int32_t clb_residency_wait(clb_model *m, clb_lease *leases, int64_t n, bool block,
                           clb_counters *counters, clb_error *error) {
    clb_load_take_in(m, false);
    count_reads(m->residency, counters);
    int64_t newly = refresh(m, leases, n);
    if (newly < 0) return report(m, error);
    if (newly || !block) return CLB_OK;
    int64_t begin = clb_now_ns();
    while (newly == 0) {
        if (!clb_load_take_in(m, true))
            return clb_fail(error, CLB_IO, "the system lost a read of an expert's weights");
        newly = refresh(m, leases, n);
    }
    count_reads(m->residency, counters);
    counters->read_wait_ns += clb_now_ns() - begin;
    return newly < 0 ? report(m, error) : CLB_OK;
}

void clb_residency_poll(clb_model *m) {
    if (m->residency->reader) clb_load_take_in(m, false);
}

void clb_residency_release(clb_model *m, clb_lease *leases, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (leases[i].slot != CLB_NONE)
            clb_slots_unpin(clb_pool_of(m->residency, leases[i].layer), leases[i].slot);
}

/* ---- uses, in the order of the tokens that were kept ---------------------------------------- */

static void commit_row(clb_session *s, int64_t row) {
    age(s->model, GROWTH);
    for (int64_t l = 0; l < s->model->config.layers; l++)
        if (s->model->layers[l].sparse) clb_residency_count(s, l, row);
}

void clb_residency_commit(clb_session *s) {
    int64_t kept = s->length - s->step_start;
    if (kept < 0) kept = 0;
    if (kept > s->step_rows) kept = s->step_rows;
    if (clb_residency_room(s->model->residency, 0) != INT64_MAX)
        for (int64_t r = 0; r < kept; r++) commit_row(s, r);
    s->step_rows = 0;
}

/* ---- the resident set, saved and loaded again ----------------------------------------------- */

typedef struct resident { /* an expert in a slot */
    double heat;
    int64_t touched;
    int32_t layer, expert;
} resident;

static int hotter_first(const void *a, const void *b) {
    const resident *x = a, *y = b;
    if (x->heat != y->heat) return x->heat > y->heat ? -1 : 1;
    return (x->touched > y->touched) - (x->touched < y->touched);
}

/* The experts of one pool, the hottest first; how many. `out` has room for all its slots. */
static int64_t list_pool(const clb_model *m, const clb_slots *p, resident *out) {
    int64_t n = 0;
    for (int64_t i = 0; i < p->count + p->spare; i++) {
        const clb_slot *s = &p->slots[i];
        if (s->layer == CLB_NONE || s->failed || s->reads_left) continue;
        if (*clb_where(m, s->layer, s->expert) != i) continue; /* a guess */
        out[n++] = (resident){s->heat, s->touched, s->layer, s->expert};
    }
    if (n) qsort(out, (size_t)n, sizeof *out, hotter_first);
    return n;
}

static int64_t list_resident(const clb_model *m, int32_t *pairs, int64_t most) {
    const clb_slots *pools = m->residency->pools;
    int64_t slots = pools[0].count + pools[0].spare + pools[1].count + pools[1].spare, n = 0;
    resident *list = malloc((size_t)(slots + 1) * sizeof *list);
    if (!list) return -1;
    for (int i = 0; i < 2; i++) n += list_pool(m, &pools[i], list + n);
    for (int64_t i = 0; i < n && i < most; i++) {
        pairs[2 * i] = list[i].layer;
        pairs[2 * i + 1] = list[i].expert;
    }
    free(list);
    return n;
}

int64_t clb_model_resident(clb_model *m, int32_t *pairs, int64_t most) {
    if (clb_lock(m, NULL)) return 0; /* others may warm meanwhile */
    int64_t n = m->residency ? list_resident(m, pairs, most) : 0;
    clb_unlock(m);
    return n;
}

static bool has_expert(const clb_model *m, int32_t layer, int32_t expert) {
    return layer >= 0 && layer < m->layer_count && m->layers[layer].sparse && expert >= 0 &&
           expert < m->config.experts;
}

/* As hot as one use makes it, at the least; each that was colder is hotter than the one before. */
static void warm_up(clb_model *m, int32_t layer, int32_t expert) {
    double heat = *clb_heat(m, layer, expert);
    age(m, LATER);
    set_heat(m, layer, expert, heat > m->residency->use ? heat : m->residency->use);
}

int32_t clb_model_warm(clb_model *m, const int32_t *pairs, int64_t n, clb_error *error) {
    clb_counters ignored = {0};
    fenv_t was;
    int32_t code = clb_begin(m, &was, error); /* heats are floats, too */
    if (code) return code;
    bool slots = m->residency && m->residency->queue_size > 0;
    for (int64_t i = 0; slots && i < n && !code; i++) {
        clb_lease lease = {.layer = pairs[2 * i], .expert = pairs[2 * i + 1]};
        if (!has_expert(m, lease.layer, lease.expert)) continue;
        code = clb_residency_lease(m, &lease, 1, &ignored, error);
        if (!code) warm_up(m, lease.layer, lease.expert);
        clb_residency_release(m, &lease, 1);
    }
    while (slots && !code && clb_load_take_in(m, true)) continue;
    clb_end(m, &was);
    return code;
}
