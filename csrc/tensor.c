/* A matrix of a shard: sizes of its rows and scales, checked before a byte is used. */
#include "core.h"

bool clb_is_float(int32_t format) {
    return format == CLB_F32 || format == CLB_BF16 || format == CLB_F16;
}

int64_t clb_scale_bytes(const clb_matrix *w) {
    return w->rows * w->row_scales * clb_scale_size(w);
}

int64_t clb_matrix_bytes(const clb_matrix *w) {
    return w->rows * w->row_bytes + clb_scale_bytes(w);
}

static int64_t row_bytes_of(int32_t format, int64_t cols) {
    switch (format) {
    case CLB_F32: return cols * 4;
    case CLB_BF16: case CLB_F16: return cols * 2;
    case CLB_INT8: return cols;
    case CLB_INT4: return (cols + 1) / 2;
    case CLB_INT3: return (cols + 63) / 64 * 24;
    case CLB_INT2: return (cols + 3) / 4;
    default: return -1;
    }
}

/* A lane's inputs must share one scale: int4 lanes span eight of them, int8 lanes four. */
static bool group_fits(int32_t format, int64_t group) {
    switch (format) {
    case CLB_INT8: return group % 4 == 0;
    case CLB_INT4: return group % 8 == 0;
    case CLB_INT3: return group == 64;
    case CLB_INT2: return group == 0;
    default: return group == 0;
    }
}

int32_t clb_tensor_check(const clb_tensor *t, clb_matrix *m, clb_error *error) {
    const int64_t most = INT64_C(1) << 40;
    if (t->format < 0 || t->format >= CLB_FORMATS)
        return clb_fail(error, CLB_INVALID, "format %d is unknown", t->format);
    if (t->rows <= 0 || t->cols <= 0 || t->rows > most || t->cols > most)
        return clb_fail(error, CLB_INVALID, "shape [%lld, %lld] is out of range",
                        (long long)t->rows, (long long)t->cols);
    if (t->group < 0 || t->group > most || !group_fits(t->format, t->group))
        return clb_fail(error, CLB_INVALID, "group %lld does not fit format %d",
                        (long long)t->group, t->format);
    if (!clb_is_float(t->format) && t->scale_format != CLB_F32 && t->scale_format != CLB_F16)
        return clb_fail(error, CLB_INVALID, "scale format %d is unknown", t->scale_format);
    int64_t total;
    *m = (clb_matrix){.format = t->format, .scale_format = t->scale_format, .rows = t->rows,
                      .cols = t->cols, .group = t->group};
    m->row_bytes = row_bytes_of(t->format, t->cols);
    if (!clb_is_float(t->format))
        m->row_scales = t->group ? (t->cols + t->group - 1) / t->group : 1;
    if (!clb_mul(m->rows, m->row_bytes, &total) || !clb_mul(m->rows, m->row_scales * 4, &total))
        return clb_fail(error, CLB_INVALID, "shape [%lld, %lld] overflows", (long long)t->rows,
                        (long long)t->cols);
    return CLB_OK;
}
