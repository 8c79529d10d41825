/* Rows of weights to codes and scales, written once. encode_scalar.c and encode_avx2.c include this
   after their sixteen lanes. The bits are those of colibri/quantize.py: floats are used element by
   element, never fused, and sums are sums of integers. */
#ifndef CLB_ENCODE_ROWS_H
#define CLB_ENCODE_ROWS_H
#include "encode.h"

#define LANES CLB_LANES
#define SMALLEST 0x1p-40f /* groups of smaller weights are not searched */

/* ---- the source as floats -------------------------------------------------------------------- */

/* Values of e2m1 codes: sign, 2 bits of exponent, 1 of mantissa. */
static const float e2m1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static const float whole[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Sixteen codes as they count before their scale. */
static inline lanes coded(int32_t dtype, const uint8_t *codes, lanes zero) {
    switch (dtype) {
    case CLB_SOURCE_F4: return lanes_fours(codes, e2m1);
    case CLB_SOURCE_I4: return lanes_sub(lanes_fours(codes, whole), zero);
    case CLB_SOURCE_I8: return lanes_sub(lanes_bytes(codes), zero);
    default: return lanes_f8(codes);
    }
}

/* Inlined with constants, so that the loop does not ask. `each`: codes a byte. */
static inline void widen_coded(int32_t dtype, int64_t each, const clb_source *s,
                               const uint8_t *row, int64_t absolute_row, float *out) {
    int64_t block = absolute_row / s->block_rows * s->scale_cols;
    for (int64_t at = 0; at < s->cols; at += s->block_cols, block++) {
        int64_t end = s->cols - at < s->block_cols ? s->cols : at + s->block_cols, i = at;
        lanes by = lanes_fill(s->scales[block]);
        lanes zero = lanes_fill(s->zeros ? s->zeros[block] : each == 2 ? 8 : 128);
        for (; i + LANES <= end; i += LANES)
            lanes_store(out + i, lanes_mul(coded(dtype, row + i / each, zero), by));
        if (i < end) {
            uint8_t last[LANES] = {0};
            float tail[LANES];
            memcpy(last, row + i / each, (size_t)((end - i + each - 1) / each));
            lanes_store(tail, lanes_mul(coded(dtype, last, zero), by));
            memcpy(out + i, tail, (size_t)(end - i) * sizeof *out);
        }
    }
}

/* One row as floats, zeros from cols to the end of its last group. */
static void widen(const clb_encoding *e, int64_t row, float *out) {
    const clb_source *s = e->source;
    const uint8_t *data = s->data + row * s->row_bytes;
    int64_t i = 0, at = s->first_row + row;
    switch (s->dtype) {
    case CLB_SOURCE_F8: widen_coded(CLB_SOURCE_F8, 1, s, data, at, out); break;
    case CLB_SOURCE_F4: widen_coded(CLB_SOURCE_F4, 2, s, data, at, out); break;
    case CLB_SOURCE_I8: widen_coded(CLB_SOURCE_I8, 1, s, data, at, out); break;
    case CLB_SOURCE_I4: widen_coded(CLB_SOURCE_I4, 2, s, data, at, out); break;
    case CLB_SOURCE_F32: memcpy(out, data, (size_t)s->cols * sizeof *out); break;
    case CLB_SOURCE_F16:
        for (; i < s->cols; i++)
            out[i] = clb_f16_float(clb_load_u16(data + 2 * i));
        break;
    default:
        for (; i < s->cols; i++)
            out[i] = clb_bf16_float(clb_load_u16(data + 2 * i));
    }
    for (i = s->cols; i < e->groups * e->group; i++)
        out[i] = 0;
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Sixteen scales as they are stored, as floats; they keep their sign and are never zero. */
static inline lanes rounded_scales(int32_t format, lanes scale) {
    return format == CLB_F16 ? lanes_halves(scale) : lanes_singles(scale);
}

/* Loads sixteen at a time, stores n. */
static void store_scales(int32_t format, const float *scale, int64_t n, uint8_t *out) {
    if (format == CLB_F32) {
        memcpy(out, scale, (size_t)n * sizeof *scale);
        return;
    }
    for (int64_t i = 0; i < n; i += LANES) {
        uint16_t half[LANES];
        int64_t count = n - i < LANES ? n - i : LANES;
        lanes_store_halves(half, lanes_load(scale + i));
        memcpy(out + 2 * i, half, (size_t)count * sizeof *half);
    }
}

/* ---- search ---------------------------------------------------------------------------------- */

enum { PAIRS_A_RUN = 2048 }; /* sums of this many pairs of x q fit 32 bits */

typedef struct sixteen { /* groups that are searched together, one a lane */
    const int16_t *x; /* [pairs][16][2]: weights in units of absmax / 32767 */
    int64_t pairs;
    pairs low, high;
    lanes one, p, square; /* sums of x q and of q q (at least 1) of the last fit */
} sixteen;

static inline void fit_run(const sixteen *s, pairs by, int64_t first, int64_t last, words *p,
                           words *square) {
    words sum = words_zero(), squares = words_zero();
#pragma GCC unroll 4
    for (int64_t i = first; i < last; i++) {
        pairs x = pairs_load(s->x + 2 * LANES * i);
        pairs q = pairs_clip(pairs_scaled(x, by), s->low, s->high);
        sum = words_add(sum, pairs_dot(x, q));
        squares = words_add(squares, pairs_dot(q, q));
    }
    *p = sum;
    *square = squares;
}

static __attribute__((noinline)) void fit_long(const sixteen *s, pairs by, float *p,
                                               float *square) {
    int64_t totals[2][LANES] = {{0}};
    for (int64_t at = 0; at < s->pairs; at += PAIRS_A_RUN) {
        int32_t part[2][LANES];
        words sum, squares;
        int64_t end = s->pairs - at < PAIRS_A_RUN ? s->pairs : at + PAIRS_A_RUN;
        fit_run(s, by, at, end, &sum, &squares);
        words_store(part[0], sum);
        words_store(part[1], squares);
        for (int l = 0; l < 2 * LANES; l++)
            totals[l / LANES][l % LANES] += part[l / LANES][l % LANES];
    }
    for (int l = 0; l < LANES; l++) {
        p[l] = (float)totals[0][l];
        square[l] = (float)totals[1][l];
    }
}

/* Codes by q = x multiplier / 2^25, rounded; all integers, so no order of adding. */
static inline void fit(sixteen *s, pairs by) {
    if (s->pairs <= PAIRS_A_RUN) {
        words sum, squares;
        fit_run(s, by, 0, s->pairs, &sum, &squares);
        s->p = words_lanes(sum);
        s->square = words_lanes(squares);
    } else {
        float p[LANES], square[LANES];
        fit_long(s, by, p, square);
        s->p = lanes_load(p);
        s->square = lanes_load(square);
    }
    s->square = lanes_max(s->square, s->one);
}

/* Multipliers for codes by a scale, in its unit. */
static inline pairs multiply_by(lanes unit, lanes scale) {
    return pairs_spread(lanes_mul(lanes_div(unit, scale), lanes_fill(0x1p25f)));
}

/* How much of the sum of x x a scale with the last fit's codes explains: more is less error. */
static inline lanes explained(const sixteen *s, lanes unit, lanes scale) {
    lanes r = lanes_div(scale, unit), twice = lanes_add(s->p, s->p);
    return lanes_mul(r, lanes_sub(twice, lanes_mul(r, s->square)));
}

/* The scale of the best of several trials, each fitted to its own codes by least squares. Its sign
   gives a group's extreme weight the one code more below zero. */
static inline lanes best_trial(const clb_encoding *e, sixteen *s, lanes unit, lanes start) {
    lanes best = lanes_fill(0), scale = start;
    pairs positive = pairs_sign(s->x, s->pairs);
    for (int t = 0; t < CLB_TRIALS; t++) {
        fit(s, pairs_signed(pairs_fill(e->multiplier[t]), positive));
        lanes fitted = lanes_div(s->p, s->square), gain = lanes_mul(s->p, fitted);
        scale = lanes_choose(gain, best, lanes_mul(fitted, unit), scale);
        best = lanes_max(gain, best);
    }
    return scale;
}

/* stored: absmax scales as stored, replaced where another explains more. */
static void search(const clb_encoding *e, sixteen *s, lanes unit, float *stored) {
    int32_t format = e->shape.scale_format;
    lanes start = lanes_load(stored);
    fit(s, multiply_by(unit, rounded_scales(format, best_trial(e, s, unit, start))));
    lanes again = rounded_scales(format, lanes_mul(lanes_div(s->p, s->square), unit));
    lanes after = explained(s, unit, again);
    fit(s, multiply_by(unit, start));
    lanes_store(stored, lanes_choose(after, explained(s, unit, start), again, start));
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* One row's codes, zeros up to the end of its last byte or block. */
static void code_row(const clb_encoding *e, const float *x, const float *scales, int8_t *codes) {
    pairs low = pairs_fill(e->low), high = pairs_fill(e->high);
    for (int64_t g = 0; g < e->groups; g++, x += e->group, codes += e->group)
        group_codes(x, e->group, scales[g], low, high, codes);
    memset(codes - e->groups * e->group + e->shape.cols, 0, CLB_BLOCK);
}

static void pack_int4(const int8_t *codes, int64_t bytes, uint8_t *out) {
    uint8_t last[LANES];
    int64_t k = 0;
    for (; k + LANES <= bytes; k += LANES)
        nibbles(codes + 2 * k, out + k);
    if (k == bytes) return;
    nibbles(codes + 2 * k, last);
    memcpy(out + k, last, (size_t)(bytes - k));
}

/* Four codes a byte; offset and mask make them two bits each. */
static void pack_pairs(const int8_t *codes, int offset, int64_t bytes, uint8_t *out) {
    for (int64_t k = 0; k < bytes; k++) {
        uint32_t byte = 0;
        for (int j = 0; j < 4; j++)
            byte |= (uint32_t)((codes[4 * k + j] + offset) & 3) << 2 * j;
        out[k] = (uint8_t)byte;
    }
}

static void pack_int3(const int8_t *codes, int64_t bytes, uint8_t *out) {
    for (int64_t b = 0; b < bytes / 24; b++, codes += CLB_BLOCK, out += 24) {
        pack_pairs(codes, 4, 16, out);
        for (int k = 0; k < 8; k++) {
            uint32_t byte = 0;
            for (int j = 0; j < 8; j++)
                byte |= (uint32_t)((codes[8 * k + j] + 4) >> 2) << j;
            out[16 + k] = (uint8_t)byte;
        }
    }
}

static void pack(const clb_encoding *e, const int8_t *codes, uint8_t *out) {
    int64_t bytes = e->shape.row_bytes;
    switch (e->shape.format) {
    case CLB_INT8: memcpy(out, codes, (size_t)bytes); break;
    case CLB_INT4: pack_int4(codes, bytes, out); break;
    case CLB_INT3: pack_int3(codes, bytes, out); break;
    default: pack_pairs(codes, 2, bytes, out);
    }
}

static clb_row_fault narrow(int32_t format, const float *x, int64_t n, uint8_t *out) {
    if (format == CLB_F32) {
        memcpy(out, x, (size_t)n * sizeof *x);
        return CLB_ROW_GOOD;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = clb_float_bits(x[i]), half;
        if (format == CLB_BF16) {
            half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        } else {
            float magnitude = __builtin_fabsf(x[i]);
            if (magnitude > 65504) return CLB_ROW_F16;
            uint32_t tiny = clb_float_bits(magnitude + 0.5f) - clb_float_bits(0.5f);
            half = magnitude < 0x1p-14f ? tiny : clb_f16_bits(clb_round_f16(magnitude));
            half |= bits >> 16 & 0x8000;
        }
        uint16_t stored = (uint16_t)half;
        memcpy(out + 2 * i, &stored, sizeof stored);
    }
    return CLB_ROW_GOOD;
}

/* ---- groups for the search ------------------------------------------------------------------- */

/* One group as 16-bit integers in units of its absmax / 32767, with a zero to make them pairs, in
   any order: only their sums are used. Tiny weights become zeros. Returns the unit. */
static float narrow_group(const float *x, int64_t n, float absmax, int16_t *out) {
    float inverse = absmax < SMALLEST ? 0 : 32767 / absmax;
    lanes by = lanes_fill(inverse);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        lanes_shorts(lanes_mul(lanes_load(x + i), by), out + i);
    for (; i < n; i++) {
        float v = x[i] * inverse;
        out[i] = (int16_t)(int32_t)(v + __builtin_copysignf(0.5f, v));
    }
    if (n % 2) out[n] = 0;
    return absmax < SMALLEST ? 1 : absmax / 32767;
}

/* Scratch, in floats: rows [batch][groups * group] and a load past them; absmax and stored scales
   [batch * groups] in whole sixteens; sixteen groups of 16-bit integers, and the same turned; codes
   of one row. */
typedef struct scratch {
    float *rows, *absmax, *stored;
    int16_t *narrow, *turned; /* [16][2 * pairs], [pairs][16][2] */
    int8_t *codes;
} scratch;

static int64_t place_scratch(const clb_encoding *e, float *memory, scratch *s) {
    int64_t width = e->groups * e->group, pairs = (e->group + 1) / 2;
    int64_t scales = (e->batch * e->groups + LANES - 1) / LANES * LANES;
    int64_t rows = e->batch * width + 2 * LANES;
    if (s) {
        s->rows = memory;
        s->absmax = s->rows + rows;
        s->stored = s->absmax + scales;
        s->narrow = (int16_t *)(s->stored + scales);
        s->turned = s->narrow + 2 * pairs * LANES;
        s->codes = (int8_t *)(s->turned + 2 * pairs * LANES);
    }
    return rows + 2 * scales + 2 * pairs * LANES + (width + 2 * CLB_BLOCK) / 4 + 1;
}

static void search_all(const clb_encoding *e, int64_t count, const scratch *at) {
    int64_t each = (e->group + 1) / 2;
    sixteen s = {.x = at->turned, .pairs = each, .low = pairs_fill(e->low),
                 .high = pairs_fill(e->high), .one = lanes_fill(1)};
    float unit[LANES];
    for (int64_t g = 0; g < count; g += LANES) {
        int64_t real = count - g < LANES ? count - g : LANES;
        for (int64_t l = 0; l < real; l++)
            unit[l] = narrow_group(at->rows + (g + l) * e->group, e->group, at->absmax[g + l],
                                   at->narrow + 2 * each * l);
        for (int64_t l = real; l < LANES; l++)
            unit[l] = 1;
        memset(at->narrow + 2 * each * real, 0, (size_t)(2 * each * (LANES - real)) * 2);
        pairs_turn(at->narrow, each, at->turned);
        search(e, &s, lanes_load(unit), at->stored + g);
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

static bool has_nan_codes(const clb_source *s, int64_t first, int64_t last) {
    uint8_t nans = 0; /* bytes, so that the loop becomes vectors of them */
    for (int64_t r = first; s->dtype == CLB_SOURCE_F8 && r < last; r++)
        for (int64_t i = 0; i < s->cols; i++)
            nans |= (uint8_t)((s->data[r * s->row_bytes + i] & 0x7f) == 0x7f);
    return nans;
}

/* Absmax of `count` groups lying one after the other, and their scales as stored. */
static clb_row_fault absmax_scales(const clb_encoding *e, const float *x, int64_t count,
                                   float *absmax, float *stored) {
    lanes high = lanes_fill((float)e->high);
    float largest = 0;
    for (int64_t g = 0; g < count; g++) {
        uint32_t bits = lanes_magnitude(x + g * e->group, e->group);
        if (bits >= 0x7f800000) return CLB_ROW_NOT_FINITE;
        absmax[g] = clb_bits_float(bits);
        largest = absmax[g] > largest ? absmax[g] : largest;
    }
    if (e->shape.scale_format == CLB_F16 && largest / (float)e->high > 65504)
        return CLB_ROW_SCALE;
    for (int64_t g = count; g % LANES; g++)
        absmax[g] = (float)e->high;
    for (int64_t g = 0; g < count; g += LANES)
        lanes_store(stored + g, rounded_scales(e->shape.scale_format,
                                               lanes_div(lanes_load(absmax + g), high)));
    return CLB_ROW_GOOD;
}

static clb_row_fault encode_rows(const clb_encoding *e, int64_t first, int64_t last, float *memory,
                                 uint8_t *codes, uint8_t *scales) {
    scratch s;
    int64_t width = e->groups * e->group, rows = last - first, count = rows * e->groups;
    place_scratch(e, memory, &s);
    if (has_nan_codes(e->source, first, last)) return CLB_ROW_NOT_FINITE;
    for (int64_t r = 0; r < rows; r++)
        widen(e, first + r, s.rows + r * width);
    if (e->shape.format <= CLB_F16) {
        if (lanes_magnitude(s.rows, rows * width) >= 0x7f800000) return CLB_ROW_NOT_FINITE;
        return narrow(e->shape.format, s.rows, rows * width, codes + first * e->shape.row_bytes);
    }
    clb_row_fault fault = absmax_scales(e, s.rows, count, s.absmax, s.stored);
    if (fault != CLB_ROW_GOOD) return fault;
    if (e->search) search_all(e, count, &s);
    for (int64_t r = 0; r < rows; r++) {
        code_row(e, s.rows + r * width, s.stored + r * e->groups, s.codes);
        pack(e, s.codes, codes + (first + r) * e->shape.row_bytes);
    }
    store_scales(e->shape.scale_format, s.stored, count,
                 scales + first * e->groups * clb_scale_size(&e->shape));
    return CLB_ROW_GOOD;
}

#endif
