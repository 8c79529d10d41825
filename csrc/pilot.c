/* Router lookahead. A layer's output is nearly the next layer's router input (only that layer's
   attention is missing), so its router already names most of the experts that will be asked for.
   Guesses go to spare slots: they evict nothing, and are read only when nothing else is. */
#include <stdlib.h>
#include <string.h>
#include "residency.h"

enum {
    MOST_ROWS = 8,    /* with more rows the union is most of the layer, and guessing is moot */
    TRIAL = 32,       /* guesses judged before the pilot itself is */
    PAUSE_STEPS = 64, /* steps without guesses after a trial that did not pay */
};

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
        clb_slots_unlink(p, victim);
        clb_slot *out = &p->slots[victim];
        if (out->layer != CLB_NONE) *clb_where(m, out->layer, out->expert) = CLB_NONE;
        out->layer = out->expert = CLB_NONE;
        r->pilot.stage[i] = victim;
        clb_slots_link(p, guess);
        *clb_where(m, layer, expert) = guess;
        r->pilot.useful++;
        r->pilot.settled++;
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
        r->pilot.settled++;
    }
}

/* After TRIAL guesses fewer than half of which were asked for, the pilot rests. */
static void judge(clb_pilot *p, int64_t step) {
    if (p->settled < TRIAL) return;
    if (2 * p->useful < p->settled) p->resume_step = step + PAUSE_STEPS;
    p->useful = p->settled = 0;
}

static void read_guess(clb_session *s, int32_t layer, int32_t expert) {
    clb_model *m = s->model;
    clb_residency *r = m->residency;
    int32_t free_slot = CLB_NONE;
    if (expert < 0 || *clb_where(m, layer, expert) != CLB_NONE) return;
    for (int i = 0; i < CLB_PILOT_SLOTS; i++) {
        const clb_slot *held = &r->pools[0].slots[r->pilot.stage[i]];
        if (stage_holds(held, layer, expert)) return;
        if (held->layer == CLB_NONE && held->reads_left == 0) free_slot = r->pilot.stage[i];
    }
    if (free_slot == CLB_NONE) return;
    clb_load_start(m, &r->pools[0], free_slot, layer, expert, s->step_id);
    s->counters.pilot_reads++;
}

/* The next layer's router on this layer's output: guesses in s->routes[layer], for now. */
static void guess_by_router(clb_session *s, int64_t layer, int64_t rows) {
    const clb_layer *next = &s->model->layers[layer];
    int64_t hidden = s->model->config.hidden;
    clb_rmsnorm_rows(s->model, s->x, next->v[CLB_POST_NORM], rows, s->normed, hidden);
    clb_input_set(&s->in_mlp, s->normed, hidden, rows, hidden);
    clb_route_rows(s, next, layer, rows);
}

void clb_pilot_hint(clb_session *s, int64_t layer, int64_t rows) {
    clb_model *m = s->model;
    clb_residency *r = m->residency;
    int64_t k = m->config.experts_per_token, guesses = rows * k;
    if (!r->pilot.mode || r->pools[0].count == 0 || rows > MOST_ROWS ||
        layer >= m->config.layers || !m->layers[layer].sparse)
        return;
    clb_load_take_in(m, false, NULL);
    expire(r, layer);
    judge(&r->pilot, s->step_id);
    if (s->step_id < r->pilot.resume_step || !clb_load_idle(r)) return;
    const int32_t *ids = s->routes[layer].expert;
    if (r->pilot.mode == CLB_PILOT_ROUTER) {
        guess_by_router(s, layer, rows);
    } else {
        ids = r->pilot.fed ? r->pilot.fed + layer * r->pilot.fed_count : NULL;
        guesses = r->pilot.fed_count;
    }
    for (int64_t i = 0; ids && i < guesses; i++) read_guess(s, (int32_t)layer, ids[i]);
    clb_load_pump(m);
}

int32_t clb_model_feed_pilot(clb_model *m, const int32_t *guesses, int64_t count,
                             clb_error *error) {
    int64_t n, layers = m->config.layers;
    clb_pilot *p = m->residency ? &m->residency->pilot : NULL;
    if (!p || p->mode != CLB_PILOT_FED || count < 1 || !clb_mul(layers, count, &n))
        return clb_fail(error, CLB_INVALID, "the pilot takes no guesses now");
    for (int64_t i = 0; i < n; i++)
        if (guesses[i] < -1 || guesses[i] >= m->config.experts)
            return clb_fail(error, CLB_INVALID, "there is no expert %d", guesses[i]);
    int32_t *fed = malloc((size_t)n * sizeof *fed);
    if (!fed) return clb_fail(error, CLB_NO_MEMORY, "out of memory");
    memcpy(fed, guesses, (size_t)n * sizeof *fed);
    free(p->fed);
    p->fed = fed;
    p->fed_count = count;
    return CLB_OK;
}
