/* The memory of one step, apart from the caches: all conversations of a model share it. */
#include <stdlib.h>
#include "experts.h"

int64_t clb_keys_chosen(const clb_config *c, int64_t context) {
    return c->index_topk < context ? c->index_topk : context;
}

static void take_attention(clb_scratch *s, clb_taken *t) {
    const clb_config *c = &s->model->config;
    int64_t n = s->max_rows, threads = clb_pool_threads(s->model->pool);
    int64_t keys = clb_keys_chosen(c, s->context);
    int64_t key = clb_most(c->kv_lora + c->rope, c->index_dim);
    s->q_latent = clb_take_floats(t, n, c->q_lora);
    s->query = clb_take_floats(t, n, c->heads * (c->nope + c->rope));
    s->absorbed = clb_take_floats(t, CLB_ROW_BLOCK, c->heads * (c->kv_lora + c->rope));
    s->heads_out = clb_take_floats(t, n, c->heads * c->v_head);
    s->angles = clb_take_floats(t, n, c->rope);
    s->new_keys = clb_take_floats(t, n, key);
    s->wide_keys = clb_take_floats(t, threads * CLB_KEY_TILE, key);
    s->index_query = clb_take_floats(t, n, c->index_heads * c->index_dim);
    s->index_weight = clb_take_floats(t, n, c->index_heads);
    s->index_score = clb_take_floats(t, CLB_ROW_BLOCK, s->context);
    s->index_order = clb_take(t, threads, s->context, (int64_t)sizeof *s->index_order);
    s->selected = clb_take(t, n, 1, (int64_t)sizeof *s->selected);
    s->selected_index = clb_take(t, n, keys, (int64_t)sizeof *s->selected_index);
    s->thread_floats = clb_most(CLB_HEAD_GROUP * s->context, CLB_ROW_TILE * c->kv_lora);
    s->of_threads = clb_take_floats(t, threads, s->thread_floats);
    if (t->failed) return;
    for (int64_t r = 0; r < n; r++) s->selected[r].index = s->selected_index + r * keys;
}

static void take_rows(clb_scratch *s, clb_taken *t) {
    const clb_config *c = &s->model->config;
    int64_t n = s->max_rows;
    int64_t wide = clb_most(s->pair_rows * c->moe_intermediate,
                            n * clb_most(c->intermediate, c->moe_intermediate * c->shared_experts));
    s->rows = clb_take(t, n, 1, (int64_t)sizeof *s->rows);
    s->x = clb_take_floats(t, n, c->hidden);
    s->normed = clb_take_floats(t, n, c->hidden);
    s->branch = clb_take_floats(t, n, c->hidden);
    s->concat = clb_take_floats(t, c->has_mtp ? n : 0, 2 * c->hidden);
    s->gate = clb_take_floats(t, wide, 1);
    s->up = clb_take_floats(t, wide, 1);
    s->router = clb_take_floats(t, n, c->experts);
    s->shared = clb_take_floats(t, c->shared_experts ? n : 0, c->hidden);
    s->pair_out = clb_take_floats(t, s->pair_rows, c->hidden);
    s->pairs = clb_take(t, n, c->experts_per_token, (int64_t)sizeof *s->pairs);
    s->leases = clb_take(t, c->experts, 1, (int64_t)sizeof *s->leases);
    s->runs = clb_take(t, c->experts, 1, (int64_t)sizeof *s->runs);
    s->active_runs = clb_take(t, c->experts, 1, (int64_t)sizeof *s->active_runs);
    s->active_pairs = clb_take(t, s->pair_rows, 1, (int64_t)sizeof *s->active_pairs);
}

static void take_inputs(clb_scratch *s, clb_taken *t) {
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
        if (clb_input_new(all[i].input, all[i].rows, all[i].cols, &t->bytes)) t->failed = true;
}

int32_t clb_scratch_new(clb_model *m, int64_t context, int64_t max_rows, clb_scratch **scratch,
                        clb_error *error) {
    clb_taken taken = {0};
    *scratch = NULL;
    if (context < 1 || context > 1 << 24 || max_rows < 1 || max_rows > 1 << 16)
        return clb_fail(error, CLB_INVALID, "a context of %lld with %lld rows a step is not "
                        "possible", (long long)context, (long long)max_rows);
    clb_scratch *s = calloc(1, sizeof *s);
    if (!s) return clb_fail(error, CLB_NO_MEMORY, "out of memory for a step");
    s->model = m;
    s->context = context;
    s->max_rows = max_rows;
    s->pair_rows = clb_most(max_rows, CLB_PAIR_BLOCK);
    take_attention(s, &taken);
    take_rows(s, &taken);
    take_inputs(s, &taken);
    if (taken.failed) {
        clb_scratch_free(s);
        return clb_fail_memory(&taken, context, error);
    }
    s->bytes = taken.bytes;
    *scratch = s;
    return CLB_OK;
}

void clb_scratch_free(clb_scratch *s) {
    if (!s) return;
    void *owned[] = {s->rows, s->angles, s->x, s->normed, s->branch, s->concat, s->q_latent,
                     s->query, s->absorbed, s->heads_out, s->new_keys, s->wide_keys,
                     s->index_query, s->index_weight, s->index_score, s->index_order,
                     s->gate, s->up, s->router, s->shared,
                     s->pair_out, s->pairs, s->leases, s->runs, s->active_runs, s->active_pairs,
                     s->selected, s->selected_index, s->of_threads};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) clb_zeroed_free(owned[i]);
    clb_input *inputs[] = {&s->in_hidden, &s->in_latent, &s->in_mixed, &s->in_heads, &s->in_mlp,
                           &s->in_pairs, &s->in_inner, &s->in_head, &s->in_concat};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) clb_input_free(inputs[i]);
    free(s);
}

int64_t clb_scratch_bytes(const clb_scratch *s) { return s->bytes; }

float *clb_thread_scratch(const clb_scratch *t, int32_t thread) {
    return t->of_threads + thread * t->thread_floats;
}

float *clb_thread_keys(const clb_scratch *t, int32_t thread) {
    const clb_config *c = &t->model->config;
    return t->wide_keys + thread * CLB_KEY_TILE * clb_most(c->kv_lora + c->rope, c->index_dim);
}
