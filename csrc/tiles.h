/* y = W x in tiles of a few outputs times a few rows, written once over the lanes of an instruction
   set. A kernels_*.c includes this after its lanes, eights and packed blocks; the shape of a tile
   moves work between registers, never the order in which one output adds up. */
#ifndef CLB_TILES_H
#define CLB_TILES_H
#include "numerics.h"

#define CLB_APART static __attribute__((noinline)) /* one copy, and registers of its own */
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

typedef enum { /* what a scale covers; each has tiles of its own */
    NOTHING, /* a float format */
    BLOCKS,  /* whole blocks: one, several, or a row */
    LANES,   /* groups that end inside blocks */
} scale_cover;

typedef enum { /* where scales of whole blocks are */
    ROW_SCALE,    /* one a row */
    F16_SCALES,   /* one a block */
    F32_SCALES,
    TWIN_SCALES,  /* one for 2, 4, 8 .. blocks, of either format */
    GROUP_SCALES, /* one for several blocks, of either format */
} scale_kind;

typedef struct lane_map lane_map;

typedef struct tile { /* outputs o, o + apart, o + 2 apart..; rows from r on */
    const clb_matrix *w;
    const clb_acts *x;
    scale_kind kind;
    lane_map *map; /* where scales cover lanes */
    int64_t o, apart, r;
    float *y;
    int64_t y_stride;
} tile;

/* ---- a block of weights times a block of activations ---------------------------------------- */

CLB_INLINE packed load_bytes(const uint8_t *p) {
    return (packed){half_load(p), half_load(p + 32)};
}

#ifndef CLB_BYTE_EXCESS /* byte_sums multiplies signed bytes as they are */
CLB_INLINE half byte_factor(half w) {
    return w;
}

CLB_INLINE sums byte_excess(const int8_t *q, sums more) {
    (void)q;
    return more;
}

CLB_INLINE sums byte_start(sums excess) {
    return excess;
}
#endif

/* Signed bytes as byte_sums takes them, which adds what is too much, byte_excess, to byte_start. */
CLB_INLINE packed as_factors(packed w) {
    return (packed){byte_factor(w.low), byte_factor(w.high)};
}

CLB_INLINE packed load_block(int32_t format, const uint8_t *p) {
    if (format == CLB_INT4)
        return nibbles(p);
    if (format == CLB_INT8)
        return as_factors(load_bytes(p));
    return as_factors(format == CLB_INT3 ? int3_bytes(p) : int2_bytes(p));
}

CLB_INLINE sums half_start(const int8_t *q) {
    return byte_start(byte_excess(q, sums_zero()));
}

CLB_INLINE sums block_start(const int8_t *q) {
    return byte_start(byte_excess(q + 32, byte_excess(q, sums_zero())));
}

/* Eight exact sums of eight products, as floats; nibbles count as 0..15. */
CLB_INLINE eight block_sums(int32_t format, packed w, const int8_t *q, sums start) {
    if (format == CLB_INT4)
        return sums_float(nibble_sums(w, q));
    return sums_float(byte_sums(w.high, q + 32, byte_sums(w.low, q, start)));
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

static scale_kind kind_of(const clb_matrix *w) {
    if (w->row_scales == 1)
        return ROW_SCALE;
    if (w->group != CLB_BLOCK)
        return w->group & (w->group - 1) ? GROUP_SCALES : TWIN_SCALES;
    return w->scale_format == CLB_F16 ? F16_SCALES : F32_SCALES;
}

/* Weight scales of blocks [b, b + 8) of a row, one by one; past its end +0. */
CLB_APART eight gather_scales(const clb_matrix *w, int64_t row, int64_t b) {
    const int64_t size = clb_scale_size(w), blocks = w->group / CLB_BLOCK; /* of a group */
    const uint8_t *at = w->scales + (row * w->row_scales + b / blocks) * size;
    float of[CLB_EIGHT] = {0};
    for (int64_t k = 0, left = blocks - b % blocks; k < CLB_EIGHT && (b + k) * CLB_BLOCK < w->cols;
         k++, left--) {
        if (left == 0) {
            at += size;
            left = blocks;
        }
        of[k] = stored_scale(at, w->scale_format);
    }
    return eight_load(of);
}

typedef struct rows_at { /* a tile's rows of activations from block 0 on */
    const int8_t *q;
    const float *scale, *nibble_offset;
    int64_t row_q, padded; /* from one row to the next */
    int64_t blocks;
} rows_at;

CLB_INLINE rows_at rows_of(const tile *t) {
    const clb_acts *x = t->x;
    return (rows_at){x->q + t->r * x->blocks * CLB_BLOCK, x->scale + t->r * x->padded,
                     x->nibble_offset + t->r * x->padded, x->blocks * CLB_BLOCK, x->padded,
                     x->blocks};
}

typedef struct scales_at { /* a tile's scales from block 0 of output 0 on */
    const uint8_t *first;
    int64_t next, left; /* scales from one output to the next, and to the end of the matrix */
} scales_at;

CLB_INLINE scales_at scales_of(const tile *t) {
    const clb_matrix *w = t->w;
    const int64_t at = t->o * w->row_scales;
    return (scales_at){w->scales + at * clb_scale_size(w), t->apart * w->row_scales,
                       w->rows * w->row_scales - at};
}

CLB_INLINE eight load_scales(const uint8_t *p, int32_t format) {
    return format == CLB_F16 ? eight_load_f16(p) : eight_load_f32(p);
}

/* Scales of groups of 2^n blocks for eight blocks, of which the first begins a group or lies with
   all others inside one; s: the first one's, with seven behind it. */
CLB_APART eight repeat_scales(const uint8_t *s, int32_t format, int64_t blocks) {
    static const int32_t of[3][CLB_EIGHT] = {
        {0, 0, 1, 1, 2, 2, 3, 3}, {0, 0, 0, 0, 1, 1, 1, 1}, {0}};
    float each[CLB_EIGHT];
    eight_store(each, load_scales(s, format));
    return eight_pick(each, of[blocks == 2 ? 0 : blocks == 4 ? 1 : 2]);
}

/* Weight scales of blocks [b, b + 8) of output i, loaded at once while the matrix has eight more.
   Lanes from block b + n on are +0 for int4 only, where take_off uses all eight. */
CLB_INLINE eight weight_scales(const tile *t, const scales_at *s, int32_t format, int i, int64_t b,
                               int64_t n) {
    const int64_t blocks = t->kind == TWIN_SCALES ? t->w->group / CLB_BLOCK : 1;
    const int64_t at = i * s->next + b / blocks;
    eight of;
    if (t->kind == ROW_SCALE) {
        float one = stored_scale(s->first + i * s->next * clb_scale_size(t->w),
                                 t->w->scale_format);
        of = eight_splat(&one);
    } else if (t->kind == GROUP_SCALES || at + CLB_EIGHT > s->left) {
        return gather_scales(t->w, t->o + i * t->apart, b);
    } else if (t->kind == TWIN_SCALES) {
        of = repeat_scales(s->first + at * clb_scale_size(t->w), t->w->scale_format, blocks);
    } else {
        of = t->kind == F16_SCALES ? eight_load_f16(s->first + 2 * at)
                                   : eight_load_f32(s->first + 4 * at);
    }
    return format == CLB_INT4 && n < CLB_EIGHT ? eight_first(of, n) : of;
}

typedef struct scales { /* of outputs x rows: both factors multiplied, or a weight's alone */
    float (*both)[SIDE][CLB_RUN]; /* [output][row][block], or NULL and.. */
    float (*of)[CLB_EIGHT];       /* [output][block] */
} scales;

CLB_INLINE eight scale_at(const scales *s, int i, int j, int64_t k, const float *x) {
    if (s->both)
        return eight_splat(&s->both[i][j][k]);
    return eight_mul(eight_splat(&s->of[i][k]), eight_splat(x));
}

CLB_INLINE eight times_row(const rows_at *x, int64_t b, int j, eight of) {
    return eight_mul(of, eight_load(x->scale + j * x->padded + b));
}

/* Adds scale times the nibble offsets of blocks [b, b + 8). */
CLB_INLINE eight take_off(const rows_at *x, int64_t b, int j, eight scale, eight acc) {
    return eight_fma(scale, eight_load(x->nibble_offset + j * x->padded + b), acc);
}

/* Asks for memory that may lie past the matrix: never read, so an address and no pointer. */
CLB_INLINE void fetch_ahead(const uint8_t *p) {
    __builtin_prefetch((const void *)((uintptr_t)p + AHEAD));
}

/* Blocks [b, b + n) of outputs x rows, whose scales begin at k; `bytes` is the first of output 0,
   output 1 is `next` away. */
CLB_INLINE void block_steps(const rows_at *x, const uint8_t *bytes, int64_t next, int64_t b,
                            int64_t n, int32_t format, int outputs, int rows, const scales *scale,
                            int64_t k, eight *acc) {
    const int8_t *q = x->q + b * CLB_BLOCK;
    const float *one = x->scale + b;
    sums start[SIDE]; /* [row] */
    for (int64_t end = k + n; k < end; k++, one++) {
        CLB_UNROLL
        for (int j = 0; j < rows; j++)
            start[j] = format == CLB_INT4 ? sums_zero() : block_start(q + j * x->row_q);
        CLB_UNROLL
        for (int i = 0; i < outputs; i++) {
            packed w = load_block(format, bytes + i * next);
            if (rows == 1 && scale->both)
                fetch_ahead(bytes + i * next);
            CLB_UNROLL
            for (int j = 0; j < rows; j++)
                acc[i * rows + j] = eight_fma(block_sums(format, w, q + j * x->row_q, start[j]),
                                              scale_at(scale, i, j, k, one + j * x->padded),
                                              acc[i * rows + j]);
        }
        bytes += clb_block_bytes(format);
        q += CLB_BLOCK;
    }
}

/* The last block of each output when bytes of it are missing, its scales at k. */
CLB_INLINE void cut_block(const tile *t, const rows_at *x, int32_t format, int outputs, int rows,
                          const scales *scale, int64_t k, eight *acc) {
    const int64_t size = clb_block_bytes(format), whole = t->w->row_bytes / size;
    uint8_t copy[SIDE][CLB_BLOCK];
    cut_blocks(t, whole, size, outputs, copy);
    block_steps(x, copy[0], CLB_BLOCK, whole, 1, format, outputs, rows, scale, k, acc);
}

CLB_INLINE void block_tile(const tile *t, int32_t format, int outputs, int rows) {
    const int64_t size = clb_block_bytes(format), next = t->apart * t->w->row_bytes;
    const int64_t whole = t->w->row_bytes / size;
    const uint8_t *bytes = t->w->data + t->o * t->w->row_bytes;
    const rows_at x = rows_of(t);
    const scales_at stored = scales_of(t);
    float both[SIDE][SIDE][CLB_RUN];
    const scales scale = {both, NULL};
    eight acc[SIDE * SIDE];
    clear(acc, outputs * rows);
    for (int64_t b = 0; b < x.blocks; b += CLB_RUN) {
        int64_t n = x.blocks - b < CLB_RUN ? x.blocks - b : CLB_RUN;
        int64_t there = whole - b < n ? whole - b : n; /* blocks whose every byte is there */
        for (int64_t k = 0; k < n; k += CLB_EIGHT) {
            CLB_UNROLL
            for (int i = 0; i < outputs; i++) {
                eight of = weight_scales(t, &stored, format, i, b + k, n - k);
                CLB_UNROLL
                for (int j = 0; j < rows; j++) {
                    eight factor = times_row(&x, b + k, j, of);
                    eight_store(both[i][j] + k, factor);
                    if (format == CLB_INT4)
                        acc[i * rows + j] = take_off(&x, b + k, j, factor, acc[i * rows + j]);
                }
            }
        }
        block_steps(&x, bytes + b * size, next, b, there, format, outputs, rows, &scale, 0, acc);
        if (there < n)
            cut_block(t, &x, format, outputs, rows, &scale, there, acc);
    }
    store_tile(t, acc, outputs, rows);
}

/* The same for rows of at most eight blocks, where multiplying the scales first and reading them
   back would take as long as the products. */
CLB_INLINE void short_tile(const tile *t, int32_t format, int outputs, int rows) {
    const int64_t whole = t->w->row_bytes / clb_block_bytes(format);
    const rows_at x = rows_of(t);
    const scales_at stored = scales_of(t);
    float of[SIDE][CLB_EIGHT];
    const scales scale = {NULL, of};
    eight acc[SIDE * SIDE];
    clear(acc, outputs * rows);
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        eight factor = weight_scales(t, &stored, format, i, 0, x.blocks);
        eight_store(of[i], factor);
        CLB_UNROLL
        for (int j = 0; j < rows; j++)
            if (format == CLB_INT4)
                acc[i * rows + j] = take_off(&x, 0, j, times_row(&x, 0, j, factor),
                                             acc[i * rows + j]);
    }
    block_steps(&x, t->w->data + t->o * t->w->row_bytes, t->apart * t->w->row_bytes, 0, whole,
                format, outputs, rows, &scale, 0, acc);
    if (whole < x.blocks)
        cut_block(t, &x, format, outputs, rows, &scale, whole, acc);
    store_tile(t, acc, outputs, rows);
}

/* ---- scales of less than a block ------------------------------------------------------------- */

struct lane_map { /* of the blocks of a run, beginning `phase` inputs into a group */
    int64_t phase, n;             /* n blocks are mapped */
    int32_t base[CLB_RUN];        /* the block's first group, from the run's */
    int32_t lane[CLB_RUN][FOURS]; /* from base: eight lanes' first fours, then the others */
};

typedef struct run { /* up to CLB_RUN blocks: where their bytes begin, and their scales */
    const uint8_t *bytes[SIDE]; /* [output] */
    float group[SIDE][SPREAD_GROUPS];  /* [output]: scales of the groups the run meets */
    uint8_t copy[SIDE][CLB_BLOCK];     /* [output]: a last block with bytes missing, then zeros */
} run;

/* Scales [first, first + n) of a row; past the row's end, its last one. */
CLB_APART void load_groups(const clb_matrix *w, int64_t row, int64_t first, int64_t n, float *out) {
    const uint8_t *at = w->scales + (row * w->row_scales + first) * clb_scale_size(w);
    int64_t i = 0;
    for (; i + CLB_EIGHT <= n && first + i + CLB_EIGHT <= w->row_scales; i += CLB_EIGHT)
        eight_store(out + i, load_scales(at + i * clb_scale_size(w), w->scale_format));
    for (; i < n; i++)
        out[i] = clb_scale_at(w, row, first + i < w->row_scales ? first + i : w->row_scales - 1);
}

/* Which group each lane belongs to: the same for all outputs, and often for the next run. */
static void map_lanes(const clb_matrix *w, int64_t phase, int64_t n, lane_map *map) {
    int64_t group = w->group;
    int32_t base = 0, size = (int32_t)(group < CLB_BLOCK ? group : CLB_BLOCK);
    int32_t reciprocal = (65535 + size) / size; /* exact for the quotients of 0..63 */
    int32_t apart = w->format == CLB_INT4 ? 8 : 4; /* inputs from lane to lane */
    if (map->n >= n && map->phase == phase)
        return;
    map->phase = phase;
    map->n = n;
    for (int64_t k = 0; k < n; k++) {
        int32_t border = (int32_t)(group - phase < CLB_BLOCK ? group - phase : CLB_BLOCK);
        for (int l = 0; l < FOURS; l++) {
            int32_t past = apart * l % CLB_BLOCK - border, whole = past * reciprocal >> 16;
            map->lane[k][l] = past < 0 ? 0 : 1 + whole;
        }
        map->base[k] = base;
        for (phase += CLB_BLOCK; phase >= group; phase -= group)
            base++;
    }
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
    int64_t group = t->w->group, first = b * CLB_BLOCK / group;
    int64_t groups = ((b + n) * CLB_BLOCK - 1) / group - first + 1;
    map_lanes(t->w, b * CLB_BLOCK % group, n, t->map);
    for (int i = 0; i < outputs; i++)
        load_groups(t->w, t->o + i * t->apart, first, groups + CLB_EIGHT, at->group[i]);
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
        const float *group = at->group[i] + t->map->base[k];
        const int32_t *lane = t->map->lane[k];
        if (format == CLB_INT4)
            w = as_factors((packed){less_eight(w.low), less_eight(w.high)});
        CLB_UNROLL
        for (int j = 0; j < rows; j++) {
            const int8_t *q = t->x->q + ((t->r + j) * t->x->blocks + b + k) * CLB_BLOCK;
            const float *x = t->x->scale + (t->r + j) * t->x->padded + b + k;
            eight *to = acc + i * rows + j;
            if (format == CLB_INT4) {
                sums low = byte_sums(w.low, q, block_start(q));
                *to = add_spread(byte_sums(w.high, q + 32, low), group, lane, x, *to);
            } else {
                sums low = byte_sums(w.low, q, half_start(q));
                sums high = byte_sums(w.high, q + 32, half_start(q + 32));
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

CLB_INLINE void any_tile(const tile *t, int32_t format, scale_cover cover, int outputs, int rows) {
    if (cover == NOTHING)
        float_tile(t, format, outputs, rows);
    else if (cover == LANES)
        spread_tile(t, format, outputs, rows);
    else if (t->x->blocks <= CLB_EIGHT)
        short_tile(t, format, outputs, rows);
    else
        block_tile(t, format, outputs, rows);
}

/* `count` outputs from t.o on, in tiles of `wide`; the few that are left one by one. Outputs of a
   tile are as far apart as can be: streams from distant pages are fetched ahead side by side,
   15 GB/s with four of them against 11 with one and 7 with four inside a page (Zen 3). */
CLB_INLINE void tile_row(tile t, int64_t count, int32_t format, scale_cover cover, int wide,
                         int rows) {
    int64_t end = t.o + count;
    lane_map map;
    if (cover == LANES) {
        map.n = 0; /* nothing mapped yet */
        t.map = &map;
    }
    t.apart = count / wide;
    for (int64_t k = 0; k < t.apart; k++, t.o++)
        any_tile(&t, format, cover, wide, rows);
    t.o += (wide - 1) * t.apart;
    for (t.apart = 1; t.o < end; t.o++)
        for (tile one = t; one.r < t.r + rows; one.r++)
            any_tile(&one, format, cover, 1, 1);
}

typedef void tile_row_fn(const tile *t, int64_t count);

/* A few rows pass over all outputs at once; more of them take a strip of outputs after the other,
   in panels of rows that stay in the second-level cache. `by_rows`: for 1, 2, 3 and 4 rows. */
static void linear_tiles(tile t, int64_t first, int64_t last, tile_row_fn *const *by_rows) {
    const int64_t rows = t.x->rows, row_size = t.x->blocks * CLB_BLOCK;
    const int64_t fits = PANEL_BYTES / row_size / SIDE * SIDE, panel = fits > SIDE ? fits : SIDE;
    const int64_t step = rows <= SIDE ? last - first : STRIP;
    for (int64_t r = 0; r < rows; r += panel) {
        int64_t end = r + panel < rows ? r + panel : rows;
        for (t.o = first; t.o < last; t.o += step)
            for (t.r = r; t.r < end; t.r += SIDE)
                by_rows[end - t.r < SIDE ? end - t.r - 1 : SIDE - 1](
                    &t, last - t.o < step ? last - t.o : step);
    }
}

#define LANE_WIDE 4, 2, 1, 1 /* outputs share the work of spreading scales over lanes */

/* One function a number of rows: apart from each other they have registers enough. A kind that is
   a constant is settled by the compiler. */
#define CLB_TILE_ROW(name, format, cover, kind_, wide, rows)                                       \
    CLB_APART void name(const tile *t, int64_t count) {                                            \
        tile own = *t;                                                                             \
        own.kind = kind_;                                                                          \
        tile_row(own, count, format, cover, wide, rows);                                           \
    }
#define CLB_TILE_ROWS(name, format, cover, kind, one, two, three, four)                            \
    CLB_TILE_ROW(name##_1, format, cover, kind, one, 1)                                            \
    CLB_TILE_ROW(name##_2, format, cover, kind, two, 2)                                            \
    CLB_TILE_ROW(name##_3, format, cover, kind, three, 3)                                          \
    CLB_TILE_ROW(name##_4, format, cover, kind, four, 4)
#define CLB_LINEAR(name, ...)                                                                      \
    CLB_TILE_ROWS(name, __VA_ARGS__)                                                               \
    static void name(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,          \
                     float *y, int64_t y_stride) {                                                 \
        static tile_row_fn *const by_rows[SIDE] = {name##_1, name##_2, name##_3, name##_4};        \
        const tile all = {.w = w, .x = x, .kind = kind_of(w), .y = y, .y_stride = y_stride};       \
        linear_tiles(all, first, last, by_rows);                                                   \
    }

CLB_LINEAR(linear_f32, CLB_F32, NOTHING, ROW_SCALE, FLOAT_WIDE)
CLB_LINEAR(linear_bf16, CLB_BF16, NOTHING, ROW_SCALE, FLOAT_WIDE)
CLB_LINEAR(linear_f16, CLB_F16, NOTHING, ROW_SCALE, 1, 1, 1, 1)
CLB_LINEAR(int8_row, CLB_INT8, BLOCKS, ROW_SCALE, TILE_WIDE)
CLB_LINEAR(int8_blocks, CLB_INT8, BLOCKS, t->kind, TILE_WIDE)
CLB_LINEAR(int8_lanes, CLB_INT8, LANES, ROW_SCALE, LANE_WIDE)
CLB_LINEAR(int4_row, CLB_INT4, BLOCKS, ROW_SCALE, TILE_WIDE)
CLB_LINEAR(int4_f16, CLB_INT4, BLOCKS, F16_SCALES, TILE_WIDE)
CLB_LINEAR(int4_f32, CLB_INT4, BLOCKS, F32_SCALES, TILE_WIDE)
CLB_LINEAR(int4_groups, CLB_INT4, BLOCKS, t->kind, TILE_WIDE)
CLB_LINEAR(int4_lanes, CLB_INT4, LANES, ROW_SCALE, LANE_WIDE)
CLB_LINEAR(linear_int3, CLB_INT3, BLOCKS, t->kind, TILE_WIDE)
CLB_LINEAR(linear_int2, CLB_INT2, BLOCKS, t->kind, TILE_WIDE)

static void linear_int8(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                        float *y, int64_t y_stride) {
    clb_linear_fn *run = clb_whole_blocks(w) ? int8_blocks : int8_lanes;
    if (w->row_scales == 1)
        run = int8_row;
    run(w, x, first, last, y, y_stride);
}

static void linear_int4(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                        float *y, int64_t y_stride) {
    static clb_linear_fn *const by_kind[] = {
        [ROW_SCALE] = int4_row, [F16_SCALES] = int4_f16, [F32_SCALES] = int4_f32,
        [TWIN_SCALES] = int4_groups, [GROUP_SCALES] = int4_groups};
    (clb_whole_blocks(w) ? by_kind[kind_of(w)] : int4_lanes)(w, x, first, last, y, y_stride);
}

#define CLB_LINEAR_ENTRIES                                                                         \
    .linear = {linear_f32, linear_bf16, linear_f16, linear_int8, linear_int4, linear_int3,         \
               linear_int2}

#endif
