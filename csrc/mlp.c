/* SwiGLU: the dense layers' MLP and the shared expert. */
#include "core.h"

typedef struct swiglu_job {
    const clb_pass *p;
    int64_t width;
} swiglu_job;

static void swiglu_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    swiglu_job *job = arg;
    const clb_scratch *t = job->p->scratch;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *gate = t->gate + r * job->width;
        job->p->model->kernels->swiglu(gate, t->up + r * job->width, job->width, gate);
    }
}

void clb_mlp(clb_pass *p, const clb_layer *layer, float *y) {
    clb_scratch *t = p->scratch;
    const clb_model *m = p->model;
    swiglu_job job = {p, layer->w[CLB_GATE].rows};
    clb_project(m, &layer->w[CLB_GATE], &t->in_mlp, t->gate, job.width);
    clb_project(m, &layer->w[CLB_UP], &t->in_mlp, t->up, job.width);
    clb_parallel(m->pool, p->n, 4, swiglu_rows, &job);
    clb_input_set(&t->in_inner, t->gate, job.width, p->n, job.width);
    clb_project(m, &layer->w[CLB_DOWN], &t->in_inner, y, m->config.hidden);
}
