/* AVX-512 with VNNI: sixteen lanes are one register, half a block's products one instruction. */
#include <stddef.h>
#include <string.h>
#include "kernels.h"

#if defined(CLB_EMULATED_AVX512) || (defined(__x86_64__) && defined(__GNUC__))

#ifndef CLB_EMULATED_AVX512 /* tests/c/emulate_avx512.h brings its own */
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target(                                                \
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif
#endif

#define CLB_LANES_NATIVE
typedef __m512 lanes;
#define CLB_CHAINS 8 /* two units of latency 4 */
#define CLB_DPBUSD _mm256_dpbusd_epi32
#include "x86.h"

static inline lanes lanes_zero(void) {
    return _mm512_setzero_ps();
}

static inline lanes lanes_load(const float *p) {
    return _mm512_loadu_ps(p);
}

static inline void lanes_store(float *p, lanes a) {
    _mm512_storeu_ps(p, a);
}

static inline lanes lanes_splat(const float *p) {
    return _mm512_set1_ps(*p);
}

static inline lanes lanes_add(lanes a, lanes b) {
    return _mm512_add_ps(a, b);
}

static inline lanes lanes_mul(lanes a, lanes b) {
    return _mm512_mul_ps(a, b);
}

static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    return _mm512_fmadd_ps(a, b, c);
}

static inline lanes lanes_max(lanes x, lanes most) { /* a NaN in x is passed over */
    return _mm512_max_ps(x, most);
}

static inline float lanes_fold(lanes a) {
    return eight_fold(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}

static inline lanes lanes_load_f32(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
}

static inline lanes lanes_load_bf16(const uint8_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline lanes lanes_load_f16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

#define CLB_LANES_BYTES
static inline lanes lanes_bytes(const uint8_t *p) { /* sixteen int8 */
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

static inline lanes lanes_nibbles(const uint8_t *p) { /* sixteen int4, low nibbles first */
    __m128i both = _mm_loadl_epi64((const __m128i *)p), mask = _mm_set1_epi8(15);
    __m128i pairs = _mm_unpacklo_epi8(_mm_and_si128(both, mask),
                                      _mm_and_si128(_mm_srli_epi16(both, 4), mask));
    pairs = _mm_sub_epi8(pairs, _mm_set1_epi8(8));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(pairs));
}

#define TILE_WIDE 4, 4, 4, 4 /* outputs of a tile at 1, 2, 3 and 4 rows: 32 registers */
#define FLOAT_WIDE 4, 4, 2, 2

#include "tiles.h"

static const clb_kernels table = {.isa = "avx512", CLB_LINEAR_ENTRIES, CLB_NUMERICS_ENTRIES};

#ifdef CLB_EMULATED_AVX512

const clb_kernels *clb_kernels_avx512(void) {
    return &table;
}

#else
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* The compiler's check covers the operating system's part too (xgetbv). */
const clb_kernels *clb_kernels_avx512(void) {
    __builtin_cpu_init();
    int here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") &&
               __builtin_cpu_supports("fma");
    return here ? &table : NULL;
}

#endif
#else

const clb_kernels *clb_kernels_avx512(void) {
    return NULL;
}

#endif
