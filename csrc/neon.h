/* NEON on 64-bit Arm: sixteen lanes are four registers. kernels_neon.c includes this for every
   processor, kernels_neon_dot.c, with CLB_NEON_DOT, for those with the dot product instructions. */
#ifndef CLB_NEON_H
#define CLB_NEON_H
#include <string.h>
#include "kernels.h"

#define CLB_LANES_NATIVE
typedef struct { float32x4_t a, b, c, d; } lanes; /* lanes 0..3, 4..7, 8..11, 12..15 */
typedef struct { float32x4_t a, b; } eight;
typedef struct { int8x16_t a, b; } half;   /* 32 bytes: four for each lane of eight */
typedef struct { int32x4_t a, b; } sums;   /* eight int32 */
typedef struct { half low, high; } packed; /* a block: inputs 0..31, 32..63; int4: even, odd ones */

static inline lanes lanes_zero(void) {
    float32x4_t z = vdupq_n_f32(0);
    return (lanes){z, z, z, z};
}

static inline lanes lanes_load(const float *p) {
    return (lanes){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}

static inline void lanes_store(float *p, lanes x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}

static inline lanes lanes_splat(const float *p) {
    float32x4_t x = vdupq_n_f32(*p);
    return (lanes){x, x, x, x};
}

static inline lanes lanes_add(lanes x, lanes y) {
    return (lanes){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c),
                   vaddq_f32(x.d, y.d)};
}

static inline lanes lanes_mul(lanes x, lanes y) {
    return (lanes){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c),
                   vmulq_f32(x.d, y.d)};
}

static inline lanes lanes_fma(lanes x, lanes y, lanes z) { /* the sum comes first in NEON */
    return (lanes){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
                   vfmaq_f32(z.d, x.d, y.d)};
}

/* NEON's own maximum would let a NaN through. */
static inline float32x4_t larger(float32x4_t x, float32x4_t most) {
    return vbslq_f32(vcgtq_f32(x, most), x, most);
}

static inline lanes lanes_max(lanes x, lanes most) { /* a NaN in x is passed over */
    return (lanes){larger(x.a, most.a), larger(x.b, most.b), larger(x.c, most.c),
                   larger(x.d, most.d)};
}

static inline eight eight_zero(void) {
    return (eight){vdupq_n_f32(0), vdupq_n_f32(0)};
}

static inline eight eight_load(const float *p) {
    return (eight){vld1q_f32(p), vld1q_f32(p + 4)};
}

static inline void eight_store(float *p, eight x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}

static inline eight eight_splat(const float *p) {
    return (eight){vdupq_n_f32(*p), vdupq_n_f32(*p)};
}

static inline eight eight_mul(eight x, eight y) {
    return (eight){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)};
}

static inline eight eight_fma(eight x, eight y, eight z) {
    return (eight){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)};
}

static inline float eight_fold(eight x) {
    float32x4_t v = vaddq_f32(x.a, x.b);
    float32x2_t two = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

static inline void eight_fold_four(const eight *a, float *out) {
    for (int k = 0; k < 4; k++)
        out[k] = eight_fold(a[k]);
}

static inline eight eight_pick(const float *f, const int32_t *lane) {
    float v[CLB_EIGHT];
    for (int l = 0; l < CLB_EIGHT; l++)
        v[l] = f[lane[l] & 7];
    return eight_load(v);
}

static inline float lanes_fold(lanes x) {
    return eight_fold((eight){vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d)});
}

static inline lanes lanes_load_f32(const uint8_t *p) {
    return (lanes){vreinterpretq_f32_u8(vld1q_u8(p)), vreinterpretq_f32_u8(vld1q_u8(p + 16)),
                   vreinterpretq_f32_u8(vld1q_u8(p + 32)), vreinterpretq_f32_u8(vld1q_u8(p + 48))};
}

static inline float32x4_t four_bf16(uint16x4_t bits) {
    return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}

static inline lanes lanes_load_bf16(const uint8_t *p) {
    uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p)), y = vreinterpretq_u16_u8(vld1q_u8(p + 16));
    return (lanes){four_bf16(vget_low_u16(x)), four_bf16(vget_high_u16(x)),
                   four_bf16(vget_low_u16(y)), four_bf16(vget_high_u16(y))};
}

static inline float32x4_t four_f16(uint16x4_t bits) {
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

static inline lanes lanes_load_f16(const uint8_t *p) {
    uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p)), y = vreinterpretq_u16_u8(vld1q_u8(p + 16));
    return (lanes){four_f16(vget_low_u16(x)), four_f16(vget_high_u16(x)),
                   four_f16(vget_low_u16(y)), four_f16(vget_high_u16(y))};
}

static inline eight eight_load_f32(const uint8_t *p) {
    return (eight){vreinterpretq_f32_u8(vld1q_u8(p)), vreinterpretq_f32_u8(vld1q_u8(p + 16))};
}

static inline eight eight_load_f16(const uint8_t *p) {
    uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p));
    return (eight){four_f16(vget_low_u16(x)), four_f16(vget_high_u16(x))};
}

/* Lanes from n on become +0. */
static inline eight eight_first(eight x, int64_t n) {
    float v[CLB_EIGHT];
    eight_store(v, x);
    for (int l = 0; l < CLB_EIGHT; l++)
        v[l] = l < n ? v[l] : 0.0f;
    return eight_load(v);
}

static inline half half_load(const uint8_t *p) {
    return (half){vreinterpretq_s8_u8(vld1q_u8(p)), vreinterpretq_s8_u8(vld1q_u8(p + 16))};
}

static inline half half_of(uint8x16_t a, uint8x16_t b) {
    return (half){vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)};
}

static inline packed nibbles(const uint8_t *p) { /* 0..15 */
    uint8x16_t x = vld1q_u8(p), y = vld1q_u8(p + 16), mask = vdupq_n_u8(15);
    return (packed){half_of(vandq_u8(x, mask), vandq_u8(y, mask)),
                    half_of(vshrq_n_u8(x, 4), vshrq_n_u8(y, 4))};
}

/* 16 values from four bytes p[first..first + 3]: each byte four times, its copies shifted apart. */
static inline uint8x16_t two_bits(uint8x16_t x, uint8_t first) {
    static const uint8_t byte[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    static const int8_t down[16] = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
    uint8x16_t own = vqtbl1q_u8(x, vaddq_u8(vld1q_u8(byte), vdupq_n_u8(first)));
    return vandq_u8(vshlq_u8(own, vld1q_s8(down)), vdupq_n_u8(3));
}

static inline packed int2_bytes(const uint8_t *p) { /* -2..1 */
    uint8x16_t x = vld1q_u8(p), two = vdupq_n_u8(2);
    return (packed){half_of(vsubq_u8(two_bits(x, 0), two), vsubq_u8(two_bits(x, 4), two)),
                    half_of(vsubq_u8(two_bits(x, 8), two), vsubq_u8(two_bits(x, 12), two))};
}

/* 16 values less 4 where their bit of p[first], p[first + 1] is 0. */
static inline uint8x16_t with_high(uint8x16_t low, uint8x16_t high, uint8_t first) {
    static const uint8_t byte[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    static const uint8_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t own = vqtbl1q_u8(high, vaddq_u8(vld1q_u8(byte), vdupq_n_u8(first)));
    return vsubq_u8(low, vbicq_u8(vdupq_n_u8(4), vtstq_u8(own, vld1q_u8(bit))));
}

static inline packed int3_bytes(const uint8_t *p) { /* -4..3: two low bits each, then high bits */
    uint8x16_t x = vld1q_u8(p), high = vcombine_u8(vld1_u8(p + 16), vdup_n_u8(0));
    return (packed){
        half_of(with_high(two_bits(x, 0), high, 0), with_high(two_bits(x, 4), high, 2)),
        half_of(with_high(two_bits(x, 8), high, 4), with_high(two_bits(x, 12), high, 6))};
}

static inline half less_eight(half w) {
    return (half){vsubq_s8(w.a, vdupq_n_s8(8)), vsubq_s8(w.b, vdupq_n_s8(8))};
}

static inline sums sums_zero(void) {
    return (sums){vdupq_n_s32(0), vdupq_n_s32(0)};
}

static inline eight sums_float(sums x) {
    return (eight){vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)};
}

/* more + sums of four products */
static inline int32x4_t four_sums(int8x16_t w, const int8_t *p, int32x4_t more) {
    int8x16_t q = vld1q_s8(p);
#ifdef CLB_NEON_DOT
    return vdotq_s32(more, w, q);
#else /* a product is at most 128 * 127 and fits 16 bits */
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(q));
    int16x8_t high = vmull_s8(vget_high_s8(w), vget_high_s8(q));
    return vaddq_s32(more, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

/* start + eight sums of four products of signed bytes */
static inline sums byte_sums(half w, const int8_t *q, sums start) {
    return (sums){four_sums(w.a, q, start.a), four_sums(w.b, q + 16, start.b)};
}

/* Eight sums of eight products; a nibble is a small signed byte. */
static inline sums nibble_sums(packed w, const int8_t *q) {
    return byte_sums(w.high, q + 32, byte_sums(w.low, q, sums_zero()));
}

/* Outputs of a tile at 1, 2, 3 and 4 rows: 32 registers, of which a float lane takes four. */
#define TILE_WIDE 4, 2, 2, 1
#define FLOAT_WIDE 2, 2, 1, 1

#include "tiles.h"

#endif
