/* SwiGLU: the dense layers' MLP and the shared expert. */
#include "core.h"

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

void clb_mlp(clb_session *s, const clb_layer *layer, int64_t n, float *y) {
    const clb_model *m = s->model;
    swiglu_job job = {s, layer->w[CLB_GATE].rows};
    clb_project(m, &layer->w[CLB_GATE], &s->in_mlp, s->gate, job.width);
    clb_project(m, &layer->w[CLB_UP], &s->in_mlp, s->up, job.width);
    clb_parallel(m->pool, n, 4, swiglu_rows, &job);
    clb_input_set(&s->in_inner, s->gate, job.width, n, job.width);
    clb_project(m, &layer->w[CLB_DOWN], &s->in_inner, y, m->config.hidden);
}
