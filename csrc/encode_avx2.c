/* The encoder's loops for AVX2: sixteen lanes are two registers. */
#include <stddef.h>
#include "encode.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

typedef struct { __m256 low, high; } lanes; /* lanes 0..7, 8..15 */

static inline lanes lanes_load(const float *p) {
    return (lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

static inline lanes lanes_fill(float value) {
    __m256 a = _mm256_set1_ps(value);
    return (lanes){a, a};
}

static inline void lanes_store(float *p, lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}

static inline lanes lanes_add(lanes a, lanes b) {
    return (lanes){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

static inline lanes lanes_sub(lanes a, lanes b) {
    return (lanes){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

static inline lanes lanes_mul(lanes a, lanes b) {
    return (lanes){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

static inline lanes lanes_max(lanes a, lanes b) {
    return (lanes){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

static inline lanes lanes_choose(lanes a, lanes b, lanes x, lanes y) { /* a > b ? x : y */
    return (lanes){
        _mm256_blendv_ps(y.low, x.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
        _mm256_blendv_ps(y.high, x.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
}

/* As lanes_f8 of encode_lanes.h. */
static inline __m256 f8_floats(__m256i codes) {
    __m256i bits = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x7f)), 20);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 24);
    __m256i normal = _mm256_add_epi32(bits, _mm256_set1_epi32(120 << 23));
    __m256 above = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(121 << 23)));
    __m256 small = _mm256_sub_ps(above, _mm256_set1_ps(0x1p-6f));
    __m256 is_small = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(1 << 23), bits));
    __m256 value = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, is_small);
    return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
}

static inline lanes lanes_f8(const uint8_t *p) {
    __m128i codes = _mm_loadu_si128((const __m128i *)p);
    return (lanes){f8_floats(_mm256_cvtepu8_epi32(codes)),
                   f8_floats(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)))};
}

static inline lanes lanes_div(lanes a, lanes b) {
    return (lanes){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

static inline lanes lanes_clip(lanes a, lanes low, lanes high) {
    return (lanes){_mm256_min_ps(_mm256_max_ps(a.low, low.low), high.low),
                   _mm256_min_ps(_mm256_max_ps(a.high, low.high), high.high)};
}

static inline __m256i whole_words(__m256 a) { /* half to even, whatever the thread's mode */
    enum { MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return _mm256_cvttps_epi32(_mm256_round_ps(a, MODE));
}

/* Whole numbers, half to even; magnitudes up to 128. */
static inline void lanes_bytes(lanes a, int8_t *out) {
    __m256i words = _mm256_packs_epi32(whole_words(a.low), whole_words(a.high));
    words = _mm256_permute4x64_epi64(words, 0xd8); /* packing works within halves */
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words),
                                    _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)out, bytes);
}

/* ---- sixteen pairs of 16-bit integers -------------------------------------------------------- */

typedef struct { __m256i low, high; } pairs;
typedef pairs words; /* one 32-bit integer where a pair was */

static inline words words_zero(void) {
    return (words){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

static inline words words_add(words a, words b) {
    return (words){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

static inline void words_store(int32_t *p, words a) {
    _mm256_storeu_si256((__m256i *)p, a.low);
    _mm256_storeu_si256((__m256i *)(p + 8), a.high);
}

static inline lanes words_lanes(words a) {
    return (lanes){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}

static inline pairs pairs_load(const int16_t *p) {
    return (pairs){_mm256_loadu_si256((const __m256i *)p),
                   _mm256_loadu_si256((const __m256i *)(p + CLB_LANES))};
}

static inline pairs pairs_fill(int32_t value) {
    __m256i a = _mm256_set1_epi16((int16_t)value);
    return (pairs){a, a};
}

static inline pairs pairs_spread(const int16_t *p) { /* p[l] to both numbers of pair l */
    int16_t both[2 * CLB_LANES];
    for (int i = 0; i < 2 * CLB_LANES; i++)
        both[i] = p[i / 2];
    return pairs_load(both);
}

/* x m / 2^25, rounded: half of a product's bits, then the last nine of those. */
static inline pairs pairs_scaled(pairs x, pairs m) {
    __m256i half = _mm256_set1_epi16(256);
    __m256i low = _mm256_add_epi16(_mm256_mulhi_epi16(x.low, m.low), half);
    __m256i high = _mm256_add_epi16(_mm256_mulhi_epi16(x.high, m.high), half);
    return (pairs){_mm256_srai_epi16(low, 9), _mm256_srai_epi16(high, 9)};
}

static inline pairs pairs_clip(pairs a, pairs low, pairs high) {
    return (pairs){_mm256_min_epi16(_mm256_max_epi16(a.low, low.low), high.low),
                   _mm256_min_epi16(_mm256_max_epi16(a.high, low.high), high.high)};
}

static inline words pairs_dot(pairs a, pairs b) { /* sums of a pair's two products */
    return (words){_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)};
}

/* Pairs of 1, or of -1 where the greatest of a lane's numbers outweighs the least. */
static inline __m256i suiting_sign(__m256i top, __m256i bottom) {
    top = _mm256_max_epi16(top, _mm256_or_si256(_mm256_slli_epi32(top, 16),
                                                _mm256_srli_epi32(top, 16)));
    bottom = _mm256_min_epi16(bottom, _mm256_or_si256(_mm256_slli_epi32(bottom, 16),
                                                      _mm256_srli_epi32(bottom, 16)));
    __m256i outweighs = _mm256_cmpgt_epi16(top, _mm256_sub_epi16(_mm256_setzero_si256(), bottom));
    return _mm256_or_si256(outweighs, _mm256_set1_epi16(1));
}

static inline pairs pairs_sign(const int16_t *x, int64_t n) {
    pairs top = words_zero(), bottom = words_zero();
    for (int64_t i = 0; i < n; i++) {
        pairs v = pairs_load(x + 2 * CLB_LANES * i);
        top = (pairs){_mm256_max_epi16(top.low, v.low), _mm256_max_epi16(top.high, v.high)};
        bottom = (pairs){_mm256_min_epi16(bottom.low, v.low),
                         _mm256_min_epi16(bottom.high, v.high)};
    }
    return (pairs){suiting_sign(top.low, bottom.low), suiting_sign(top.high, bottom.high)};
}

static inline pairs pairs_signed(pairs a, pairs sign) {
    return (pairs){_mm256_sign_epi16(a.low, sign.low), _mm256_sign_epi16(a.high, sign.high)};
}

/* Eight rows of eight pairs, `stride` numbers apart, become columns of rows of sixteen. */
static inline void turn_eight(const int16_t *x, int64_t stride, int16_t *out) {
    __m256i a[8], b[8];
    for (int r = 0; r < 8; r++)
        a[r] = _mm256_loadu_si256((const __m256i *)(x + r * stride));
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 8; r += 4)
        for (int k = 0; k < 2; k++) {
            a[r + 2 * k] = _mm256_unpacklo_epi64(b[r + k], b[r + k + 2]);
            a[r + 2 * k + 1] = _mm256_unpackhi_epi64(b[r + k], b[r + k + 2]);
        }
    for (int k = 0; k < 4; k++) {
        __m256i first = _mm256_permute2x128_si256(a[k], a[k + 4], 0x20);
        __m256i fifth = _mm256_permute2x128_si256(a[k], a[k + 4], 0x31);
        _mm256_storeu_si256((__m256i *)(out + k * 2 * CLB_LANES), first);
        _mm256_storeu_si256((__m256i *)(out + (k + 4) * 2 * CLB_LANES), fifth);
    }
}

/* x [16][n] pairs to turned [n][16] pairs. */
static inline void pairs_turn(const int16_t *x, int64_t n, int16_t *turned) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        int16_t *out = turned + 2 * i * CLB_LANES;
        turn_eight(x + 2 * i, 2 * n, out);
        turn_eight(x + 2 * (8 * n + i), 2 * n, out + CLB_LANES);
    }
    for (; i < n; i++)
        for (int64_t l = 0; l < CLB_LANES; l++)
            memcpy(turned + 2 * (i * CLB_LANES + l), x + 2 * (l * n + i), 2 * sizeof *x);
}

#include "encode_rows.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

clb_encode_fn *clb_encode_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") ? encode_rows : NULL;
}

#else

clb_encode_fn *clb_encode_avx2(void) {
    return NULL;
}

#endif
