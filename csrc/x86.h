/* Quantised products in 256-bit registers: eight lanes are one, a block is two of weights and two
   of activations. CLB_DPBUSD is the instruction set's name for VNNI's products, if it has them. */
#ifndef CLB_X86_H
#define CLB_X86_H

typedef __m256 eight;
typedef __m256i half;                      /* 32 bytes: four for each lane */
typedef __m256i sums;                      /* eight int32 */
typedef struct { half low, high; } packed; /* a block: inputs 0..31, 32..63; int4: even, odd ones */

static inline eight eight_zero(void) {
    return _mm256_setzero_ps();
}

static inline eight eight_load(const float *p) {
    return _mm256_loadu_ps(p);
}

static inline void eight_store(float *p, eight a) {
    _mm256_storeu_ps(p, a);
}

static inline eight eight_load_f32(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline eight eight_load_f16(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline eight eight_splat(const float *p) {
    return _mm256_broadcast_ss(p);
}

static inline eight eight_mul(eight a, eight b) {
    return _mm256_mul_ps(a, b);
}

static inline eight eight_fma(eight a, eight b, eight c) {
    return _mm256_fmadd_ps(a, b, c);
}

static inline float eight_fold(eight a) {
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

/* The same additions for four at once: halves side by side, then pairs side by side. */
static inline __m256 fold_halves(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

static inline void eight_fold_four(const eight *a, float *out) {
    __m256 ab = fold_halves(a[0], a[1]), cd = fold_halves(a[2], a[3]);
    __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88),
                               _mm256_shuffle_ps(two, two, 0xdd)); /* a c . . b d . . */
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(one),
                                       _mm256_extractf128_ps(one, 1)));
}

/* Lanes from n on become +0. */
static inline eight eight_first(eight a, int64_t n) {
    static const int32_t keep[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const int32_t *mask = keep + (n < 8 ? 8 - n : 0);
    return _mm256_and_ps(a, eight_load_f32((const uint8_t *)mask));
}

/* f[lane[l] & 7] */
static inline eight eight_pick(const float *f, const int32_t *lane) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(f),
                                    _mm256_loadu_si256((const __m256i *)lane));
}

static inline half half_load(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}

static inline packed nibbles(const uint8_t *p) { /* 0..15 */
    half both = half_load(p), mask = _mm256_set1_epi8(15);
    return (packed){_mm256_and_si256(both, mask),
                    _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}

/* 32 values of 0..3, four in a byte: each byte becomes a word of four bytes, two bits in each. */
static inline half two_bits(const uint8_t *p) {
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    x = _mm256_or_si256(x, _mm256_slli_epi32(x, 6));
    x = _mm256_or_si256(x, _mm256_slli_epi32(x, 12));
    return _mm256_and_si256(x, _mm256_set1_epi8(3));
}

static inline packed int2_bytes(const uint8_t *p) { /* -2..1 */
    half two = _mm256_set1_epi8(2);
    return (packed){_mm256_sub_epi8(two_bits(p), two), _mm256_sub_epi8(two_bits(p + 8), two)};
}

/* 4 where one of 32 bits is 0, else 0. */
static inline half four_unless(const uint8_t *p) {
    static const uint8_t byte[32] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                     2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3};
    static const uint8_t bit[32] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                                    1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    int32_t all;
    memcpy(&all, p, sizeof all);
    half own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(all), half_load(byte)),
                                half_load(bit));
    return _mm256_andnot_si256(_mm256_cmpeq_epi8(own, half_load(bit)), _mm256_set1_epi8(4));
}

static inline packed int3_bytes(const uint8_t *p) { /* -4..3: two low bits each, then high bits */
    return (packed){_mm256_sub_epi8(two_bits(p), four_unless(p + 16)),
                    _mm256_sub_epi8(two_bits(p + 8), four_unless(p + 20))};
}

static inline half less_eight(half w) {
    return _mm256_sub_epi8(w, _mm256_set1_epi8(8));
}

static inline sums sums_zero(void) {
    return _mm256_setzero_si256();
}

static inline eight sums_float(sums a) {
    return _mm256_cvtepi32_ps(a);
}

/* Eight sums of eight products, nibbles times signed bytes. */
static inline sums nibble_sums(packed w, const int8_t *q) {
    half low = half_load((const uint8_t *)q), high = half_load((const uint8_t *)q + 32);
#ifdef CLB_DPBUSD
    return CLB_DPBUSD(CLB_DPBUSD(sums_zero(), w.low, low), w.high, high);
#else /* four products of at most 15 * 127 fit 16 bits */
    __m256i fours = _mm256_add_epi16(_mm256_maddubs_epi16(w.low, low),
                                     _mm256_maddubs_epi16(w.high, high));
    return _mm256_madd_epi16(fours, _mm256_set1_epi16(1));
#endif
}

#ifdef CLB_DPBUSD /* VNNI multiplies unsigned by signed bytes: w + 128, and 128 q taken off */
#define CLB_BYTE_EXCESS

static inline half byte_factor(half w) {
    return _mm256_xor_si256(w, _mm256_set1_epi8(-128));
}

static inline sums byte_excess(const int8_t *q, sums more) {
    return CLB_DPBUSD(more, _mm256_set1_epi8(-128), half_load((const uint8_t *)q));
}

static inline sums byte_start(sums excess) {
    return _mm256_sub_epi32(sums_zero(), excess);
}

/* start + eight sums of four products */
static inline sums byte_sums(half factor, const int8_t *q, sums start) {
    return CLB_DPBUSD(start, factor, half_load((const uint8_t *)q));
}

#else /* |w| times q with w's sign: two products of at most 128 * 127 fit 16 bits */

static inline sums byte_sums(half w, const int8_t *q, sums start) {
    half signed_q = _mm256_sign_epi8(half_load((const uint8_t *)q), w);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_q);
    return _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#endif

#endif
