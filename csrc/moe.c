/* The mixture of experts: each distinct expert runs once over all the rows that chose it, the
   shared one and those in memory first, the others as they arrive. A row's experts are added in
   ascending id, the shared one last, whatever order they were computed in. */
#include <string.h>
#include "experts.h"

enum {
    UNIT = 32,   /* output rows of one task */
    AT_ONCE = 2, /* experts computed between two looks at the reader, while reads are in flight */
};

typedef struct batch { /* runs [first, last) of the layer: what the pair buffers hold at once */
    int64_t first, last;
    bool leased;
} batch;

typedef struct moe_job {
    clb_pass *p;
    const clb_layer *layer;
    int64_t number;        /* of the layer */
    clb_lease *leases;     /* [runs of the layer] */
    clb_run *runs;
    int64_t run_count, base; /* base: first pair of the batch */
    int32_t *active;       /* runs computed now */
    int64_t active_count, units;
    int32_t *active_pairs; /* and their pairs, counted from base */
    int64_t active_pair_count;
    int64_t ready_left;    /* runs that could be computed but are not among the active */
    batch batch;
} moe_job;

/* ---- gate, up, down ------------------------------------------------------------------------- */

/* Output rows of tasks [task, task + count) of one matrix. */
static void run_tasks(moe_job *job, const clb_matrix *w, const clb_run *run, clb_input *input,
                      float *y, int64_t task, int64_t count) {
    int64_t pair = run->first - job->base, first = task * UNIT, last = (task + count) * UNIT;
    clb_acts acts = clb_acts_part(&input->form[clb_order_of(w->format)], pair,
                                  run->last - job->base);
    job->p->model->kernels->linear[w->format](w, &acts, first, last < w->rows ? last : w->rows,
                                              y + pair * w->rows, w->rows);
}

static void gate_and_up(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_scratch *t = job->p->scratch;
    (void)thread;
    for (int64_t i = begin, count; i < end; i += count) {
        int64_t matrix = i / job->units, task = i % job->units;
        int32_t run = job->active[matrix / 2];
        count = job->units - task < end - i ? job->units - task : end - i;
        if (matrix % 2 == 0)
            run_tasks(job, &job->leases[run].gate, &job->runs[run], &t->in_pairs, t->gate, task,
                      count);
        else
            run_tasks(job, &job->leases[run].up, &job->runs[run], &t->in_pairs, t->up, task, count);
    }
}

static void down(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_scratch *t = job->p->scratch;
    (void)thread;
    for (int64_t i = begin, count; i < end; i += count) {
        int64_t task = i % job->units;
        int32_t run = job->active[i / job->units];
        count = job->units - task < end - i ? job->units - task : end - i;
        run_tasks(job, &job->leases[run].down, &job->runs[run], &t->in_inner, t->pair_out, task,
                  count);
    }
}

/* ---- rows of activations -------------------------------------------------------------------- */

static void copy_quantised(const clb_acts *from, int64_t row, clb_acts *to, int64_t pair) {
    const size_t bytes = (size_t)from->blocks * CLB_BLOCK;
    const size_t scales = (size_t)from->padded * sizeof(float);
    memcpy(to->q + pair * to->blocks * CLB_BLOCK, from->q + row * from->blocks * CLB_BLOCK, bytes);
    memcpy(to->scale + pair * to->padded, from->scale + row * from->padded, scales);
    memcpy(to->nibble_offset + pair * to->padded, from->nibble_offset + row * from->padded, scales);
}

/* Pair rows side by side, in the form the experts want: quantised once a row, copied a pair. */
static void gather_pairs(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_scratch *t = job->p->scratch;
    int32_t format = job->leases[job->batch.first].gate.format;
    const clb_acts *from = &t->in_mlp.form[clb_order_of(format)];
    clb_acts *to = &t->in_pairs.form[clb_order_of(format)];
    (void)thread;
    for (int64_t n = begin; n < end; n++) {
        int64_t i = job->active_pairs[n], r = t->pairs[job->base + i].row;
        if (clb_is_float(format))
            memcpy(t->pair_out + i * from->cols, from->x + r * from->x_stride,
                   (size_t)from->cols * sizeof(float));
        else
            copy_quantised(from, r, to, i);
    }
}

static void swiglu_pairs(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_scratch *t = job->p->scratch;
    const clb_kernels *k = job->p->model->kernels;
    int32_t format = job->leases[job->batch.first].down.format;
    clb_acts *inner = &t->in_inner.form[clb_order_of(format)];
    int64_t width = job->p->model->config.moe_intermediate;
    (void)thread;
    for (int64_t n = begin; n < end; n++) {
        int64_t i = job->active_pairs[n];
        float *gate = t->gate + i * width;
        k->swiglu(gate, t->up + i * width, width, gate);
        if (!clb_is_float(format)) k->quantize(inner, i, format);
    }
}

/* branch[row] += weight * pair_out, in the order of the pairs; columns [begin, end). */
static void add_pairs(void *arg, int64_t begin, int64_t end, int32_t thread) {
    moe_job *job = arg;
    clb_scratch *t = job->p->scratch;
    const clb_kernels *k = job->p->model->kernels;
    int64_t hidden = job->p->model->config.hidden, last = job->runs[job->batch.last - 1].last;
    (void)thread;
    for (int64_t i = job->base; i < last; i++)
        k->axpy(t->pairs[i].weight, t->pair_out + (i - job->base) * hidden + begin,
                t->branch + t->pairs[i].row * hidden + begin, end - begin);
}

/* ---- one batch ------------------------------------------------------------------------------ */

/* The runs that can be computed and have not been; a few at a time while reads are in flight. */
static void collect_active(moe_job *job) {
    int64_t most = CLB_MAX_EXPERTS;
    job->active_count = job->active_pair_count = job->ready_left = 0;
    for (int64_t i = job->batch.first; i < job->batch.last; i++)
        if (!job->leases[i].ready) most = AT_ONCE;
    for (int64_t i = job->batch.first; i < job->batch.last; i++) {
        if (job->runs[i].done || !job->leases[i].ready) continue;
        if (job->active_count == most) {
            job->ready_left++;
            continue;
        }
        job->runs[i].done = true;
        job->active[job->active_count++] = (int32_t)i;
        for (int64_t p = job->runs[i].first; p < job->runs[i].last; p++)
            job->active_pairs[job->active_pair_count++] = (int32_t)(p - job->base);
    }
}

static void compute_active(moe_job *job) {
    clb_model *m = job->p->model;
    const clb_config *c = &m->config;
    clb_parallel(m->pool, job->active_pair_count, 4, gather_pairs, job);
    job->units = (c->moe_intermediate + UNIT - 1) / UNIT;
    clb_parallel(m->pool, job->active_count * 2 * job->units, 1, gate_and_up, job);
    clb_residency_poll(m);
    clb_parallel(m->pool, job->active_pair_count, 4, swiglu_pairs, job);
    job->units = (c->hidden + UNIT - 1) / UNIT;
    clb_parallel(m->pool, job->active_count * job->units, 1, down, job);
}

static int32_t run_batch(moe_job *job, clb_error *error) {
    clb_pass *p = job->p;
    clb_scratch *t = p->scratch;
    const clb_config *c = &p->model->config;
    int64_t n = job->batch.last - job->batch.first, done = 0;
    int64_t pairs = job->runs[job->batch.last - 1].last - job->base;
    if (job->batch.first == 0 && c->shared_experts) clb_mlp(p, job->layer, t->shared);
    clb_input_set(&t->in_pairs, t->pair_out, c->hidden, pairs, c->hidden);
    clb_input_set(&t->in_inner, t->gate, c->moe_intermediate, pairs, c->moe_intermediate);
    for (;;) {
        collect_active(job);
        if (job->active_count) compute_active(job);
        done += job->active_count;
        if (done == n) break;
        if (clb_cancelled(p)) return clb_fail(error, CLB_CANCELLED, "cancelled");
        clb_tell(p, job->number, (double)(job->batch.first + done) / (double)job->run_count);
        int32_t code = clb_residency_wait(p->model, job->leases + job->batch.first, n,
                                          job->ready_left == 0, &p->counters, error);
        if (code) return code;
    }
    clb_parallel(p->model->pool, c->hidden, 512, add_pairs, job);
    p->counters.expert_uses += n;
    p->counters.expert_bytes += n * job->layer->expert_bytes;
    return CLB_OK;
}

/* ---- one layer's experts -------------------------------------------------------------------- */

/* All (expert, row) pairs by expert, then row; and one run an expert. */
static void make_runs(moe_job *job) {
    clb_pass *p = job->p;
    const clb_config *c = &p->model->config;
    int32_t start[CLB_MAX_EXPERTS + 1];
    int64_t k = c->experts_per_token;
    memset(start, 0, (size_t)(c->experts + 1) * sizeof *start);
    for (int64_t r = 0; r < p->n; r++)
        for (int64_t i = 0; i < k; i++)
            start[clb_route_of(p, r, job->number).expert[i] + 1]++;
    for (int64_t e = 0; e < c->experts; e++) {
        if (start[e + 1]) {
            clb_lease *lease = &job->leases[job->run_count];
            *lease = (clb_lease){.layer = (int32_t)job->number, .expert = (int32_t)e};
            job->runs[job->run_count++] = (clb_run){start[e], start[e] + start[e + 1], false};
        }
        start[e + 1] += start[e];
    }
    for (int64_t r = 0; r < p->n; r++) {
        clb_route route = clb_route_of(p, r, job->number);
        for (int64_t i = 0; i < k; i++)
            p->scratch->pairs[start[route.expert[i]]++] =
                (clb_pair){route.expert[i], (int32_t)r, route.weight[i]};
    }
}

/* The next runs from `first` on whose pairs fit the buffers and whose experts fit `room` slots. */
static batch next_batch(const moe_job *job, int64_t first, int64_t room) {
    batch b = {first, first, false};
    while (b.last < job->run_count && b.last - first < room &&
           (b.last == first ||
            job->runs[b.last].last - job->runs[first].first <= job->p->scratch->pair_rows))
        b.last++;
    return b;
}

static int32_t lease_batch(moe_job *job, batch *b, clb_error *error) {
    clb_pass *p = job->p;
    if (b->leased || b->first == b->last) return CLB_OK;
    b->leased = true; /* also when it fails half-way: what is pinned must be released */
    return clb_residency_lease(p->model, job->leases + b->first, b->last - b->first, &p->counters,
                               error);
}

static void release_batch(moe_job *job, const batch *b) {
    if (b->leased)
        clb_residency_release(job->p->model, job->leases + b->first, b->last - b->first);
}

/* Each batch computes while the next one's experts are read. */
static int32_t run_batches(moe_job *job, clb_error *error) {
    int64_t room = clb_residency_room(job->p->model->residency, job->number), half = room / 2;
    batch now = next_batch(job, 0, job->run_count <= room ? room : (half ? half : 1));
    int32_t code = lease_batch(job, &now, error);
    while (!code && now.first < job->run_count) {
        batch next = next_batch(job, now.last, half ? half : 1);
        if (next.last - now.first <= room) code = lease_batch(job, &next, error);
        job->batch = now;
        job->base = job->runs[now.first].first;
        if (!code) code = run_batch(job, error);
        release_batch(job, &now);
        now = next;
        if (!code) code = lease_batch(job, &now, error);
    }
    if (now.first < job->run_count) release_batch(job, &now);
    return code;
}

int32_t clb_moe(clb_pass *p, clb_layer *layer, int64_t number, clb_error *error) {
    clb_scratch *t = p->scratch;
    const clb_model *m = p->model;
    int64_t hidden = m->config.hidden;
    moe_job job = {.p = p, .layer = layer, .number = number, .leases = t->leases,
                   .runs = t->runs, .active = t->active_runs, .active_pairs = t->active_pairs};
    make_runs(&job);
    memset(t->branch, 0, (size_t)(p->n * hidden) * sizeof *t->branch);
    clb_input_form(m, &t->in_mlp, layer->experts[0].gate.format);
    int32_t code = run_batches(&job, error);
    if (!code && m->config.shared_experts) m->kernels->add(t->shared, t->branch, p->n * hidden);
    return code;
}
