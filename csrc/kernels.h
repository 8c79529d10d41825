/* The arithmetic that defines the bits (docs/arithmetic.md), as one table of functions per
   instruction set. kernels_scalar.c is the definition; every other table gives the same bits. */
#ifndef CLB_KERNELS_H
#define CLB_KERNELS_H
#include <stddef.h>
#include <stdint.h>
#include "colibri.h"

/* Whether the compiler knows VNNI in 256 bits. */
#if defined(__x86_64__) && defined(__clang__)
#define CLB_AVX_VNNI_BUILDS (__clang_major__ >= 12)
#elif defined(__x86_64__) && defined(__GNUC__)
#define CLB_AVX_VNNI_BUILDS (__GNUC__ >= 11)
#else
#define CLB_AVX_VNNI_BUILDS 0
#endif

enum {
    CLB_LANES = 16,
    CLB_EIGHT = 8,  /* lanes of a quantised output: each owns eight inputs of a block */
    CLB_BLOCK = 64, /* inputs under one activation scale */
    CLB_RUN = 32,   /* blocks of int4 whose offsets are taken off together */
};

static inline int64_t clb_least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t clb_most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t clb_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

typedef struct clb_matrix { /* a matrix in memory, any alignment */
    int32_t format, scale_format;
    int64_t rows, cols;
    int64_t group;      /* 0: one scale a row */
    int64_t row_bytes;  /* payload bytes of one row */
    int64_t row_scales; /* scales of one row */
    const uint8_t *data;   /* [rows][row_bytes] */
    const uint8_t *scales; /* [rows][row_scales] of scale_format */
} clb_matrix;

typedef struct clb_acts { /* S rows of activations, in the form a format's kernel wants */
    int64_t rows, cols;
    int64_t blocks, padded; /* ceil(cols / 64); the same, up to a multiple of eight */
    const float *x;         /* [rows][x_stride]: float formats read this */
    int64_t x_stride;
    int8_t *q;            /* [rows][blocks][64], zero padded; order by format, see clb_order */
    float *scale;         /* [rows][padded] */
    float *nibble_offset; /* [rows][padded]: -8 * the sum of a block's q: nibbles are weights + 8 */
} clb_acts;

/* How a block's 64 inputs lie in q. CLB_EVEN_ODD: [inputs 0,2..62 | 1,3..63], for int4.
   CLB_NATURAL: 0..63, for int8, and for int3 and int2, which run as int8. */
typedef enum { CLB_NATURAL, CLB_EVEN_ODD } clb_order;

static inline clb_order clb_order_of(int32_t format) {
    return format == CLB_INT4 ? CLB_EVEN_ODD : CLB_NATURAL;
}

static inline clb_acts clb_acts_of(const float *x, int64_t x_stride, int64_t rows, int64_t cols) {
    int64_t blocks = (cols + CLB_BLOCK - 1) / CLB_BLOCK;
    int64_t padded = (blocks + CLB_EIGHT - 1) / CLB_EIGHT * CLB_EIGHT;
    return (clb_acts){rows, cols, blocks, padded, x, x_stride, NULL, NULL, NULL};
}

/* Rows [first, last) of them. */
static inline clb_acts clb_acts_part(const clb_acts *acts, int64_t first, int64_t last) {
    clb_acts part = *acts;
    part.rows = last - first;
    part.x += first * acts->x_stride;
    part.q += first * acts->blocks * CLB_BLOCK;
    part.scale += first * acts->padded;
    part.nibble_offset += first * acts->padded;
    return part;
}

static inline int64_t clb_scale_size(const clb_matrix *w) { /* bytes */
    return w->scale_format == CLB_F16 ? 2 : 4;
}

/* Output rows [first, first + count) as a matrix of their own. */
static inline clb_matrix clb_matrix_part(const clb_matrix *w, int64_t first, int64_t count) {
    clb_matrix part = *w;
    part.rows = count;
    part.data += first * w->row_bytes;
    if (w->scales) part.scales += first * w->row_scales * clb_scale_size(w);
    return part;
}

/* Output rows [first, last) for every row of x: y[r * y_stride + o]. Each output is a function of
   its own weights and its own row of x alone, whatever the other arguments. */
typedef void clb_linear_fn(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                           float *y, int64_t y_stride);

typedef struct clb_kernels {
    const char *isa;
    clb_linear_fn *linear[CLB_FORMATS];
    /* x's row as integers and their scales */
    void (*quantize)(const clb_acts *acts, int64_t row, int32_t format);
    /* rows [first, first + count) as floats: [count][cols] */
    void (*dequantize)(const clb_matrix *w, int64_t first, int64_t count, float *out);
    void (*to_f16)(const float *x, int64_t n, uint8_t *y); /* half to even; infinite past 65504 */
    float (*dot)(const float *a, const float *b, int64_t n);            /* 16 lanes, folded */
    void (*axpy)(float a, const float *x, float *y, int64_t n);         /* y = fma(a, x, y) */
    /* out[i] = dot(a[i], b, n) for i < count */
    void (*dots)(const float *const *a, int64_t count, const float *b, int64_t n, float *out);
    /* y = fma(a[k], x[k], y) for k = 0..count - 1 in this order: count axpys in one pass over y */
    void (*axpys)(const float *a, const float *const *x, int64_t count, float *y, int64_t n);
    void (*scale)(float a, float *x, int64_t n);                        /* x = a * x */
    void (*add)(const float *x, float *y, int64_t n);                   /* y = y + x */
    void (*rmsnorm)(const float *x, const float *gain, float eps, int64_t n, float *y);
    void (*layernorm)(const float *x, const float *gain, const float *bias, float eps, int64_t n,
                      float *y);
    void (*softmax)(float *x, int64_t n);                               /* in place */
    void (*sigmoid)(const float *x, int64_t n, float *y);
    void (*swiglu)(const float *gate, const float *up, int64_t n, float *y);
    void (*rope)(float *v, const float *cos_sin, int64_t half); /* pairs in place; [half][2] */
    /* Index scores of n keys: out[s] = sum over m in order of
       fma(weight[m], max(0, dot(q + m * dim, keys + s * dim)), acc). */
    void (*index_scores)(const float *q, const float *weight, int64_t heads, int64_t dim,
                         const float *keys, int64_t n, float *out);
} clb_kernels;

const clb_kernels *clb_kernels_find(const char *isa); /* NULL name: best; NULL result: not here */
const clb_kernels *clb_kernels_scalar(void);
const clb_kernels *clb_kernels_avx2(void);   /* NULL when the processor or build lacks it */
const clb_kernels *clb_kernels_avx_vnni(void);
const clb_kernels *clb_kernels_avx512(void);
const clb_kernels *clb_kernels_neon_dot(void); /* "neon" too: the same with dot products */
const clb_kernels *clb_kernels_neon(void);

/* cos and sin of float(position) * inv_freq[j]: out [half][2]. One code for every ISA. */
void clb_rope_angles(int64_t position, const float *inv_freq, int64_t half, float *out);

#endif
