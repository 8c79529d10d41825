/* One linear with its data in memory: the door through which tests and benchmarks come in. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels.h"

enum { MAX_SIDE = 1 << 24 }; /* keeps every product below far from overflow */

static int32_t fail(clb_error *error, int32_t code, const char *text) {
    error->code = code;
    snprintf(error->text, sizeof error->text, "%s", text);
    return code;
}

static const char *shape_problem(const clb_tensor *shape, int64_t s) {
    if (shape->format < 0 || shape->format >= CLB_FORMATS)
        return "unknown matrix format";
    if (shape->rows < 1 || shape->rows > MAX_SIDE || shape->cols < 1 || shape->cols > MAX_SIDE)
        return "matrix rows and columns must be 1..2^24";
    if (s < 1 || s > MAX_SIDE / 16)
        return "activation rows must be 1..2^20";
    if (shape->format <= CLB_F16)
        return NULL;
    if (shape->scale_format != CLB_F32 && shape->scale_format != CLB_F16)
        return "scales must be f32 or f16";
    int64_t step = shape->format == CLB_INT4 ? 8 : shape->format == CLB_INT3 ? 64 : 4;
    if (shape->group < 0 || shape->group % step)
        return "the scale group must be a multiple of 8 (int4), 64 (int3) or 4 inputs";
    return NULL;
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static int64_t row_bytes(int32_t format, int64_t cols) {
    switch (format) {
    case CLB_F32: return 4 * cols;
    case CLB_BF16:
    case CLB_F16: return 2 * cols;
    case CLB_INT8: return cols;
    case CLB_INT4: return ceil_div(cols, 2);
    case CLB_INT3: return 24 * ceil_div(cols, CLB_BLOCK);
    default: return ceil_div(cols, 4);
    }
}

static int32_t quantize_rows(const clb_kernels *table, int32_t format, clb_acts *acts,
                             clb_error *error) {
    size_t blocks = (size_t)acts->rows * (size_t)acts->blocks;
    acts->q = malloc(blocks * CLB_BLOCK);
    acts->scale = malloc(blocks * sizeof *acts->scale);
    acts->start = malloc(blocks * CLB_LANES * sizeof *acts->start);
    if (!acts->q || !acts->scale || !acts->start)
        return fail(error, CLB_NO_MEMORY, "no memory for the quantised activations");
    for (int64_t r = 0; r < acts->rows; r++) {
        int64_t block = r * acts->blocks;
        table->quantize(acts->x + r * acts->x_stride, acts->cols, format,
                        acts->q + block * CLB_BLOCK, acts->scale + block,
                        acts->start + block * CLB_LANES);
    }
    return CLB_OK;
}

int32_t clb_linear_test(const char *isa, const clb_tensor *shape, const uint8_t *data,
                        const void *scales, const float *x, int64_t s, float *y, clb_error *error) {
    const clb_kernels *table = clb_kernels_find(isa);
    if (!table)
        return fail(error, CLB_INVALID, "this processor has no such instruction set");
    const char *problem = shape_problem(shape, s);
    if (problem)
        return fail(error, CLB_INVALID, problem);
    clb_matrix w = {.format = shape->format, .scale_format = shape->scale_format,
                    .rows = shape->rows, .cols = shape->cols, .group = shape->group,
                    .row_bytes = row_bytes(shape->format, shape->cols),
                    .row_scales = shape->group ? ceil_div(shape->cols, shape->group) : 1,
                    .data = data, .scales = scales};
    clb_acts acts = {.rows = s, .cols = w.cols, .blocks = ceil_div(w.cols, CLB_BLOCK),
                     .x = x, .x_stride = w.cols};
    int32_t code = w.format > CLB_F16 ? quantize_rows(table, w.format, &acts, error) : CLB_OK;
    if (code == CLB_OK)
        table->linear[w.format](&w, &acts, 0, w.rows, y, w.rows);
    free(acts.q);
    free(acts.scale);
    free(acts.start);
    return code;
}
