/* The encoder's loops for AVX2: sixteen lanes are two registers. */
#include <stddef.h>
#include "encode.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }; /* whatever the thread's mode */

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

static inline __m256i magnitudes(const float *p) {
    __m256i bits = _mm256_loadu_si256((const __m256i *)p);
    return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
}

static inline uint32_t lanes_magnitude(const float *x, int64_t n) {
    __m256i a = _mm256_setzero_si256(), b = a;
    int64_t i = 0;
    for (; i + CLB_LANES <= n; i += CLB_LANES) {
        a = _mm256_max_epi32(a, magnitudes(x + i));
        b = _mm256_max_epi32(b, magnitudes(x + i + 8));
    }
    if (i < n) {
        float last[CLB_LANES] = {0};
        memcpy(last, x + i, (size_t)(n - i) * sizeof *x);
        a = _mm256_max_epi32(_mm256_max_epi32(a, magnitudes(last)), magnitudes(last + 8));
    }
    a = _mm256_max_epi32(a, b);
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(most);
}

/* As lanes_halves of encode_lanes.h. */
static inline __m256 halves(__m256 a) {
    __m256 sign = _mm256_and_ps(a, _mm256_set1_ps(-0.0f));
    __m256 magnitude = _mm256_xor_ps(a, sign), least = _mm256_set1_ps(0x1p-14f);
    __m256 normal = _mm256_cvtph_ps(_mm256_cvtps_ph(magnitude, NEAREST));
    __m256 units = _mm256_ceil_ps(_mm256_mul_ps(magnitude, _mm256_set1_ps(0x1p24f)));
    __m256 small = _mm256_mul_ps(_mm256_max_ps(units, _mm256_set1_ps(1)), _mm256_set1_ps(0x1p-24f));
    __m256 is_small = _mm256_cmp_ps(magnitude, least, _CMP_LT_OQ);
    return _mm256_or_ps(_mm256_blendv_ps(normal, small, is_small), sign);
}

static inline lanes lanes_halves(lanes a) {
    return (lanes){halves(a.low), halves(a.high)};
}

static inline void lanes_store_halves(uint16_t *p, lanes a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.low, NEAREST));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.high, NEAREST));
}

static inline __m256 singles(__m256 a) {
    __m256 sign = _mm256_and_ps(a, _mm256_set1_ps(-0.0f));
    return _mm256_or_ps(_mm256_max_ps(_mm256_xor_ps(a, sign), _mm256_set1_ps(1e-8f)), sign);
}

static inline lanes lanes_singles(lanes a) {
    return (lanes){singles(a.low), singles(a.high)};
}

/* As lanes_f8 of encode_lanes.h: an f16 has the same mantissa and an exponent larger by 8. */
static inline lanes lanes_f8(const uint8_t *p) {
    __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i halves = _mm256_slli_epi16(codes, 7); /* the sign twice, and the rest */
    halves = _mm256_and_si256(halves, _mm256_set1_epi16((int16_t)0xbf80));
    __m256 by = _mm256_set1_ps(0x1p8f);
    return (lanes){_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), by),
                   _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), by)};
}

static inline __m256 looked_up(__m128i codes, __m256 low, __m256 high) {
    __m256i which = _mm256_cvtepu8_epi32(codes); /* three bits choose a lane, the fourth a half */
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(which, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, which),
                            _mm256_permutevar8x32_ps(high, which), upper);
}

/* As lanes_fours of encode_lanes.h. */
static inline lanes lanes_fours(const uint8_t *p, const float *table) {
    __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p), mask = _mm_set1_epi8(15);
    __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask),
                                      _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
    return (lanes){looked_up(codes, low, high), looked_up(_mm_srli_si128(codes, 8), low, high)};
}

static inline lanes lanes_bytes(const uint8_t *p) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    __m256i low = _mm256_cvtepu8_epi32(bytes);
    __m256i high = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
    return (lanes){_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
}

static inline lanes lanes_div(lanes a, lanes b) {
    return (lanes){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

/* As lanes_shorts of encode_lanes.h, but in another order. */
static inline void lanes_shorts(lanes a, int16_t *out) {
    __m256 minus = _mm256_set1_ps(-0.0f), half = _mm256_set1_ps(0.5f);
    __m256 low = _mm256_add_ps(a.low, _mm256_or_ps(_mm256_and_ps(a.low, minus), half));
    __m256 high = _mm256_add_ps(a.high, _mm256_or_ps(_mm256_and_ps(a.high, minus), half));
    __m256i both = _mm256_packs_epi32(_mm256_cvttps_epi32(low), _mm256_cvttps_epi32(high));
    _mm256_storeu_si256((__m256i *)out, both);
}

/* Thirty-two codes from -8 to 7 become sixteen bytes. */
static inline void nibbles(const int8_t *codes, uint8_t *out) {
    __m256i a = _mm256_loadu_si256((const __m256i *)codes);
    a = _mm256_add_epi8(a, _mm256_set1_epi8(8));
    a = _mm256_maddubs_epi16(a, _mm256_set1_epi16(0x1001)); /* the first and sixteen the second */
    a = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, a), 0xd8);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(a));
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

/* a, rounded half away from zero and at most 32767 either way, in both numbers of a pair. */
static inline __m256i spread(__m256 a) {
    __m256 most = _mm256_set1_ps(32767), minus = _mm256_set1_ps(-0.0f);
    a = _mm256_max_ps(_mm256_min_ps(a, most), _mm256_xor_ps(most, minus));
    a = _mm256_add_ps(a, _mm256_or_ps(_mm256_and_ps(a, minus), _mm256_set1_ps(0.5f)));
    __m256i whole = _mm256_cvttps_epi32(a);
    return _mm256_blend_epi16(whole, _mm256_slli_epi32(whole, 16), 0xaa);
}

static inline pairs pairs_spread(lanes a) {
    return (pairs){spread(a.low), spread(a.high)};
}

/* x m / 2^25, rounded: half of a product's bits, then the last nine of those, as the rounding
   product with 2^6 drops them. */
static inline pairs pairs_scaled(pairs x, pairs m) {
    __m256i by = _mm256_set1_epi16(64);
    return (pairs){_mm256_mulhrs_epi16(_mm256_mulhi_epi16(x.low, m.low), by),
                   _mm256_mulhrs_epi16(_mm256_mulhi_epi16(x.high, m.high), by)};
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

/* Thirty-two numbers below 256 as codes. */
static inline void store_codes(__m256 a, __m256 b, __m256 c, __m256 d, pairs low, pairs high,
                               int8_t *out) {
    __m256i ab = _mm256_packs_epi32(_mm256_cvttps_epi32(a), _mm256_cvttps_epi32(b));
    __m256i cd = _mm256_packs_epi32(_mm256_cvttps_epi32(c), _mm256_cvttps_epi32(d));
    pairs both = pairs_clip((pairs){ab, cd}, low, high);
    __m256i bytes = _mm256_packs_epi16(both.low, both.high); /* packing works within halves */
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)out, bytes);
}

/* x / by or, when `product`, x inverse: whether a quotient may round elsewhere. */
static inline bool thirty_two(const float *x, __m256 by, bool product, pairs low, pairs high,
                              int8_t *out) {
    __m256 whole[4], apart = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    for (int k = 0; k < 4; k++) {
        __m256 v = _mm256_loadu_ps(x + 8 * k);
        __m256 q = product ? _mm256_mul_ps(v, by) : _mm256_div_ps(v, by);
        whole[k] = _mm256_round_ps(q, NEAREST);
        apart = _mm256_max_ps(apart, _mm256_andnot_ps(sign, _mm256_sub_ps(q, whole[k])));
    }
    store_codes(whole[0], whole[1], whole[2], whole[3], low, high, out);
    __m256 near = _mm256_cmp_ps(apart, _mm256_set1_ps(0.5f - 0x1p-13f), _CMP_GT_OQ);
    return _mm256_movemask_ps(near);
}

/* x inverse errs by less than 2^-14 where x / by is below 256: only near a half does it matter. */
static inline void group_codes(const float *x, int64_t n, float scale, pairs low, pairs high,
                               int8_t *out) {
    __m256 by = _mm256_set1_ps(scale), inverse = _mm256_set1_ps(1 / scale);
    for (int64_t i = 0; i < n; i += 2 * CLB_LANES)
        if (thirty_two(x + i, inverse, true, low, high, out + i))
            thirty_two(x + i, by, false, low, high, out + i);
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
    unsigned a, b, c, d;
    __builtin_cpu_init();
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C; /* older compilers cannot ask */
    return f16c && __builtin_cpu_supports("avx2") ? encode_rows : NULL;
}

#else

clb_encode_fn *clb_encode_avx2(void) {
    return NULL;
}

#endif
