/* A session: caches of one conversation, and the scratch of one step. */
#include <stdlib.h>
#include <string.h>
#include "experts.h"

/* ---- memory --------------------------------------------------------------------------------- */

typedef struct budget { /* a failed or overflowing allocation is noticed once, at the end */
    int64_t bytes;
    bool failed;
} budget;

/* Zeroed, so that untouched cache rows cost no memory. */
static void *take(budget *b, int64_t count, int64_t width, int64_t item) {
    int64_t n;
    if (!clb_mul(count, width, &n) || !clb_mul(n, item, &n)) {
        b->failed = true;
        return NULL;
    }
    void *p = clb_zeroed(n);
    if (!p) b->failed = true;
    else b->bytes += n;
    return p;
}

static float *floats(budget *b, int64_t count, int64_t width) {
    return take(b, count, width, (int64_t)sizeof(float));
}

static void take_caches(clb_session *s, budget *b) {
    const clb_model *m = s->model;
    const clb_config *c = &m->config;
    s->layer_count = m->layer_count;
    s->kv = take(b, m->layer_count, 1, (int64_t)sizeof *s->kv);
    s->index_keys = take(b, m->layer_count, 1, (int64_t)sizeof *s->index_keys);
    s->routes = take(b, m->layer_count, 1, (int64_t)sizeof *s->routes);
    if (b->failed) return;
    for (int64_t i = 0; i < m->layer_count; i++) {
        const clb_layer *layer = &m->layers[i];
        s->kv[i] = floats(b, s->context, c->kv_lora + c->rope);
        if (layer->index_kind == CLB_INDEX_FULL)
            s->index_keys[i] = floats(b, s->context, c->index_dim);
        if (!layer->sparse) continue;
        s->routes[i].expert = take(b, s->max_rows, c->experts_per_token, (int64_t)sizeof(int32_t));
        s->routes[i].weight = floats(b, s->max_rows, c->experts_per_token);
    }
}

static void take_attention(clb_session *s, budget *b) {
    const clb_config *c = &s->model->config;
    int64_t n = s->max_rows, threads = clb_pool_threads(s->model->pool);
    int64_t keys = c->index_topk < s->context ? c->index_topk : s->context; /* chosen at most */
    s->q_latent = floats(b, n, c->q_lora);
    s->query = floats(b, n, c->heads * (c->nope + c->rope));
    s->absorbed = floats(b, CLB_ROW_BLOCK, c->heads * (c->kv_lora + c->rope));
    s->heads_out = floats(b, n, c->heads * c->v_head);
    s->angles = floats(b, n, c->rope);
    s->index_query = floats(b, n, c->index_heads * c->index_dim);
    s->index_weight = floats(b, n, c->index_heads);
    s->index_score = floats(b, CLB_ROW_BLOCK, s->context);
    s->index_order = take(b, threads, s->context, (int64_t)sizeof *s->index_order);
    s->selected = take(b, n, 1, (int64_t)sizeof *s->selected);
    s->selected_index = take(b, n, keys, (int64_t)sizeof *s->selected_index);
    s->mtp_seed_index = take(b, 1, keys, (int64_t)sizeof *s->mtp_seed_index);
    s->thread_floats = clb_most(CLB_HEAD_GROUP * s->context, CLB_ROW_TILE * c->kv_lora);
    s->thread_scratch = floats(b, threads, s->thread_floats);
    if (b->failed) return;
    for (int64_t r = 0; r < n; r++) s->selected[r].index = s->selected_index + r * keys;
}

static void take_rows(clb_session *s, budget *b) {
    const clb_config *c = &s->model->config;
    int64_t n = s->max_rows;
    int64_t wide = clb_most(s->pair_rows * c->moe_intermediate,
                        n * clb_most(c->intermediate, c->moe_intermediate * c->shared_experts));
    s->x = floats(b, n, c->hidden);
    s->normed = floats(b, n, c->hidden);
    s->branch = floats(b, n, c->hidden);
    s->hidden = floats(b, s->window_rows, c->hidden);
    s->concat = floats(b, c->has_mtp ? n : 0, 2 * c->hidden);
    s->gate = floats(b, wide, 1);
    s->up = floats(b, wide, 1);
    s->router = floats(b, n, c->experts);
    s->shared = floats(b, c->shared_experts ? n : 0, c->hidden);
    s->pair_out = floats(b, s->pair_rows, c->hidden);
    s->pairs = take(b, n, c->experts_per_token, (int64_t)sizeof *s->pairs);
    s->leases = take(b, c->experts, 1, (int64_t)sizeof *s->leases);
    s->runs = take(b, c->experts, 1, (int64_t)sizeof *s->runs);
    s->active_runs = take(b, c->experts, 1, (int64_t)sizeof *s->active_runs);
    s->active_pairs = take(b, s->pair_rows, 1, (int64_t)sizeof *s->active_pairs);
}

static int32_t take_inputs(clb_session *s, budget *b) {
    const clb_config *c = &s->model->config;
    int64_t n = s->max_rows;
    int64_t moe = c->moe_intermediate * clb_most(c->shared_experts, 1);
    int64_t inner = clb_most(clb_most(c->intermediate, moe), CLB_BLOCK);
    struct { clb_input *input; int64_t rows, cols; } all[] = {
        {&s->in_hidden, n, c->hidden}, {&s->in_latent, n, c->q_lora},
        {&s->in_mixed, CLB_ROW_BLOCK * c->heads, c->kv_lora},
        {&s->in_heads, n, c->heads * c->v_head}, {&s->in_mlp, n, c->hidden},
        {&s->in_pairs, s->pair_rows, c->hidden}, {&s->in_inner, s->pair_rows, inner},
        {&s->in_head, n, c->hidden}, {&s->in_concat, c->has_mtp ? n : 1, 2 * c->hidden}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (clb_input_new(all[i].input, all[i].rows, all[i].cols, &b->bytes)) b->failed = true;
    return b->failed ? CLB_NO_MEMORY : CLB_OK;
}

int32_t clb_session_new(clb_model *m, int64_t context, int64_t max_rows, clb_session **session,
                        clb_error *error) {
    budget b = {0};
    *session = NULL;
    if (context < 1 || context > 1 << 24 || max_rows < 1 || max_rows > 1 << 16)
        return clb_fail(error, CLB_INVALID, "a context of %lld with %lld rows a step is not "
                        "possible", (long long)context, (long long)max_rows);
    clb_session *s = calloc(1, sizeof *s);
    if (!s) return clb_fail(error, CLB_NO_MEMORY, "out of memory for a session");
    s->model = m;
    s->context = context;
    s->max_rows = max_rows;
    s->pair_rows = clb_most(max_rows, CLB_PAIR_BLOCK);
    s->window_rows = max_rows + (m->config.has_mtp ? CLB_WAITING : 0);
    s->watch_fd = -1;
    take_caches(s, &b);
    take_attention(s, &b);
    take_rows(s, &b);
    if (take_inputs(s, &b)) {
        clb_session_free(s);
        return clb_fail(error, CLB_NO_MEMORY, "out of memory: a context of %lld needs more than "
                        "%lld bytes; ask for a smaller one", (long long)context,
                        (long long)b.bytes);
    }
    s->bytes = b.bytes;
    *session = s;
    return CLB_OK;
}

void clb_session_free(clb_session *s) {
    if (!s) return;
    for (int64_t i = 0; i < s->layer_count; i++) { /* the model may be gone */
        if (s->kv) clb_zeroed_free(s->kv[i]);
        if (s->index_keys) clb_zeroed_free(s->index_keys[i]);
        if (s->routes) clb_zeroed_free(s->routes[i].expert);
        if (s->routes) clb_zeroed_free(s->routes[i].weight);
    }
    void *owned[] = {s->kv, s->index_keys, s->routes, s->q_latent, s->query, s->absorbed,
                     s->heads_out, s->angles, s->index_query, s->index_weight, s->index_score,
                     s->index_order, s->selected, s->selected_index, s->mtp_seed_index,
                     s->thread_scratch, s->x, s->normed, s->branch, s->hidden, s->concat, s->gate,
                     s->up, s->router, s->shared, s->pair_out, s->pairs, s->captured, s->leases,
                     s->runs, s->active_runs, s->active_pairs};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) clb_zeroed_free(owned[i]);
    clb_input *inputs[] = {&s->in_hidden, &s->in_latent, &s->in_mixed, &s->in_heads, &s->in_mlp,
                           &s->in_pairs, &s->in_inner, &s->in_head, &s->in_concat};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) clb_input_free(inputs[i]);
    free(s);
}

float *clb_thread_scratch(clb_session *s, int32_t thread) {
    return s->thread_scratch + thread * s->thread_floats;
}

/* ---- what Python asks ----------------------------------------------------------------------- */

int64_t clb_session_bytes(const clb_session *s) { return s->bytes; }

int64_t clb_session_length(const clb_session *s) { return s->length; }

const clb_counters *clb_session_counters(const clb_session *s) { return &s->counters; }

const clb_counters *clb_session_work(const clb_session *s) { return s->work; }

void clb_charge(clb_session *s, int32_t work, const clb_counters *before) {
    int64_t now[sizeof *before / sizeof(int64_t)], then[sizeof now / sizeof *now], *sum;
    memcpy(now, &s->counters, sizeof now);
    memcpy(then, before, sizeof then);
    sum = (int64_t *)&s->work[work]; /* a struct of nothing but int64 */
    for (size_t i = 0; i < sizeof now / sizeof *now; i++) sum[i] += now[i] - then[i];
}

const float *clb_session_hidden(const clb_session *s, int64_t position) {
    if (position < s->window || position >= s->length) return NULL;
    return s->hidden + (position - s->window) * s->model->config.hidden;
}

void clb_session_watch(clb_session *s, int32_t fd) { s->watch_fd = fd; }

void clb_session_report(clb_session *s, clb_report *report, void *who) {
    s->report = report;
    s->who = who;
}

void clb_session_cancel(clb_session *s, int32_t on) { atomic_store(&s->cancelled, on); }

int32_t clb_session_rewind(clb_session *s, int64_t length, clb_error *error) {
    if (length < 0 || length > s->length)
        return clb_fail(error, CLB_INVALID, "cannot rewind from %lld to %lld",
                        (long long)s->length, (long long)length);
    s->length = length;
    if (s->mtp_length > length) {
        s->mtp_length = length;
        s->mtp_seed.count = 0; /* drafting from a row that is gone would be wrong */
    }
    if (s->window > length) s->window = length;
    return CLB_OK;
}

int32_t clb_session_restore(clb_session *s, int64_t length, int64_t mtp_length,
                            clb_error *error) {
    if (length < 0 || length > s->context || mtp_length < 0 || mtp_length > length)
        return clb_fail(error, CLB_INVALID, "a context of %lld cannot hold %lld rows, %lld of them "
                        "in the MTP cache", (long long)s->context, (long long)length,
                        (long long)mtp_length);
    if (mtp_length > 0 && !s->model->config.has_mtp)
        return clb_fail(error, CLB_INVALID, "the MTP layer is not loaded");
    s->length = length;
    s->mtp_length = mtp_length;
    s->mtp_seed.count = 0;
    s->window = length;
    s->step_rows = 0; /* nothing of an older step is to be kept or taken back */
    return CLB_OK;
}

float *clb_session_cache(clb_session *s, int32_t layer, int32_t kind, int64_t *width) {
    const clb_config *c = &s->model->config;
    *width = kind == CLB_CACHE_KV ? c->kv_lora + c->rope : c->index_dim;
    if (layer < 0 || layer >= s->model->layer_count) return NULL;
    return kind == CLB_CACHE_KV ? s->kv[layer] : s->index_keys[layer];
}

const int32_t *clb_session_experts(const clb_session *s, int32_t layer) {
    return layer >= 0 && layer < s->model->layer_count ? s->routes[layer].expert : NULL;
}

int32_t clb_session_capture(clb_session *s, int32_t on, clb_error *error) {
    budget b = {0};
    clb_zeroed_free(s->captured);
    s->captured = NULL;
    if (on) s->captured = take(&b, s->model->layer_count * s->max_rows,
                               s->model->config.index_topk + 1, (int64_t)sizeof *s->captured);
    return b.failed ? clb_fail(error, CLB_NO_MEMORY, "out of memory for the capture") : CLB_OK;
}

const int32_t *clb_session_captured(const clb_session *s, int32_t layer, int64_t row) {
    if (!s->captured || layer < 0 || layer >= s->model->layer_count || row < 0 ||
        row >= s->max_rows)
        return NULL;
    return s->captured + (layer * s->max_rows + row) * (s->model->config.index_topk + 1);
}
