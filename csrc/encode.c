/* Encoding a matrix of a checkpoint: what is asked for is checked here, done in encode_rows.h. */
#include <stdlib.h>
#include <string.h>
#include "core.h"
#include "encode.h"

enum { MOST_SIDE = 1 << 30, WIDE_GROUP = 128 };

typedef struct code_range { /* of a format, and the fractions of the absmax scale worth trying */
    int32_t low, high;
    float least, most;
} code_range;

/* Where least squares finds its scales, by measurement (docs/format.md); in wide groups outliers
   move them down. */
static code_range range_of(int32_t format, int64_t group) {
    switch (format) {
    case CLB_INT8: return (code_range){-128, 127, 1, 1};
    case CLB_INT4: return group > WIDE_GROUP ? (code_range){-8, 7, 0.35f, 0.95f}
                                             : (code_range){-8, 7, 0.66f, 0.96f};
    case CLB_INT3: return (code_range){-4, 3, 0.5f, 0.8f};
    default: return (code_range){-2, 1, 0.1f, 0.5f};
    }
}

static int64_t source_bits(int32_t dtype) {
    switch (dtype) {
    case CLB_SOURCE_F32: return 32;
    case CLB_SOURCE_BF16: case CLB_SOURCE_F16: return 16;
    case CLB_SOURCE_F8: case CLB_SOURCE_I8: return 8;
    case CLB_SOURCE_F4: case CLB_SOURCE_I4: return 4;
    default: return 0;
    }
}

/* Whether every weight has a scale, and a block begins with a whole byte. */
static bool scales_cover(const clb_source *s) {
    if (!s->scales || s->block_rows < 1 || s->block_cols < 1 || s->scale_cols < 1 ||
        s->first_row < 0 || s->first_row > INT64_C(1) << 40)
        return false;
    bool halves = source_bits(s->dtype) < 8 && s->block_cols % 2 && s->block_cols < s->cols;
    return !halves && (s->cols - 1) / s->block_cols < s->scale_cols &&
           (s->first_row + s->rows - 1) / s->block_rows < s->scale_rows;
}

static int32_t check_source(const clb_source *s, const clb_tensor *shape, clb_error *error) {
    int64_t bits = source_bits(s->dtype);
    if (!bits) return clb_fail(error, CLB_INVALID, "source dtype %d is unknown", s->dtype);
    if (s->rows != shape->rows || s->cols != shape->cols || s->rows > MOST_SIDE ||
        s->cols > MOST_SIDE)
        return clb_fail(error, CLB_INVALID, "source and result differ in shape, or are too large");
    if (s->row_bytes < (s->cols * bits + 7) / 8)
        return clb_fail(error, CLB_INVALID, "rows of %lld bytes are too short",
                        (long long)s->row_bytes);
    if (s->dtype >= CLB_SOURCE_F8 && !scales_cover(s))
        return clb_fail(error, CLB_INVALID, "the block scales do not cover the matrix");
    return CLB_OK;
}

static void prepare(clb_encoding *e, int32_t search) {
    bool wide = e->shape.format <= CLB_F16;
    code_range range = range_of(e->shape.format, e->shape.group ? e->shape.group : e->shape.cols);
    e->group = e->shape.group && !wide ? e->shape.group : e->shape.cols;
    e->groups = (e->shape.cols + e->group - 1) / e->group;
    e->search = search && e->shape.format != CLB_INT8;
    e->low = range.low;
    e->high = range.high;
    for (int t = 0; e->search && t < CLB_TRIALS; t++) {
        float f = range.least + (range.most - range.least) * (float)t / (CLB_TRIALS - 1);
        e->multiplier[t] = (int16_t)((float)range.high / f * 0x1p25f / 32767 + 0.5f);
    }
    e->batch = 1;
    while (e->search && e->batch * e->groups % CLB_LANES)
        e->batch++;
}

/* Says which weight of rows [first, last) is at fault. */
static int32_t report(const clb_encoding *e, int64_t first, int64_t last, clb_row_fault fault,
                      clb_error *error) {
    const clb_source *s = e->source;
    if (fault == CLB_ROW_SCALE)
        return clb_fail(error, CLB_INVALID, "weights are too large for f16 scales; use f32 scales "
                        "(int4-g64-f32)");
    if (fault == CLB_ROW_F16)
        return clb_fail(error, CLB_INVALID, "weights beyond 65504 do not fit f16; use bf16 or f32");
    for (int64_t r = first; s->dtype == CLB_SOURCE_F8 && r < last; r++)
        for (int64_t c = 0; c < s->cols; c++) {
            uint8_t code = s->data[r * s->row_bytes + c];
            if ((code & 0x7f) == 0x7f)
                return clb_fail(error, CLB_INVALID, "FP8 code 0x%02X at [%lld, %lld] is NaN; the "
                                "source is damaged", code, (long long)(s->first_row + r),
                                (long long)c);
        }
    return clb_fail(error, CLB_INVALID, "a weight in rows %lld to %lld is not finite; the source "
                    "is damaged", (long long)(s->first_row + first),
                    (long long)(s->first_row + last) - 1);
}

static clb_encode_fn *find(const char *isa) {
    bool plain = isa && !strcmp(isa, "scalar");
    clb_encode_fn *fast = plain ? NULL : clb_encode_avx2();
    if (isa && !plain && strcmp(isa, "avx2")) return NULL;
    return fast || (isa && !plain) ? fast : clb_encode_scalar();
}

int32_t clb_encode(const char *isa, const clb_source *source, const clb_tensor *shape,
                   int32_t search, uint8_t *codes, uint8_t *scales, clb_error *error) {
    clb_encoding e = {.source = source};
    clb_encode_fn *run = find(isa);
    if (!run) return clb_fail(error, CLB_INVALID, "this processor has no such instruction set");
    int32_t code = clb_tensor_check(shape, &e.shape, error);
    if (code == CLB_OK) code = check_source(source, shape, error);
    if (code != CLB_OK) return code;
    fenv_t was;
    clb_default_floats(&was);
    prepare(&e, search);
    float *scratch = calloc((size_t)clb_encode_scratch(&e), sizeof *scratch);
    if (!scratch) code = clb_fail(error, CLB_NO_MEMORY, "no memory to encode a matrix");
    for (int64_t first = 0; first < source->rows && code == CLB_OK; first += e.batch) {
        int64_t last = source->rows - first < e.batch ? source->rows : first + e.batch;
        clb_row_fault fault = run(&e, first, last, scratch, codes, scales);
        if (fault != CLB_ROW_GOOD) code = report(&e, first, last, fault, error);
    }
    free(scratch);
    fesetenv(&was);
    return code;
}
