/* How stored bytes become numbers: half floats, packed integers, scales. Little endian only. */
#ifndef CLB_DECODE_H
#define CLB_DECODE_H
#include <string.h>
#include "kernels.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "containers are little endian, and so is this code"
#endif
#if defined(__FAST_MATH__) || (defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0)
#error "the bits need IEEE floats, computed as floats"
#endif
_Static_assert(sizeof(size_t) == 8, "files are mapped whole");

static inline float clb_bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t clb_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float clb_load_f32(const uint8_t *p) {
    float value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline uint16_t clb_load_u16(const uint8_t *p) {
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline float clb_bf16_float(uint16_t bits) {
    return clb_bits_float((uint32_t)bits << 16);
}

/* Exact, subnormals included; a NaN comes out quiet, as the processors' own conversions do. */
static inline float clb_f16_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    uint32_t value = clb_float_bits(clb_bits_float(magnitude << 13) * 0x1p112f);
    uint32_t special = 0u - (uint32_t)(magnitude >= 0x7c00); /* masks: loops become vectors */
    uint32_t quiet = 0u - (uint32_t)(magnitude > 0x7c00);
    return clb_bits_float(sign | value | (special & 0x7f800000) | (quiet & 0x400000));
}

/* Element i of a row of a float format. */
static inline float clb_float_at(int32_t format, const uint8_t *row, int64_t i) {
    if (format == CLB_F32)
        return clb_load_f32(row + 4 * i);
    uint16_t bits = clb_load_u16(row + 2 * i);
    return format == CLB_BF16 ? clb_bf16_float(bits) : clb_f16_float(bits);
}

static inline float clb_scale_at(const clb_matrix *w, int64_t row, int64_t group) {
    int64_t i = row * w->row_scales + group;
    if (w->scale_format == CLB_F16)
        return clb_f16_float(clb_load_u16(w->scales + 2 * i));
    return clb_load_f32(w->scales + 4 * i);
}

/* The scale that covers one input. Padding past the last group takes the row's last scale. */
static inline float clb_scale_of_input(const clb_matrix *w, int64_t row, int64_t input) {
    int64_t group = w->group ? input / w->group : 0;
    return clb_scale_at(w, row, group < w->row_scales ? group : w->row_scales - 1);
}

/* Whether each scale covers whole blocks. */
static inline int clb_whole_blocks(const clb_matrix *w) {
    return w->row_scales == 1 || w->group % CLB_BLOCK == 0;
}

/* The scale of a whole block. */
static inline float clb_scale_of_block(const clb_matrix *w, int64_t row, int64_t block) {
    return clb_scale_at(w, row, w->row_scales > 1 ? block / (w->group / CLB_BLOCK) : 0);
}

/* Payload bytes of one block of 64 inputs; 0 for a float format. */
static inline int64_t clb_block_bytes(int32_t format) {
    switch (format) {
    case CLB_INT8: return 64;
    case CLB_INT4: return 32;
    case CLB_INT3: return 24;
    case CLB_INT2: return 16;
    default: return 0;
    }
}

static inline void clb_unpack_int4(const uint8_t *p, int8_t *out) {
    for (int k = 0; k < 32; k++) {
        out[k] = (int8_t)((p[k] & 15) - 8);
        out[k + 32] = (int8_t)((p[k] >> 4) - 8);
    }
}

/* Four values as the bytes of one word: two-bit fields spread to bytes, then minus offsets. */
static inline uint32_t clb_spread_pairs(uint32_t byte) {
    return (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
}

static inline uint32_t clb_subtract_bytes(uint32_t bytes, uint32_t offsets) {
    return ((bytes | 0x80808080u) - offsets) ^ 0x80808080u; /* no borrow crosses a byte */
}

static inline void clb_unpack_int3(const uint8_t *p, int8_t *out) {
    uint32_t words[CLB_BLOCK / 4], high[2]; /* the high bits of eight fours each */
    memcpy(high, p + 16, sizeof high);
    for (int half = 0; half < 2; half++)
        for (int l = 0; l < 8; l++) {
            uint32_t bits = high[half] >> 4 * l & 15; /* bit i of the four goes to byte i */
            bits = (bits | bits << 7 | bits << 14 | bits << 21) & 0x01010101u;
            words[8 * half + l] = clb_subtract_bytes(clb_spread_pairs(p[8 * half + l]) | bits << 2,
                                           0x04040404u);
        }
    memcpy(out, words, sizeof words);
}

static inline void clb_unpack_int2(const uint8_t *p, int8_t *out) {
    uint32_t words[CLB_BLOCK / 4];
    for (int l = 0; l < CLB_BLOCK / 4; l++)
        words[l] = clb_subtract_bytes(clb_spread_pairs(p[l]), 0x02020202u);
    memcpy(out, words, sizeof words);
}

/* One whole block as 64 signed values, in the order of the activations' q. */
static inline void clb_unpack(int32_t format, const uint8_t *p, int8_t *out) {
    switch (format) {
    case CLB_INT4: clb_unpack_int4(p, out); break;
    case CLB_INT3: clb_unpack_int3(p, out); break;
    case CLB_INT2: clb_unpack_int2(p, out); break;
    default: memcpy(out, p, CLB_BLOCK);
    }
}

#endif
