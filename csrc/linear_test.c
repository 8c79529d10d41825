/* One linear with its data in memory: the door through which tests and benchmarks come in. */
#include "core.h"

static int32_t quantize_rows(const clb_kernels *table, int32_t format, clb_acts *acts,
                             clb_error *error) {
    size_t blocks = (size_t)acts->rows * (size_t)acts->blocks;
    acts->cells = clb_zeroed((int64_t)(blocks * sizeof *acts->cells));
    acts->scale = clb_zeroed((int64_t)((blocks + CLB_LANES) * sizeof *acts->scale));
    if (!acts->cells || !acts->scale)
        return clb_fail(error, CLB_NO_MEMORY, "no memory for %lld quantised activation rows",
                        (long long)acts->rows);
    for (int64_t r = 0; r < acts->rows; r++) {
        int64_t block = r * acts->blocks;
        table->quantize(acts->x + r * acts->x_stride, acts->cols, format,
                        acts->cells + block, acts->scale + block);
    }
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
    clb_acts acts = {.rows = s, .cols = w.cols, .blocks = (w.cols + CLB_BLOCK - 1) / CLB_BLOCK,
                     .x = x, .x_stride = w.cols};
    if (!clb_is_float(w.format))
        code = quantize_rows(table, w.format, &acts, error);
    if (code == CLB_OK)
        table->linear[w.format](&w, &acts, 0, w.rows, y, w.rows);
    clb_zeroed_free(acts.cells);
    clb_zeroed_free(acts.scale);
    return code;
}
