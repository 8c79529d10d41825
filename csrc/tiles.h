/* y = W x in tiles of a few outputs times a few rows, written once over the lanes of an instruction
   set. A kernels_*.c includes this after its lanes, eights and packed blocks; the shape of a tile
   moves work between registers, never the order in which one output adds up. */
#ifndef CLB_TILES_H
#define CLB_TILES_H
#include "numerics.h"

#define CLB_INLINE static inline __attribute__((always_inline))
#define CLB_APART static __attribute__((noinline)) /* once a run: not worth a copy in each tile */
#ifdef __clang__
#define CLB_UNROLL _Pragma("unroll")
#else
#define CLB_UNROLL _Pragma("GCC unroll 16")
#endif

enum {
    FOURS = CLB_BLOCK / 4,
    SIDE = 4,   /* outputs and rows that share a pass over the weights */
    STRIP = 16, /* outputs that many rows pass over together: they stay in the first-level cache */
    AHEAD = 512, /* bytes fetched before one row of a long matrix needs them: memory 7 % faster */
    SPREAD_GROUPS = CLB_RUN * FOURS + CLB_EIGHT, /* groups of 4, and one load past them */
    PANEL_BYTES = 192 << 10, /* quantised activations that stay in the second-level cache */
};

typedef struct tile { /* outputs o, o + apart, o + 2 apart..; rows from r on */
    const clb_matrix *w;
    const clb_acts *x;
    int64_t o, apart, r;
    float *y;
    int64_t y_stride;
} tile;

typedef enum { /* where a matrix has its scales */
    NO_SCALES,  /* a float format */
    ROW_SCALE,  /* one a row */
    F16_SCALES, /* one a block */
    F32_SCALES,
    GROUP_SCALES, /* groups of whole blocks, of either format */
    LANE_SCALES,  /* groups that end inside blocks */
} scale_kind;

/* ---- a block of weights times a block of activations ---------------------------------------- */

CLB_INLINE packed load_bytes(const uint8_t *p) {
    return (packed){half_load(p), half_load(p + 32)};
}

CLB_INLINE packed load_block(int32_t format, const uint8_t *p) {
    if (format == CLB_INT4)
        return nibbles(p);
    if (format == CLB_INT8)
        return load_bytes(p);
    int8_t values[CLB_BLOCK];
    if (format == CLB_INT3)
        clb_unpack_int3(p, values);
    else
        clb_unpack_int2(p, values);
    return load_bytes((const uint8_t *)values);
}

/* Eight exact sums of eight products, as floats; nibbles count as 0..15. */
CLB_INLINE eight block_sums(int32_t format, packed w, const int8_t *q) {
    if (format == CLB_INT4)
        return sums_float(nibble_sums(w, q));
    return sums_float(byte_sums(w.high, q + 32, byte_sums(w.low, q, sums_zero())));
}

CLB_INLINE void clear(eight *acc, int count) {
    CLB_UNROLL
    for (int n = 0; n < count; n++)
        acc[n] = eight_zero();
}

CLB_INLINE void store_tile(const tile *t, const eight *acc, int outputs, int rows) {
    float *y = t->y + t->r * t->y_stride + t->o, sum[SIDE * SIDE];
    int n = 0;
    CLB_UNROLL
    for (; n + 4 <= outputs * rows; n += 4)
        eight_fold_four(acc + n, sum + n);
    CLB_UNROLL
    for (; n < outputs * rows; n++)
        sum[n] = eight_fold(acc[n]);
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        CLB_UNROLL
        for (int j = 0; j < rows; j++)
            y[j * t->y_stride + i * t->apart] = sum[i * rows + j];
    }
}

/* The last block of each output, when bytes of it are missing: copies with zeros. */
CLB_INLINE void cut_blocks(const tile *t, int64_t b, int64_t size, int outputs,
                           uint8_t copy[SIDE][CLB_BLOCK]) {
    const int64_t row_bytes = t->w->row_bytes;
    memset(copy, 0, SIDE * CLB_BLOCK);
    for (int i = 0; i < outputs; i++)
        memcpy(copy[i], t->w->data + (t->o + i * t->apart) * row_bytes + b * size,
               (size_t)(row_bytes - b * size));
}

/* ---- scales that cover whole blocks ---------------------------------------------------------- */

CLB_INLINE float row_scale(const clb_matrix *w, int64_t row) {
    return stored_scale(w->scales + row * w->row_scales * clb_scale_size(w), w->scale_format);
}

/* Weight scales of blocks [b, b + 8) of a row, one by one; past its end +0. */
CLB_APART eight gather_scales(const clb_matrix *w, int64_t row, int64_t b) {
    float of[CLB_EIGHT] = {0};
    for (int k = 0; k < CLB_EIGHT && (b + k) * CLB_BLOCK < w->cols; k++)
        of[k] = clb_scale_of_block(w, row, b + k);
    return eight_load(of);
}

/* The same in the quickest way, read at once while the matrix has so many; the +0 for int4 only,
   where all eight are used. */
CLB_INLINE eight weight_scales(const tile *t, int32_t format, int i, int64_t b, scale_kind kind) {
    const clb_matrix *w = t->w;
    const int64_t row = t->o + i * t->apart, at = row * w->row_scales + b, n = t->x->blocks - b;
    eight of;
    if (kind == ROW_SCALE) {
        float one = row_scale(w, row);
        of = eight_splat(&one);
    } else if (kind == GROUP_SCALES || at + CLB_EIGHT > w->rows * w->row_scales) {
        return gather_scales(w, row, b);
    } else {
        of = kind == F16_SCALES ? eight_load_f16(w->scales + 2 * at)
                                : eight_load_f32(w->scales + 4 * at);
    }
    return format == CLB_INT4 && n < CLB_EIGHT ? eight_first(of, n) : of;
}

CLB_INLINE eight times_row(const tile *t, int64_t b, int j, eight of) {
    return eight_mul(of, eight_load(t->x->scale + (t->r + j) * t->x->padded + b));
}

/* Takes off what the nibbles of blocks [b, b + 8) have too much. */
CLB_INLINE void take_off(const tile *t, int64_t b, int j, eight scale, eight *acc) {
    *acc = eight_fma(scale, eight_load(t->x->less + (t->r + j) * t->x->padded + b), *acc);
}

typedef struct scales { /* of outputs x rows: both factors multiplied, or a weight's alone */
    float (*both)[SIDE][CLB_RUN]; /* [output][row][block], or NULL and.. */
    float (*of)[CLB_EIGHT];       /* [output][block, or 0 for all] */
} scales;

CLB_INLINE eight scale_at(const scales *s, int each, int i, int j, int64_t k, const float *x) {
    if (s->both)
        return eight_splat(&s->both[i][j][k]);
    return eight_mul(eight_splat(&s->of[i][each ? k : 0]), eight_splat(x));
}

/* Asks for memory that may lie past the matrix: never read, so an address and no pointer. */
CLB_INLINE void fetch_ahead(const uint8_t *p) {
    __builtin_prefetch((const void *)((uintptr_t)p + AHEAD));
}

/* Blocks [b, b + n) of outputs x rows, whose scales begin at k; `bytes` is the first of output 0,
   output 1 is `next` away. */
CLB_INLINE void block_steps(const tile *t, const uint8_t *bytes, int64_t next, int64_t b, int64_t n,
                            int32_t format, int outputs, int rows, const scales *scale, int each,
                            int64_t k, eight *acc) {
    const int64_t row_q = t->x->blocks * CLB_BLOCK, padded = t->x->padded;
    const int8_t *q = t->x->q + t->r * row_q + b * CLB_BLOCK;
    const float *x = t->x->scale + t->r * padded + b;
    for (int64_t end = k + n; k < end; k++, x++) {
        CLB_UNROLL
        for (int i = 0; i < outputs; i++) {
            packed w = load_block(format, bytes + i * next);
            if (rows == 1 && scale->both)
                fetch_ahead(bytes + i * next);
            CLB_UNROLL
            for (int j = 0; j < rows; j++)
                acc[i * rows + j] = eight_fma(block_sums(format, w, q + j * row_q),
                                              scale_at(scale, each, i, j, k, x + j * padded),
                                              acc[i * rows + j]);
        }
        bytes += clb_block_bytes(format);
        q += CLB_BLOCK;
    }
}

/* The last block of each output when bytes of it are missing, its scales at k. */
CLB_INLINE void cut_block(const tile *t, int32_t format, int outputs, int rows,
                          const scales *scale, int each, int64_t k, eight *acc) {
    const int64_t size = clb_block_bytes(format), whole = t->w->row_bytes / size;
    uint8_t copy[SIDE][CLB_BLOCK];
    cut_blocks(t, whole, size, outputs, copy);
    block_steps(t, copy[0], CLB_BLOCK, whole, 1, format, outputs, rows, scale, each, k, acc);
}

CLB_INLINE void block_tile(const tile *t, int32_t format, scale_kind kind, int outputs, int rows) {
    const int64_t size = clb_block_bytes(format), row_bytes = t->w->row_bytes;
    const int64_t whole = row_bytes / size, blocks = t->x->blocks;
    const uint8_t *bytes = t->w->data + t->o * row_bytes;
    float both[SIDE][SIDE][CLB_RUN];
    const scales scale = {both, NULL};
    eight acc[SIDE * SIDE];
    clear(acc, outputs * rows);
    for (int64_t b = 0; b < blocks; b += CLB_RUN) {
        int64_t n = blocks - b < CLB_RUN ? blocks - b : CLB_RUN;
        int64_t there = whole - b < n ? whole - b : n; /* blocks whose every byte is there */
        for (int64_t k = 0; k < n; k += CLB_EIGHT) {
            CLB_UNROLL
            for (int i = 0; i < outputs; i++) {
                eight of = weight_scales(t, format, i, b + k, kind);
                CLB_UNROLL
                for (int j = 0; j < rows; j++) {
                    eight factor = times_row(t, b + k, j, of);
                    eight_store(both[i][j] + k, factor);
                    if (format == CLB_INT4)
                        take_off(t, b + k, j, factor, acc + i * rows + j);
                }
            }
        }
        block_steps(t, bytes + b * size, t->apart * row_bytes, b, there, format, outputs, rows,
                    &scale, 1, 0, acc);
        if (there < n)
            cut_block(t, format, outputs, rows, &scale, 1, there, acc);
    }
    store_tile(t, acc, outputs, rows);
}

/* The same for rows of at most eight blocks, where multiplying the scales first and reading them
   back would take as long as the products. */
CLB_INLINE void short_tile(const tile *t, int32_t format, scale_kind kind, int outputs, int rows) {
    const int each = kind != ROW_SCALE;
    const int64_t whole = t->w->row_bytes / clb_block_bytes(format);
    float of[SIDE][CLB_EIGHT];
    const scales scale = {NULL, of};
    eight acc[SIDE * SIDE];
    clear(acc, outputs * rows);
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        if (!each)
            of[i][0] = row_scale(t->w, t->o + i * t->apart);
        if (!each && format != CLB_INT4)
            continue;
        eight factor = weight_scales(t, format, i, 0, kind);
        if (each)
            eight_store(of[i], factor);
        CLB_UNROLL
        for (int j = 0; j < rows; j++)
            if (format == CLB_INT4)
                take_off(t, 0, j, times_row(t, 0, j, factor), acc + i * rows + j);
    }
    block_steps(t, t->w->data + t->o * t->w->row_bytes, t->apart * t->w->row_bytes, 0, whole,
                format, outputs, rows, &scale, each, 0, acc);
    if (whole < t->x->blocks)
        cut_block(t, format, outputs, rows, &scale, each, whole, acc);
    store_tile(t, acc, outputs, rows);
}

/* ---- scales of less than a block ------------------------------------------------------------- */

typedef struct run { /* up to CLB_RUN blocks: where their bytes begin, and their scales */
    const uint8_t *bytes[SIDE]; /* [output] */
    float group[SIDE][SPREAD_GROUPS];  /* [output]: scales of the groups the run meets */
    int32_t base[CLB_RUN];             /* the block's first group in group[] */
    int32_t lane[CLB_RUN][FOURS];      /* from base: eight lanes' first fours, then the others */
    uint8_t copy[SIDE][CLB_BLOCK];     /* [output]: a last block with bytes missing, then zeros */
} run;

/* Scales [first, first + n) of a row; past the row's end, its last one. */
CLB_APART void load_groups(const clb_matrix *w, int64_t row, int64_t first, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++)
        out[i] = clb_scale_at(w, row, first + i < w->row_scales ? first + i : w->row_scales - 1);
}

/* Which group each lane of each block belongs to. */
static void spread_scales(const tile *t, int64_t b, int64_t n, int outputs, run *at) {
    int64_t group = t->w->group, first = b * CLB_BLOCK / group, phase = b * CLB_BLOCK % group;
    int64_t groups = ((b + n) * CLB_BLOCK - 1) / group - first + 1;
    int32_t base = 0, size = (int32_t)(group < CLB_BLOCK ? group : CLB_BLOCK);
    int32_t reciprocal = (65535 + size) / size; /* exact for the quotients of 0..63 */
    int32_t apart = t->w->format == CLB_INT4 ? 8 : 4; /* inputs from lane to lane */
    for (int64_t k = 0; k < n; k++) {
        int32_t border = (int32_t)(group - phase < CLB_BLOCK ? group - phase : CLB_BLOCK);
        for (int l = 0; l < FOURS; l++) {
            int32_t past = apart * l % CLB_BLOCK - border, whole = past * reciprocal >> 16;
            at->lane[k][l] = past < 0 ? 0 : 1 + whole;
        }
        at->base[k] = base;
        for (phase += CLB_BLOCK; phase >= group; phase -= group)
            base++;
    }
    for (int i = 0; i < outputs; i++)
        load_groups(t->w, t->o + i * t->apart, first, groups + CLB_EIGHT, at->group[i]);
}

/* Makes the run at block b ready and returns its length. */
CLB_APART int64_t begin_run(const tile *t, int64_t b, int outputs, run *at) {
    const int64_t size = clb_block_bytes(t->w->format), row_bytes = t->w->row_bytes;
    const int64_t whole = row_bytes / size;
    int64_t end = b < whole ? whole : t->x->blocks, n = end - b < CLB_RUN ? end - b : CLB_RUN;
    if (b == whole)
        cut_blocks(t, b, size, outputs, at->copy);
    for (int i = 0; i < outputs; i++)
        at->bytes[i] = b == whole ? at->copy[i]
                                  : t->w->data + (t->o + i * t->apart) * row_bytes + b * size;
    spread_scales(t, b, n, outputs, at);
    return n;
}

/* acc += d * (the lanes' weight scales * the row's); eight lanes meet eight groups from the first
   one's on at most. */
CLB_INLINE eight add_spread(sums d, const float *group, const int32_t *lane, const float *x,
                            eight acc) {
    eight scale = eight_pick(group + (lane[0] & ~7), lane);
    return eight_fma(sums_float(d), eight_mul(scale, eight_splat(x)), acc);
}

CLB_INLINE void spread_step(const tile *t, const run *at, int64_t b, int64_t k, int32_t format,
                            int outputs, int rows, eight *acc) {
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        packed w = load_block(format, at->bytes[i] + k * clb_block_bytes(format));
        const float *group = at->group[i] + at->base[k];
        const int32_t *lane = at->lane[k];
        if (format == CLB_INT4)
            w = (packed){less_eight(w.low), less_eight(w.high)};
        CLB_UNROLL
        for (int j = 0; j < rows; j++) {
            const int8_t *q = t->x->q + ((t->r + j) * t->x->blocks + b + k) * CLB_BLOCK;
            const float *x = t->x->scale + (t->r + j) * t->x->padded + b + k;
            eight *to = acc + i * rows + j;
            sums low = byte_sums(w.low, q, sums_zero());
            if (format == CLB_INT4) {
                *to = add_spread(byte_sums(w.high, q + 32, low), group, lane, x, *to);
            } else {
                sums high = byte_sums(w.high, q + 32, sums_zero());
                *to = add_spread(low, group, lane, x, *to);
                *to = add_spread(high, group, lane + CLB_EIGHT, x, *to);
            }
        }
    }
}

CLB_INLINE void spread_tile(const tile *t, int32_t format, int outputs, int rows) {
    eight acc[SIDE * SIDE];
    run at;
    clear(acc, outputs * rows);
    for (int64_t b = 0, n; b < t->x->blocks; b += n) {
        n = begin_run(t, b, outputs, &at);
        for (int64_t k = 0; k < n; k++)
            spread_step(t, &at, b, k, format, outputs, rows, acc);
    }
    store_tile(t, acc, outputs, rows);
}

/* ---- float weights ------------------------------------------------------------------------- */

CLB_INLINE lanes load_weights(int format, const uint8_t *p) {
    if (format == CLB_F32)
        return lanes_load_f32(p);
    return format == CLB_BF16 ? lanes_load_bf16(p) : lanes_load_f16(p);
}

/* Adds what is left of output t->o + i and row t->r + j from column c on. */
CLB_APART void float_tail(const tile *t, int i, int j, int64_t c, lanes *acc) {
    const uint8_t *row = t->w->data + (t->o + i * t->apart) * t->w->row_bytes;
    float tail[CLB_LANES];
    for (int64_t l = 0; l < t->w->cols - c; l++)
        tail[l] = clb_float_at(t->w->format, row, c + l);
    *acc = lanes_fma_tail(tail, t->x->x + (t->r + j) * t->x->x_stride + c, t->w->cols - c, *acc);
}

CLB_INLINE void float_tile(const tile *t, int32_t format, int outputs, int rows) {
    const int64_t size = format == CLB_F32 ? 4 : 2, cols = t->w->cols;
    const int64_t row_bytes = t->w->row_bytes, stride = t->x->x_stride;
    const uint8_t *data = t->w->data + t->o * row_bytes;
    const float *x = t->x->x + t->r * stride;
    lanes acc[SIDE * SIDE];
    int64_t c = 0;
    CLB_UNROLL
    for (int n = 0; n < outputs * rows; n++)
        acc[n] = lanes_zero();
    for (; c + CLB_LANES <= cols; c += CLB_LANES) {
        CLB_UNROLL
        for (int i = 0; i < outputs; i++) {
            lanes w = load_weights(format, data + i * t->apart * row_bytes + c * size);
            CLB_UNROLL
            for (int j = 0; j < rows; j++)
                acc[i * rows + j] = lanes_fma(w, lanes_load(x + j * stride + c),
                                              acc[i * rows + j]);
        }
    }
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        CLB_UNROLL
        for (int j = 0; j < rows; j++) {
            lanes sum = acc[i * rows + j];
            if (c < cols)
                float_tail(t, i, j, c, &sum);
            t->y[(t->r + j) * t->y_stride + t->o + i * t->apart] = lanes_fold(sum);
        }
    }
}

/* ---- walking the outputs and rows ----------------------------------------------------------- */

CLB_INLINE void any_tile(const tile *t, int32_t format, scale_kind kind, int outputs, int rows) {
    if (kind == NO_SCALES)
        float_tile(t, format, outputs, rows);
    else if (kind == LANE_SCALES)
        spread_tile(t, format, outputs, rows);
    else if (format < CLB_INT3 && kind != GROUP_SCALES && t->x->blocks <= CLB_EIGHT)
        short_tile(t, format, kind, outputs, rows);
    else
        block_tile(t, format, kind, outputs, rows);
}

/* `count` outputs from t.o on, in tiles of `wide` and then of one. Outputs of a tile are as far
   apart as can be: streams from distant pages are fetched ahead side by side, 15 GB/s with four
   of them against 11 with one and 7 with four inside a page (Zen 3). */
CLB_INLINE void tile_row(tile t, int64_t count, int32_t format, scale_kind kind, int wide,
                         int rows) {
    int64_t end = t.o + count;
    t.apart = count / wide;
    for (int64_t k = 0; k < t.apart; k++, t.o++)
        any_tile(&t, format, kind, wide, rows);
    t.o += (wide - 1) * t.apart;
    for (t.apart = 1; t.o < end; t.o++)
        any_tile(&t, format, kind, 1, rows);
}

/* A few rows pass over all outputs at once; more of them take a strip of outputs after the other,
   in panels of rows that stay in the second-level cache. `wide`: outputs of a tile at 1,
   2, 3 and 4 rows. */
CLB_INLINE void linear_tiles(tile t, int64_t first, int64_t last, int32_t format, scale_kind kind,
                             const int *wide) {
    const int64_t rows = t.x->rows, row_size = t.x->blocks * CLB_BLOCK;
    const int64_t fits = PANEL_BYTES / row_size / SIDE * SIDE, panel = fits > SIDE ? fits : SIDE;
    const int64_t step = rows < SIDE ? last - first : STRIP;
    for (int64_t r = 0; r < rows; r += panel) {
        int64_t end = r + panel < rows ? r + panel : rows;
        for (t.o = first; t.o < last; t.o += step) {
            int64_t count = last - t.o < step ? last - t.o : step;
            for (t.r = r; t.r < end; t.r += SIDE) {
                switch (end - t.r) {
                case 1: tile_row(t, count, format, kind, wide[0], 1); break;
                case 2: tile_row(t, count, format, kind, wide[1], 2); break;
                case 3: tile_row(t, count, format, kind, wide[2], 3); break;
                default: tile_row(t, count, format, kind, wide[3], 4);
                }
            }
        }
    }
}

#define LANE_WIDE 4, 2, 1, 1 /* outputs share the work of spreading scales over lanes */

#define CLB_LINEAR(name, format, kind, ...)                                                        \
    static void name(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,          \
                     float *y, int64_t y_stride) {                                                 \
        static const int wide[4] = {__VA_ARGS__};                                                  \
        linear_tiles((tile){w, x, 0, 1, 0, y, y_stride}, first, last, format, kind, wide);         \
    }

CLB_LINEAR(linear_f32, CLB_F32, NO_SCALES, FLOAT_WIDE)
CLB_LINEAR(linear_bf16, CLB_BF16, NO_SCALES, FLOAT_WIDE)
CLB_LINEAR(linear_f16, CLB_F16, NO_SCALES, 1, 1, 1, 1)
CLB_LINEAR(int8_row, CLB_INT8, ROW_SCALE, TILE_WIDE)
CLB_LINEAR(int8_groups, CLB_INT8, GROUP_SCALES, TILE_WIDE)
CLB_LINEAR(int8_lanes, CLB_INT8, LANE_SCALES, LANE_WIDE)
CLB_LINEAR(int4_row, CLB_INT4, ROW_SCALE, TILE_WIDE)
CLB_LINEAR(int4_f16, CLB_INT4, F16_SCALES, TILE_WIDE)
CLB_LINEAR(int4_f32, CLB_INT4, F32_SCALES, TILE_WIDE)
CLB_LINEAR(int4_groups, CLB_INT4, GROUP_SCALES, TILE_WIDE)
CLB_LINEAR(int4_lanes, CLB_INT4, LANE_SCALES, LANE_WIDE)
CLB_LINEAR(linear_int3, CLB_INT3, GROUP_SCALES, 1, 1, 1, 1)
CLB_LINEAR(linear_int2, CLB_INT2, ROW_SCALE, 1, 1, 1, 1)

static void linear_int8(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                        float *y, int64_t y_stride) {
    clb_linear_fn *run = clb_whole_blocks(w) ? int8_groups : int8_lanes;
    if (w->row_scales == 1)
        run = int8_row;
    run(w, x, first, last, y, y_stride);
}

static void linear_int4(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                        float *y, int64_t y_stride) {
    clb_linear_fn *run = int4_groups;
    if (!clb_whole_blocks(w))
        run = int4_lanes;
    else if (w->row_scales == 1)
        run = int4_row;
    else if (w->group == CLB_BLOCK)
        run = w->scale_format == CLB_F16 ? int4_f16 : int4_f32;
    run(w, x, first, last, y, y_stride);
}

#define CLB_LINEAR_ENTRIES                                                                         \
    .linear = {linear_f32, linear_bf16, linear_f16, linear_int8, linear_int4, linear_int3,         \
               linear_int2}

#endif
