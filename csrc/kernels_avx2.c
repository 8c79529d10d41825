/* AVX2 with FMA and F16C, on its own. */
#include <stddef.h>
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "avx2.h"

static const clb_kernels table = {.isa = "avx2", CLB_LINEAR_ENTRIES, CLB_NUMERICS_ENTRIES};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* The compiler's check covers the operating system's part (xgetbv), which F16C shares with AVX2. */
const clb_kernels *clb_kernels_avx2(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
    int here = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return here ? &table : NULL;
}

#else

const clb_kernels *clb_kernels_avx2(void) {
    return NULL;
}

#endif
