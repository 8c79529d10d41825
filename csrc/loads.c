/* Filling slots: an expert's extents are cut into pieces, many of which are in flight at once. */
#include <errno.h>
#include "residency.h"

/* Bytes of one read: large enough for a drive's full rate, small enough that one expert alone keeps
   several reads in flight. */
enum { PIECE = 1 << 20 };

static void count_reads(clb_slot *s, const clb_extents *places) {
    s->reads_left = 0;
    for (int i = 0; i < places->count; i++)
        s->reads_left += (int32_t)((places->at[i].last - places->at[i].first + PIECE - 1) / PIECE);
}

static bool is_sound(const clb_copy *copy) { return copy->fd >= 0 && !copy->failed; }

/* Past the page cache: the drive with the fewest bytes in flight; so a faster one gets more, and
   one that fails at once must not be asked again. */
static int32_t idlest_drive(const clb_residency *r, const clb_shard *shard) {
    int32_t best = CLB_NONE;
    for (int32_t i = 1; i <= CLB_DRIVES; i++) {
        int32_t drive = (r->last_drive + i) % CLB_DRIVES;
        if (!is_sound(&shard->copy[drive])) continue;
        if (best == CLB_NONE || r->bytes_in_flight[drive] < r->bytes_in_flight[best]) best = drive;
    }
    return best == CLB_NONE ? 0 : best;
}

/* Through the page cache: a piece always comes from the same drive, or it would be kept twice. */
static int32_t drive_of_piece(const clb_shard *shard, int64_t offset) {
    int64_t copies = 0;
    int32_t drive = 0;
    for (int32_t i = 0; i < CLB_DRIVES; i++) copies += is_sound(&shard->copy[i]);
    if (copies == 0) return 0;
    for (int64_t before = offset / PIECE % copies;; drive++) {
        if (!is_sound(&shard->copy[drive])) continue;
        if (before-- == 0) return drive;
    }
}

/* The next piece of the head of the queue, from one drive. */
static void submit_piece(clb_model *m, clb_pending *p, int32_t drive) {
    clb_residency *r = m->residency;
    const clb_extent *x = &p->places.at[p->extent];
    const clb_copy *copy = &m->shards[x->shard].copy[drive];
    int64_t length = x->last - p->offset < PIECE ? x->last - p->offset : PIECE;
    int64_t end = p->offset + length < x->needed ? p->offset + length : x->needed;
    int32_t i = r->free_reads[--r->free_count];
    bool direct = r->io == CLB_IO_DIRECT && copy->direct_fd >= 0 && !copy->buffered;
    r->reads[i] = (clb_read){.fd = direct ? copy->direct_fd : copy->fd, .offset = p->offset,
                             .length = (uint32_t)length, .tag = i};
    r->reads[i].out = p->pool->memory + p->slot * p->pool->slot_bytes + x->out +
                      (p->offset - x->first);
    r->flights[i] = (clb_flight){.pool = p->pool, .needed = end - p->offset, .slot = p->slot,
                                 .shard = x->shard, .drive = drive};
    r->reads_in_flight[drive]++;
    r->bytes_in_flight[drive] += length;
    r->last_drive = drive;
    if (drive > 0) r->mirror_bytes += length;
    clb_reader_submit(r->reader, &r->reads[i]);
    p->offset += length;
}

void clb_load_pump(clb_model *m) {
    clb_residency *r = m->residency;
    while (r->queue_head != r->queue_tail) {
        clb_pending *p = &r->queue[r->queue_head % r->queue_size];
        const clb_extent *x = &p->places.at[p->extent];
        const clb_shard *shard = &m->shards[x->shard];
        int32_t drive = r->io == CLB_IO_DIRECT ? idlest_drive(r, shard)
                                               : drive_of_piece(shard, p->offset);
        if (r->reads_in_flight[drive] == CLB_READS) return;
        submit_piece(m, p, drive);
        if (p->offset < x->last) continue;
        if (++p->extent < p->places.count) p->offset = p->places.at[p->extent].first;
        else r->queue_head++;
    }
}

/* Whether a read that did not give all it should says something about the file or its drive. */
static bool tells_of_copy(int32_t result) {
    return result != -EINVAL && result != -EINTR && result != -EAGAIN && result != -ENOMEM &&
           result != -ECANCELED;
}

/* Takes in one finished read. A short or failed one is repeated through the page cache. Some file
   systems open files for direct reads and then refuse each: one that does is not asked again. */
static void settle(clb_model *m, const clb_read *read) {
    clb_residency *r = m->residency;
    const clb_flight *flight = &r->flights[read->tag];
    clb_copy *copy = &m->shards[flight->shard].copy[flight->drive];
    int64_t got = read->result > 0 ? read->result : 0;
    copy->buffered |= read->result == -EINVAL && read->fd == copy->direct_fd;
    if (got < flight->needed) {
        r->repeated_reads++;
        copy->failed |= tells_of_copy(read->result);
        if (clb_shard_read(&m->shards[flight->shard], read->offset + got, flight->needed - got,
                           read->out + got, &r->fault))
            flight->pool->slots[flight->slot].failed = true;
    }
    clb_slots_read(flight->pool, flight->slot);
    r->reads_in_flight[flight->drive]--;
    r->bytes_in_flight[flight->drive] -= read->length;
    r->free_reads[r->free_count++] = read->tag;
}

bool clb_load_take_in(clb_model *m, bool wait) {
    clb_residency *r = m->residency;
    clb_load_pump(m);
    const clb_read *read = clb_reader_next(r->reader, wait);
    if (!read) return false;
    do settle(m, read);
    while ((read = clb_reader_next(r->reader, false)));
    clb_load_pump(m);
    return true;
}

bool clb_load_idle(const clb_residency *r) {
    return r->queue_head == r->queue_tail && r->free_count == CLB_ALL_READS;
}

void clb_load_start(clb_model *m, clb_slots *pool, int32_t i, int32_t layer, int32_t expert) {
    clb_residency *r = m->residency;
    clb_slot *s = &pool->slots[i];
    clb_pending *next = &r->queue[r->queue_tail++ % r->queue_size];
    s->layer = layer;
    s->expert = expert;
    s->failed = false;
    *next = (clb_pending){.pool = pool, .slot = i,
                          .places = clb_extents_of(&m->layers[layer].experts[expert])};
    next->offset = next->places.at[0].first;
    count_reads(s, &next->places);
}
