/* The mixture of experts: each distinct expert runs once over all the rows that chose it. A row's
   experts are added in ascending id, whatever rows run beside it. */
#include <string.h>
#include "core.h"

enum { UNIT = 32 }; /* output rows of one task */

typedef struct expert_run { /* pairs [first, last) of the batch share one expert */
    const clb_expert *expert;
    int64_t first, last;
} expert_run;

typedef struct moe_job {
    clb_session *s;
    clb_layer *layer;
    const clb_pair *pairs; /* of this batch, by expert then row */
    int64_t pair_count;
    const expert_run *runs;
    int64_t run_count, units;
    atomic_int failed;
} moe_job;

/* ---- pages ------------------------------------------------------------------------------------ */

static int32_t populate_matrix(const clb_matrix *w) {
    int64_t scales = w->rows * w->row_scales * (w->scale_format == CLB_F16 ? 2 : 4);
    if (clb_populate(w->data, w->rows * w->row_bytes)) return CLB_IO;
    return w->scales ? clb_populate(w->scales, scales) : CLB_OK;
}

static void populate_runs(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const clb_expert *e = job->runs[i].expert;
        atomic_uchar *flag = &job->layer->populated[e - job->layer->experts];
        if (atomic_load_explicit(flag, memory_order_relaxed)) continue;
        if (populate_matrix(&e->gate) || populate_matrix(&e->up) || populate_matrix(&e->down))
            atomic_store(&job->failed, 1);
        atomic_store(flag, 1);
    }
}

/* ---- gate, up, down ----------------------------------------------------------------------------- */

/* Rows [first, last) of an input's form. */
static clb_acts part_of(const clb_acts *acts, int64_t first, int64_t last) {
    clb_acts part = *acts;
    part.rows = last - first;
    part.x += first * acts->x_stride;
    part.q += first * acts->blocks * CLB_BLOCK;
    part.scale += first * acts->blocks;
    part.start += first * acts->blocks * CLB_LANES;
    return part;
}

static void run_units(moe_job *job, const clb_matrix *w, const expert_run *run, clb_input *input,
                      float *y, int64_t unit) {
    const clb_model *m = job->s->model;
    clb_acts acts = part_of(&input->form[w->format == CLB_INT4], run->first, run->last);
    int64_t first = unit * UNIT, last = first + UNIT < w->rows ? first + UNIT : w->rows;
    m->kernels->linear[w->format](w, &acts, first, last, y + run->first * w->rows, w->rows);
}

static void gate_and_up(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_session *s = job->s;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const expert_run *run = &job->runs[i / (2 * job->units)];
        int64_t unit = i % (2 * job->units);
        bool up = unit >= job->units;
        run_units(job, up ? &run->expert->up : &run->expert->gate, run, &s->in_pairs,
                  up ? s->up : s->gate, up ? unit - job->units : unit);
    }
}

static void down(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const expert_run *run = &job->runs[i / job->units];
        run_units(job, &run->expert->down, run, &job->s->in_inner, job->s->pair_out,
                  i % job->units);
    }
}

typedef struct swiglu_job {
    clb_session *s;
    int64_t width;
} swiglu_job;

static void swiglu_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    swiglu_job *job = arg;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *gate = job->s->gate + r * job->width;
        job->s->model->kernels->swiglu(gate, job->s->up + r * job->width, job->width, gate);
    }
}

static void swiglu(clb_session *s, int64_t n, int64_t width) {
    swiglu_job job = {s, width};
    clb_parallel(s->model->pool, n, 4, swiglu_rows, &job);
    clb_input_set(&s->in_inner, s->gate, width, n, width);
}

void clb_mlp(clb_session *s, const clb_layer *layer, int64_t n, float *y) {
    const clb_model *m = s->model;
    int64_t inner = layer->w[CLB_GATE].rows;
    clb_project(m, &layer->w[CLB_GATE], &s->in_mlp, s->gate, inner);
    clb_project(m, &layer->w[CLB_UP], &s->in_mlp, s->up, inner);
    swiglu(s, n, inner);
    clb_project(m, &layer->w[CLB_DOWN], &s->in_inner, y, m->config.hidden);
}

/* ---- one batch of pairs ---------------------------------------------------------------------------- */

/* Pair rows side by side, in the form the experts want: quantised once a row, copied a pair. */
static void gather_pairs(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_session *s = job->s;
    bool even_odd = job->layer->experts[0].gate.format == CLB_INT4;
    const clb_acts *from = &s->in_mlp.form[even_odd];
    clb_acts *to = &s->in_pairs.form[even_odd];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t r = job->pairs[i].row, blocks = from->blocks;
        if (clb_is_float(job->layer->experts[0].gate.format)) {
            memcpy(s->pair_out + i * from->cols, from->x + r * from->x_stride,
                   (size_t)from->cols * sizeof(float));
            continue;
        }
        memcpy(to->q + i * blocks * CLB_BLOCK, from->q + r * blocks * CLB_BLOCK,
               (size_t)(blocks * CLB_BLOCK));
        memcpy(to->scale + i * blocks, from->scale + r * blocks, (size_t)blocks * sizeof(float));
        memcpy(to->start + i * blocks * CLB_LANES, from->start + r * blocks * CLB_LANES,
               (size_t)(blocks * CLB_LANES) * sizeof(int32_t));
    }
}

/* branch[row] += weight * pair_out, in the order of the pairs; columns [begin, end). */
static void add_pairs(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_session *s = job->s;
    int64_t hidden = s->model->config.hidden;
    (void)thread;
    for (int64_t i = 0; i < job->pair_count; i++)
        s->model->kernels->axpy(job->pairs[i].weight, s->pair_out + i * hidden + begin,
                                s->branch + job->pairs[i].row * hidden + begin, end - begin);
}

static int32_t run_batch(moe_job *job, clb_error *error) {
    clb_session *s = job->s;
    const clb_model *m = s->model;
    const clb_config *c = &m->config;
    clb_parallel(m->pool, job->run_count, 1, populate_runs, job);
    if (atomic_load(&job->failed))
        return clb_fail(error, CLB_IO, "reading an expert's weights failed: the disk reported an "
                        "error (see the system log)");
    clb_input_set(&s->in_pairs, s->pair_out, c->hidden, job->pair_count, c->hidden);
    clb_parallel(m->pool, job->pair_count, 4, gather_pairs, job);
    job->units = (c->moe_intermediate + UNIT - 1) / UNIT;
    clb_parallel(m->pool, job->run_count * 2 * job->units, 1, gate_and_up, job);
    swiglu(s, job->pair_count, c->moe_intermediate);
    clb_input_form(m, &s->in_inner, job->layer->experts[0].down.format);
    job->units = (c->hidden + UNIT - 1) / UNIT;
    clb_parallel(m->pool, job->run_count * job->units, 1, down, job);
    clb_parallel(m->pool, c->hidden, 512, add_pairs, job);
    s->counters.expert_uses += job->run_count;
    s->counters.expert_bytes += job->run_count * job->layer->expert_bytes;
    return CLB_OK;
}

/* ---- one layer's experts ----------------------------------------------------------------------------- */

/* All (expert, row) pairs by expert, then row. */
static void sort_pairs(clb_session *s, const clb_route *route, int64_t n) {
    const clb_config *c = &s->model->config;
    int32_t start[CLB_MAX_EXPERTS + 1] = {0};
    int64_t k = c->experts_per_token;
    for (int64_t i = 0; i < n * k; i++) start[route->expert[i] + 1]++;
    for (int64_t e = 0; e < c->experts; e++) start[e + 1] += start[e];
    for (int64_t i = 0; i < n * k; i++)
        s->pairs[start[route->expert[i]]++] =
            (clb_pair){route->expert[i], (int32_t)(i / k), route->weight[i]};
}

int32_t clb_moe(clb_session *s, clb_layer *layer, int64_t number, int64_t n, clb_error *error) {
    const clb_model *m = s->model;
    const clb_config *c = &m->config;
    int64_t total = n * c->experts_per_token, next = 0;
    expert_run runs[CLB_MAX_EXPERTS];
    sort_pairs(s, &s->routes[number], n);
    memset(s->branch, 0, (size_t)(n * c->hidden) * sizeof *s->branch);
    clb_input_form(m, &s->in_mlp, layer->experts[0].gate.format);
    while (next < total) {
        moe_job job = {.s = s, .layer = layer, .pairs = s->pairs + next, .runs = runs};
        while (next + job.pair_count < total) {
            int64_t first = next + job.pair_count, last = first;
            while (last < total && s->pairs[last].expert == s->pairs[first].expert) last++;
            if (job.pair_count && last - next > s->pair_rows) break;
            runs[job.run_count++] = (expert_run){&layer->experts[s->pairs[first].expert],
                                                 first - next, last - next};
            job.pair_count = last - next;
        }
        int32_t code = run_batch(&job, error);
        if (code) return code;
        next += job.pair_count;
    }
    if (c->shared_experts) {
        clb_mlp(s, layer, n, s->pair_out);
        m->kernels->add(s->pair_out, s->branch, n * c->hidden);
    }
    return CLB_OK;
}
