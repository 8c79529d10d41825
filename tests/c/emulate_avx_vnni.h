/* The one instruction that csrc/kernels_avx_vnni.c has beyond AVX2, made of AVX2: cc -include this
   file, then compare with the scalar table. */
#ifndef EMULATE_AVX_VNNI_H
#define EMULATE_AVX_VNNI_H
#include <immintrin.h>

#define CLB_EMULATED_AVX_VNNI

/* Sums of two products of bytes [16 * half, 16 * half + 16): eight int32. */
__attribute__((target("avx2"))) static inline __m256i emulated_pairs(__m128i u, __m128i s) {
    return _mm256_madd_epi16(_mm256_cvtepu8_epi16(u), _mm256_cvtepi8_epi16(s));
}

__attribute__((target("avx2"))) static inline __m256i emulated_dpbusd(__m256i sum, __m256i u,
                                                                      __m256i s) {
    __m256i low = emulated_pairs(_mm256_castsi256_si128(u), _mm256_castsi256_si128(s));
    __m256i high = emulated_pairs(_mm256_extracti128_si256(u, 1), _mm256_extracti128_si256(s, 1));
    __m256i fours = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
    return _mm256_add_epi32(sum, fours);
}

#define _mm256_dpbusd_avx_epi32 emulated_dpbusd

#endif
