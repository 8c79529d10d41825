/* Sixteen lanes for the encoder as plain arrays; encode_avx2.c has its own. */
#ifndef CLB_ENCODE_LANES_H
#define CLB_ENCODE_LANES_H
#include "encode.h"

typedef struct { float v[CLB_LANES]; } lanes;

static inline lanes lanes_load(const float *p) {
    lanes a;
    memcpy(a.v, p, sizeof a.v);
    return a;
}

static inline lanes lanes_fill(float value) {
    lanes a;
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = value;
    return a;
}

static inline void lanes_store(float *p, lanes a) {
    memcpy(p, a.v, sizeof a.v);
}

#define CLB_BINARY(name, expression)                     \
    static inline lanes lanes_##name(lanes a, lanes b) { \
        for (int l = 0; l < CLB_LANES; l++) {            \
            float x = a.v[l], y = b.v[l];                \
            a.v[l] = expression;                         \
        }                                                \
        return a;                                        \
    }
CLB_BINARY(add, x + y)
CLB_BINARY(sub, x - y)
CLB_BINARY(mul, x * y)
CLB_BINARY(div, x / y)
CLB_BINARY(max, x > y ? x : y)
#undef CLB_BINARY

static inline lanes lanes_choose(lanes a, lanes b, lanes x, lanes y) { /* a > b ? x : y */
    for (int l = 0; l < CLB_LANES; l++)
        y.v[l] = a.v[l] > b.v[l] ? x.v[l] : y.v[l];
    return y;
}

/* e4m3 codes: sign, 4 bits of exponent, 3 of mantissa; NaN codes come out as 480. */
static inline lanes lanes_f8(const uint8_t *p) {
    lanes a;
    for (int l = 0; l < CLB_LANES; l++) {
        uint32_t bits = (uint32_t)(p[l] & 0x7f) << 20, sign = (uint32_t)(p[l] & 0x80) << 24;
        float small = clb_bits_float(bits + (121u << 23)) - 0x1p-6f; /* the exponent field is 0 */
        float normal = clb_bits_float(bits + (120u << 23));
        a.v[l] = clb_bits_float(clb_float_bits(bits < 1u << 23 ? small : normal) | sign);
    }
    return a;
}

/* Sixteen codes of four bits by a table, the first in the low half of its byte. */
static inline lanes lanes_fours(const uint8_t *p, const float *table) {
    lanes a;
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = table[p[l / 2] >> l % 2 * 4 & 15];
    return a;
}

static inline lanes lanes_bytes(const uint8_t *p) {
    lanes a;
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] = p[l];
    return a;
}

/* Rounded half away from zero, in any order; magnitudes up to 32767. */
static inline void lanes_shorts(lanes a, int16_t *out) {
    for (int l = 0; l < CLB_LANES; l++)
        out[l] = (int16_t)(int32_t)(a.v[l] + __builtin_copysignf(0.5f, a.v[l]));
}

/* Thirty-two codes from -8 to 7 become sixteen bytes. */
static inline void nibbles(const int8_t *codes, uint8_t *out) {
    for (int k = 0; k < CLB_LANES; k++)
        out[k] = (uint8_t)((codes[2 * k] + 8) | (codes[2 * k + 1] + 8) << 4);
}

/* Largest magnitude of n floats as bits: as integers they are ordered like the floats, infinities
   and NaNs last. */
static inline uint32_t lanes_magnitude(const float *x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = clb_float_bits(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* To f16 and back: half to even, but away from zero below 2^-14, so that no code clips; at least
   2^-24, infinite where f16 ends. The sign stays. */
static inline lanes lanes_halves(lanes a) {
    for (int l = 0; l < CLB_LANES; l++) {
        float half = clb_round_f16(__builtin_fabsf(a.v[l]));
        a.v[l] = __builtin_copysignf(half < 0x1p-24f ? 0x1p-24f : half, a.v[l]);
    }
    return a;
}

static inline void lanes_store_halves(uint16_t *p, lanes a) { /* exact ones */
    for (int l = 0; l < CLB_LANES; l++)
        p[l] = (uint16_t)(clb_f16_bits(__builtin_fabsf(a.v[l])) | (a.v[l] < 0) << 15);
}

static inline lanes lanes_singles(lanes a) { /* the sign stays */
    for (int l = 0; l < CLB_LANES; l++) {
        float magnitude = __builtin_fabsf(a.v[l]);
        a.v[l] = __builtin_copysignf(magnitude < 1e-8f ? 1e-8f : magnitude, a.v[l]);
    }
    return a;
}

/* ---- sixteen pairs of 16-bit integers -------------------------------------------------------- */

typedef struct { int16_t v[2 * CLB_LANES]; } pairs;
typedef struct { int32_t v[CLB_LANES]; } words;

static inline words words_zero(void) {
    return (words){{0}};
}

static inline words words_add(words a, words b) {
    for (int l = 0; l < CLB_LANES; l++)
        a.v[l] += b.v[l];
    return a;
}

static inline void words_store(int32_t *p, words a) {
    memcpy(p, a.v, sizeof a.v);
}

static inline lanes words_lanes(words a) {
    lanes out;
    for (int l = 0; l < CLB_LANES; l++)
        out.v[l] = (float)a.v[l];
    return out;
}

static inline pairs pairs_load(const int16_t *p) {
    pairs a;
    memcpy(a.v, p, sizeof a.v);
    return a;
}

static inline pairs pairs_fill(int32_t value) {
    pairs a;
    for (int i = 0; i < 2 * CLB_LANES; i++)
        a.v[i] = (int16_t)value;
    return a;
}

/* a, at most 32767 either way and rounded half away from zero, in both numbers of a pair. */
static inline pairs pairs_spread(lanes a) {
    pairs out;
    for (int i = 0; i < 2 * CLB_LANES; i++) {
        float m = a.v[i / 2];
        m = m > 32767 ? 32767 : m < -32767 ? -32767 : m;
        out.v[i] = (int16_t)(m + __builtin_copysignf(0.5f, m));
    }
    return out;
}

/* x m / 2^25, rounded: half of a product's bits, then the last nine of those. */
static inline pairs pairs_scaled(pairs x, pairs m) {
    for (int i = 0; i < 2 * CLB_LANES; i++)
        x.v[i] = (int16_t)((((x.v[i] * m.v[i]) >> 16) + 256) >> 9);
    return x;
}

static inline pairs pairs_clip(pairs a, pairs low, pairs high) {
    for (int i = 0; i < 2 * CLB_LANES; i++) {
        int16_t x = a.v[i] > low.v[i] ? a.v[i] : low.v[i];
        a.v[i] = x < high.v[i] ? x : high.v[i];
    }
    return a;
}

static inline words pairs_dot(pairs a, pairs b) { /* sums of a pair's two products */
    words sum;
    for (int l = 0; l < CLB_LANES; l++)
        sum.v[l] = a.v[2 * l] * b.v[2 * l] + a.v[2 * l + 1] * b.v[2 * l + 1];
    return sum;
}

/* Per pair lane of x [n][16]: -1 where the greatest number outweighs the least one, so that a
   negative scale suits; else 1. */
static inline pairs pairs_sign(const int16_t *x, int64_t n) {
    pairs sign;
    for (int l = 0; l < CLB_LANES; l++) {
        int32_t top = 0, bottom = 0;
        for (int64_t i = 0; i < 2 * n; i++) {
            int32_t v = x[i / 2 * 2 * CLB_LANES + 2 * l + i % 2];
            top = v > top ? v : top;
            bottom = v < bottom ? v : bottom;
        }
        sign.v[2 * l] = sign.v[2 * l + 1] = top > -bottom ? -1 : 1;
    }
    return sign;
}

static inline pairs pairs_signed(pairs a, pairs sign) {
    for (int i = 0; i < 2 * CLB_LANES; i++)
        a.v[i] = (int16_t)(a.v[i] * sign.v[i]);
    return a;
}

/* n codes x / scale, rounded half to even; other versions may write 31 more. */
static inline void group_codes(const float *x, int64_t n, float scale, pairs low, pairs high,
                               int8_t *out) {
    for (int64_t i = 0; i < n; i++) {
        float q = x[i] / scale;
        q = q > low.v[0] ? q : low.v[0];
        q = q < high.v[0] ? q : high.v[0];
        out[i] = (int8_t)((q + 0x1.8p23f) - 0x1.8p23f);
    }
}

/* x [16][n] pairs to turned [n][16] pairs. */
static inline void pairs_turn(const int16_t *x, int64_t n, int16_t *turned) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t l = 0; l < CLB_LANES; l++)
            memcpy(turned + 2 * (i * CLB_LANES + l), x + 2 * (l * n + i), 2 * sizeof *x);
}

#endif
