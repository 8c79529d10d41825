/* One linear with its data in memory: the door through which tests and benchmarks come in. */
#include "core.h"

static int32_t quantize_rows(const clb_kernels *table, int32_t format, clb_acts *acts,
                             clb_error *error) {
    const int64_t scales = acts->rows * acts->padded * (int64_t)sizeof(float);
    acts->q = clb_zeroed(acts->rows * acts->blocks * CLB_BLOCK);
    acts->scale = clb_zeroed(scales);
    acts->nibble_offset = clb_zeroed(scales);
    if (!acts->q || !acts->scale || !acts->nibble_offset)
        return clb_fail(error, CLB_NO_MEMORY, "no memory for %lld quantised activation rows",
                        (long long)acts->rows);
    for (int64_t r = 0; r < acts->rows; r++)
        table->quantize(acts, r, format);
    return CLB_OK;
}

int32_t clb_linear_test(const char *isa, const clb_tensor *shape, const uint8_t *data,
                        const void *scales, const float *x, int64_t s, float *y,
                        clb_error *error) {
    const clb_kernels *table = clb_kernels_find(isa);
    const int64_t most = INT64_C(1) << 40; /* bytes of the largest form an activation row takes */
    clb_matrix w;
    int64_t total;
    if (!table)
        return clb_fail(error, CLB_INVALID, "instruction set %s is not available here", isa);
    int32_t code = clb_tensor_check(shape, &w, error);
    if (code != CLB_OK)
        return code;
    if (s < 1 || !clb_mul(s, w.cols, &total) || total > most / 8 || s > most / w.rows)
        return clb_fail(error, CLB_INVALID, "%lld rows of %lld inputs are out of range",
                        (long long)s, (long long)w.cols);
    w.data = data;
    w.scales = scales;
    clb_acts acts = clb_acts_of(x, w.cols, s, w.cols);
    fenv_t was;
    clb_default_floats(&was);
    if (!clb_is_float(w.format))
        code = quantize_rows(table, w.format, &acts, error);
    if (code == CLB_OK)
        table->linear[w.format](&w, &acts, 0, w.rows, y, w.rows);
    clb_zeroed_free(acts.q);
    clb_zeroed_free(acts.scale);
    clb_zeroed_free(acts.nibble_offset);
    fesetenv(&was);
    return code;
}
