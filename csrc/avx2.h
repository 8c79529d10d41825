/* AVX2 with FMA and F16C: sixteen lanes are two registers. kernels_avx2.c includes this for every
   processor that has these, kernels_avx_vnni.c, with CLB_DPBUSD, for those that have VNNI too. */
#ifndef CLB_AVX2_H
#define CLB_AVX2_H

#define CLB_LANES_NATIVE
typedef struct { __m256 low, high; } lanes; /* lanes 0..7, 8..15 */
#include "x86.h"

static inline lanes lanes_zero(void) {
    return (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

static inline lanes lanes_load(const float *p) {
    return (lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

static inline void lanes_store(float *p, lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}

static inline lanes lanes_splat(const float *p) {
    __m256 a = _mm256_broadcast_ss(p);
    return (lanes){a, a};
}

static inline lanes lanes_add(lanes a, lanes b) {
    return (lanes){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

static inline lanes lanes_mul(lanes a, lanes b) {
    return (lanes){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    return (lanes){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

static inline lanes lanes_max(lanes x, lanes most) { /* a NaN in x is passed over */
    return (lanes){_mm256_max_ps(x.low, most.low), _mm256_max_ps(x.high, most.high)};
}

static inline float lanes_fold(lanes a) {
    return eight_fold(_mm256_add_ps(a.low, a.high));
}

#define CLB_FOLD_FOUR
static inline void lanes_fold_four(const lanes *a, float *out) {
    const eight folded[] = {_mm256_add_ps(a[0].low, a[0].high), _mm256_add_ps(a[1].low, a[1].high),
                            _mm256_add_ps(a[2].low, a[2].high), _mm256_add_ps(a[3].low, a[3].high)};
    eight_fold_four(folded, out);
}

static inline lanes lanes_load_f32(const uint8_t *p) {
    return (lanes){eight_load_f32(p), eight_load_f32(p + 32)};
}

static inline __m256 bf16_floats(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline lanes lanes_load_bf16(const uint8_t *p) {
    return (lanes){bf16_floats(p), bf16_floats(p + 16)};
}

static inline lanes lanes_load_f16(const uint8_t *p) {
    return (lanes){eight_load_f16(p), eight_load_f16(p + 16)};
}

#define CLB_LANES_BYTES
static inline __m256 byte_floats(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

static inline lanes lanes_bytes(const uint8_t *p) { /* sixteen int8 */
    return (lanes){byte_floats(p), byte_floats(p + 8)};
}

/* Eight int4, low nibbles first: each is shifted to the top of its own number, and the sign of what
   is then 16 times its distance from 8 comes down with it. */
static inline __m256 nibble_floats(const uint8_t *p) {
    const __m256i up = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    int32_t all;
    memcpy(&all, p, sizeof all);
    __m256i eight = _mm256_xor_si256(_mm256_set1_epi32(all), _mm256_set1_epi8((char)0x88));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sllv_epi32(eight, up), 28));
}

static inline lanes lanes_nibbles(const uint8_t *p) { /* sixteen */
    return (lanes){nibble_floats(p), nibble_floats(p + 4)};
}

#define CLB_F16_ONE f16_one
static inline float f16_one(uint16_t bits) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

/* Outputs of a tile at 1, 2, 3 and 4 rows: 16 registers, of which a float lane takes two. */
#define TILE_WIDE 4, 2, 2, 2
#define FLOAT_WIDE 4, 2, 1, 1

#include "tiles.h"

#endif
