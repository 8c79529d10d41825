/* The multi-token-prediction layer: absorb verified rows, then draft step by step.
   Row j joins the hidden of position j with the embedding of token j + 1 (embedding half first). */
#include <string.h>
#include "experts.h"

static int32_t check_mtp(const clb_session *s, int64_t first, int64_t n, clb_error *error) {
    if (!s->model->config.has_mtp)
        return clb_fail(error, CLB_INVALID, "this model was opened without its MTP layer");
    if (n > s->context - first)
        return clb_fail(error, CLB_FULL, "%lld MTP rows from %lld on are outside the context of "
                        "%lld", (long long)n, (long long)first, (long long)s->context);
    return clb_check_loaded(s->model, error);
}

int64_t clb_mtp_length(const clb_session *s) { return s->mtp_length; }

int32_t clb_mtp_rewind(clb_session *s, int64_t length, clb_error *error) {
    if (length < 0 || length > s->mtp_length)
        return clb_fail(error, CLB_INVALID, "cannot rewind the MTP cache from %lld to %lld",
                        (long long)s->mtp_length, (long long)length);
    if (length < s->mtp_length) s->mtp_seed.count = 0;
    s->mtp_length = length;
    return CLB_OK;
}

/* x = W_eh [ rms(embedding) ; rms(hidden) ] for n rows, and the attention input made of it. */
static void join(clb_pass *p, const float *hidden, const int32_t *tokens) {
    clb_scratch *t = p->scratch;
    const clb_model *m = p->model;
    const clb_layer *layer = &m->layers[m->config.layers];
    int64_t width = m->config.hidden;
    clb_pass_lay(p);
    clb_embed(m, tokens, p->n, t->x);
    clb_rmsnorm_rows(m, t->x, layer->v[CLB_E_NORM], p->n, t->concat, 2 * width);
    clb_rmsnorm_rows(m, hidden, layer->v[CLB_H_NORM], p->n, t->concat + width, 2 * width);
    clb_input_set(&t->in_concat, t->concat, 2 * width, p->n, 2 * width);
    clb_project(m, &layer->w[CLB_EH], &t->in_concat, t->x, width);
    clb_attention_input(p, layer);
}

/* From the attention on, for the one row in scratch->x: its post-norm output and logits. */
static int32_t finish_row(clb_pass *p, float *logits, float *draft_hidden, clb_error *error) {
    clb_scratch *t = p->scratch;
    const clb_model *m = p->model;
    int64_t number = m->config.layers;
    int32_t code = clb_layer_finish(p, number, error);
    if (code) return code;
    if (m->layers[number].sparse) clb_residency_count(p->parts->session, number, 0);
    clb_rmsnorm_rows(m, t->x, m->layers[number].v[CLB_HEAD_NORM], 1, t->normed, m->config.hidden);
    if (draft_hidden) memcpy(draft_hidden, t->normed, (size_t)m->config.hidden * sizeof(float));
    if (logits) clb_head(p, t->normed, 1, logits);
    return CLB_OK;
}

static void keep_seed(clb_session *s) {
    const clb_selection *set = &s->scratch->selected[0];
    s->mtp_seed.count = set->count;
    s->mtp_seed.dense = set->dense;
    s->mtp_seed.index = s->mtp_seed_index;
    if (!set->dense)
        memcpy(s->mtp_seed_index, set->index, (size_t)set->count * sizeof *set->index);
}

/* Weights read for rows that leave nothing but their keys. */
static int64_t key_bytes(const clb_layer *layer) {
    const int32_t roles[] = {CLB_EH, CLB_KV_A, CLB_INDEX_K};
    int64_t bytes = 0;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        bytes += clb_matrix_bytes(&layer->w[roles[i]]);
    return bytes;
}

static int32_t absorb(clb_pass *p, const float *hidden, const int32_t *next, float *logits,
                      float *draft_hidden, clb_error *error) {
    clb_session *s = p->parts->session;
    clb_layer *layer = &p->model->layers[p->model->config.layers];
    int64_t n = p->n;
    int32_t code = check_mtp(s, s->mtp_length, n, error);
    if (!code) code = clb_check_ids(s, next, n, error);
    if (code) return code;
    s->mtp_seed.count = 0; /* drafting from an older row would be wrong */
    join(p, hidden, next);
    clb_write_keys(p, layer, p->model->config.layers);
    if (logits || draft_hidden) { /* only the last row is ever asked for its output */
        clb_pass_last(p);
        clb_attention_input(p, layer);
        code = finish_row(p, logits, draft_hidden, error);
        if (code) return code;
        keep_seed(s);
    } else {
        p->counters.dense_bytes += key_bytes(layer);
    }
    s->mtp_length += n;
    return CLB_OK;
}

static int32_t draft(clb_pass *p, int32_t token, int64_t step, float *hidden, float *logits,
                     clb_error *error) {
    clb_session *s = p->parts->session;
    clb_selection *selected = p->scratch->selected;
    const clb_model *m = p->model;
    if (step < 1 || step > s->context || s->mtp_length < 1 || s->mtp_seed.count < 1)
        return clb_fail(error, CLB_INVALID, "a draft step follows an absorb that gave a hidden");
    int32_t code = check_mtp(s, s->mtp_length - 1 + step, 1, error);
    if (!code) code = clb_check_ids(s, &token, 1, error);
    if (code) return code;
    p->parts->position = s->mtp_length - 1 + step;
    p->frozen = m->config.mtp_share_index;
    join(p, hidden, &token);
    if (p->frozen) {
        selected->count = s->mtp_seed.count;
        selected->dense = s->mtp_seed.dense;
        if (!s->mtp_seed.dense)
            memcpy(selected->index, s->mtp_seed_index,
                   (size_t)s->mtp_seed.count * sizeof *s->mtp_seed_index);
    } else {
        clb_write_keys(p, &m->layers[m->config.layers], m->config.layers);
    }
    return finish_row(p, logits, hidden, error);
}

int32_t clb_mtp_absorb(clb_session *s, const float *hidden, const int32_t *next, int64_t n,
                       float *logits, float *draft_hidden, clb_error *error) {
    fenv_t was;
    int32_t code = clb_begin(s->model, &was, error);
    if (code) return code;
    clb_part part = {.session = s, .n = n, .position = s->mtp_length, .work = CLB_ABSORB};
    clb_pass pass = clb_pass_of(&part, 1);
    code = absorb(&pass, hidden, next, logits, draft_hidden, error);
    clb_pass_charge(&pass);
    clb_end(s->model, &was);
    return code;
}

int32_t clb_mtp_draft(clb_session *s, int32_t token, int64_t step, float *hidden, float *logits,
                      clb_error *error) {
    fenv_t was;
    int32_t code = clb_begin(s->model, &was, error);
    if (code) return code;
    clb_part part = {.session = s, .n = 1, .work = CLB_DRAFT};
    clb_pass pass = clb_pass_of(&part, 1);
    code = draft(&pass, token, step, hidden, logits, error);
    clb_pass_charge(&pass);
    clb_end(s->model, &was);
    return code;
}
