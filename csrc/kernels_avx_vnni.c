/* AVX2 with VNNI in 256 bits: desktop processors that have no AVX-512. */
#include <stddef.h>
#include "kernels.h"

#if CLB_AVX_VNNI_BUILDS || defined(CLB_EMULATED_AVX_VNNI)
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

/* tests/c/emulate_avx_vnni.h brings the one instruction, where the processor has only AVX2. */
#ifdef __clang__
#ifdef CLB_EMULATED_AVX_VNNI
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#endif
#else
#pragma GCC push_options
#ifdef CLB_EMULATED_AVX_VNNI
#pragma GCC target("avx2,fma,f16c")
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#endif

#define CLB_DPBUSD _mm256_dpbusd_avx_epi32
#include "avx2.h"

static const clb_kernels table = {.isa = "avxvnni", CLB_LINEAR_ENTRIES, CLB_NUMERICS_ENTRIES};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static int has_vnni(void) {
#ifdef CLB_EMULATED_AVX_VNNI
    return 1;
#else
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 4;
#endif
}

const clb_kernels *clb_kernels_avx_vnni(void) {
    return has_vnni() && clb_kernels_avx2() ? &table : NULL;
}

#else

const clb_kernels *clb_kernels_avx_vnni(void) {
    return NULL;
}

#endif
