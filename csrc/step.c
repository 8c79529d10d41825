/* The forward pass: embedding, layers in order, final norm, head. */
#include <poll.h>
#include <string.h>
#include "experts.h"

bool clb_cancelled(clb_session *s) {
    if (atomic_load_explicit(&s->cancelled, memory_order_relaxed)) return true;
    if (s->watch_fd < 0) return false;
    struct pollfd fd = {.fd = s->watch_fd, .events = POLLIN};
    return poll(&fd, 1, 0) > 0;
}

void clb_tell(const clb_session *s, int64_t number, double share) {
    if (!s->report) return;
    double done = ((double)number + share) / (double)s->model->config.layers;
    if (done < 1.0) s->report(s->who, done);
}

/* ---- rows ----------------------------------------------------------------------------------- */

typedef struct norm_job {
    const clb_model *m;
    const float *x, *gain;
    float *y;
    int64_t y_stride;
} norm_job;

static void norm_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    norm_job *job = arg;
    int64_t hidden = job->m->config.hidden;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        job->m->kernels->rmsnorm(job->x + r * hidden, job->gain, job->m->config.rms_eps, hidden,
                                 job->y + r * job->y_stride);
}

void clb_rmsnorm_rows(const clb_model *m, const float *x, const float *gain, int64_t n, float *y,
                      int64_t y_stride) {
    norm_job job = {m, x, gain, y, y_stride};
    clb_parallel(m->pool, n, 8, norm_rows, &job);
}

void clb_add_rows(clb_session *s, const float *branch, int64_t n) {
    s->model->kernels->add(branch, s->scratch->x, n * s->model->config.hidden);
}

int32_t clb_check_ids(const clb_session *s, const int32_t *ids, int64_t n, clb_error *error) {
    if (n < 1 || n > s->max_rows)
        return clb_fail(error, CLB_INVALID, "%lld rows asked for, 1 to %lld possible", (long long)n,
                        (long long)s->max_rows);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->model->config.vocab)
            return clb_fail(error, CLB_INVALID, "token id %d is outside the vocabulary of %lld",
                            ids[i], (long long)s->model->config.vocab);
    return CLB_OK;
}

void clb_embed(const clb_session *s, const int32_t *ids, int64_t n, float *out, int64_t stride) {
    for (int64_t i = 0; i < n; i++)
        s->model->kernels->dequantize(&s->model->top.w[CLB_EMBED], ids[i], 1, out + i * stride);
}

void clb_set_angles(clb_session *s, const clb_rows *rows) {
    const clb_config *c = &s->model->config;
    for (int64_t r = 0; r < rows->n; r++)
        clb_rope_angles(rows->position + r, s->model->inv_freq, c->rope / 2,
                        s->scratch->angles + r * c->rope);
}

void clb_head(clb_session *s, const float *hidden, int64_t n, float *logits) {
    clb_scratch *t = s->scratch;
    const clb_config *c = &s->model->config;
    const clb_matrix *head = &s->model->top.w[CLB_HEAD];
    clb_input_set(&t->in_head, hidden, c->hidden, n, c->hidden);
    clb_project(s->model, head, &t->in_head, logits, c->vocab);
    s->counters.head_bytes += clb_matrix_bytes(head);
}

/* ---- one layer ------------------------------------------------------------------------------ */

void clb_attention_input(clb_session *s, const clb_layer *layer, int64_t n) {
    clb_scratch *t = s->scratch;
    int64_t hidden = s->model->config.hidden;
    clb_rmsnorm_rows(s->model, t->x, layer->v[CLB_INPUT_NORM], n, t->normed, hidden);
    clb_input_set(&t->in_hidden, t->normed, hidden, n, hidden);
}

static void capture(clb_session *s, int64_t number, const clb_rows *rows) {
    int64_t width = s->model->config.index_topk + 1;
    for (int64_t r = 0; r < rows->n; r++) {
        const clb_selection *set = &s->scratch->selected[r];
        int32_t *out = s->captured + (number * s->max_rows + r) * width;
        out[0] = set->dense ? -1 : set->count;
        if (!set->dense) memcpy(out + 1, set->index, (size_t)set->count * sizeof *out);
    }
}

int32_t clb_layer_finish(clb_session *s, int64_t number, const clb_rows *rows, clb_error *error) {
    clb_scratch *t = s->scratch;
    clb_layer *layer = &s->model->layers[number];
    int64_t hidden = s->model->config.hidden;
    int32_t code = CLB_OK;
    clb_attend(s, layer, number, rows);
    clb_residency_poll(s->model);
    if (s->captured) capture(s, number, rows);
    clb_add_rows(s, t->branch, rows->n);
    clb_rmsnorm_rows(s->model, t->x, layer->v[CLB_POST_NORM], rows->n, t->normed, hidden);
    clb_input_set(&t->in_mlp, t->normed, hidden, rows->n, hidden);
    if (layer->sparse) {
        clb_route_rows(s, layer, number, rows->n);
        code = clb_moe(s, layer, number, rows->n, error);
    } else {
        clb_mlp(s, layer, rows->n, t->branch);
    }
    clb_add_rows(s, t->branch, rows->n);
    s->counters.dense_bytes += layer->dense_bytes;
    return code;
}

/* ---- all layers ----------------------------------------------------------------------------- */

int32_t clb_check_loaded(const clb_model *m, clb_error *error) {
    bool loaded = m->top.loaded && m->residency;
    for (int64_t i = 0; i < m->layer_count; i++) loaded &= m->layers[i].loaded;
    return loaded ? CLB_OK : clb_fail(error, CLB_INVALID, "the model is not loaded");
}

static int32_t check_step(const clb_session *s, const int32_t *ids, int64_t n, clb_error *error) {
    int32_t code = clb_check_loaded(s->model, error);
    if (code) return code;
    if (n > s->context - s->length)
        return clb_fail(error, CLB_FULL, "%lld tokens in a context of %lld have no room for "
                        "%lld more", (long long)s->length, (long long)s->context, (long long)n);
    return clb_check_ids(s, ids, n, error);
}

/* Room for the hidden states of the next n rows. Rows that the MTP cache holds are dropped for it;
   if that is not enough all are, and that cache cannot catch up any more. */
static float *hidden_room(clb_session *s, int64_t n) {
    int64_t width = s->model->config.hidden, first = s->length;
    if (s->length - s->window + n > s->window_rows) {
        if (s->mtp_length < first && s->length - s->mtp_length + n <= s->window_rows)
            first = s->mtp_length;
        memmove(s->hidden, s->hidden + (first - s->window) * width,
                (size_t)((s->length - first) * width) * sizeof(float));
        s->window = first;
    }
    return s->hidden + (s->length - s->window) * width;
}

static int32_t run_step(clb_session *s, const int32_t *ids, int64_t n, int32_t want, float *logits,
                        clb_error *error) {
    clb_scratch *t = s->scratch;
    clb_model *m = s->model;
    int64_t hidden = m->config.hidden;
    clb_rows rows = {.n = n, .position = s->length, .cache_row = s->length};
    int32_t code = check_step(s, ids, n, error);
    if (code) return code;
    clb_residency_commit(s);
    clb_set_angles(s, &rows);
    clb_embed(s, ids, n, t->x, hidden);
    for (int64_t i = 0; i < m->config.layers; i++) {
        if (clb_cancelled(s)) return clb_fail(error, CLB_CANCELLED, "cancelled");
        clb_attention_input(s, &m->layers[i], n);
        clb_residency_poll(s->model);
        clb_write_keys(s, &m->layers[i], i, &rows);
        clb_residency_poll(s->model);
        code = clb_layer_finish(s, i, &rows, error);
        if (code) return code;
        clb_pilot_hint(s, i + 1, n);
        clb_tell(s, i, 1.0);
    }
    float *out = hidden_room(s, n);
    clb_rmsnorm_rows(m, t->x, m->top.v[CLB_NORM], n, out, hidden);
    if (want == CLB_LOGITS_ALL) clb_head(s, out, n, logits);
    if (want == CLB_LOGITS_LAST) clb_head(s, out + (n - 1) * hidden, 1, logits);
    s->step_start = s->length;
    s->step_rows = n;
    s->length += n;
    s->counters.forwards++;
    s->counters.rows += n;
    return CLB_OK;
}

int32_t clb_step_all(clb_session *s, const int32_t *ids, int64_t n, int32_t want, float *logits,
                     clb_error *error) {
    fenv_t was;
    int32_t code = clb_begin(s->model, &was, error);
    if (code) return code;
    clb_counters before = s->counters;
    code = run_step(s, ids, n, want, logits, error);
    clb_charge(s, n > 1 ? CLB_VERIFY : CLB_PLAIN, &before);
    clb_end(s->model, &was);
    return code;
}
