/* y = W x for rows of activations: quantise the input once, hand out chunks of output rows. */
#include <string.h>
#include "core.h"

enum { ROWS_A_CHUNK = 16 }; /* output rows: fewer are not worth handing over */

/* ---- rows of activations -------------------------------------------------------------------- */

int32_t clb_input_new(clb_input *input, int64_t capacity, int64_t cols, int64_t *bytes) {
    const clb_acts shape = clb_acts_of(NULL, 0, capacity, cols);
    int64_t n, scales;
    memset(input, 0, sizeof *input);
    if (!clb_mul(capacity, shape.blocks * CLB_BLOCK, &n)) return CLB_NO_MEMORY;
    if (!clb_mul(capacity, shape.padded * (int64_t)sizeof(float), &scales)) return CLB_NO_MEMORY;
    for (int i = 0; i < 2; i++) {
        clb_acts *a = &input->form[i];
        a->q = clb_zeroed(n);
        a->scale = clb_zeroed(scales);
        a->nibble_offset = clb_zeroed(scales);
        if (!a->q || !a->scale || !a->nibble_offset) return CLB_NO_MEMORY;
    }
    *bytes += 2 * (n + 2 * scales);
    return CLB_OK;
}

void clb_input_free(clb_input *input) {
    for (int i = 0; i < 2; i++) {
        clb_zeroed_free(input->form[i].q);
        clb_zeroed_free(input->form[i].scale);
        clb_zeroed_free(input->form[i].nibble_offset);
    }
}

void clb_input_set(clb_input *input, const float *x, int64_t stride, int64_t rows, int64_t cols) {
    for (int i = 0; i < 2; i++) {
        clb_acts *a = &input->form[i], set = clb_acts_of(x, stride, rows, cols);
        set.q = a->q;
        set.scale = a->scale;
        set.nibble_offset = a->nibble_offset;
        *a = set;
        input->ready[i] = false;
    }
}

typedef struct quantize_job {
    const clb_kernels *kernels;
    clb_acts *acts;
    int32_t format;
} quantize_job;

static void quantize_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    quantize_job *job = arg;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        job->kernels->quantize(job->acts, r, job->format);
}

const clb_acts *clb_input_form(const clb_model *model, clb_input *input, int32_t format) {
    clb_order order = clb_order_of(format);
    clb_acts *acts = &input->form[order];
    if (clb_is_float(format) || input->ready[order]) return acts;
    quantize_job job = {model->kernels, acts, format};
    clb_parallel(model->pool, acts->rows, 4, quantize_rows, &job);
    input->ready[order] = true;
    return acts;
}

/* ---- y = W x -------------------------------------------------------------------------------- */

typedef struct linear_job {
    const clb_kernels *kernels;
    const clb_matrix *w;
    const clb_acts *acts;
    float *y;
    int64_t y_stride;
} linear_job;

static void linear_rows(void *arg, int64_t begin, int64_t end, int32_t thread) {
    linear_job *job = arg;
    (void)thread;
    job->kernels->linear[job->w->format](job->w, job->acts, begin, end, job->y, job->y_stride);
}

void clb_project(const clb_model *model, const clb_matrix *w, clb_input *input, float *y,
                 int64_t y_stride) {
    linear_job job = {model->kernels, w, clb_input_form(model, input, w->format), y, y_stride};
    clb_parallel(model->pool, w->rows, ROWS_A_CHUNK, linear_rows, &job);
}
