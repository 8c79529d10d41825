/* The arithmetic that is not a matrix, written once. Every kernels_*.c includes this file under its
   own target, after it has defined 16 lanes in its own registers (CLB_LANES_NATIVE) or not; the
   bits are equal by construction: element-wise code has one order, reductions have 16 lanes.
   Needs -ffp-contract=off; -O3 makes the loops vectors. */
#ifndef CLB_NUMERICS_H
#define CLB_NUMERICS_H
#include "decode.h"

#ifndef CLB_F16_ONE /* an f16 as a float; some instruction sets have an instruction for it */
#define CLB_F16_ONE clb_f16_float
#endif

#ifndef CLB_CHAINS /* lanes that add up side by side: enough to hide the latency of an fma */
#define CLB_CHAINS 4
#endif

#ifndef CLB_INLINE /* a test defines it: compiled twenty times as soon */
#define CLB_INLINE static inline __attribute__((always_inline))
#endif

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

static inline lanes lanes_splat(const float *p) {
    lanes a;
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = *p;
    return a;
}

static inline lanes lanes_add(lanes a, lanes b) {
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = a.v[l] + b.v[l];
    return a;
}

static inline lanes lanes_mul(lanes a, lanes b) {
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = a.v[l] * b.v[l];
    return a;
}

static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    for (int l = 0; l < CLB_LANES; l++)
        c.v[l] = __builtin_fmaf(a.v[l], b.v[l], c.v[l]);
    return c;
}

static inline lanes lanes_max(lanes x, lanes most) { /* a NaN in x is passed over */
    for (int l = 0; l < CLB_LANES; l++)
        most.v[l] = x.v[l] > most.v[l] ? x.v[l] : most.v[l];
    return most;
}

static inline float lanes_fold(lanes a) {
    for (int half = CLB_LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            a.v[l] = a.v[l] + a.v[l + half];
    return a.v[0];
}

static inline lanes lanes_load_f16(const uint8_t *p) {
    lanes a;
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = clb_f16_float(clb_load_u16(p + 2 * l));
    return a;
}
#endif

#ifndef CLB_LANES_BYTES
static inline lanes lanes_bytes(const uint8_t *p) { /* sixteen int8 */
    float v[CLB_LANES];
    for (int l = 0; l < CLB_LANES; l++)
        v[l] = (float)(int8_t)p[l];
    return lanes_load(v);
}

static inline lanes lanes_nibbles(const uint8_t *p) { /* sixteen int4, low nibbles first */
    float v[CLB_LANES];
    for (int l = 0; l < CLB_LANES / 2; l++) {
        v[2 * l] = (float)((p[l] & 15) - 8);
        v[2 * l + 1] = (float)((p[l] >> 4) - 8);
    }
    return lanes_load(v);
}
#endif

#ifndef CLB_FOLD_FOUR
static inline void lanes_fold_four(const lanes *a, float *out) {
    for (int k = 0; k < 4; k++)
        out[k] = lanes_fold(a[k]);
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

/* out[i] = dot(a[i], b) for i < count, a constant: they share the loads of b and hide each other's
   latency; each keeps its own lanes. */
CLB_INLINE void dot_some(const float *const *a, const float *b, int64_t n, float *out, int count) {
    lanes acc[CLB_CHAINS];
    int64_t i = 0;
    for (int k = 0; k < count; k++)
        acc[k] = lanes_zero();
    for (; i + CLB_LANES <= n; i += CLB_LANES) {
        lanes shared = lanes_load(b + i);
        for (int k = 0; k < count; k++)
            acc[k] = lanes_fma(lanes_load(a[k] + i), shared, acc[k]);
    }
    for (int k = 0; k < count && i < n; k++)
        acc[k] = lanes_fma_tail(a[k] + i, b + i, n - i, acc[k]);
    for (int k = 0; k < count; k += 4)
        lanes_fold_four(acc + k, out + k);
}

static inline void dots_all(const float *const *a, int64_t count, const float *b, int64_t n,
                            float *out) {
    int64_t i = 0;
    for (; i + CLB_CHAINS <= count; i += CLB_CHAINS)
        dot_some(a + i, b, n, out + i, CLB_CHAINS);
    for (; CLB_CHAINS > 4 && i + 4 <= count; i += 4)
        dot_some(a + i, b, n, out + i, 4);
    for (; i < count; i++)
        out[i] = dot_lanes(a[i], b, n);
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
    /* the ends by masks, because a choice between floats keeps compilers from making vectors */
    uint32_t over = 0u - (uint32_t)(x > 0x1.62e43p+6f);
    uint32_t under = 0u - (uint32_t)(x < -0x1.5d589ep+6f);
    uint32_t y = (clb_float_bits(e * low * high) & ~over) | (0x7f800000u & over);
    return clb_bits_float(y & ~under);
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
    lanes most = lanes_splat(x);
    float v[CLB_LANES], max = x[0];
    int64_t whole = n / CLB_LANES * CLB_LANES;
    for (int64_t i = 0; i < whole; i += CLB_LANES)
        most = lanes_max(lanes_load(x + i), most);
    lanes_store(v, most);
    for (int l = 0; l < CLB_LANES; l++)
        max = v[l] > max ? v[l] : max;
    for (int64_t i = whole; i < n; i++)
        max = x[i] > max ? x[i] : max;
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

/* One axpy after another for the 16 * wide outputs from i on, which stay in registers; wide is a
   constant. */
CLB_INLINE void axpys_some(const float *a, const float *const *x, int64_t count, int64_t i,
                           float *y, int wide) {
    lanes acc[CLB_CHAINS];
    for (int l = 0; l < wide; l++)
        acc[l] = lanes_load(y + i + l * CLB_LANES);
    for (int64_t k = 0; k < count; k++) {
        lanes factor = lanes_splat(a + k);
        for (int l = 0; l < wide; l++)
            acc[l] = lanes_fma(factor, lanes_load(x[k] + i + l * CLB_LANES), acc[l]);
    }
    for (int l = 0; l < wide; l++)
        lanes_store(y + i + l * CLB_LANES, acc[l]);
}

static inline void axpys_all(const float *a, const float *const *x, int64_t count, float *y,
                             int64_t n) {
    int64_t i = 0;
    for (; i + CLB_CHAINS * CLB_LANES <= n; i += CLB_CHAINS * CLB_LANES)
        axpys_some(a, x, count, i, y, CLB_CHAINS);
    for (; CLB_CHAINS > 4 && i + 4 * CLB_LANES <= n; i += 4 * CLB_LANES)
        axpys_some(a, x, count, i, y, 4);
    for (int64_t k = 0; k < count; k++)
        axpy_all(a[k], x[k] + i, y + i, n - i);
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
                                    int64_t dim, const float *keys, int64_t n, float *out) {
    int64_t s = 0;
    for (; s + CLB_CHAINS <= n; s += CLB_CHAINS) {
        const float *at[CLB_CHAINS];
        float acc[CLB_CHAINS] = {0}, found[CLB_CHAINS];
        for (int k = 0; k < CLB_CHAINS; k++)
            at[k] = keys + (s + k) * dim;
        for (int64_t m = 0; m < heads; m++) {
            dot_some(at, q + m * dim, dim, found, CLB_CHAINS);
            for (int k = 0; k < CLB_CHAINS; k++)
                acc[k] = __builtin_fmaf(weight[m], relu_one(found[k]), acc[k]);
        }
        memcpy(out + s, acc, sizeof acc);
    }
    for (; s < n; s++) {
        float acc = 0;
        for (int64_t m = 0; m < heads; m++)
            acc = __builtin_fmaf(weight[m], relu_one(dot_lanes(q + m * dim, keys + s * dim, dim)),
                                 acc);
        out[s] = acc;
    }
}

/* ---- activations to int8 ------------------------------------------------------------------- */

/* 64 inputs as integers of -127..127 in floats with `magic` added; returns absmax / 127. */
static inline float quantize_block(const float *x, float *shifted) {
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, half to even */
    int32_t most = 0;
    for (int i = 0; i < CLB_BLOCK; i++) { /* as integers: no NaN slips through a comparison */
        int32_t bits = (int32_t)(clb_float_bits(x[i]) & 0x7fffffff);
        most = bits > most ? bits : most;
    }
    float absmax = clb_bits_float((uint32_t)most);
    if (most >= 0x7f800000 || absmax < 0x1p-100f) {
        for (int i = 0; i < CLB_BLOCK; i++)
            shifted[i] = magic;
        return most >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
    }
    float inverse = 127.0f / absmax;
    for (int i = 0; i < CLB_BLOCK; i++)
        shifted[i] = x[i] * inverse + magic;
    return absmax / 127.0f;
}

/* The low byte of the bits of magic + q is q. */
static inline void natural_bytes(const float *shifted, int8_t *q) {
    for (int i = 0; i < CLB_BLOCK; i++)
        q[i] = (int8_t)(clb_float_bits(shifted[i]) & 255);
}

static inline void even_odd_bytes(const float *shifted, int8_t *q) {
    uint16_t pairs[CLB_BLOCK / 2];
    int8_t natural[CLB_BLOCK];
    natural_bytes(shifted, natural);
    memcpy(pairs, natural, sizeof pairs);
    for (int i = 0; i < CLB_BLOCK / 2; i++) {
        q[i] = (int8_t)(pairs[i] & 255);
        q[i + CLB_BLOCK / 2] = (int8_t)(pairs[i] >> 8);
    }
}

static inline void quantize_all(const clb_acts *acts, int64_t row, int32_t format) {
    const float *x = acts->x + row * acts->x_stride;
    int8_t *q = acts->q + row * acts->blocks * CLB_BLOCK;
    float *scale = acts->scale + row * acts->padded;
    float *nibble_offset = acts->nibble_offset + row * acts->padded;
    for (int64_t b = 0; b < acts->blocks; b++, x += CLB_BLOCK, q += CLB_BLOCK) {
        float padded[CLB_BLOCK] = {0}, shifted[CLB_BLOCK];
        int64_t count = acts->cols - b * CLB_BLOCK;
        int32_t sum = 0;
        if (count < CLB_BLOCK)
            memcpy(padded, x, (size_t)count * sizeof *x);
        scale[b] = quantize_block(count < CLB_BLOCK ? padded : x, shifted);
        if (format == CLB_INT4)
            even_odd_bytes(shifted, q);
        else
            natural_bytes(shifted, q);
        for (int i = 0; i < CLB_BLOCK; i++)
            sum += q[i];
        nibble_offset[b] = (float)(-8 * sum);
    }
    for (int64_t b = acts->blocks; b < acts->padded; b++) {
        scale[b] = 0.0f;
        nibble_offset[b] = -0.0f; /* times +0 it can be added to anything without a trace */
    }
}

/* ---- weights back to floats ---------------------------------------------------------------- */

/* Elements [i, end) of an int8 or int4 row, under one scale; i is even. */
static inline void dequantize_run(int32_t format, const uint8_t *data, int64_t i, int64_t end,
                                  float scale, float *out) {
    const lanes factor = lanes_splat(&scale);
    if (format == CLB_INT8) {
        for (; i + CLB_LANES <= end; i += CLB_LANES)
            lanes_store(out + i, lanes_mul(lanes_bytes(data + i), factor));
        for (; i < end; i++)
            out[i] = (float)(int8_t)data[i] * scale;
    } else {
        for (; i + CLB_LANES <= end; i += CLB_LANES)
            lanes_store(out + i, lanes_mul(lanes_nibbles(data + i / 2), factor));
        for (; i < end; i++)
            out[i] = (float)((data[i / 2] >> i % 2 * 4 & 15) - 8) * scale;
    }
}

/* int3 and int2, whose scales cover whole blocks. */
static inline void dequantize_blocks(const clb_matrix *w, int64_t row, float *out) {
    const int64_t size = clb_block_bytes(w->format);
    for (int64_t i = 0, at = 0; i < w->cols; i += CLB_BLOCK, at += size) {
        int64_t left = w->row_bytes - at, count = w->cols - i;
        uint8_t bytes[CLB_BLOCK] = {0};
        int8_t values[CLB_BLOCK];
        memcpy(bytes, w->data + row * w->row_bytes + at, (size_t)(left < size ? left : size));
        clb_unpack(w->format, bytes, values);
        float scale = clb_scale_of_input(w, row, i);
        for (int64_t k = 0; k < CLB_BLOCK && k < count; k++)
            out[i + k] = (float)values[k] * scale;
    }
}

static inline void dequantize_floats(const clb_matrix *w, const uint8_t *data, float *out) {
    if (w->format == CLB_F32) {
        memcpy(out, data, (size_t)w->cols * sizeof *out);
    } else if (w->format == CLB_BF16) {
        CLB_EACH
        for (int64_t i = 0; i < w->cols; i++)
            out[i] = clb_bf16_float(clb_load_u16(data + 2 * i));
    } else {
        int64_t i = 0;
        for (; i + CLB_LANES <= w->cols; i += CLB_LANES)
            lanes_store(out + i, lanes_load_f16(data + 2 * i));
        for (; i < w->cols; i++)
            out[i] = CLB_F16_ONE(clb_load_u16(data + 2 * i));
    }
}

static inline float stored_scale(const uint8_t *p, int32_t format) {
    return format == CLB_F16 ? CLB_F16_ONE(clb_load_u16(p)) : clb_load_f32(p);
}

static inline void dequantize_groups(const clb_matrix *w, int64_t row, float *out) {
    const int64_t size = clb_scale_size(w), group = w->group ? w->group : w->cols;
    const uint8_t *scale = w->scales + row * w->row_scales * size;
    for (int64_t i = 0; i < w->cols; i += group, scale += size) {
        float factor = stored_scale(scale, w->scale_format);
        int64_t end = i + group < w->cols ? i + group : w->cols;
        dequantize_run(w->format, w->data + row * w->row_bytes, i, end, factor, out);
    }
}

static inline void dequantize_all(const clb_matrix *w, int64_t first, int64_t count, float *out) {
    for (int64_t row = first; row < first + count; row++, out += w->cols) {
        if (w->format <= CLB_F16)
            dequantize_floats(w, w->data + row * w->row_bytes, out);
        else if (w->format >= CLB_INT3)
            dequantize_blocks(w, row, out);
        else
            dequantize_groups(w, row, out);
    }
}

/* ---- floats in half the bytes --------------------------------------------------------------- */

/* Half to even: a rounding addition to the bits, or, for what becomes subnormal, to the float. */
static inline uint16_t f16_bits(float x) {
    const uint32_t bits = clb_float_bits(x), magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    uint32_t tiny = clb_float_bits(clb_bits_float(magnitude) + 0.5f) - clb_float_bits(0.5f);
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t half = magnitude < 113u << 23 ? tiny : normal;
    return (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)(magnitude >= 143u << 23 ? special : half);
}

static inline void to_f16_all(const float *x, int64_t n, uint8_t *y) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = f16_bits(x[i]);
        memcpy(y + 2 * i, &bits, sizeof bits);
    }
}

/* The entries of a table that are the same code for every instruction set. */
#define CLB_NUMERICS_ENTRIES                                                                       \
    .quantize = quantize_all, .dequantize = dequantize_all, .to_f16 = to_f16_all,                  \
    .dot = dot_lanes, .dots = dots_all, .axpy = axpy_all, .axpys = axpys_all, .scale = scale_all,  \
    .add = add_all, .rmsnorm = rmsnorm_all, .layernorm = layernorm_all, .softmax = softmax_all,    \
    .sigmoid = sigmoid_all, .swiglu = swiglu_all, .rope = rope_all,                                \
    .index_scores = index_scores_all

#endif
