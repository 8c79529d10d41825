#include "experts.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    PIECE = 1 << 20,       /* bytes of one read: large enough for a drive's full rate, small enough
                              that one expert alone keeps several reads in flight */
    READS = 256,           /* reads in flight at most */
    GAP = 1 << 16,         /* parts closer than this are one read */
    PAGE = 4096,           /* O_DIRECT's unit, in file and memory */
    HUGE_PAGE = 2 << 20,
    NONE = -1,
};

typedef struct extent { /* one aligned stretch of a shard that holds parts of an expert */
    int32_t shard;
    int64_t first, last; /* bytes, multiples of PAGE; last may lie past the end of the file */
    int64_t needed;      /* the last byte a part needs, plus one */
    int64_t out;         /* where `first` goes in the slot */
} extent;

typedef struct extents {
    extent at[CLB_EXPERT_PARTS];
    int32_t count;
    int64_t bytes; /* of the slot */
} extents;

typedef struct slot {
    int32_t layer, expert; /* NONE: empty */
    int32_t newer, older;  /* recency list */
    int32_t pins, reads_left;
    bool failed;
    int64_t loaded_step, used_step;
} slot;

typedef struct slot_pool { /* slots of one size */
    uint8_t *memory;
    int64_t slot_bytes, count, mapped;
    slot *slots;
    int32_t filled; /* slots that were ever used; only those are in the recency list */
    int32_t newest, oldest;
} slot_pool;

typedef struct pending { /* a slot whose reads are not all in flight yet */
    slot_pool *pool;
    int32_t slot, extent;
    int64_t offset; /* next byte of the extent */
    extents places;
} pending;

struct clb_residency {
    int32_t io;
    int64_t mtp_layer;
    slot_pool pools[2]; /* main layers; the MTP layer, whose experts may be larger */
    int32_t *where;     /* [layer_count][experts] slot or NONE */
    uint8_t *populated; /* [layer_count][experts] mapped pages asked for once */
    clb_reader *reader;
    clb_read reads[READS];
    slot *read_slot[READS];
    int64_t read_needed[READS]; /* bytes of the read that must arrive */
    int32_t read_shard[READS];
    int32_t free_reads[READS], free_count;
    pending *queue; /* [slots] ring of slots still to be put in flight */
    int64_t queue_head, queue_tail, queue_size;
};

/* ---- where an expert's bytes go in a slot --------------------------------------------------- */

static int64_t down_to_page(int64_t n) { return n / PAGE * PAGE; }
static int64_t up_to_page(int64_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

static bool before(const clb_place *a, const clb_place *b) {
    return a->shard != b->shard ? a->shard < b->shard : a->offset < b->offset;
}

static extents extents_of(const clb_expert *e) {
    const clb_place *order[CLB_EXPERT_PARTS];
    extents out = {.count = 0};
    int n = 0;
    for (int i = 0; i < CLB_EXPERT_PARTS; i++) {
        if (e->part[i].bytes == 0) continue;
        int j = n++;
        for (; j > 0 && before(&e->part[i], order[j - 1]); j--) order[j] = order[j - 1];
        order[j] = &e->part[i];
    }
    for (int i = 0; i < n; i++) {
        int64_t end = order[i]->offset + order[i]->bytes;
        extent *x = out.count ? &out.at[out.count - 1] : NULL;
        if (!x || x->shard != order[i]->shard || order[i]->offset > x->needed + GAP) {
            x = &out.at[out.count++];
            *x = (extent){.shard = order[i]->shard, .first = down_to_page(order[i]->offset)};
        }
        if (end > x->needed) x->needed = end;
    }
    for (int i = 0; i < out.count; i++) {
        out.at[i].last = up_to_page(out.at[i].needed);
        out.at[i].out = out.bytes;
        out.bytes += out.at[i].last - out.at[i].first;
    }
    return out;
}

static const uint8_t *part_address(const extents *x, const clb_place *part, const uint8_t *slot) {
    for (int i = 0; i < x->count; i++)
        if (x->at[i].shard == part->shard && part->offset >= x->at[i].first &&
            part->offset < x->at[i].last)
            return slot + x->at[i].out + (part->offset - x->at[i].first);
    return NULL;
}

/* ---- recency -------------------------------------------------------------------------------- */

static void unlink_slot(slot_pool *p, int32_t i) {
    slot *s = &p->slots[i];
    if (s->newer != NONE) p->slots[s->newer].older = s->older;
    else p->newest = s->older;
    if (s->older != NONE) p->slots[s->older].newer = s->newer;
    else p->oldest = s->newer;
}

static void link_newest(slot_pool *p, int32_t i) {
    p->slots[i].older = p->newest;
    p->slots[i].newer = NONE;
    if (p->newest != NONE) p->slots[p->newest].newer = i;
    else p->oldest = i;
    p->newest = i;
}

static void make_newest(slot_pool *p, int32_t i) {
    if (p->newest == i) return;
    unlink_slot(p, i);
    link_newest(p, i);
}

static void make_oldest(slot_pool *p, int32_t i) {
    if (p->oldest == i) return;
    unlink_slot(p, i);
    p->slots[i].newer = p->oldest;
    p->slots[i].older = NONE;
    p->slots[p->oldest].older = i;
    p->oldest = i;
}

/* A slot to fill, already the most recent: an unused one, else the oldest that nobody holds. */
static int32_t take_slot(slot_pool *p) {
    int32_t i = p->oldest;
    if (p->filled < p->count) {
        link_newest(p, p->filled);
        return p->filled++;
    }
    while (i != NONE && (p->slots[i].pins || p->slots[i].reads_left)) i = p->slots[i].newer;
    if (i != NONE) make_newest(p, i);
    return i;
}

/* ---- building ------------------------------------------------------------------------------- */

static slot_pool *pool_of(clb_residency *r, int64_t layer) {
    return &r->pools[layer == r->mtp_layer];
}

static int32_t *where_of(clb_model *m, int64_t layer, int64_t expert) {
    return &m->residency->where[layer * m->config.experts + expert];
}

/* Bytes of a slot that takes any expert of the layers [first, last), and how many are sparse. */
static int64_t slot_bytes_of(const clb_model *m, int64_t first, int64_t last, int64_t *sparse) {
    int64_t most = 0;
    *sparse = 0;
    for (int64_t l = first; l < last; l++) {
        if (!m->layers[l].sparse || !m->layers[l].experts) continue;
        ++*sparse;
        for (int64_t e = 0; e < m->config.experts; e++) {
            int64_t need = extents_of(&m->layers[l].experts[e]).bytes;
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

static int32_t open_pool(clb_model *m, slot_pool *p, int64_t first, int64_t last, int64_t per_layer,
                         clb_error *error) {
    int64_t sparse, bytes;
    p->slot_bytes = slot_bytes_of(m, first, last, &sparse);
    p->count = sparse * (per_layer < m->config.experts ? per_layer : m->config.experts);
    p->newest = p->oldest = NONE;
    if (p->count == 0) return CLB_OK;
    if (!clb_mul(p->count, p->slot_bytes, &bytes) || p->count > INT32_MAX)
        return clb_fail(error, CLB_INVALID, "%lld expert slots overflow", (long long)p->count);
    p->mapped = bytes + HUGE_PAGE;
    void *memory = mmap(NULL, (size_t)p->mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    p->slots = calloc((size_t)p->count, sizeof *p->slots);
    if (memory == MAP_FAILED || !p->slots) {
        if (memory != MAP_FAILED) munmap(memory, (size_t)p->mapped);
        return clb_fail(error, CLB_NO_MEMORY, "out of memory for %lld expert slots of %lld bytes",
                        (long long)p->count, (long long)p->slot_bytes);
    }
    p->memory = memory;
    madvise(memory, (size_t)p->mapped, MADV_HUGEPAGE);
    for (int32_t i = 0; i < p->count; i++) p->slots[i] = (slot){.layer = NONE, .expert = NONE};
    return CLB_OK;
}

static int32_t fill_residency(clb_model *m, clb_residency *r, int64_t per_layer, clb_error *error) {
    const clb_config *c = &m->config;
    int64_t all = m->layer_count * c->experts;
    r->mtp_layer = c->layers;
    r->where = malloc((size_t)(all + 1) * sizeof *r->where);
    r->populated = calloc((size_t)all + 1, 1);
    if (!r->where || !r->populated) return clb_fail(error, CLB_NO_MEMORY, "out of memory");
    for (int64_t i = 0; i < all; i++) r->where[i] = NONE;
    if (r->io == CLB_IO_MMAP || r->io == CLB_IO_MMAP_TIGHT) return CLB_OK;
    int32_t code = open_pool(m, &r->pools[0], 0, c->layers, per_layer, error);
    if (!code) code = open_pool(m, &r->pools[1], c->layers, m->layer_count, per_layer, error);
    if (code) return code;
    r->queue_size = r->pools[0].count + r->pools[1].count + 1;
    r->queue = malloc((size_t)r->queue_size * sizeof *r->queue);
    r->reader = clb_reader_new(true, r->io == CLB_IO_BUFFERED);
    if (!r->reader) r->reader = clb_reader_new(false, false);
    if (!r->queue || !r->reader) return clb_fail(error, CLB_NO_MEMORY, "out of memory or threads");
    for (int32_t i = 0; i < READS; i++) r->free_reads[i] = i;
    r->free_count = READS;
    return CLB_OK;
}

int32_t clb_residency_new(clb_model *m, int32_t io, int64_t per_layer, clb_error *error) {
    if (io < CLB_IO_MMAP || io > CLB_IO_DIRECT)
        return clb_fail(error, CLB_INVALID, "io mode %d is unknown", io);
    bool slots = io == CLB_IO_BUFFERED || io == CLB_IO_DIRECT;
    if (slots && m->config.experts && per_layer < 1)
        return clb_fail(error, CLB_INVALID, "%lld expert slots a layer cannot work",
                        (long long)per_layer);
    clb_residency *r = calloc(1, sizeof *r);
    if (!r) return clb_fail(error, CLB_NO_MEMORY, "out of memory");
    r->io = io;
    clb_residency *old = m->residency;
    m->residency = r;
    int32_t code = fill_residency(m, r, per_layer, error);
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
    for (int i = 0; i < 2; i++) {
        if (r->pools[i].memory) munmap(r->pools[i].memory, (size_t)r->pools[i].mapped);
        free(r->pools[i].slots);
    }
    free(r->where);
    free(r->populated);
    free(r->queue);
    free(r);
}

/* ---- reading -------------------------------------------------------------------------------- */

static void count_reads(slot *s, const extents *places) {
    s->reads_left = 0;
    for (int i = 0; i < places->count; i++)
        s->reads_left += (int32_t)((places->at[i].last - places->at[i].first + PIECE - 1) / PIECE);
}

/* Puts as many of the waiting pieces in flight as the reader has room for. */
static void pump(clb_model *m) {
    clb_residency *r = m->residency;
    while (r->queue_head != r->queue_tail && r->free_count && clb_reader_room(r->reader)) {
        pending *p = &r->queue[r->queue_head % r->queue_size];
        const extent *x = &p->places.at[p->extent];
        const clb_shard *shard = &m->shards[x->shard];
        int64_t length = x->last - p->offset < PIECE ? x->last - p->offset : PIECE;
        int32_t i = r->free_reads[--r->free_count];
        bool direct = r->io == CLB_IO_DIRECT && shard->direct_fd >= 0;
        r->reads[i] = (clb_read){.fd = direct ? shard->direct_fd : shard->fd, .offset = p->offset,
                                 .length = (uint32_t)length, .tag = i};
        r->reads[i].out = p->pool->memory + p->slot * p->pool->slot_bytes + x->out +
                          (p->offset - x->first);
        r->read_slot[i] = &p->pool->slots[p->slot];
        r->read_shard[i] = x->shard;
        r->read_needed[i] = (p->offset + length < x->needed ? p->offset + length : x->needed) -
                            p->offset;
        clb_reader_submit(r->reader, &r->reads[i], 1);
        p->offset += length;
        if (p->offset < x->last) continue;
        if (++p->extent < p->places.count) p->offset = p->places.at[p->extent].first;
        else r->queue_head++;
    }
}

/* Takes in one finished read. A short or failed one is read again through the page cache. */
static void settle(clb_model *m, const clb_read *read, clb_error *error) {
    clb_residency *r = m->residency;
    int32_t i = read->tag;
    slot *s = r->read_slot[i];
    int64_t got = read->result > 0 ? read->result : 0, needed = r->read_needed[i];
    if (got < needed && clb_shard_read(&m->shards[r->read_shard[i]], read->offset + got,
                                       needed - got, read->out + got, error))
        s->failed = true;
    s->reads_left--;
    r->free_reads[r->free_count++] = i;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Takes in what is done; waits for one read when asked. False: nothing is left to wait for. */
static bool take_in(clb_model *m, bool wait, clb_error *error) {
    clb_residency *r = m->residency;
    pump(m);
    const clb_read *read = clb_reader_next(r->reader, wait);
    if (!read) return false;
    do settle(m, read, error);
    while ((read = clb_reader_next(r->reader, false)));
    pump(m);
    return true;
}

/* ---- leases --------------------------------------------------------------------------------- */

int64_t clb_residency_room(const clb_residency *r, int64_t layer) {
    if (r->io == CLB_IO_MMAP || r->io == CLB_IO_MMAP_TIGHT) return INT64_MAX;
    return r->pools[layer == r->mtp_layer].count;
}

static void address_lease(const clb_expert *e, const slot_pool *p, clb_lease *lease) {
    const uint8_t *memory = p->memory + lease->slot * p->slot_bytes;
    extents places = extents_of(e);
    clb_matrix *w[3] = {&lease->gate, &lease->up, &lease->down};
    for (int i = 0; i < 3; i++) {
        w[i]->data = part_address(&places, &e->part[2 * i], memory);
        if (e->part[2 * i + 1].bytes)
            w[i]->scales = part_address(&places, &e->part[2 * i + 1], memory);
    }
}

static int32_t load_slot(clb_model *m, clb_lease *lease, int64_t step, clb_error *error) {
    clb_residency *r = m->residency;
    slot_pool *p = pool_of(r, lease->layer);
    int32_t i;
    while ((i = take_slot(p)) == NONE)
        if (!take_in(m, true, error))
            return clb_fail(error, CLB_NO_MEMORY, "layer %d has no free expert slot", lease->layer);
    slot *s = &p->slots[i];
    if (s->layer != NONE) *where_of(m, s->layer, s->expert) = NONE;
    s->layer = lease->layer;
    s->expert = lease->expert;
    s->failed = false;
    s->loaded_step = step;
    s->used_step = -1;
    *where_of(m, lease->layer, lease->expert) = i;
    pending *next = &r->queue[r->queue_tail++ % r->queue_size];
    *next = (pending){.pool = p, .slot = i,
                      .places = extents_of(&m->layers[lease->layer].experts[lease->expert])};
    next->offset = next->places.at[0].first;
    count_reads(s, &next->places);
    lease->slot = i;
    return CLB_OK;
}

/* Empties a slot whose reads failed, so that the expert is read again. */
static bool forget_failed(clb_model *m, slot_pool *p, int32_t i) {
    slot *s = &p->slots[i];
    if (!s->failed || s->reads_left) return false;
    if (s->layer != NONE) *where_of(m, s->layer, s->expert) = NONE;
    s->layer = s->expert = NONE;
    s->failed = false;
    return true;
}

static int32_t lease_slot(clb_model *m, clb_lease *lease, int64_t step, clb_counters *counters,
                          clb_error *error) {
    slot_pool *p = pool_of(m->residency, lease->layer);
    lease->slot = *where_of(m, lease->layer, lease->expert);
    if (lease->slot != NONE && forget_failed(m, p, lease->slot)) lease->slot = NONE;
    if (lease->slot == NONE) {
        int32_t code = load_slot(m, lease, step, error);
        if (code) return code;
        counters->expert_loads++;
        counters->read_bytes += m->layers[lease->layer].expert_bytes;
    } else if (lease->layer == m->residency->mtp_layer) {
        make_newest(p, lease->slot);
    }
    p->slots[lease->slot].pins++;
    address_lease(&m->layers[lease->layer].experts[lease->expert], p, lease);
    lease->ready = p->slots[lease->slot].reads_left == 0 && !p->slots[lease->slot].failed;
    return CLB_OK;
}

static int32_t populate_matrix(const clb_matrix *w, bool start) {
    int64_t scales = w->rows * w->row_scales * (w->scale_format == CLB_F16 ? 2 : 4);
    if (clb_populate(w->data, w->rows * w->row_bytes, start)) return CLB_IO;
    return w->scales ? clb_populate(w->scales, scales, start) : CLB_OK;
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

int32_t clb_residency_lease(clb_model *m, clb_lease *leases, int64_t n, clb_counters *counters,
                            clb_error *error) {
    clb_residency *r = m->residency;
    bool mapped = r->io == CLB_IO_MMAP || r->io == CLB_IO_MMAP_TIGHT;
    for (int64_t i = 0; i < n; i++) {
        const clb_expert *e = &m->layers[leases[i].layer].experts[leases[i].expert];
        leases[i].gate = e->gate;
        leases[i].up = e->up;
        leases[i].down = e->down;
        leases[i].slot = NONE;
        leases[i].ready = mapped;
    }
    if (mapped) return lease_mapped(m, leases, n, error);
    for (int64_t i = 0; i < n; i++) {
        int32_t code = lease_slot(m, &leases[i], counters->forwards, counters, error);
        if (code) return code;
    }
    pump(m);
    return CLB_OK;
}

/* A lease whose reads are done becomes ready; a failed one empties its slot. */
static int32_t check_lease(clb_model *m, clb_lease *lease) {
    slot_pool *p = pool_of(m->residency, lease->layer);
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

int32_t clb_residency_wait(clb_model *m, clb_lease *leases, int64_t n, clb_counters *counters,
                           clb_error *error) {
    int64_t newly = refresh(m, leases, n), begin = newly ? 0 : now_ns();
    while (newly == 0) {
        if (!take_in(m, true, error))
            return clb_fail(error, CLB_IO, "the system lost a read of an expert's weights");
        newly = refresh(m, leases, n);
    }
    if (begin) counters->read_wait_ns += now_ns() - begin;
    return newly < 0 ? CLB_IO : CLB_OK;
}

void clb_residency_release(clb_model *m, clb_lease *leases, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (leases[i].slot != NONE)
            pool_of(m->residency, leases[i].layer)->slots[leases[i].slot].pins--;
}

/* ---- recency in the order of the tokens that were kept -------------------------------------- */

static void commit_row(clb_session *s, int64_t row, bool kept) {
    clb_model *m = s->model;
    slot_pool *p = &m->residency->pools[0];
    int64_t k = m->config.experts_per_token;
    for (int64_t l = 0; l < m->config.layers; l++) {
        if (!m->layers[l].sparse) continue;
        for (int64_t i = 0; i < k; i++) {
            int32_t at = *where_of(m, l, s->routes[l].expert[row * k + i]);
            if (at == NONE) continue;
            slot *held = &p->slots[at];
            if (kept) {
                held->used_step = s->step_id;
                make_newest(p, at);
            } else if (held->loaded_step == s->step_id && held->used_step != s->step_id) {
                make_oldest(p, at);
            }
        }
    }
}

void clb_residency_commit(clb_session *s) {
    int64_t kept = s->length - s->step_start;
    if (kept < 0) kept = 0;
    if (kept > s->step_rows) kept = s->step_rows;
    if (clb_residency_room(s->model->residency, 0) != INT64_MAX)
        for (int64_t r = 0; r < s->step_rows; r++) commit_row(s, r, r < kept);
    s->step_rows = 0;
}

/* ---- the resident set, saved and loaded again ----------------------------------------------- */

int64_t clb_model_resident(const clb_model *m, int32_t *pairs, int64_t most) {
    int64_t n = 0;
    if (!m->residency) return 0;
    for (int pool = 0; pool < 2; pool++) {
        const slot_pool *p = &m->residency->pools[pool];
        if (p->count == 0) continue;
        for (int32_t i = p->newest; i != NONE; i = p->slots[i].older) {
            const slot *s = &p->slots[i];
            if (s->layer == NONE || s->failed || s->reads_left) continue;
            if (n < most) {
                pairs[2 * n] = s->layer;
                pairs[2 * n + 1] = s->expert;
            }
            n++;
        }
    }
    return n;
}

static bool has_expert(const clb_model *m, int32_t layer, int32_t expert) {
    return layer >= 0 && layer < m->layer_count && m->layers[layer].sparse && expert >= 0 &&
           expert < m->config.experts;
}

int32_t clb_model_warm(clb_model *m, const int32_t *pairs, int64_t n, clb_error *error) {
    clb_counters ignored = {0};
    int32_t code = CLB_OK;
    if (!m->residency || m->residency->queue_size == 0) return CLB_OK;
    pthread_mutex_lock(&m->step);
    for (int64_t i = 0; i < n && !code; i++) {
        clb_lease lease = {.layer = pairs[2 * i], .expert = pairs[2 * i + 1]};
        if (!has_expert(m, lease.layer, lease.expert)) continue;
        code = clb_residency_lease(m, &lease, 1, &ignored, error);
        clb_residency_release(m, &lease, 1);
    }
    while (!code && take_in(m, true, error)) continue;
    pthread_mutex_unlock(&m->step);
    return code;
}
