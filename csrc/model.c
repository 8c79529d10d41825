/* The model: what each tensor must be, where it lies, and loading the dense part into memory. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "experts.h"

/* ---- shapes: what each role must be (reference: the checkpoint's tensor table) -------------- */

typedef struct role_shape {
    int64_t rows, cols; /* rows 1: a vector */
    bool needed;
} role_shape;

static const char *const role_names[CLB_ROLES] = {
    "embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm",
    "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
    "o_proj", "indexer.wq_b", "indexer.wk", "indexer.k_norm.weight", "indexer.k_norm.bias",
    "indexer.weights_proj", "gate_proj", "up_proj", "down_proj", "mlp.gate",
    "e_score_correction_bias", "eh_proj", "enorm", "hnorm", "shared_head.norm"};

static bool is_vector(int32_t role) {
    switch (role) {
    case CLB_NORM: case CLB_INPUT_NORM: case CLB_POST_NORM: case CLB_Q_A_NORM: case CLB_KV_A_NORM:
    case CLB_INDEX_K_NORM: case CLB_INDEX_K_BIAS: case CLB_ROUTER_BIAS: case CLB_E_NORM:
    case CLB_H_NORM: case CLB_HEAD_NORM: return true;
    default: return false;
    }
}

static role_shape attention_shape(const clb_config *c, const clb_layer *layer, int32_t role) {
    bool full = layer->index_kind == CLB_INDEX_FULL;
    switch (role) {
    case CLB_INPUT_NORM: case CLB_POST_NORM: return (role_shape){1, c->hidden, true};
    case CLB_Q_A: return (role_shape){c->q_lora, c->hidden, true};
    case CLB_Q_A_NORM: return (role_shape){1, c->q_lora, true};
    case CLB_Q_B: return (role_shape){c->heads * (c->nope + c->rope), c->q_lora, true};
    case CLB_KV_A: return (role_shape){c->kv_lora + c->rope, c->hidden, true};
    case CLB_KV_A_NORM: return (role_shape){1, c->kv_lora, true};
    case CLB_KV_B: return (role_shape){c->heads * (c->nope + c->v_head), c->kv_lora, true};
    case CLB_O: return (role_shape){c->hidden, c->heads * c->v_head, true};
    case CLB_INDEX_Q: return (role_shape){c->index_heads * c->index_dim, c->q_lora, full};
    case CLB_INDEX_K: return (role_shape){c->index_dim, c->hidden, full};
    case CLB_INDEX_K_NORM: case CLB_INDEX_K_BIAS: return (role_shape){1, c->index_dim, full};
    case CLB_INDEX_WEIGHTS: return (role_shape){c->index_heads, c->hidden, full};
    default: return (role_shape){0, 0, false};
    }
}

static role_shape shape_of(const clb_model *m, const clb_layer *layer, int32_t role) {
    const clb_config *c = &m->config;
    bool mtp = c->has_mtp && layer == &m->layers[c->layers];
    int64_t inner = layer->sparse ? c->moe_intermediate * c->shared_experts : c->intermediate;
    if (layer == &m->top) {
        if (role == CLB_NORM) return (role_shape){1, c->hidden, true};
        bool table = role == CLB_EMBED || role == CLB_HEAD;
        return (role_shape){c->vocab, c->hidden, table};
    }
    switch (role) {
    case CLB_EMBED: case CLB_HEAD: case CLB_NORM: return (role_shape){0, 0, false};
    case CLB_GATE: case CLB_UP: return (role_shape){inner, c->hidden, inner > 0};
    case CLB_DOWN: return (role_shape){c->hidden, inner, inner > 0};
    case CLB_ROUTER: return (role_shape){c->experts, c->hidden, layer->sparse};
    case CLB_ROUTER_BIAS: return (role_shape){1, c->experts, layer->sparse};
    case CLB_EH: return (role_shape){c->hidden, 2 * c->hidden, mtp};
    case CLB_E_NORM: case CLB_H_NORM: case CLB_HEAD_NORM: return (role_shape){1, c->hidden, mtp};
    default: return attention_shape(c, layer, role);
    }
}

/* ---- configuration -------------------------------------------------------------------------- */

static int32_t check_config(const clb_config *c, clb_error *error) {
    const int64_t sizes[] = {c->vocab, c->hidden, c->layers, c->heads, c->q_lora, c->kv_lora,
                             c->nope, c->rope, c->v_head};
    const int64_t optional[] = {c->has_mtp, c->intermediate, c->moe_intermediate, c->experts,
                                c->shared_experts, c->experts_per_token, c->groups, c->groups_kept,
                                c->index_heads, c->index_dim, c->index_topk};
    const int64_t most = 1 << 24; /* so that any product of two fits well inside int64 */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] < 1 || sizes[i] > most)
            return clb_fail(error, CLB_INVALID, "config size %d is %lld", (int)i,
                            (long long)sizes[i]);
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++)
        if (optional[i] < 0 || optional[i] > most)
            return clb_fail(error, CLB_INVALID, "config count %d is %lld", (int)i,
                            (long long)optional[i]);
    if (c->layers > CLB_MAX_LAYERS || c->has_mtp > 1 || c->rope % 2 ||
        c->experts > CLB_MAX_EXPERTS || c->moe_intermediate * c->shared_experts > most)
        return clb_fail(error, CLB_INVALID, "layers, MTP, rope or experts out of range");
    if (!c->sparse || !c->index_kind || !c->inv_freq)
        return clb_fail(error, CLB_INVALID, "a config array is missing");
    return CLB_OK;
}

static int32_t check_layer_kinds(const clb_config *c, clb_error *error) {
    bool any_index = false;
    for (int64_t i = 0; i < c->layers + c->has_mtp; i++) {
        uint8_t kind = c->index_kind[i];
        any_index |= kind != CLB_INDEX_NONE;
        if (kind > CLB_INDEX_SHARED || (kind == CLB_INDEX_SHARED &&
            (i == 0 || i == c->layers || c->index_kind[i - 1] == CLB_INDEX_NONE)))
            return clb_fail(error, CLB_INVALID, "layer %d has no full indexer before it", (int)i);
        if (c->sparse[i] && (c->experts < 1 || c->moe_intermediate < 1 || c->groups < 1 ||
            c->experts % c->groups || c->groups_kept < 1 || c->groups_kept > c->groups ||
            c->experts_per_token < 1 ||
            c->experts_per_token > c->experts / c->groups * c->groups_kept))
            return clb_fail(error, CLB_INVALID, "layer %d is sparse but the expert counts do not "
                            "fit together", (int)i);
        if (!c->sparse[i] && c->intermediate < 1)
            return clb_fail(error, CLB_INVALID, "layer %d is dense but intermediate is 0", (int)i);
    }
    if (any_index && (c->index_heads < 1 || c->index_dim < c->rope || c->index_topk < 1))
        return clb_fail(error, CLB_INVALID, "the indexer's sizes do not fit");
    return CLB_OK;
}

/* ---- building ------------------------------------------------------------------------------- */

static int32_t fill_model(clb_model *m, const clb_config *c, const char *isa, int32_t threads,
                          clb_error *error) {
    m->kernels = clb_kernels_find(isa);
    if (!m->kernels)
        return clb_fail(error, CLB_INVALID, "this processor does not run '%s' kernels", isa);
    m->config = *c;
    m->config.sparse = m->config.index_kind = NULL;
    m->config.inv_freq = NULL;
    m->layer_count = c->layers + c->has_mtp;
    m->layers = calloc((size_t)m->layer_count, sizeof *m->layers);
    m->inv_freq = malloc((size_t)c->rope / 2 * sizeof *m->inv_freq);
    m->pool = clb_pool_new(threads);
    if (!m->layers || !m->inv_freq || !m->pool)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory or threads for %d threads", threads);
    memcpy(m->inv_freq, c->inv_freq, (size_t)c->rope / 2 * sizeof *m->inv_freq);
    for (int64_t i = 0; i < m->layer_count; i++) {
        m->layers[i].sparse = c->sparse[i];
        m->layers[i].index_kind = c->index_kind[i];
    }
    return CLB_OK;
}

int32_t clb_model_new(const clb_config *config, const char *isa, int32_t threads,
                      clb_model **model, clb_error *error) {
    *model = NULL;
    int32_t code = check_config(config, error);
    if (!code) code = check_layer_kinds(config, error);
    if (!code && (threads < 1 || threads > 1024))
        code = clb_fail(error, CLB_INVALID, "%d threads asked for", threads);
    if (code) return code;
    clb_model *m = calloc(1, sizeof *m);
    if (!m) return clb_fail(error, CLB_NO_MEMORY, "out of memory for a model");
    m->owner = getpid();
    pthread_mutexattr_t checked;
    pthread_mutexattr_init(&checked);
    pthread_mutexattr_settype(&checked, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(&m->step, &checked);
    pthread_mutexattr_destroy(&checked);
    code = fill_model(m, config, isa, threads, error);
    if (code) {
        clb_model_free(m);
        return code;
    }
    *model = m;
    return CLB_OK;
}

static void free_layer(clb_layer *layer) {
    free(layer->memory);
    free(layer->experts);
}

void clb_model_free(clb_model *m) {
    if (!m || m->owner != getpid()) return; /* a fork's memory goes with it: no waiting */
    clb_residency_free(m->residency);
    clb_pool_free(m->pool);
    pthread_mutex_destroy(&m->step);
    for (int64_t i = 0; m->layers && i < m->layer_count; i++) free_layer(&m->layers[i]);
    free_layer(&m->top);
    for (int32_t i = 0; i < m->shard_count; i++) clb_shard_close(&m->shards[i]);
    free(m->shards);
    free(m->layers);
    free(m->inv_freq);
    free(m);
}

const char *clb_model_isa(const clb_model *m) { return m->kernels->isa; }

int32_t clb_lock(clb_model *m, clb_error *error) {
    if (m->owner != getpid())
        return clb_fail(error, CLB_INVALID, "a model cannot be used in a fork of the process that "
                        "opened it: open it there again");
    if (pthread_mutex_lock(&m->step))
        return clb_fail(error, CLB_INVALID, "a report of a step cannot call the model");
    return CLB_OK;
}

void clb_unlock(clb_model *m) { pthread_mutex_unlock(&m->step); }

int32_t clb_begin(clb_model *m, fenv_t *was, clb_error *error) {
    int32_t code = clb_lock(m, error);
    if (code) return code;
    clb_default_floats(was);
    return CLB_OK;
}

void clb_end(clb_model *m, const fenv_t *was) {
    fesetenv(was);
    clb_unlock(m);
}

int32_t clb_model_add_shard(clb_model *m, const char *path, int64_t size, clb_error *error) {
    clb_shard *shards = realloc(m->shards, (size_t)(m->shard_count + 1) * sizeof *shards);
    if (!shards) return clb_fail(error, CLB_NO_MEMORY, "out of memory opening %s", path);
    m->shards = shards;
    int32_t code = clb_shard_open(&shards[m->shard_count], path, size, error);
    if (code) clb_shard_close(&shards[m->shard_count]);
    else m->shard_count++;
    return code;
}

int32_t clb_model_add_copy(clb_model *m, int32_t shard, int32_t drive, const char *path,
                           clb_error *error) {
    if (shard < 0 || shard >= m->shard_count || drive < 1 || drive >= CLB_DRIVES ||
        m->shards[shard].copy[drive].path)
        return clb_fail(error, CLB_INVALID, "shard %d takes no copy on drive %d", shard, drive);
    return clb_shard_add(&m->shards[shard], drive, path, error);
}

static clb_layer *find_layer(clb_model *m, int32_t number) {
    if (number == -1) return &m->top;
    return number >= 0 && number < m->layer_count ? &m->layers[number] : NULL;
}

/* Shape, group and byte range of one tensor, against its shard. */
static int32_t check_place(const clb_model *m, const clb_tensor *t, clb_matrix *shape,
                           clb_error *error) {
    int32_t code = clb_tensor_check(t, shape, error);
    if (code) return code;
    const struct { int32_t shard; int64_t offset, bytes; } part[2] = {
        {t->shard, t->offset, shape->rows * shape->row_bytes},
        {t->scale_shard, t->scale_offset, clb_scale_bytes(shape)}};
    for (int i = 0; i < (clb_is_float(t->format) ? 1 : 2); i++) {
        if (part[i].shard < 0 || part[i].shard >= m->shard_count)
            return clb_fail(error, CLB_INVALID, "shard %d was not added", part[i].shard);
        const clb_shard *shard = &m->shards[part[i].shard];
        if (part[i].offset < 0 || part[i].offset > shard->size ||
            part[i].bytes > shard->size - part[i].offset)
            return clb_fail(error, CLB_INVALID, "bytes %lld + %lld lie outside %s",
                            (long long)part[i].offset, (long long)part[i].bytes,
                            shard->copy[0].path);
    }
    return CLB_OK;
}

int32_t clb_model_set(clb_model *m, int32_t number, int32_t role, const clb_tensor *tensor,
                      clb_error *error) {
    clb_layer *layer = find_layer(m, number);
    clb_matrix shape;
    if (!layer || role < 0 || role >= CLB_ROLES || layer->loaded)
        return clb_fail(error, CLB_INVALID, "layer %d, role %d cannot be set", number, role);
    int32_t code = check_place(m, tensor, &shape, error);
    if (code) return code;
    role_shape want = shape_of(m, layer, role);
    if (!want.needed || tensor->rows != want.rows || tensor->cols != want.cols ||
        (is_vector(role) && !clb_is_float(tensor->format)))
        return clb_fail(error, CLB_INVALID, "layer %d %s is [%lld, %lld] where the configuration "
                        "asks for [%lld, %lld]", number, role_names[role], (long long)tensor->rows,
                        (long long)tensor->cols, (long long)want.rows, (long long)want.cols);
    layer->spec[role] = *tensor;
    layer->given[role] = true;
    return CLB_OK;
}

static clb_matrix in_place(const clb_model *m, const clb_tensor *t, clb_matrix shape) {
    shape.data = m->shards[t->shard].map + t->offset;
    if (!clb_is_float(t->format)) shape.scales = m->shards[t->scale_shard].map + t->scale_offset;
    return shape;
}

static void set_parts(clb_expert *e, int64_t which, const clb_tensor *t, const clb_matrix *shape) {
    e->part[2 * which] = (clb_place){t->shard, t->offset, shape->rows * shape->row_bytes};
    e->part[2 * which + 1] = (clb_place){t->scale_shard, t->scale_offset, clb_scale_bytes(shape)};
}

static int32_t fill_experts(clb_model *m, clb_layer *layer, int32_t number,
                            const clb_tensor *tensors, clb_error *error) {
    const clb_config *c = &m->config;
    for (int64_t i = 0; i < 3 * c->experts; i++) {
        const clb_tensor *t = &tensors[i];
        clb_matrix *place[3] = {&layer->experts[i / 3].gate, &layer->experts[i / 3].up,
                                &layer->experts[i / 3].down};
        int64_t rows = i % 3 == 2 ? c->hidden : c->moe_intermediate;
        int64_t cols = i % 3 == 2 ? c->moe_intermediate : c->hidden;
        clb_matrix shape;
        int32_t code = check_place(m, t, &shape, error);
        if (code) return code;
        /* one format a layer: the activations of a pair are quantised once for all its experts */
        if (t->rows != rows || t->cols != cols || t->format != tensors[i % 3].format ||
            tensors[0].format != tensors[1].format)
            return clb_fail(error, CLB_INVALID, "layer %d expert %d: shape or format differs from "
                            "its neighbours or the configuration", number, (int)(i / 3));
        *place[i % 3] = in_place(m, t, shape);
        set_parts(&layer->experts[i / 3], i % 3, t, &shape);
        if (i < 3) layer->expert_bytes += clb_matrix_bytes(&shape);
    }
    return CLB_OK;
}

int32_t clb_model_set_experts(clb_model *m, int32_t number, const clb_tensor *tensors,
                              clb_error *error) {
    clb_layer *layer = find_layer(m, number);
    if (number < 0 || !layer || !layer->sparse || layer->experts)
        return clb_fail(error, CLB_INVALID, "layer %d takes no experts", number);
    layer->experts = calloc((size_t)m->config.experts, sizeof *layer->experts);
    if (!layer->experts)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory for layer %d", number);
    int32_t code = fill_experts(m, layer, number, tensors, error);
    if (!code) return CLB_OK;
    free(layer->experts); /* half a table is none */
    layer->experts = NULL;
    layer->expert_bytes = 0;
    return code;
}

/* ---- loading the dense part ----------------------------------------------------------------- */

static int64_t aligned(int64_t n) { return clb_round_up(n, 64); }

/* Bytes of role's copy: vectors become f32, matrices keep their bytes. */
static void copy_sizes(const clb_matrix *w, int32_t role, int64_t *data, int64_t *scales) {
    *data = is_vector(role) ? w->cols * 4 : w->rows * w->row_bytes;
    *scales = clb_scale_bytes(w);
}

static int32_t copy_role(clb_model *m, clb_layer *layer, int32_t role, uint8_t *out,
                         clb_error *error) {
    const clb_tensor *t = &layer->spec[role];
    clb_matrix *w = &layer->w[role];
    int64_t data, scales;
    copy_sizes(w, role, &data, &scales);
    if (is_vector(role)) {
        clb_matrix mapped = in_place(m, t, *w);
        if (clb_populate(mapped.data, w->row_bytes, false))
            return clb_fail(error, CLB_IO, "reading %s failed", m->shards[t->shard].copy[0].path);
        m->kernels->dequantize(&mapped, 0, 1, (float *)out);
        layer->v[role] = (const float *)out;
        return CLB_OK;
    }
    int32_t code = clb_shard_read(&m->shards[t->shard], t->offset, data, out, error);
    w->data = out;
    if (code || clb_is_float(t->format)) return code;
    w->scales = out + aligned(data);
    return clb_shard_read(&m->shards[t->scale_shard], t->scale_offset, scales, out + aligned(data),
                          error);
}

static int32_t plan_layer(clb_model *m, clb_layer *layer, int32_t number, int64_t offsets[],
                          int64_t *total, clb_error *error) {
    for (int32_t role = 0; role < CLB_ROLES; role++) {
        int64_t data, scales;
        if (!layer->given[role]) {
            if (shape_of(m, layer, role).needed)
                return clb_fail(error, CLB_INVALID, "layer %d has no %s", number, role_names[role]);
            continue;
        }
        int32_t code = clb_tensor_check(&layer->spec[role], &layer->w[role], error);
        if (code) return code;
        copy_sizes(&layer->w[role], role, &data, &scales);
        offsets[role] = *total;
        if (__builtin_add_overflow(*total, aligned(data) + aligned(scales), total))
            return clb_fail(error, CLB_INVALID, "layer %d is too large", number);
        if (role != CLB_INDEX_Q && role != CLB_INDEX_WEIGHTS) /* read where keys are chosen */
            layer->dense_bytes += data + scales;
    }
    if (layer->sparse && !layer->experts)
        return clb_fail(error, CLB_INVALID, "layer %d has no experts", number);
    return CLB_OK;
}

static int32_t load(clb_model *m, int32_t number, int64_t *bytes, clb_error *error) {
    clb_layer *layer = find_layer(m, number);
    int64_t offsets[CLB_ROLES] = {0}, total = 0;
    if (!layer || layer->loaded)
        return clb_fail(error, CLB_INVALID, "layer %d cannot be loaded", number);
    layer->dense_bytes = 0;
    int32_t code = plan_layer(m, layer, number, offsets, &total, error);
    if (code) return code;
    free(layer->memory);
    layer->memory = clb_paged(aligned(total) + 64);
    if (!layer->memory)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory: layer %d needs %lld bytes", number,
                        (long long)total);
    for (int32_t role = 0; role < CLB_ROLES && !code; role++)
        if (layer->given[role])
            code = copy_role(m, layer, role, layer->memory + offsets[role], error);
    layer->loaded = !code;
    if (bytes) *bytes = total;
    return code;
}

int32_t clb_model_load(clb_model *m, int32_t number, int64_t *bytes, clb_error *error) {
    fenv_t was;
    int32_t code = clb_begin(m, &was, error); /* vectors become f32 */
    if (code) return code;
    code = load(m, number, bytes, error);
    clb_end(m, &was);
    return code;
}

/* ---- residency ------------------------------------------------------------------------------ */

int64_t clb_model_expert_bytes(const clb_model *m, int32_t layer) {
    return layer >= 0 && layer < m->layer_count ? m->layers[layer].expert_bytes : 0;
}

int32_t clb_model_set_residency(clb_model *m, int32_t io, int64_t slots, int64_t mtp_slots,
                                int32_t pilot, clb_error *error) {
    for (int64_t i = 0; i < m->layer_count; i++)
        if (m->layers[i].sparse && !m->layers[i].experts)
            return clb_fail(error, CLB_INVALID, "layer %d has no experts yet", (int)i);
    int32_t code = clb_lock(m, error);
    if (code) return code;
    code = clb_residency_new(m, io, slots, mtp_slots, pilot, error);
    clb_unlock(m);
    return code;
}
