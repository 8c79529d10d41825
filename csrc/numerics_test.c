/* The functions of one table that are no matrices, for tests. */
#include <string.h>
#include "core.h"

int32_t clb_numerics_test(const char *isa, int32_t function, const float *a, const float *b,
                          const float *c, int64_t n, float *out, clb_error *error) {
    const clb_kernels *k = clb_kernels_find(isa);
    if (!k)
        return clb_fail(error, CLB_INVALID, "instruction set %s is not available here", isa);
    if (n < 1 || n > INT64_C(1) << 32)
        return clb_fail(error, CLB_INVALID, "%lld elements are out of range", (long long)n);
    fenv_t was;
    int32_t code = CLB_OK;
    clb_default_floats(&was);
    memcpy(out, a, (size_t)n * sizeof *out);
    switch (function) {
    case CLB_TEST_DOT: out[0] = k->dot(a, b, n); break;
    case CLB_TEST_AXPY: k->axpy(b[0], c, out, n); break;
    case CLB_TEST_RMSNORM: k->rmsnorm(a, b, 1e-5f, n, out); break;
    case CLB_TEST_LAYERNORM: k->layernorm(a, b, c, 1e-6f, n, out); break;
    case CLB_TEST_SOFTMAX: k->softmax(out, n); break;
    case CLB_TEST_SIGMOID: k->sigmoid(a, n, out); break;
    case CLB_TEST_SWIGLU: k->swiglu(a, b, n, out); break;
    case CLB_TEST_ROPE: k->rope(out, b, n / 2); break;
    case CLB_TEST_INDEX_SCORES: k->index_scores(a, b, n, 1, c, n, out); break;
    case CLB_TEST_ANGLES: clb_rope_angles((int64_t)b[0], a, n / 2, out); break;
    case CLB_TEST_TO_F16: k->to_f16(a, n, (uint8_t *)out); break;
    default: code = clb_fail(error, CLB_INVALID, "function %d is unknown", function);
    }
    fesetenv(&was);
    return code;
}
