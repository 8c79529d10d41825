/* The router: sigmoid scores, groups, a bias that selects only, top-k, normalised weights. */
#include <math.h>
#include <stdlib.h>
#include "core.h"

/* Below every other choice, but still one: a group's sum of two must not become -inf. */
static const float LAST = -1e38f;

typedef struct route_job {
    const clb_pass *p;
    const clb_layer *layer;
    int64_t number;
} route_job;

/* Best of choice[first, last) that is not yet -inf; the lowest index wins ties. -1: none left. */
static int32_t best_of(const float *choice, int64_t first, int64_t last) {
    int32_t best = -1;
    for (int64_t e = first; e < last; e++)
        if (choice[e] > -INFINITY && (best < 0 || choice[e] > choice[best])) best = (int32_t)e;
    return best;
}

/* A group's score is the sum of its two best choices. */
static float group_score(float *choice, int64_t first, int64_t last) {
    int32_t a = best_of(choice, first, last);
    float top = choice[a];
    choice[a] = -INFINITY;
    int32_t b = best_of(choice, first, last);
    choice[a] = top;
    return b < 0 ? top : top + choice[b];
}

/* Leaves -inf in every group but the groups_kept best. */
static void keep_groups(const clb_config *c, float *choice) {
    int64_t size = c->experts / c->groups;
    float score[CLB_MAX_EXPERTS];
    bool kept[CLB_MAX_EXPERTS] = {false};
    if (c->groups_kept == c->groups) return;
    for (int64_t g = 0; g < c->groups; g++)
        score[g] = group_score(choice, g * size, (g + 1) * size);
    for (int64_t i = 0; i < c->groups_kept; i++) {
        int32_t best = best_of(score, 0, c->groups);
        kept[best] = true;
        score[best] = -INFINITY;
    }
    for (int64_t e = 0; e < c->experts; e++)
        if (!kept[e / size]) choice[e] = -INFINITY;
}

static int by_id(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

/* score: sigmoid of the router's logits, [experts]. */
static void route_row(const clb_config *c, const float *score, const float *bias, int32_t *expert,
                      float *weight) {
    float choice[CLB_MAX_EXPERTS], sum = 0.0f;
    int64_t k = c->experts_per_token;
    for (int64_t e = 0; e < c->experts; e++) {
        choice[e] = score[e] + bias[e];
        if (!(choice[e] >= LAST)) choice[e] = LAST; /* NaN too */
    }
    keep_groups(c, choice);
    for (int64_t i = 0; i < k; i++) {
        expert[i] = best_of(choice, 0, c->experts);
        choice[expert[i]] = -INFINITY;
    }
    qsort(expert, (size_t)k, sizeof *expert, by_id);
    for (int64_t i = 0; i < k; i++) sum += score[expert[i]];
    for (int64_t i = 0; i < k; i++) {
        float a = score[expert[i]];
        weight[i] = (c->normalize_topk ? a / (sum + 1e-20f) : a) * c->routed_scale;
    }
}

static void route_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    route_job *job = arg;
    const clb_model *m = job->p->model;
    const clb_config *c = &m->config;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *score = job->p->scratch->router + r * c->experts;
        clb_route route = clb_route_of(job->p, r, job->number);
        m->kernels->sigmoid(score, c->experts, score);
        route_row(c, score, job->layer->v[CLB_ROUTER_BIAS], route.expert, route.weight);
    }
}

void clb_route_rows(clb_pass *p, const clb_layer *layer, int64_t number) {
    const clb_model *m = p->model;
    clb_scratch *t = p->scratch;
    route_job job = {p, layer, number};
    clb_project(m, &layer->w[CLB_ROUTER], &t->in_mlp, t->router, m->config.experts);
    clb_parallel(m->pool, p->n, 4, route_rows, &job);
}
