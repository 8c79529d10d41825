/* The definition of the bits: plain C, one output at a time (in words: docs/arithmetic.md). */
#include "kernels.h"
#include "numerics.h"

static float float_output(const clb_matrix *w, const uint8_t *row, const float *x) {
    lanes acc = lanes_zero();
    for (int64_t i = 0; i < w->cols; i++)
        acc.v[i % CLB_LANES] = __builtin_fmaf(clb_float_at(w->format, row, i), x[i],
                                              acc.v[i % CLB_LANES]);
    return lanes_fold(acc);
}

static void linear_float(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                         float *y, int64_t y_stride) {
    for (int64_t o = first; o < last; o++)
        for (int64_t r = 0; r < x->rows; r++)
            y[r * y_stride + o] = float_output(w, w->data + o * w->row_bytes,
                                               x->x + r * x->x_stride);
}

/* One block's 64 products into the lanes. */
static void block_products(const clb_matrix *w, const clb_acts *x, int64_t o, int64_t r, int64_t b,
                           lanes *acc) {
    int64_t block_bytes = clb_block_bytes(w->format), left = w->row_bytes - b * block_bytes;
    const int8_t *q = x->cells[r * x->blocks + b].q;
    uint8_t bytes[CLB_BLOCK] = {0};
    int8_t values[CLB_BLOCK];
    memcpy(bytes, w->data + o * w->row_bytes + b * block_bytes,
           (size_t)(left < block_bytes ? left : block_bytes));
    clb_unpack(w->format, bytes, values);
    for (int l = 0; l < CLB_LANES; l++) {
        int32_t d = 0;
        for (int i = 4 * l; i < 4 * l + 4; i++)
            d += values[i] * q[i];
        int64_t input = b * CLB_BLOCK + clb_lane_input(w->format, l);
        float scale = clb_scale_of_input(w, o, input) * x->scale[r * x->blocks + b];
        acc->v[l] = __builtin_fmaf((float)d, scale, acc->v[l]);
    }
}

static void linear_quantised(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                             float *y, int64_t y_stride) {
    for (int64_t o = first; o < last; o++)
        for (int64_t r = 0; r < x->rows; r++) {
            lanes acc = lanes_zero();
            for (int64_t b = 0; b < x->blocks; b++)
                block_products(w, x, o, r, b, &acc);
            y[r * y_stride + o] = lanes_fold(acc);
        }
}

static const clb_kernels table = {
    .isa = "scalar",
    .linear = {linear_float, linear_float, linear_float, linear_quantised, linear_quantised,
               linear_quantised, linear_quantised},
    CLB_NUMERICS_ENTRIES,
};

const clb_kernels *clb_kernels_scalar(void) {
    return &table;
}
