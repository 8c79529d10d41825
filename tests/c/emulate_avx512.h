/* The AVX-512 intrinsics of csrc/kernels_avx512.c in plain C, so that its source is tested on
   machines without AVX-512: cc -include this file, then compare with the scalar table. */
#ifndef EMULATE_AVX512_H
#define EMULATE_AVX512_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#define CLB_EMULATED_AVX512

typedef struct { float f[4]; } __m128;
typedef struct { float f[8]; } __m256;
typedef struct { float f[16]; } __m512;
typedef struct { uint8_t b[16]; } __m128i;
typedef struct { uint8_t b[32]; } __m256i;
typedef struct { uint8_t b[64]; } __m512i;

#define EACH(n) for (int i = 0; i < (n); i++)

static inline __m512 _mm512_setzero_ps(void) {
    return (__m512){{0}};
}

static inline __m512 _mm512_set1_ps(float x) {
    __m512 r;
    EACH(16) r.f[i] = x;
    return r;
}

static inline __m512 _mm512_loadu_ps(const void *p) {
    __m512 r;
    memcpy(&r, p, sizeof r);
    return r;
}

static inline void _mm512_storeu_ps(void *p, __m512 a) {
    memcpy(p, &a, sizeof a);
}

static inline __m512i _mm512_loadu_si512(const void *p) {
    __m512i r;
    memcpy(&r, p, sizeof r);
    return r;
}

static inline __m256i _mm256_loadu_si256(const __m256i *p) {
    __m256i r;
    memcpy(&r, p, sizeof r);
    return r;
}

static inline __m512 _mm512_castsi512_ps(__m512i a) {
    __m512 r;
    memcpy(&r, &a, sizeof r);
    return r;
}

static inline __m512 _mm512_add_ps(__m512 a, __m512 b) {
    EACH(16) a.f[i] = a.f[i] + b.f[i];
    return a;
}

static inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
    EACH(16) a.f[i] = a.f[i] * b.f[i];
    return a;
}

static inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
    EACH(16) a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i];
    return a;
}

static inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    EACH(16) c.f[i] = fmaf(a.f[i], b.f[i], c.f[i]);
    return c;
}

static inline __m256 _mm512_castps512_ps256(__m512 a) {
    __m256 r;
    memcpy(&r, a.f, sizeof r);
    return r;
}

static inline __m256 _mm512_extractf32x8_ps(__m512 a, int half) {
    __m256 r;
    memcpy(&r, a.f + 8 * half, sizeof r);
    return r;
}

static inline __m256 _mm256_add_ps(__m256 a, __m256 b) {
    EACH(8) a.f[i] = a.f[i] + b.f[i];
    return a;
}

static inline __m128 _mm256_castps256_ps128(__m256 a) {
    __m128 r;
    memcpy(&r, a.f, sizeof r);
    return r;
}

static inline __m128 _mm256_extractf128_ps(__m256 a, int half) {
    __m128 r;
    memcpy(&r, a.f + 4 * half, sizeof r);
    return r;
}

static inline __m128 _mm_add_ps(__m128 a, __m128 b) {
    EACH(4) a.f[i] = a.f[i] + b.f[i];
    return a;
}

static inline __m128 _mm_add_ss(__m128 a, __m128 b) {
    a.f[0] = a.f[0] + b.f[0];
    return a;
}

static inline __m128 _mm_movehl_ps(__m128 a, __m128 b) {
    return (__m128){{b.f[2], b.f[3], a.f[2], a.f[3]}};
}

static inline __m128 _mm_movehdup_ps(__m128 a) {
    return (__m128){{a.f[1], a.f[1], a.f[3], a.f[3]}};
}

static inline float _mm_cvtss_f32(__m128 a) {
    return a.f[0];
}

static inline int32_t emulated_int32(const uint8_t *b, int i) {
    int32_t r;
    memcpy(&r, b + 4 * i, sizeof r);
    return r;
}

static inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
    __m512i r;
    memset(&r, 0, sizeof r);
    EACH(16) memcpy(r.b + 4 * i, a.b + 2 * i, 2);
    return r;
}

static inline __m128i _mm_loadu_si128(const __m128i *p) {
    __m128i r;
    memcpy(&r, p, sizeof r);
    return r;
}

static inline __m128i _mm_loadl_epi64(const __m128i *p) {
    __m128i r = {{0}};
    memcpy(&r, p, 8);
    return r;
}

static inline __m128i _mm_set1_epi8(char x) {
    __m128i r;
    memset(&r, x, sizeof r);
    return r;
}

static inline __m128i _mm_and_si128(__m128i a, __m128i b) {
    EACH(16) a.b[i] &= b.b[i];
    return a;
}

static inline __m128i _mm_sub_epi8(__m128i a, __m128i b) {
    EACH(16) a.b[i] = (uint8_t)(a.b[i] - b.b[i]);
    return a;
}

static inline __m128i _mm_srli_epi16(__m128i a, int n) {
    EACH(8) {
        uint16_t x;
        memcpy(&x, a.b + 2 * i, 2);
        x = (uint16_t)(x >> n);
        memcpy(a.b + 2 * i, &x, 2);
    }
    return a;
}

static inline __m128i _mm_unpacklo_epi8(__m128i a, __m128i b) {
    __m128i r;
    EACH(8) {
        r.b[2 * i] = a.b[i];
        r.b[2 * i + 1] = b.b[i];
    }
    return r;
}

static inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
    __m512i r;
    EACH(16) {
        int32_t x = (int8_t)a.b[i];
        memcpy(r.b + 4 * i, &x, 4);
    }
    return r;
}

static inline __m512i _mm512_slli_epi32(__m512i a, unsigned n) {
    EACH(16) {
        uint32_t v;
        memcpy(&v, a.b + 4 * i, 4);
        v <<= n;
        memcpy(a.b + 4 * i, &v, 4);
    }
    return a;
}

/* By the value of the bits, independently of csrc/decode.h. */
static inline float emulated_half(unsigned h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float r = exponent == 31 ? (fraction ? NAN : INFINITY)
              : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                             : ldexpf((float)fraction, -24);
    return h & 0x8000 ? -r : r;
}

static inline __m512 _mm512_cvtph_ps(__m256i a) {
    __m512 r;
    EACH(16) r.f[i] = emulated_half((unsigned)(a.b[2 * i] | a.b[2 * i + 1] << 8));
    return r;
}

static inline __m512 _mm512_cvtepi32_ps(__m512i a) {
    __m512 r;
    EACH(16) r.f[i] = (float)emulated_int32(a.b, i);
    return r;
}

/* ---- eight lanes ---- */

static inline __m256 _mm256_setzero_ps(void) {
    return (__m256){{0}};
}

static inline __m256 _mm256_broadcast_ss(const float *p) {
    __m256 r;
    EACH(8) r.f[i] = *p;
    return r;
}

static inline __m256 _mm256_loadu_ps(const float *p) {
    __m256 r;
    memcpy(&r, p, sizeof r);
    return r;
}

static inline void _mm256_storeu_ps(float *p, __m256 a) {
    memcpy(p, &a, sizeof a);
}

static inline void _mm_storeu_ps(float *p, __m128 a) {
    memcpy(p, &a, sizeof a);
}

static inline __m256 _mm256_castsi256_ps(__m256i a) {
    __m256 r;
    memcpy(&r, &a, sizeof r);
    return r;
}

static inline __m256 _mm256_mul_ps(__m256 a, __m256 b) {
    EACH(8) a.f[i] = a.f[i] * b.f[i];
    return a;
}

static inline __m256 _mm256_and_ps(__m256 a, __m256 b) {
    uint32_t x[8], y[8];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    EACH(8) x[i] &= y[i];
    memcpy(&a, x, sizeof a);
    return a;
}

static inline __m256 _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c) {
    EACH(8) c.f[i] = fmaf(a.f[i], b.f[i], c.f[i]);
    return c;
}

static inline __m256 _mm256_cvtph_ps(__m128i a) {
    __m256 r;
    EACH(8) r.f[i] = emulated_half((unsigned)(a.b[2 * i] | a.b[2 * i + 1] << 8));
    return r;
}

static inline __m256 _mm256_cvtepi32_ps(__m256i a) {
    __m256 r;
    EACH(8) r.f[i] = (float)emulated_int32(a.b, i);
    return r;
}

static inline __m256 _mm256_permutevar8x32_ps(__m256 a, __m256i index) {
    __m256 r;
    EACH(8) r.f[i] = a.f[emulated_int32(index.b, i) & 7];
    return r;
}

static inline __m256 _mm256_permute2f128_ps(__m256 a, __m256 b, int control) {
    const float *from[] = {a.f, a.f + 4, b.f, b.f + 4};
    __m256 r;
    memcpy(r.f, from[control & 3], sizeof r.f / 2);
    memcpy(r.f + 4, from[control >> 4 & 3], sizeof r.f / 2);
    return r;
}

static inline __m256 _mm256_shuffle_ps(__m256 a, __m256 b, int control) {
    __m256 r;
    EACH(8) r.f[i] = (i & 2 ? b : a).f[(i & 4) + (control >> 2 * (i & 3) & 3)];
    return r;
}

static inline __m128 _mm_unpacklo_ps(__m128 a, __m128 b) {
    return (__m128){{a.f[0], b.f[0], a.f[1], b.f[1]}};
}

static inline __m256i _mm256_setzero_si256(void) {
    return (__m256i){{0}};
}

static inline __m256i _mm256_set1_epi8(char x) {
    __m256i r;
    memset(&r, x, sizeof r);
    return r;
}

static inline __m256i _mm256_and_si256(__m256i a, __m256i b) {
    EACH(32) a.b[i] &= b.b[i];
    return a;
}

static inline __m256i _mm256_cvtepu8_epi32(__m128i a) {
    __m256i r = {{0}};
    EACH(8) r.b[4 * i] = a.b[i];
    return r;
}

static inline __m256i _mm256_slli_epi32(__m256i a, int n) {
    EACH(8) {
        uint32_t word = (uint32_t)emulated_int32(a.b, i) << n;
        memcpy(a.b + 4 * i, &word, sizeof word);
    }
    return a;
}

static inline __m256i _mm256_or_si256(__m256i a, __m256i b) {
    EACH(32) a.b[i] |= b.b[i];
    return a;
}

static inline __m256i _mm256_andnot_si256(__m256i a, __m256i b) {
    EACH(32) a.b[i] = (uint8_t)(~a.b[i] & b.b[i]);
    return a;
}

static inline __m256i _mm256_cmpeq_epi8(__m256i a, __m256i b) {
    EACH(32) a.b[i] = a.b[i] == b.b[i] ? 255 : 0;
    return a;
}

static inline __m256i _mm256_shuffle_epi8(__m256i a, __m256i by) { /* in halves */
    __m256i r;
    EACH(32) r.b[i] = by.b[i] & 128 ? 0 : a.b[(i & 16) + (by.b[i] & 15)];
    return r;
}

static inline __m256i _mm256_set1_epi32(int32_t x) {
    __m256i r;
    EACH(8) memcpy(r.b + 4 * i, &x, sizeof x);
    return r;
}

static inline __m256i _mm256_sub_epi8(__m256i a, __m256i b) {
    EACH(32) a.b[i] = (uint8_t)(a.b[i] - b.b[i]);
    return a;
}

static inline __m256i _mm256_srli_epi16(__m256i a, int n) {
    EACH(16) {
        uint16_t x;
        memcpy(&x, a.b + 2 * i, 2);
        x = (uint16_t)(x >> n);
        memcpy(a.b + 2 * i, &x, 2);
    }
    return a;
}

static inline __m256i _mm256_xor_si256(__m256i a, __m256i b) {
    EACH(32) a.b[i] ^= b.b[i];
    return a;
}

static inline __m256i _mm256_sub_epi32(__m256i a, __m256i b) {
    EACH(8) {
        int32_t v = emulated_int32(a.b, i) - emulated_int32(b.b, i);
        memcpy(a.b + 4 * i, &v, 4);
    }
    return a;
}

static inline __m256i _mm256_dpbusd_epi32(__m256i sum, __m256i u, __m256i s) {
    EACH(8) {
        int32_t v = emulated_int32(sum.b, i);
        for (int k = 4 * i; k < 4 * i + 4; k++)
            v += (int32_t)u.b[k] * (int8_t)s.b[k];
        memcpy(sum.b + 4 * i, &v, 4);
    }
    return sum;
}

#undef EACH
#endif
