/* A session: the caches of one conversation. */
#include <stdlib.h>
#include <string.h>
#include "core.h"

/* ---- memory --------------------------------------------------------------------------------- */

static clb_cache take_cache(clb_taken *t, int32_t format, int64_t context, int64_t width) {
    clb_cache cache = {format, width, NULL};
    cache.rows = clb_take(t, context, 1, clb_cache_row_bytes(&cache));
    return cache;
}

static void take_caches(clb_session *s, int32_t format, clb_taken *t) {
    const clb_model *m = s->model;
    const clb_config *c = &m->config;
    s->layer_count = m->layer_count;
    s->kv = clb_take(t, m->layer_count, 1, (int64_t)sizeof *s->kv);
    s->index_keys = clb_take(t, m->layer_count, 1, (int64_t)sizeof *s->index_keys);
    s->routes = clb_take(t, m->layer_count, 1, (int64_t)sizeof *s->routes);
    s->hidden = clb_take_floats(t, s->window_rows, c->hidden);
    s->mtp_seed_index = clb_take(t, 1, clb_keys_chosen(c, s->context),
                                 (int64_t)sizeof *s->mtp_seed_index);
    if (t->failed) return;
    for (int64_t i = 0; i < m->layer_count; i++) {
        const clb_layer *layer = &m->layers[i];
        clb_route *routes = &s->routes[i];
        s->kv[i] = take_cache(t, format, s->context, c->kv_lora + c->rope);
        if (layer->index_kind == CLB_INDEX_FULL)
            s->index_keys[i] = take_cache(t, format, s->context, c->index_dim);
        if (!layer->sparse) continue;
        routes->expert = clb_take(t, s->max_rows, c->experts_per_token, (int64_t)sizeof(int32_t));
        routes->weight = clb_take_floats(t, s->max_rows, c->experts_per_token);
    }
}

int32_t clb_session_new(clb_scratch *scratch, int64_t context, int64_t max_rows, int32_t format,
                        clb_session **session, clb_error *error) {
    clb_taken taken = {0};
    *session = NULL;
    if (format != CLB_F32 && format != CLB_F16)
        return clb_fail(error, CLB_INVALID, "caches are in f32 or f16, not in format %d", format);
    if (context < 1 || context > scratch->context || max_rows < 1 || max_rows > scratch->max_rows)
        return clb_fail(error, CLB_INVALID, "a context of %lld with %lld rows a step is not "
                        "possible in a scratch for %lld with %lld", (long long)context,
                        (long long)max_rows, (long long)scratch->context,
                        (long long)scratch->max_rows);
    clb_session *s = calloc(1, sizeof *s);
    if (!s) return clb_fail(error, CLB_NO_MEMORY, "out of memory for a session");
    s->model = scratch->model;
    s->scratch = scratch;
    s->context = context;
    s->max_rows = max_rows;
    s->window_rows = max_rows + (s->model->config.has_mtp ? CLB_WAITING : 0);
    s->watch_fd = -1;
    take_caches(s, format, &taken);
    if (taken.failed) {
        clb_session_free(s);
        return clb_fail_memory(&taken, context, error);
    }
    s->bytes = taken.bytes;
    *session = s;
    return CLB_OK;
}

void clb_session_free(clb_session *s) {
    if (!s) return;
    for (int64_t i = 0; i < s->layer_count; i++) { /* the model and the scratch may be gone */
        if (s->kv) clb_zeroed_free(s->kv[i].rows);
        if (s->index_keys) clb_zeroed_free(s->index_keys[i].rows);
        if (s->routes) clb_zeroed_free(s->routes[i].expert);
        if (s->routes) clb_zeroed_free(s->routes[i].weight);
    }
    void *owned[] = {s->kv, s->index_keys, s->routes, s->hidden, s->mtp_seed_index, s->captured};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) clb_zeroed_free(owned[i]);
    free(s);
}

/* ---- what Python asks ----------------------------------------------------------------------- */

int64_t clb_session_bytes(const clb_session *s) { return s->bytes; }

int64_t clb_session_length(const clb_session *s) { return s->length; }

const clb_counters *clb_session_counters(const clb_session *s) { return &s->counters; }

const clb_counters *clb_session_work(const clb_session *s) { return s->work; }

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

void *clb_session_cache(clb_session *s, int32_t layer, int32_t kind, int64_t *width) {
    *width = 0;
    if (layer < 0 || layer >= s->model->layer_count) return NULL;
    const clb_cache *cache = kind == CLB_CACHE_KV ? &s->kv[layer] : &s->index_keys[layer];
    *width = cache->width;
    return cache->rows;
}

const int32_t *clb_session_experts(const clb_session *s, int32_t layer) {
    return layer >= 0 && layer < s->model->layer_count ? s->routes[layer].expert : NULL;
}

int32_t clb_session_capture(clb_session *s, int32_t on, clb_error *error) {
    clb_taken taken = {0};
    clb_zeroed_free(s->captured);
    s->captured = NULL;
    if (on) s->captured = clb_take(&taken, s->model->layer_count * s->max_rows,
                                   s->model->config.index_topk + 1, (int64_t)sizeof *s->captured);
    return taken.failed ? clb_fail(error, CLB_NO_MEMORY, "out of memory for the capture") : CLB_OK;
}

const int32_t *clb_session_captured(const clb_session *s, int32_t layer, int64_t row) {
    if (!s->captured || layer < 0 || layer >= s->model->layer_count || row < 0 ||
        row >= s->max_rows)
        return NULL;
    return s->captured + (layer * s->max_rows + row) * (s->model->config.index_topk + 1);
}
