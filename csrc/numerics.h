/* The arithmetic that is not a matrix, written once. Every kernels_*.c includes this file under its
   own target, after it has defined 16 lanes in its own registers (CLB_LANES_NATIVE) or not; the
   bits are equal by construction: element-wise code has one order, reductions have 16 lanes.
   Needs -ffp-contract=off; -O3 makes the loops vectors. */
#ifndef CLB_NUMERICS_H
#define CLB_NUMERICS_H
#include "decode.h"

#ifdef __clang__
#define CLB_EACH _Pragma("clang loop vectorize(assume_safety)")
#else /* element i never reads what another element wrote, even when y is x */
#define CLB_EACH _Pragma("GCC ivdep")
#endif

/* ---- sixteen lanes ------------------------------------------------------------------------- */

#ifndef CLB_LANES_NATIVE
typedef struct { float v[CLB_LANES]; } lanes;

static inline lanes lanes_zero(void) {
    return (lanes){{0}};
}

static inline lanes lanes_load(const float *p) {
    lanes a;
    memcpy(a.v, p, sizeof a.v);
    return a;
}

static inline void lanes_store(float *p, lanes a) {
    memcpy(p, a.v, sizeof a.v);
}

static inline lanes lanes_add(lanes a, lanes b) {
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = a.v[l] + b.v[l];
    return a;
}

static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    for (int l = 0; l < CLB_LANES; l++)
        c.v[l] = __builtin_fmaf(a.v[l], b.v[l], c.v[l]);
    return c;
}

static inline float lanes_fold(lanes a) {
    for (int half = CLB_LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            a.v[l] = a.v[l] + a.v[l + half];
    return a.v[0];
}
#endif

/* Adds the last n < 16 products; lanes from n on keep their value, the sign of a zero included. */
static inline lanes lanes_fma_tail(const float *a, const float *b, int64_t n, lanes acc) {
    float v[CLB_LANES];
    lanes_store(v, acc);
    for (int64_t l = 0; l < n; l++)
        v[l] = __builtin_fmaf(a[l], b[l], v[l]);
    return lanes_load(v);
}

static inline float dot_lanes(const float *a, const float *b, int64_t n) {
    lanes acc = lanes_zero();
    int64_t i = 0;
    for (; i + CLB_LANES <= n; i += CLB_LANES)
        acc = lanes_fma(lanes_load(a + i), lanes_load(b + i), acc);
    if (i < n)
        acc = lanes_fma_tail(a + i, b + i, n - i, acc);
    return lanes_fold(acc);
}

static inline float sum_lanes(const float *x, int64_t n) {
    lanes acc = lanes_zero();
    float v[CLB_LANES];
    int64_t i = 0;
    for (; i + CLB_LANES <= n; i += CLB_LANES)
        acc = lanes_add(acc, lanes_load(x + i));
    lanes_store(v, acc);
    for (int64_t l = 0; l < n - i; l++)
        v[l] = v[l] + x[i + l];
    return lanes_fold(lanes_load(v));
}

/* ---- exponential --------------------------------------------------------------------------- */

/* e^x = 2^k e^r with |r| <= ln 2 / 2, e^r = 1 + r + r^2 q(r), q of degree 4 (relative error of the
   polynomial 3.1e-9). 0 below ln 2^-126: no subnormal ever comes out. NaN stays NaN. */
static inline float exp_one(float x) {
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, half to even */
    float shifted = __builtin_fmaf(x, 0x1.715476p+0f, magic), k = shifted - magic;
    float r = __builtin_fmaf(k, -0x1.62e4p-1f, x);
    r = __builtin_fmaf(k, -0x1.7f7d1cp-20f, r);
    float q = __builtin_fmaf(0x1.6a234ep-10f, r, 0x1.123a6cp-7f);
    q = __builtin_fmaf(q, r, 0x1.5558f4p-5f);
    q = __builtin_fmaf(q, r, 0x1.55549p-3f);
    q = __builtin_fmaf(q, r, 0x1.fffffcp-2f);
    float e = 1.0f + __builtin_fmaf(q, r * r, r);
    /* 2^k as two factors, because 2^128 alone is not a float */
    int32_t power = (int32_t)(clb_float_bits(shifted) - 0x4b400000u), half = power >> 1;
    float low = clb_bits_float((uint32_t)(half + 127) << 23);
    float high = clb_bits_float((uint32_t)(power - half + 127) << 23);
    float y = e * low * high;
    y = x > 0x1.62e43p+6f ? __builtin_inff() : y;
    return x < -0x1.5d589ep+6f ? 0.0f : y;
}

static inline float sigmoid_one(float x) {
    return 1.0f / (1.0f + exp_one(-x));
}

static inline void sigmoid_all(const float *x, int64_t n, float *y) {
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        y[i] = sigmoid_one(x[i]);
}

static inline void swiglu_all(const float *gate, const float *up, int64_t n, float *y) {
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        y[i] = gate[i] * sigmoid_one(gate[i]) * up[i];
}

/* A NaN anywhere makes every output NaN: the maximum skips it, the sum does not. */
static inline void softmax_all(float *x, int64_t n) {
    if (n <= 0)
        return;
    float v[CLB_LANES];
    for (int l = 0; l < CLB_LANES; l++)
        v[l] = x[0];
    int64_t whole = n / CLB_LANES * CLB_LANES;
    for (int64_t i = 0; i < whole; i += CLB_LANES)
        for (int l = 0; l < CLB_LANES; l++)
            v[l] = x[i + l] > v[l] ? x[i + l] : v[l];
    for (int64_t i = whole; i < n; i++)
        v[0] = x[i] > v[0] ? x[i] : v[0];
    float max = v[0];
    for (int l = 1; l < CLB_LANES; l++)
        max = v[l] > max ? v[l] : max;
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        x[i] = exp_one(x[i] - max);
    float inverse = 1.0f / sum_lanes(x, n);
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * inverse;
}

/* ---- vectors ------------------------------------------------------------------------------- */

static inline void axpy_all(float a, const float *x, float *y, int64_t n) {
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        y[i] = __builtin_fmaf(a, x[i], y[i]);
}

static inline void scale_all(float a, float *x, int64_t n) {
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        x[i] = a * x[i];
}

static inline void add_all(const float *x, float *y, int64_t n) {
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        y[i] = y[i] + x[i];
}

static inline void rmsnorm_all(const float *x, const float *gain, float eps, int64_t n, float *y) {
    float mean = dot_lanes(x, x, n) / (float)n;
    float r = 1.0f / __builtin_sqrtf(mean + eps);
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] * r * gain[i];
}

static inline float centred_squares(const float *x, float mean, int64_t n) {
    lanes acc = lanes_zero();
    float v[CLB_LANES];
    for (int64_t i = 0; i < n; i += CLB_LANES) {
        int64_t count = n - i < CLB_LANES ? n - i : CLB_LANES;
        for (int64_t l = 0; l < count; l++)
            v[l] = x[i + l] - mean;
        if (count == CLB_LANES)
            acc = lanes_fma(lanes_load(v), lanes_load(v), acc);
        else
            acc = lanes_fma_tail(v, v, count, acc);
    }
    return lanes_fold(acc);
}

static inline void layernorm_all(const float *x, const float *gain, const float *bias, float eps,
                                 int64_t n, float *y) {
    float mean = sum_lanes(x, n) / (float)n;
    float variance = centred_squares(x, mean, n) / (float)n;
    float r = 1.0f / __builtin_sqrtf(variance + eps);
    CLB_EACH
    for (int64_t i = 0; i < n; i++)
        y[i] = __builtin_fmaf((x[i] - mean) * r, gain[i], bias[i]);
}

/* (a, b) -> (a cos - b sin, b cos + a sin), each as one product and one fma. */
static inline void rope_all(float *v, const float *cos_sin, int64_t half) {
    CLB_EACH
    for (int64_t j = 0; j < half; j++) {
        float a = v[2 * j], b = v[2 * j + 1];
        float c = cos_sin[2 * j], s = cos_sin[2 * j + 1];
        v[2 * j] = __builtin_fmaf(a, c, -(b * s));
        v[2 * j + 1] = __builtin_fmaf(b, c, a * s);
    }
}

/* A NaN product stays NaN; a negative one counts as +0. */
static inline float relu_one(float d) {
    return d < 0 ? 0.0f : d;
}

static inline void index_scores_all(const float *q, const float *weight, int64_t heads,
                                    int64_t dim, const float *keys, int64_t first, int64_t last,
                                    float *out) {
    for (int64_t s = first; s < last; s++) {
        float acc = 0;
        for (int64_t m = 0; m < heads; m++) {
            float d = relu_one(dot_lanes(q + m * dim, keys + s * dim, dim));
            acc = __builtin_fmaf(weight[m], d, acc);
        }
        out[s - first] = acc;
    }
}

/* ---- activations to int8 ------------------------------------------------------------------- */

/* 64 inputs to integers of -127..127 in *rounded; returns their scale (absmax / 127). */
static inline float quantize_block(const float *x, int32_t *rounded) {
    const float magic = 0x1.8p23f;
    int32_t most = 0;
    for (int i = 0; i < CLB_BLOCK; i++) { /* as integers: no NaN slips through a comparison */
        int32_t bits = (int32_t)(clb_float_bits(x[i]) & 0x7fffffff);
        most = bits > most ? bits : most;
    }
    float absmax = clb_bits_float((uint32_t)most);
    int usable = most < 0x7f800000 && absmax >= 0x1p-100f;
    float inverse = usable ? 127.0f / absmax : 0.0f;
    for (int i = 0; i < CLB_BLOCK; i++) {
        float shifted = (usable ? x[i] : 0.0f) * inverse + magic;
        rounded[i] = (int32_t)(clb_float_bits(shifted) - 0x4b400000u);
    }
    if (most >= 0x7f800000)
        return __builtin_nanf("");
    return usable ? absmax / 127.0f : 0.0f;
}

static inline void quantize_all(const float *x, int64_t n, int32_t format, int8_t *q, float *scale,
                         int32_t *start) {
    int32_t offset = format == CLB_INT4 ? 8 : 128; /* int3 and int2 run as int8 */
    for (int64_t b = 0; b * CLB_BLOCK < n; b++, q += CLB_BLOCK, start += CLB_LANES) {
        float padded[CLB_BLOCK] = {0};
        int32_t rounded[CLB_BLOCK];
        int64_t count = n - b * CLB_BLOCK < CLB_BLOCK ? n - b * CLB_BLOCK : CLB_BLOCK;
        memcpy(padded, x + b * CLB_BLOCK, (size_t)count * sizeof *x);
        scale[b] = quantize_block(padded, rounded);
        for (int i = 0; i < CLB_BLOCK; i++)
            q[i] = (int8_t)rounded[format != CLB_INT4 ? i : i < 32 ? 2 * i : 2 * i - 63];
        for (int l = 0; l < CLB_LANES; l++)
            start[l] = -offset * (q[4 * l] + q[4 * l + 1] + q[4 * l + 2] + q[4 * l + 3]);
    }
}

/* ---- weights back to floats ---------------------------------------------------------------- */

static inline void dequantize_row_all(const clb_matrix *w, int64_t row, float *out) {
    const uint8_t *data = w->data + row * w->row_bytes;
    int64_t block_bytes = clb_block_bytes(w->format);
    if (!block_bytes) {
        for (int64_t i = 0; i < w->cols; i++)
            out[i] = clb_float_at(w->format, data, i);
        return;
    }
    for (int64_t b = 0; b * CLB_BLOCK < w->cols; b++) {
        uint8_t bytes[CLB_BLOCK] = {0};
        int8_t values[CLB_BLOCK];
        int64_t left = w->row_bytes - b * block_bytes;
        memcpy(bytes, data + b * block_bytes, (size_t)(left < block_bytes ? left : block_bytes));
        clb_unpack(w->format, bytes, values);
        int64_t count = w->cols - b * CLB_BLOCK < CLB_BLOCK ? w->cols - b * CLB_BLOCK : CLB_BLOCK;
        for (int64_t i = 0; i < count; i++) {
            int64_t k = w->format != CLB_INT4 ? i : i / 2 + i % 2 * 32;
            float scale = clb_scale_of_input(w, row, b * CLB_BLOCK + i);
            out[b * CLB_BLOCK + i] = (float)values[k] * scale;
        }
    }
}

/* The entries of a table that are the same code for every instruction set. */
#define CLB_NUMERICS_ENTRIES                                                                       \
    .quantize = quantize_all, .dequantize_row = dequantize_row_all, .dot = dot_lanes,              \
    .axpy = axpy_all, .scale = scale_all, .add = add_all, .rmsnorm = rmsnorm_all,                  \
    .layernorm = layernorm_all, .softmax = softmax_all, .sigmoid = sigmoid_all,                    \
    .swiglu = swiglu_all, .rope = rope_all, .index_scores = index_scores_all

#endif
