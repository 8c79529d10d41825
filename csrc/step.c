/* A step: embedding, layers in order, final norm, head. */
#include <string.h>
#include "experts.h"

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

void clb_add_rows(clb_pass *p, const float *branch) {
    p->model->kernels->add(branch, p->scratch->x, p->n * p->model->config.hidden);
}

void clb_embed(const clb_model *m, const int32_t *ids, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++)
        m->kernels->dequantize(&m->top.w[CLB_EMBED], ids[i], 1, out + i * m->config.hidden);
}

void clb_head(clb_pass *p, const float *hidden, int64_t n, float *logits) {
    clb_scratch *t = p->scratch;
    const clb_config *c = &p->model->config;
    const clb_matrix *head = &p->model->top.w[CLB_HEAD];
    clb_input_set(&t->in_head, hidden, c->hidden, n, c->hidden);
    clb_project(p->model, head, &t->in_head, logits, c->vocab);
    p->counters.head_bytes += clb_matrix_bytes(head);
}

/* ---- one layer ------------------------------------------------------------------------------ */

void clb_attention_input(clb_pass *p, const clb_layer *layer) {
    clb_scratch *t = p->scratch;
    int64_t hidden = p->model->config.hidden;
    clb_rmsnorm_rows(p->model, t->x, layer->v[CLB_INPUT_NORM], p->n, t->normed, hidden);
    clb_input_set(&t->in_hidden, t->normed, hidden, p->n, hidden);
}

static void capture(const clb_pass *p, int64_t number) {
    int64_t width = p->model->config.index_topk + 1;
    for (int64_t r = 0; r < p->n; r++) {
        const clb_part *part = p->scratch->rows[r].part;
        const clb_session *s = part->session;
        const clb_selection *set = &p->scratch->selected[r];
        if (!s->captured) continue;
        int32_t *out = s->captured + (number * s->max_rows + r - part->first) * width;
        out[0] = set->dense ? -1 : set->count;
        if (!set->dense) memcpy(out + 1, set->index, (size_t)set->count * sizeof *out);
    }
}

int32_t clb_layer_finish(clb_pass *p, int64_t number, clb_error *error) {
    clb_scratch *t = p->scratch;
    clb_model *m = p->model;
    clb_layer *layer = &m->layers[number];
    int64_t hidden = m->config.hidden;
    int32_t code = CLB_OK;
    clb_attend(p, layer, number);
    clb_residency_poll(m);
    capture(p, number);
    clb_add_rows(p, t->branch);
    clb_rmsnorm_rows(m, t->x, layer->v[CLB_POST_NORM], p->n, t->normed, hidden);
    clb_input_set(&t->in_mlp, t->normed, hidden, p->n, hidden);
    if (layer->sparse) {
        clb_route_rows(p, layer, number);
        code = clb_moe(p, layer, number, error);
    } else {
        clb_mlp(p, layer, t->branch);
    }
    clb_add_rows(p, t->branch);
    p->counters.dense_bytes += layer->dense_bytes;
    return code;
}

/* ---- what may run --------------------------------------------------------------------------- */

int32_t clb_check_loaded(const clb_model *m, clb_error *error) {
    bool loaded = m->top.loaded && m->residency;
    for (int64_t i = 0; i < m->layer_count; i++) loaded &= m->layers[i].loaded;
    return loaded ? CLB_OK : clb_fail(error, CLB_INVALID, "the model is not loaded");
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

static int32_t check_part(const clb_session *s, const int32_t *ids, int64_t n, clb_error *error) {
    if (n > s->context - s->length)
        return clb_fail(error, CLB_FULL, "%lld tokens in a context of %lld have no room for "
                        "%lld more", (long long)s->length, (long long)s->context, (long long)n);
    return clb_check_ids(s, ids, n, error);
}

/* Every session once, all in one scratch that has room for their rows. */
static int32_t check_sessions(clb_session *const *sessions, const int64_t *rows, int64_t count,
                              const int32_t *ids, clb_error *error) {
    int32_t code = CLB_OK;
    int64_t n = 0;
    if (count < 1 || count > CLB_TOGETHER)
        return clb_fail(error, CLB_INVALID, "%lld sessions cannot step together, 1 to %d can",
                        (long long)count, CLB_TOGETHER);
    for (int64_t i = 0; i < count && !code; i++) {
        if (sessions[i]->scratch != sessions[0]->scratch)
            return clb_fail(error, CLB_INVALID, "sessions that step together share a scratch");
        for (int64_t j = 0; j < i; j++)
            if (sessions[i] == sessions[j])
                return clb_fail(error, CLB_INVALID, "a session cannot step with itself");
        code = check_part(sessions[i], ids + n, rows[i], error);
        n += rows[i];
    }
    if (!code && n > sessions[0]->scratch->max_rows)
        return clb_fail(error, CLB_INVALID, "%lld rows together, in a scratch for %lld",
                        (long long)n, (long long)sessions[0]->scratch->max_rows);
    return code;
}

/* ---- all layers ----------------------------------------------------------------------------- */

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

/* The rows are the session's from now on; hidden: [n][hidden], post-norm. */
static void commit_rows(clb_part *part, const float *hidden) {
    clb_session *s = part->session;
    size_t bytes = (size_t)(part->n * s->model->config.hidden) * sizeof *hidden;
    memcpy(hidden_room(s, part->n), hidden, bytes);
    s->step_start = s->length;
    s->step_rows = part->n;
    s->length += part->n;
    part->own.forwards++;
    part->own.rows += part->n;
}

static int32_t run_step(clb_pass *p, const int32_t *ids, int32_t want, float *logits,
                        clb_error *error) {
    clb_scratch *t = p->scratch;
    clb_model *m = p->model;
    int64_t hidden = m->config.hidden;
    for (int64_t i = 0; i < p->part_count; i++) clb_residency_commit(p->parts[i].session);
    clb_pass_lay(p);
    clb_embed(m, ids, p->n, t->x);
    for (int64_t i = 0; i < m->config.layers; i++) {
        if (clb_cancelled(p)) return clb_fail(error, CLB_CANCELLED, "cancelled");
        clb_attention_input(p, &m->layers[i]);
        clb_residency_poll(m);
        clb_write_keys(p, &m->layers[i], i);
        clb_residency_poll(m);
        int32_t code = clb_layer_finish(p, i, error);
        if (code) return code;
        clb_pilot_hint(p, i + 1);
        clb_tell(p, i, 1.0);
    }
    clb_rmsnorm_rows(m, t->x, m->top.v[CLB_NORM], p->n, t->normed, hidden);
    if (want == CLB_LOGITS_ALL) clb_head(p, t->normed, p->n, logits);
    if (want == CLB_LOGITS_LAST) clb_head(p, t->normed + (p->n - 1) * hidden, 1, logits);
    for (int64_t i = 0; i < p->part_count; i++)
        commit_rows(&p->parts[i], t->normed + p->parts[i].first * hidden);
    return CLB_OK;
}

static int32_t step(clb_session *const *sessions, const int64_t *rows, int64_t count,
                    const int32_t *ids, int32_t want, float *logits, clb_error *error) {
    clb_part parts[CLB_TOGETHER];
    int32_t code = clb_check_loaded(sessions[0]->model, error);
    if (!code) code = check_sessions(sessions, rows, count, ids, error);
    if (code) return code;
    for (int64_t i = 0; i < count; i++)
        parts[i] = (clb_part){.session = sessions[i], .n = rows[i],
                              .position = sessions[i]->length,
                              .work = rows[i] > 1 ? CLB_VERIFY : CLB_PLAIN};
    clb_pass pass = clb_pass_of(parts, count);
    code = run_step(&pass, ids, want, logits, error);
    clb_pass_charge(&pass);
    return code;
}

int32_t clb_step_together(clb_session *const *sessions, const int64_t *rows, int64_t count,
                          const int32_t *ids, int32_t want, float *logits, clb_error *error) {
    fenv_t was;
    if (count < 1) return clb_fail(error, CLB_INVALID, "no session is to step");
    int32_t code = clb_begin(sessions[0]->model, &was, error);
    if (code) return code;
    code = step(sessions, rows, count, ids, want, logits, error);
    clb_end(sessions[0]->model, &was);
    return code;
}

int32_t clb_step_all(clb_session *s, const int32_t *ids, int64_t n, int32_t want, float *logits,
                     clb_error *error) {
    return clb_step_together(&s, &n, 1, ids, want, logits, error);
}
