/* DSA: a light scorer chooses the index_topk keys each row attends to (DeepSeek-V3.2's lightning
   indexer; full layers choose, shared layers reuse the choice). */
#include <math.h>
#include <string.h>
#include "core.h"

enum { TASK_KEYS = 256 }; /* keys scored by one task */

typedef struct index_job {
    const clb_pass *p;
    const clb_layer *layer;
    int64_t number;   /* of the layer */
    int64_t first, n; /* rows [first, first + n) of the pass */
    int64_t tasks;    /* of each row */
} index_job;

static const clb_cache *index_keys_of(const index_job *job, int64_t r) {
    return &job->p->scratch->rows[r].part->session->index_keys[job->number];
}

static void finish_index_keys(void *arg, int64_t begin, int64_t end, int32_t thread) {
    index_job *job = arg;
    const clb_scratch *t = job->p->scratch;
    const clb_config *c = &job->p->model->config;
    const clb_kernels *k = job->p->model->kernels;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *key = t->new_keys + r * c->index_dim;
        k->layernorm(key, job->layer->v[CLB_INDEX_K_NORM], job->layer->v[CLB_INDEX_K_BIAS],
                     c->index_eps, c->index_dim, key);
        k->rope(key, t->angles + r * c->rope, c->rope / 2);
        clb_cache_put(k, index_keys_of(job, r), t->rows[r].position, key);
    }
}

void clb_index_write(clb_pass *p, const clb_layer *layer, int64_t number) {
    index_job job = {p, layer, number, 0, p->n, 0};
    clb_project(p->model, &layer->w[CLB_INDEX_K], &p->scratch->in_hidden, p->scratch->new_keys,
                p->model->config.index_dim);
    clb_parallel(p->model->pool, p->n, 8, finish_index_keys, &job);
}

/* ---- scores --------------------------------------------------------------------------------- */

static void score_keys(void *arg, int64_t begin, int64_t end, int32_t thread) {
    index_job *job = arg;
    const clb_scratch *t = job->p->scratch;
    const clb_config *c = &job->p->model->config;
    const clb_kernels *k = job->p->model->kernels;
    float *room = clb_thread_keys(t, thread);
    for (int64_t i = begin; i < end; i++) {
        int64_t r = i / job->tasks, first = i % job->tasks * TASK_KEYS, row = job->first + r;
        int64_t last = clb_least(first + TASK_KEYS, t->rows[row].position + 1);
        if (t->rows[row].position < c->index_topk) continue; /* takes all */
        for (int64_t n; first < last; first += n) {
            n = clb_least(last - first, CLB_KEY_TILE);
            k->index_scores(t->index_query + row * c->index_heads * c->index_dim,
                            t->index_weight + row * c->index_heads, c->index_heads, c->index_dim,
                            clb_cache_rows(k, index_keys_of(job, row), first, n, room), n,
                            t->index_score + r * t->context + first);
        }
    }
}

/* ---- the topk best, ascending --------------------------------------------------------------- */

/* Smaller is better: higher score first, then the lower position. NaN ranks last. */
static uint64_t rank_of(float score, int64_t position) {
    uint32_t bits;
    score = score != score ? -INFINITY : score + 0.0f; /* -0 and +0 tie */
    memcpy(&bits, &score, sizeof bits);
    bits = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    return (uint64_t)bits << 32 | (uint64_t)position;
}

/* The k-th smallest (k from 0) of n distinct values; reorders them. Quickselect; its partition has
   no branch to mispredict, and pivots are drawn: fixed ones take quadratic time on some rows. */
static uint64_t kth_smallest(uint64_t *v, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    uint64_t drawn = 0x9e3779b97f4a7c15u;
    while (low < high) {
        drawn = drawn * 6364136223846793005u + 1442695040888963407u;
        int64_t middle = low + (int64_t)((drawn >> 32) * (uint64_t)(high - low + 1) >> 32);
        int64_t below = low;
        uint64_t pivot = v[middle];
        v[middle] = v[high];
        for (int64_t i = low; i < high; i++) {
            uint64_t value = v[i];
            v[i] = v[below];
            v[below] = value;
            below += value < pivot;
        }
        v[high] = v[below];
        v[below] = pivot;
        if (k == below) break;
        if (k < below) high = below - 1;
        else low = below + 1;
    }
    return v[k];
}

static void select_row(int64_t topk, const float *score, clb_selection *out, uint64_t *order) {
    int64_t n = out->count, kept = 0;
    for (int64_t t = 0; t < n; t++) order[t] = rank_of(score[t], t);
    uint64_t limit = kth_smallest(order, n, topk - 1);
    for (int64_t t = 0; t < n; t++)
        if (rank_of(score[t], t) <= limit) out->index[kept++] = (int32_t)t;
    out->count = (int32_t)kept;
    out->dense = false;
}

static void select_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    index_job *job = arg;
    const clb_scratch *t = job->p->scratch;
    int64_t topk = job->p->model->config.index_topk;
    for (int64_t r = begin; r < end; r++) {
        clb_selection *row = &t->selected[job->first + r];
        if (row->count > topk)
            select_row(topk, t->index_score + r * t->context, row,
                       t->index_order + thread * t->context);
    }
}

static void make_index_queries(clb_pass *p, const clb_layer *layer) {
    clb_scratch *t = p->scratch;
    const clb_model *m = p->model;
    const clb_config *c = &m->config;
    float scale = 1.0f / sqrtf((float)c->index_heads * (float)c->index_dim);
    p->counters.dense_bytes += clb_matrix_bytes(&layer->w[CLB_INDEX_Q]) +
                               clb_matrix_bytes(&layer->w[CLB_INDEX_WEIGHTS]);
    clb_project(m, &layer->w[CLB_INDEX_Q], &t->in_latent, t->index_query,
                c->index_heads * c->index_dim);
    clb_project(m, &layer->w[CLB_INDEX_WEIGHTS], &t->in_hidden, t->index_weight, c->index_heads);
    m->kernels->scale(scale, t->index_weight, p->n * c->index_heads);
    for (int64_t i = 0; i < p->n * c->index_heads; i++)
        m->kernels->rope(t->index_query + i * c->index_dim,
                         t->angles + i / c->index_heads * c->rope, c->rope / 2);
}

void clb_index_select(clb_pass *p, const clb_layer *layer, int64_t number) {
    const clb_row *rows = p->scratch->rows;
    const int64_t topk = p->model->config.index_topk;
    if (clb_last_position(p, 0, p->n) < topk) return; /* every row attends to all */
    make_index_queries(p, layer);
    for (int64_t first = 0; first < p->n; first += CLB_ROW_BLOCK) {
        index_job job = {p, layer, number, first, clb_least(CLB_ROW_BLOCK, p->n - first), 0};
        job.tasks = clb_last_position(p, first, job.n) / TASK_KEYS + 1;
        for (int64_t r = first; r < first + job.n; r++)
            if (rows[r].position >= topk) rows[r].part->own.index_scores += rows[r].position + 1;
        clb_parallel(p->model->pool, job.n * job.tasks, 1, score_keys, &job);
        clb_parallel(p->model->pool, job.n, 1, select_rows, &job);
    }
}
