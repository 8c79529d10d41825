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

static float fold_eight(const float *lane) {
    float v[CLB_EIGHT];
    memcpy(v, lane, sizeof v);
    for (int half = CLB_EIGHT / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            v[l] = v[l] + v[l + half];
    return v[0];
}

/* A block as signed integers, in the order of q: eight lanes' fours, twice. */
static void load_values(const clb_matrix *w, int64_t o, int64_t b, int8_t *values) {
    int64_t block_bytes = clb_block_bytes(w->format), left = w->row_bytes - b * block_bytes;
    uint8_t bytes[CLB_BLOCK] = {0};
    memcpy(bytes, w->data + o * w->row_bytes + b * block_bytes,
           (size_t)(left < block_bytes ? left : block_bytes));
    clb_unpack(w->format, bytes, values);
}

static int32_t four_products(const int8_t *values, const int8_t *q) {
    return values[0] * q[0] + values[1] * q[1] + values[2] * q[2] + values[3] * q[3];
}

/* A block under one scale: each lane has one sum of eight products; int4 as nibbles 0..15. */
static void whole_block(const clb_matrix *w, int8_t *values, const int8_t *q, float scale,
                        float *lane) {
    for (int i = 0; w->format == CLB_INT4 && i < CLB_BLOCK; i++)
        values[i] = (int8_t)(values[i] + 8);
    for (int l = 0; l < CLB_EIGHT; l++) {
        int32_t d = four_products(values + 4 * l, q + 4 * l);
        d += four_products(values + 32 + 4 * l, q + 32 + 4 * l);
        lane[l] = __builtin_fmaf((float)d, scale, lane[l]);
    }
}

/* A block with more scales. int4: a lane's eight inputs follow each other, under one of them.
   int8: two fours, one after the other. */
static void spread_block(const clb_matrix *w, int64_t o, int64_t b, const int8_t *values,
                         const int8_t *q, float x, float *lane) {
    const int64_t first = b * CLB_BLOCK;
    for (int l = 0; l < CLB_EIGHT; l++) {
        int32_t low = four_products(values + 4 * l, q + 4 * l);
        int32_t high = four_products(values + 32 + 4 * l, q + 32 + 4 * l);
        if (w->format == CLB_INT4) {
            float scale = clb_scale_of_input(w, o, first + 8 * l) * x;
            lane[l] = __builtin_fmaf((float)(low + high), scale, lane[l]);
        } else {
            float scale = clb_scale_of_input(w, o, first + 4 * l) * x;
            lane[l] = __builtin_fmaf((float)low, scale, lane[l]);
            scale = clb_scale_of_input(w, o, first + 32 + 4 * l) * x;
            lane[l] = __builtin_fmaf((float)high, scale, lane[l]);
        }
    }
}

/* What the nibbles of a run of blocks have too much: block b's in lane b % 8. */
static void take_off(const clb_matrix *w, const clb_acts *x, int64_t o, int64_t r, int64_t b,
                     float *lane) {
    for (int64_t end = b + CLB_RUN; b < x->blocks && b < end; b++) {
        float scale = clb_scale_of_block(w, o, b) * x->scale[r * x->padded + b];
        lane[b % CLB_EIGHT] = __builtin_fmaf(scale, x->nibble_offset[r * x->padded + b],
                                             lane[b % CLB_EIGHT]);
    }
}

static float quantised_output(const clb_matrix *w, const clb_acts *x, int64_t o, int64_t r) {
    const int whole = clb_whole_blocks(w);
    const int8_t *q = x->q + r * x->blocks * CLB_BLOCK;
    float lane[CLB_EIGHT] = {0};
    for (int64_t b = 0; b < x->blocks; b++, q += CLB_BLOCK) {
        int8_t values[CLB_BLOCK];
        float scale = x->scale[r * x->padded + b];
        load_values(w, o, b, values);
        if (whole && w->format == CLB_INT4 && b % CLB_RUN == 0)
            take_off(w, x, o, r, b, lane);
        if (whole)
            whole_block(w, values, q, clb_scale_of_block(w, o, b) * scale, lane);
        else
            spread_block(w, o, b, values, q, scale, lane);
    }
    return fold_eight(lane);
}

static void linear_quantised(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                             float *y, int64_t y_stride) {
    for (int64_t o = first; o < last; o++)
        for (int64_t r = 0; r < x->rows; r++)
            y[r * y_stride + o] = quantised_output(w, x, o, r);
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
