/* How sure a drafter is of a token. Nothing but the depth of drafting depends on it. */
#include <string.h>
#include "core.h"

float clb_confidence(const float *logits, int64_t n, int64_t token, float scale, float *scratch) {
    const clb_kernels *k = clb_kernels_find(NULL);
    fenv_t was;
    if (token < 0 || token >= n) return 0.0f;
    clb_default_floats(&was);
    memcpy(scratch, logits, (size_t)n * sizeof *scratch);
    if (scale != 1.0f) k->scale(scale, scratch, n);
    k->softmax(scratch, n);
    fesetenv(&was);
    return scratch[token];
}
