/* Filling slots: an expert's extents are cut into pieces, many of which are in flight at once. */
#include "residency.h"

/* Bytes of one read: large enough for a drive's full rate, small enough that one expert alone keeps
   several reads in flight. */
enum { PIECE = 1 << 20 };

static void count_reads(clb_slot *s, const clb_extents *places) {
    s->reads_left = 0;
    for (int i = 0; i < places->count; i++)
        s->reads_left += (int32_t)((places->at[i].last - places->at[i].first + PIECE - 1) / PIECE);
}

void clb_load_pump(clb_model *m) {
    clb_residency *r = m->residency;
    while (r->queue_head != r->queue_tail && r->free_count > 0) {
        clb_pending *p = &r->queue[r->queue_head % r->queue_size];
        const clb_extent *x = &p->places.at[p->extent];
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
static void settle(clb_model *m, const clb_read *read) {
    clb_residency *r = m->residency;
    int32_t i = read->tag;
    clb_slot *s = r->read_slot[i];
    int64_t got = read->result > 0 ? read->result : 0, needed = r->read_needed[i];
    if (got < needed && clb_shard_read(&m->shards[r->read_shard[i]], read->offset + got,
                                       needed - got, read->out + got, &r->fault))
        s->failed = true;
    s->reads_left--;
    r->free_reads[r->free_count++] = i;
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
    return r->queue_head == r->queue_tail && r->free_count == CLB_READS;
}

void clb_load_start(clb_model *m, clb_slots *pool, int32_t i, int32_t layer, int32_t expert,
                    int64_t step) {
    clb_residency *r = m->residency;
    clb_slot *s = &pool->slots[i];
    clb_pending *next = &r->queue[r->queue_tail++ % r->queue_size];
    s->layer = layer;
    s->expert = expert;
    s->failed = false;
    s->loaded_step = step;
    s->used_step = -1;
    *next = (clb_pending){.pool = pool, .slot = i,
                          .places = clb_extents_of(&m->layers[layer].experts[expert])};
    next->offset = next->places.at[0].first;
    count_reads(s, &next->places);
}
