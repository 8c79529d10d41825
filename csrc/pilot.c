/* Router lookahead. A layer's output is nearly the next layer's router input (only that layer's
   attention is missing), so its router already names most of the experts that will be asked for.
   The surest guesses go to spare slots: they evict nothing, and are read only when nothing else is.
   A wrong one costs the disk what a right one saves, so a rank that is wrong too often rests. */
#include <stdlib.h>
#include <string.h>
#include "residency.h"

enum {
    MOST_ROWS = 8,     /* with more rows the union is most of the layer, and guessing is moot */
    LATEST = 8,        /* worth is a decaying mean of about so many guesses */
    FIRST_GAP = 8,     /* hints between two tries of a rank that rests, doubled by every failure */
    LAST_GAP = 64,
    QUIET = 6,         /* with nothing to read, one hint in 2^QUIET looks again */
};

static const float WORTH = 0.2f; /* a rank is read above this: three of five were asked for */

/* ---- how far each rank is trusted ------------------------------------------------------------ */

static bool may_read(const clb_pilot *p, int32_t rank) {
    return p->trust[rank].worth > WORTH || p->hints >= p->trust[rank].next;
}

static void judge(clb_pilot *p, int32_t rank, bool useful) {
    clb_trust *t = &p->trust[rank];
    t->worth += ((useful ? 1.0f : -1.0f) - t->worth) / LATEST;
    if (useful || t->gap < FIRST_GAP) t->gap = FIRST_GAP;
    else t->gap = clb_least(2 * t->gap, LAST_GAP);
    t->next = p->hints + t->gap;
}

/* ---- guesses that are there ------------------------------------------------------------------ */

static bool stage_holds(const clb_slot *s, int32_t layer, int32_t expert) {
    return s->layer == layer && s->expert == expert && !s->failed;
}

int32_t clb_pilot_adopt(clb_model *m, int32_t layer, int32_t expert) {
    clb_residency *r = m->residency;
    clb_slots *p = &r->pools[0];
    if (!r->pilot.mode || layer == r->mtp_layer) return CLB_NONE;
    for (int i = 0; i < CLB_PILOT_SLOTS; i++) {
        int32_t guess = r->pilot.stage[i];
        if (!stage_holds(&p->slots[guess], layer, expert)) continue;
        int32_t victim = clb_slots_take(p);
        if (victim == CLB_NONE) return CLB_NONE;
        clb_slots_pin(p, victim);
        clb_slot *out = &p->slots[victim];
        if (out->layer != CLB_NONE) *clb_where(m, out->layer, out->expert) = CLB_NONE;
        out->layer = out->expert = CLB_NONE;
        r->pilot.stage[i] = victim;
        clb_slots_heat(p, guess, *clb_heat(m, layer, expert));
        clb_slots_unpin(p, guess);
        *clb_where(m, layer, expert) = guess;
        judge(&r->pilot, r->pilot.rank[i], true);
        return guess;
    }
    return CLB_NONE;
}

/* Guesses for layers that have been computed were wrong. */
static void expire(clb_residency *r, int64_t next_layer) {
    for (int i = 0; i < CLB_PILOT_SLOTS; i++) {
        clb_slot *s = &r->pools[0].slots[r->pilot.stage[i]];
        if (s->layer == CLB_NONE || s->layer == next_layer || s->reads_left) continue;
        s->layer = s->expert = CLB_NONE;
        judge(&r->pilot, r->pilot.rank[i], false);
    }
}

static bool held(const clb_model *m, int32_t layer, int32_t expert) {
    const clb_residency *r = m->residency;
    if (*clb_where(m, layer, expert) != CLB_NONE) return true;
    for (int i = 0; i < CLB_PILOT_SLOTS; i++)
        if (stage_holds(&r->pools[0].slots[r->pilot.stage[i]], layer, expert)) return true;
    return false;
}

/* ---- guesses to be read ---------------------------------------------------------------------- */

/* False: no spare slot is free. */
static bool read_guess(clb_pass *p, int32_t layer, int32_t expert, int32_t rank) {
    clb_residency *r = p->model->residency;
    for (int i = 0; i < CLB_PILOT_SLOTS; i++) {
        const clb_slot *slot = &r->pools[0].slots[r->pilot.stage[i]];
        if (slot->layer != CLB_NONE || slot->reads_left) continue;
        r->pilot.rank[i] = rank;
        r->pilot.trust[rank].next = r->pilot.hints + r->pilot.trust[rank].gap;
        clb_load_start(p->model, &r->pools[0], r->pilot.stage[i], layer, expert);
        p->counters.pilot_reads++;
        p->counters.pilot_bytes += p->model->layers[layer].expert_bytes;
        p->counters.read_bytes += p->model->layers[layer].expert_bytes;
        return true;
    }
    return false;
}

/* The next layer's router on this layer's output: guesses are that layer's routes, for now. */
static void guess_by_router(clb_pass *p, int64_t layer) {
    clb_scratch *t = p->scratch;
    const clb_layer *next = &p->model->layers[layer];
    int64_t hidden = p->model->config.hidden;
    clb_rmsnorm_rows(p->model, t->x, next->v[CLB_POST_NORM], p->n, t->normed, hidden);
    clb_input_set(&t->in_mlp, t->normed, hidden, p->n, hidden);
    clb_route_rows(p, next, layer);
}

/* The surest guess not yet in memory, by the router's choice of any row; CLB_NONE: no more. */
static int32_t surest(const clb_pass *p, int64_t layer) {
    const clb_config *c = &p->model->config;
    const float *bias = p->model->layers[layer].v[CLB_ROUTER_BIAS];
    int64_t k = c->experts_per_token;
    int32_t best = CLB_NONE;
    float most = 0.0f;
    for (int64_t i = 0; i < p->n * k; i++) {
        int32_t e = clb_route_of(p, i / k, layer).expert[i % k];
        float choice = p->scratch->router[i / k * c->experts + e] + bias[e];
        if ((best != CLB_NONE && !(choice > most)) || held(p->model, (int32_t)layer, e)) continue;
        best = e;
        most = choice;
    }
    return best;
}

static int32_t next_fed(const clb_model *m, int64_t layer) {
    const clb_pilot *p = &m->residency->pilot;
    for (int64_t i = 0; p->fed && i < p->fed_count; i++) {
        int32_t e = p->fed[layer * p->fed_count + i];
        if (e >= 0 && !held(m, (int32_t)layer, e)) return e;
    }
    return CLB_NONE;
}

static void read_guesses(clb_pass *p, int64_t layer) {
    clb_pilot *pilot = &p->model->residency->pilot;
    bool routed = pilot->mode == CLB_PILOT_ROUTER;
    if (routed) guess_by_router(p, layer);
    pilot->quiet++;
    for (int32_t rank = 0; rank < CLB_PILOT_SLOTS && may_read(pilot, rank); rank++) {
        int32_t e = routed ? surest(p, layer) : next_fed(p->model, layer);
        if (e == CLB_NONE || !read_guess(p, (int32_t)layer, e, rank)) break;
        pilot->quiet = 0;
    }
    clb_load_pump(p->model);
}

void clb_pilot_hint(clb_pass *p, int64_t layer) {
    clb_model *m = p->model;
    clb_residency *r = m->residency;
    clb_pilot *pilot = &r->pilot;
    if (!pilot->mode || r->pools[0].count == 0 || p->n > MOST_ROWS || layer >= m->config.layers ||
        !m->layers[layer].sparse)
        return;
    clb_load_take_in(m, false);
    expire(r, layer);
    pilot->hints++;
    bool look = pilot->hints % (1 << (pilot->quiet < QUIET ? pilot->quiet : QUIET)) == 0;
    if (look && may_read(pilot, 0) && clb_load_idle(r)) read_guesses(p, layer);
}

static int32_t feed(clb_model *m, const int32_t *guesses, int64_t count, clb_error *error) {
    int64_t n, layers = m->config.layers;
    clb_pilot *p = m->residency ? &m->residency->pilot : NULL;
    if (!p || p->mode != CLB_PILOT_FED || count < 1 || !clb_mul(layers, count, &n))
        return clb_fail(error, CLB_INVALID, "the pilot takes no guesses now");
    for (int64_t i = 0; i < n; i++)
        if (guesses[i] < -1 || guesses[i] >= m->config.experts)
            return clb_fail(error, CLB_INVALID, "there is no expert %d", guesses[i]);
    int32_t *fed = malloc((size_t)n * sizeof *fed);
    if (!fed) return clb_fail(error, CLB_NO_MEMORY, "out of memory for %lld guesses", (long long)n);
    memcpy(fed, guesses, (size_t)n * sizeof *fed);
    free(p->fed);
    p->fed = fed;
    p->fed_count = count;
    return CLB_OK;
}

int32_t clb_model_feed_pilot(clb_model *m, const int32_t *guesses, int64_t count,
                             clb_error *error) {
    int32_t code = clb_lock(m, error);
    if (code) return code;
    code = feed(m, guesses, count, error);
    clb_unlock(m);
    return code;
}
