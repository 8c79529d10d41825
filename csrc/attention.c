/* Absorbed multi-head latent attention: queries are carried into the latent space, so that the
   cache holds kv_lora + rope floats a token, shared by all heads. */
#include <math.h>
#include <string.h>
#include "core.h"

enum {
    NEAR_KEYS = 8,    /* so many of them stay in L1, */
    NEAR_WIDTH = 128, /* or of all of them so many numbers */
};

typedef struct attention_job {
    const clb_pass *p;
    const clb_layer *layer;
    int64_t number;   /* of the layer */
    int64_t first, n; /* rows [first, first + n) of the pass */
} attention_job;

/* ---- keys ----------------------------------------------------------------------------------- */

static void finish_keys(void *arg, int64_t begin, int64_t end, int32_t thread) {
    attention_job *job = arg;
    const clb_scratch *t = job->p->scratch;
    const clb_config *c = &job->p->model->config;
    const clb_kernels *k = job->p->model->kernels;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const clb_row *row = &t->rows[r];
        float *key = t->new_keys + r * (c->kv_lora + c->rope);
        k->rmsnorm(key, job->layer->v[CLB_KV_A_NORM], c->rms_eps, c->kv_lora, key);
        k->rope(key + c->kv_lora, t->angles + r * c->rope, c->rope / 2);
        clb_cache_put(k, &row->part->session->kv[job->number], row->position, key);
    }
}

void clb_write_keys(clb_pass *p, const clb_layer *layer, int64_t number) {
    const clb_model *m = p->model;
    attention_job job = {p, layer, number, 0, p->n};
    clb_project(m, &layer->w[CLB_KV_A], &p->scratch->in_hidden, p->scratch->new_keys,
                m->config.kv_lora + m->config.rope);
    clb_parallel(m->pool, p->n, 8, finish_keys, &job);
    if (layer->index_kind == CLB_INDEX_FULL) clb_index_write(p, layer, number);
}

/* ---- queries into the latent space ---------------------------------------------------------- */

/* What head h's query of row r became: [kv_lora + rope]. */
static float *latent_of(const attention_job *job, int64_t h, int64_t r) {
    const clb_config *c = &job->p->model->config;
    return job->p->scratch->absorbed + (h * job->n + r) * (c->kv_lora + c->rope);
}

/* [sum over nope rows of kv_b, in order | roped query], for one head. */
static void absorb_head(const attention_job *job, int64_t h, float *rows) {
    const clb_scratch *t = job->p->scratch;
    const clb_config *c = &job->p->model->config;
    const clb_kernels *k = job->p->model->kernels;
    int64_t head = c->nope + c->rope;
    const float *at[CLB_ROW_TILE];
    for (int64_t r = 0; r < job->n; r++) {
        float *out = latent_of(job, h, r);
        const float *query = t->query + ((job->first + r) * c->heads + h) * head;
        memset(out, 0, (size_t)c->kv_lora * sizeof *out);
        memcpy(out + c->kv_lora, query + c->nope, (size_t)c->rope * sizeof *out);
    }
    for (int i = 0; i < CLB_ROW_TILE; i++) at[i] = rows + i * c->kv_lora;
    for (int64_t i = 0; i < c->nope; i += CLB_ROW_TILE) {
        int64_t n = c->nope - i < CLB_ROW_TILE ? c->nope - i : CLB_ROW_TILE;
        k->dequantize(&job->layer->w[CLB_KV_B], h * (c->nope + c->v_head) + i, n, rows);
        for (int64_t r = 0; r < job->n; r++)
            k->axpys(t->query + ((job->first + r) * c->heads + h) * head + i, at, n,
                     latent_of(job, h, r), c->kv_lora);
    }
}

static void absorb_queries(void *arg, int64_t begin, int64_t end, int32_t thread) {
    attention_job *job = arg;
    for (int64_t h = begin; h < end; h++)
        absorb_head(job, h, clb_thread_scratch(job->p->scratch, thread));
}

/* ---- scores, softmax, weighted latents ------------------------------------------------------ */

typedef struct key_walk { /* one row's keys, for the heads of a group */
    const clb_kernels *k;
    const clb_selection *keys;
    const clb_cache *kv;
    float *room; /* [CLB_KEY_TILE][width] */
    int64_t width, kv_lora, heads;
    float *latent[CLB_HEAD_GROUP]; /* the heads' queries, then their sums of latents */
    float *scores;             /* [heads][keys->count] */
} key_walk;

/* Where the keys from number t on are; returns how many, at most CLB_KEY_TILE. */
static int64_t find_keys(const key_walk *walk, int64_t t, const float **at) {
    const clb_selection *keys = walk->keys;
    int64_t n = clb_least(keys->count - t, CLB_KEY_TILE);
    for (int64_t i = 0; i < n; i++)
        at[i] = clb_cache_rows(walk->k, walk->kv, keys->dense ? t + i : keys->index[t + i], 1,
                               walk->room + i * walk->width);
    return n;
}

static void score_keys(const key_walk *walk) {
    const float *key[CLB_KEY_TILE];
    int64_t count = walk->keys->count;
    for (int64_t t = 0, n; t < count; t += n) {
        n = find_keys(walk, t, key);
        for (int64_t i = 0; i < n; i += NEAR_KEYS)
            for (int64_t h = 0; h < walk->heads; h++)
                walk->k->dots(key + i, n - i < NEAR_KEYS ? n - i : NEAR_KEYS, walk->latent[h],
                              walk->width, walk->scores + h * count + t + i);
    }
}

static void mix_latents(const key_walk *walk) {
    const float *key[CLB_KEY_TILE];
    int64_t count = walk->keys->count;
    for (int64_t t = 0, n; t < count; t += n) {
        n = find_keys(walk, t, key);
        for (int64_t c = 0, wide; c < walk->kv_lora; c += wide) {
            wide = walk->kv_lora - c < NEAR_WIDTH ? walk->kv_lora - c : NEAR_WIDTH;
            for (int64_t h = 0; h < walk->heads; h++)
                walk->k->axpys(walk->scores + h * count + t, key, n, walk->latent[h] + c, wide);
            for (int64_t i = 0; i < n; i++) key[i] += wide;
        }
    }
}

static void attend_group(const attention_job *job, int64_t r, int64_t first_head, int64_t heads,
                         int32_t thread) {
    const clb_config *c = &job->p->model->config;
    const clb_kernels *k = job->p->model->kernels;
    const clb_selection *keys = &job->p->scratch->selected[job->first + r];
    const clb_cache *kv = &job->p->scratch->rows[job->first + r].part->session->kv[job->number];
    float *scores = clb_thread_scratch(job->p->scratch, thread);
    key_walk walk = {k, keys, kv, clb_thread_keys(job->p->scratch, thread), kv->width, c->kv_lora,
                     heads, {0}, scores};
    for (int64_t h = 0; h < heads; h++) walk.latent[h] = latent_of(job, first_head + h, r);
    score_keys(&walk);
    for (int64_t h = 0; h < heads; h++) {
        k->scale(1.0f / sqrtf((float)(c->nope + c->rope)), scores + h * keys->count, keys->count);
        k->softmax(scores + h * keys->count, keys->count);
        memset(walk.latent[h], 0, (size_t)c->kv_lora * sizeof *walk.latent[h]);
    }
    mix_latents(&walk);
}

static void attend_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    attention_job *job = arg;
    int64_t heads = job->p->model->config.heads;
    int64_t groups = (heads + CLB_HEAD_GROUP - 1) / CLB_HEAD_GROUP;
    for (int64_t i = begin; i < end; i++) {
        int64_t first = i % groups * CLB_HEAD_GROUP;
        int64_t n = heads - first < CLB_HEAD_GROUP ? heads - first : CLB_HEAD_GROUP;
        attend_group(job, i / groups, first, n, thread);
    }
}

/* heads_out[r][h] = value rows of kv_b times the weighted latent, as any linear. */
static void expand_values(void *arg, int64_t begin, int64_t end, int32_t thread) {
    attention_job *job = arg;
    const clb_scratch *t = job->p->scratch;
    const clb_config *c = &job->p->model->config;
    const clb_kernels *k = job->p->model->kernels;
    const int32_t format = job->layer->w[CLB_KV_B].format;
    const clb_acts *mixed = &t->in_mixed.form[clb_order_of(format)];
    (void)thread;
    for (int64_t h = begin; h < end; h++) {
        clb_matrix values = clb_matrix_part(&job->layer->w[CLB_KV_B],
                                            h * (c->nope + c->v_head) + c->nope, c->v_head);
        clb_acts rows = clb_acts_part(mixed, h * job->n, (h + 1) * job->n);
        for (int64_t r = 0; r < job->n && !clb_is_float(format); r++)
            k->quantize(&rows, r, format);
        k->linear[format](&values, &rows, 0, c->v_head,
                          t->heads_out + (job->first * c->heads + h) * c->v_head,
                          c->heads * c->v_head);
    }
}

/* ---- one layer's attention ------------------------------------------------------------------ */

static void rope_queries(void *arg, int64_t begin, int64_t end, int32_t thread) {
    attention_job *job = arg;
    const clb_scratch *t = job->p->scratch;
    const clb_config *c = &job->p->model->config;
    int64_t head = c->nope + c->rope;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        for (int64_t h = 0; h < c->heads; h++)
            job->p->model->kernels->rope(t->query + (r * c->heads + h) * head + c->nope,
                                         t->angles + r * c->rope, c->rope / 2);
}

static void make_queries(attention_job *job) {
    clb_scratch *t = job->p->scratch;
    const clb_model *m = job->p->model;
    const clb_layer *layer = job->layer;
    const clb_config *c = &m->config;
    int64_t n = job->p->n;
    clb_project(m, &layer->w[CLB_Q_A], &t->in_hidden, t->q_latent, c->q_lora);
    for (int64_t r = 0; r < n; r++) {
        float *q = t->q_latent + r * c->q_lora;
        m->kernels->rmsnorm(q, layer->v[CLB_Q_A_NORM], c->rms_eps, c->q_lora, q);
    }
    clb_input_set(&t->in_latent, t->q_latent, c->q_lora, n, c->q_lora);
    clb_project(m, &layer->w[CLB_Q_B], &t->in_latent, t->query, layer->w[CLB_Q_B].rows);
    clb_parallel(m->pool, n, 8, rope_queries, job);
}

/* Which keys each row attends to: given, shared with the full layer before, or chosen here. */
static void choose_keys(clb_pass *p, const clb_layer *layer, int64_t number) {
    clb_scratch *t = p->scratch;
    if (p->frozen || layer->index_kind == CLB_INDEX_SHARED) return;
    for (int64_t r = 0; r < p->n; r++) {
        t->selected[r].dense = true;
        t->selected[r].count = (int32_t)(t->rows[r].position + 1);
    }
    if (layer->index_kind == CLB_INDEX_FULL) clb_index_select(p, layer, number);
}

void clb_attend(clb_pass *p, const clb_layer *layer, int64_t number) {
    clb_scratch *t = p->scratch;
    const clb_model *m = p->model;
    const clb_config *c = &m->config;
    attention_job job = {p, layer, number, 0, 0};
    make_queries(&job);
    choose_keys(p, layer, number);
    const int64_t groups = (c->heads + CLB_HEAD_GROUP - 1) / CLB_HEAD_GROUP;
    for (job.first = 0; job.first < p->n; job.first += CLB_ROW_BLOCK) {
        int64_t left = p->n - job.first;
        job.n = left < CLB_ROW_BLOCK ? left : CLB_ROW_BLOCK;
        clb_parallel(m->pool, c->heads, 1, absorb_queries, &job);
        clb_parallel(m->pool, job.n * groups, 1, attend_rows, &job);
        clb_input_set(&t->in_mixed, t->absorbed, c->kv_lora + c->rope, c->heads * job.n,
                      c->kv_lora);
        clb_parallel(m->pool, c->heads, 1, expand_values, &job);
    }
    for (int64_t r = 0; r < p->n; r++)
        t->rows[r].part->own.attended += t->selected[r].count * c->heads;
    clb_input_set(&t->in_heads, t->heads_out, c->heads * c->v_head, p->n, c->heads * c->v_head);
    clb_project(m, &layer->w[CLB_O], &t->in_heads, t->branch, c->hidden);
}
