/* NEON as every 64-bit Arm processor has it. */
#include <stddef.h>
#include "kernels.h"

#if defined(CLB_EMULATED_NEON) || defined(__aarch64__)

#ifndef CLB_EMULATED_NEON /* tests/c/emulate_neon.h brings its own */
#include <arm_neon.h>
#endif
#include "neon.h"

static const clb_kernels table = {.isa = "neon", CLB_LINEAR_ENTRIES, CLB_NUMERICS_ENTRIES};

const clb_kernels *clb_kernels_neon(void) {
    return &table;
}

#else

const clb_kernels *clb_kernels_neon(void) {
    return NULL;
}

#endif
