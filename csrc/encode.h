/* Between encode.c, which checks, and the loops that encode_rows.h makes for an instruction set. */
#ifndef CLB_ENCODE_H
#define CLB_ENCODE_H
#include <stdbool.h>
#include "decode.h"

enum { CLB_TRIALS = 6 }; /* scales tried per group */

typedef struct clb_encoding { /* everything about one matrix but where its results go */
    const clb_source *source;
    clb_matrix shape;   /* of the result; data and scales are unused */
    int64_t group;      /* inputs that share a scale: the row's length for row formats */
    int64_t groups;     /* of one row */
    int64_t batch;      /* rows taken at once, so that sixteen groups fill the lanes */
    bool search;
    int32_t low, high;  /* codes */
    int16_t multiplier[CLB_TRIALS]; /* for the scales that are tried (encode_rows.h) */
} clb_encoding;

typedef enum { CLB_ROW_GOOD, CLB_ROW_NOT_FINITE, CLB_ROW_SCALE, CLB_ROW_F16 } clb_row_fault;

/* Encodes rows [first, last), at most `batch` of them, into codes [..][row_bytes] and scales
   [..][row_scales], both counted from row 0. scratch: clb_encode_scratch floats. */
typedef clb_row_fault clb_encode_fn(const clb_encoding *e, int64_t first, int64_t last,
                                    float *scratch, uint8_t *codes, uint8_t *scales);

/* A magnitude rounded to f16: half to even, but away from zero below 2^-14, so that no code clips;
   infinite where f16 ends. */
static inline float clb_round_f16(float magnitude) {
    uint32_t bits = clb_float_bits(magnitude);
    float normal = clb_bits_float((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
    float units = (bits < 0x38800000 ? magnitude : 0) * 0x1p24f; /* exact */
    int32_t whole = (int32_t)units;
    float small = (float)(whole + ((float)whole < units)) * 0x1p-24f;
    float rounded = bits < 0x38800000 ? small : normal;
    return bits < 0x477ff000 ? rounded : clb_bits_float(0x7f800000);
}

/* Bits of a magnitude that f16 holds exactly. */
static inline uint16_t clb_f16_bits(float magnitude) {
    uint32_t bits = clb_float_bits(magnitude);
    uint32_t units = (uint32_t)(int32_t)((bits < 0x38800000 ? magnitude : 0) * 0x1p24f);
    return (uint16_t)(bits < 0x38800000 ? units : (bits >> 13) - 0x1c000);
}

clb_encode_fn *clb_encode_scalar(void);
clb_encode_fn *clb_encode_avx2(void); /* NULL when the processor or build lacks it */
int64_t clb_encode_scratch(const clb_encoding *e);

#endif
