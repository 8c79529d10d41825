/* The NEON intrinsics of csrc/neon.h in plain C, so that its source is tested on any machine:
   cc -include this file, then compare with the scalar table. */
#ifndef EMULATE_NEON_H
#define EMULATE_NEON_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#define CLB_EMULATED_NEON

typedef struct { float v[2]; } float32x2_t;
typedef struct { float v[4]; } float32x4_t;
typedef struct { int32_t v[4]; } int32x4_t;
typedef struct { uint32_t v[4]; } uint32x4_t;
typedef struct { int16_t v[8]; } int16x8_t;
typedef struct { uint16_t v[4]; } uint16x4_t;
typedef struct { uint16_t v[4]; } float16x4_t; /* the bits */
typedef struct { uint16_t v[8]; } uint16x8_t;
typedef struct { int8_t v[8]; } int8x8_t;
typedef struct { int8_t v[16]; } int8x16_t;
typedef struct { uint8_t v[8]; } uint8x8_t;
typedef struct { uint8_t v[16]; } uint8x16_t;

#define EACH(n) for (int i = 0; i < (n); i++)

/* name(from) makes a `to` of the first bytes of p or of a register, beginning at byte `at` */
#define LOAD(name, to, from)                                                                       \
    static inline to name(const from *p) {                                                         \
        to r;                                                                                      \
        memcpy(&r, p, sizeof r);                                                                   \
        return r;                                                                                  \
    }
#define CAST(name, to, from, at)                                                                   \
    static inline to name(from x) {                                                                \
        to r;                                                                                      \
        memcpy(&r, (const char *)&x + (at), sizeof r);                                             \
        return r;                                                                                  \
    }
#define SPLAT(name, to, from, n)                                                                   \
    static inline to name(from x) {                                                                \
        to r;                                                                                      \
        EACH(n) r.v[i] = x;                                                                        \
        return r;                                                                                  \
    }
#define PAIR(name, type, n, expression)                                                            \
    static inline type name(type x, type y) {                                                      \
        type r;                                                                                    \
        EACH(n) r.v[i] = expression;                                                               \
        return r;                                                                                  \
    }

LOAD(vld1q_f32, float32x4_t, float)
LOAD(vld1_u8, uint8x8_t, uint8_t)
LOAD(vld1q_u8, uint8x16_t, uint8_t)
LOAD(vld1q_s8, int8x16_t, int8_t)
SPLAT(vdupq_n_f32, float32x4_t, float, 4)
SPLAT(vdupq_n_s32, int32x4_t, int32_t, 4)
SPLAT(vdupq_n_s8, int8x16_t, int8_t, 16)
SPLAT(vdup_n_u8, uint8x8_t, uint8_t, 8)
SPLAT(vdupq_n_u8, uint8x16_t, uint8_t, 16)
CAST(vreinterpretq_f32_u8, float32x4_t, uint8x16_t, 0)
CAST(vreinterpretq_f32_u32, float32x4_t, uint32x4_t, 0)
CAST(vreinterpretq_u16_u8, uint16x8_t, uint8x16_t, 0)
CAST(vreinterpretq_s8_u8, int8x16_t, uint8x16_t, 0)
CAST(vreinterpret_f16_u16, float16x4_t, uint16x4_t, 0)
CAST(vget_low_f32, float32x2_t, float32x4_t, 0)
CAST(vget_high_f32, float32x2_t, float32x4_t, 8)
CAST(vget_low_u16, uint16x4_t, uint16x8_t, 0)
CAST(vget_high_u16, uint16x4_t, uint16x8_t, 8)
CAST(vget_low_s8, int8x8_t, int8x16_t, 0)
CAST(vget_high_s8, int8x8_t, int8x16_t, 8)
PAIR(vaddq_f32, float32x4_t, 4, x.v[i] + y.v[i])
PAIR(vaddq_s32, int32x4_t, 4, x.v[i] + y.v[i])
PAIR(vmulq_f32, float32x4_t, 4, x.v[i] * y.v[i])
PAIR(vadd_f32, float32x2_t, 2, x.v[i] + y.v[i])
PAIR(vsubq_s8, int8x16_t, 16, (int8_t)(x.v[i] - y.v[i]))
PAIR(vaddq_u8, uint8x16_t, 16, (uint8_t)(x.v[i] + y.v[i]))
PAIR(vsubq_u8, uint8x16_t, 16, (uint8_t)(x.v[i] - y.v[i]))
PAIR(vandq_u8, uint8x16_t, 16, x.v[i] & y.v[i])
PAIR(vbicq_u8, uint8x16_t, 16, (uint8_t)(x.v[i] & ~y.v[i]))
PAIR(vtstq_u8, uint8x16_t, 16, x.v[i] & y.v[i] ? 255 : 0)
PAIR(vqtbl1q_u8, uint8x16_t, 16, y.v[i] < 16 ? x.v[y.v[i]] : 0)
PAIR(vpaddq_s32, int32x4_t, 4,
     i < 2 ? x.v[2 * i] + x.v[2 * i + 1] : y.v[2 * i - 4] + y.v[2 * i - 3])

static inline void vst1q_f32(float *p, float32x4_t x) {
    memcpy(p, &x, sizeof x);
}

static inline float vget_lane_f32(float32x2_t x, int lane) {
    return x.v[lane];
}

static inline float32x4_t vfmaq_f32(float32x4_t sum, float32x4_t x, float32x4_t y) {
    EACH(4) sum.v[i] = fmaf(x.v[i], y.v[i], sum.v[i]);
    return sum;
}

static inline uint32x4_t vcgtq_f32(float32x4_t x, float32x4_t y) {
    uint32x4_t r;
    EACH(4) r.v[i] = x.v[i] > y.v[i] ? UINT32_MAX : 0;
    return r;
}

static inline float32x4_t vbslq_f32(uint32x4_t mask, float32x4_t x, float32x4_t y) {
    EACH(4) x.v[i] = mask.v[i] ? x.v[i] : y.v[i];
    return x;
}

static inline uint32x4_t vshll_n_u16(uint16x4_t x, int n) {
    uint32x4_t r;
    EACH(4) r.v[i] = (uint32_t)x.v[i] << n;
    return r;
}

static inline uint8x16_t vshrq_n_u8(uint8x16_t x, int n) {
    EACH(16) x.v[i] = (uint8_t)(x.v[i] >> n);
    return x;
}

/* Shifted left; right where the distance is negative. */
static inline uint8x16_t vshlq_u8(uint8x16_t x, int8x16_t by) {
    EACH(16) x.v[i] = (uint8_t)(by.v[i] < 0 ? x.v[i] >> -by.v[i] : x.v[i] << by.v[i]);
    return x;
}

static inline uint8x16_t vcombine_u8(uint8x8_t low, uint8x8_t high) {
    uint8x16_t r;
    memcpy(r.v, low.v, 8);
    memcpy(r.v + 8, high.v, 8);
    return r;
}

/* By the value of the bits, independently of csrc/decode.h. */
static inline float emulated_half(unsigned h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float r = exponent == 31 ? (fraction ? NAN : INFINITY)
              : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                             : ldexpf((float)fraction, -24);
    return h & 0x8000 ? -r : r;
}

static inline float32x4_t vcvt_f32_f16(float16x4_t x) {
    float32x4_t r;
    EACH(4) r.v[i] = emulated_half(x.v[i]);
    return r;
}

static inline float32x4_t vcvtq_f32_s32(int32x4_t x) {
    float32x4_t r;
    EACH(4) r.v[i] = (float)x.v[i];
    return r;
}

static inline int16x8_t vmull_s8(int8x8_t x, int8x8_t y) {
    int16x8_t r;
    EACH(8) r.v[i] = (int16_t)(x.v[i] * y.v[i]);
    return r;
}

static inline int32x4_t vpaddlq_s16(int16x8_t x) {
    int32x4_t r;
    EACH(4) r.v[i] = x.v[2 * i] + x.v[2 * i + 1];
    return r;
}

static inline int32x4_t vdotq_s32(int32x4_t sum, int8x16_t x, int8x16_t y) {
    EACH(16) sum.v[i / 4] += x.v[i] * y.v[i];
    return sum;
}

#undef EACH
#undef LOAD
#undef CAST
#undef SPLAT
#undef PAIR
#endif
