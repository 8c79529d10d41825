/* NEON with the dot product instructions, an extension of Armv8.2. */
#include <stddef.h>
#include "kernels.h"

/* Before version 16, clang's header has the intrinsics only when the whole build has them. */
#if defined(__clang__) && !defined(__ARM_FEATURE_DOTPROD)
#define CLB_HIDDEN_DOT (__clang_major__ < 16)
#else
#define CLB_HIDDEN_DOT 0
#endif

#if defined(CLB_EMULATED_NEON) || (defined(__aarch64__) && !CLB_HIDDEN_DOT)

#ifndef CLB_EMULATED_NEON /* tests/c/emulate_neon.h brings its own */
#include <arm_neon.h>
#include <string.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#endif

#define CLB_NEON_DOT
#include "neon.h"

static const clb_kernels table = {.isa = "neon", CLB_LINEAR_ENTRIES, CLB_NUMERICS_ENTRIES};

#ifndef CLB_EMULATED_NEON
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

static int has_dot(void) {
#if defined(CLB_EMULATED_NEON) || defined(__APPLE__) || defined(__ARM_FEATURE_DOTPROD)
    return 1;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & 1 << 20) != 0; /* HWCAP_ASIMDDP */
#else
    return 0;
#endif
}

const clb_kernels *clb_kernels_neon_dot(void) {
    return has_dot() ? &table : NULL;
}

#else

const clb_kernels *clb_kernels_neon_dot(void) {
    return NULL;
}

#endif
