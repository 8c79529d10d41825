/* Rows of one session, or of several, side by side through the layers. What a row gives depends on
   its own session alone, so that company changes nothing but the clock. */
#include <poll.h>
#include <string.h>
#include "core.h"

clb_pass clb_pass_of(clb_part *parts, int64_t count) {
    clb_pass p = {.model = parts->session->model, .scratch = parts->session->scratch,
                  .parts = parts, .part_count = count};
    for (int64_t i = 0; i < count; i++) {
        parts[i].first = p.n;
        p.n += parts[i].n;
    }
    return p;
}

static void set_angles(const clb_pass *p, int64_t r) {
    const clb_config *c = &p->model->config;
    clb_rope_angles(p->scratch->rows[r].position, p->model->inv_freq, c->rope / 2,
                    p->scratch->angles + r * c->rope);
}

void clb_pass_lay(clb_pass *p) {
    for (int64_t i = 0; i < p->part_count; i++) {
        clb_part *part = &p->parts[i];
        for (int64_t r = 0; r < part->n; r++) {
            p->scratch->rows[part->first + r] = (clb_row){part, part->position + r};
            set_angles(p, part->first + r);
        }
    }
}

void clb_pass_last(clb_pass *p) {
    clb_scratch *t = p->scratch;
    int64_t last = p->n - 1, hidden = p->model->config.hidden;
    clb_part *part = t->rows[last].part;
    memmove(t->x, t->x + last * hidden, (size_t)hidden * sizeof *t->x);
    t->rows[0] = t->rows[last];
    part->position = t->rows[0].position;
    part->first = 0;
    part->n = p->n = 1;
    p->parts = part;
    p->part_count = 1;
    set_angles(p, 0);
}

/* ---- what its rows need ---------------------------------------------------------------------- */

clb_route clb_route_of(const clb_pass *p, int64_t r, int64_t number) {
    const clb_part *part = p->scratch->rows[r].part;
    const clb_route *route = &part->session->routes[number];
    int64_t at = (r - part->first) * p->model->config.experts_per_token;
    return (clb_route){route->expert + at, route->weight + at};
}

int64_t clb_last_position(const clb_pass *p, int64_t first, int64_t n) {
    int64_t last = 0;
    for (int64_t r = first; r < first + n; r++)
        last = clb_most(last, p->scratch->rows[r].position);
    return last;
}

/* ---- whoever waits for it -------------------------------------------------------------------- */

static bool wants_to_stop(clb_session *s) {
    if (atomic_load_explicit(&s->cancelled, memory_order_relaxed)) return true;
    if (s->watch_fd < 0) return false;
    struct pollfd fd = {.fd = s->watch_fd, .events = POLLIN};
    return poll(&fd, 1, 0) > 0;
}

bool clb_cancelled(const clb_pass *p) {
    for (int64_t i = 0; i < p->part_count; i++)
        if (wants_to_stop(p->parts[i].session)) return true;
    return false;
}

void clb_tell(const clb_pass *p, int64_t number, double share) {
    double done = ((double)number + share) / (double)p->model->config.layers;
    for (int64_t i = 0; i < p->part_count && done < 1.0; i++) {
        const clb_session *s = p->parts[i].session;
        if (s->report) s->report(s->who, done);
    }
}

/* ---- what it cost ---------------------------------------------------------------------------- */

enum { COUNTERS = sizeof(clb_counters) / sizeof(int64_t) }; /* a struct of nothing else */

void clb_pass_charge(clb_pass *p) {
    int64_t all[COUNTERS], own[COUNTERS];
    memcpy(all, &p->counters, sizeof all);
    for (int64_t i = 0; i < p->part_count && p->n > 0; i++) {
        clb_part *part = &p->parts[i];
        int64_t *sums[] = {(int64_t *)&part->session->counters,
                           (int64_t *)&part->session->work[part->work]};
        memcpy(own, &part->own, sizeof own);
        for (int c = 0; c < COUNTERS; c++) { /* shares that add up to the whole */
            own[c] += all[c] * (part->first + part->n) / p->n - all[c] * part->first / p->n;
            for (int s = 0; s < 2; s++) sums[s][c] += own[c];
        }
    }
}
