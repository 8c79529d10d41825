/* y = W x in tiles of a few outputs times a few rows, written once over the lanes of an instruction
   set. A kernels_*.c includes this after its lanes and packed blocks; the shape of a tile moves
   work between registers, never the order in which one output adds up. */
#ifndef CLB_TILES_H
#define CLB_TILES_H
#include "numerics.h"

#define CLB_INLINE static inline __attribute__((always_inline))
#define CLB_APART static __attribute__((noinline)) /* once a run: not worth a copy in each tile */
#define CLB_UNROLL _Pragma("GCC unroll 16")

#ifndef CLB_READ_AGAIN /* what keeps a compiler from holding a cell in registers too long */
#define CLB_READ_AGAIN ((void)0)
#endif

enum {
    SIDE = 4,   /* outputs and rows that share a pass over the weights */
    STRIP = 16, /* outputs that many rows pass over together: they stay in the first-level cache */
    SHORT = 8,  /* blocks of a row whose one scale is not worth spreading */
    FEW = 4,    /* and of a row with a scale a block */
    CHUNK = 32, /* blocks whose scales are made ready at once */
    CHUNK_GROUPS = CHUNK * CLB_LANES + CLB_LANES, /* groups of 4 inputs, and one load past them */
    PANEL_BYTES = 192 << 10, /* quantised activations that stay in the second-level cache */
};

typedef struct tile { /* outputs o, o + apart, o + 2 apart..; rows from r on */
    const clb_matrix *w;
    const clb_acts *x;
    int64_t o, apart, r;
    float *y;
    int64_t y_stride;
} tile;

/* ---- scales -------------------------------------------------------------------------------- */

typedef struct run { /* up to CHUNK blocks: where their bytes begin, and their scales */
    const uint8_t *bytes[SIDE];  /* [output] */
    const clb_cell *cells[SIDE]; /* [row] */
    const float *scale[SIDE];
    float group[SIDE][CHUNK_GROUPS]; /* [output]: scales of the groups the run meets */
    int32_t base[CHUNK];             /* spread scales: the block's first group in group[] */
    int32_t lane[CHUNK][CLB_LANES];  /* and the lane's group, counted from base */
    uint8_t tail[SIDE][CLB_BLOCK];   /* [output]: a last block with bytes missing, then zeros */
} run;

/* Scales [first, first + n) of a row; past the row's end, its last one. */
CLB_APART void load_scales(const clb_matrix *w, int64_t row, int64_t first, int64_t n, float *out) {
    int64_t have = w->row_scales - first < n ? w->row_scales - first : n, i = 0;
    int64_t at = row * w->row_scales + first;
    if (w->scale_format == CLB_F16) {
        for (; i + CLB_LANES <= have; i += CLB_LANES)
            lanes_store(out + i, lanes_load_f16(w->scales + 2 * (at + i)));
        for (; i < have; i++)
            out[i] = clb_f16_float(clb_load_u16(w->scales + 2 * (at + i)));
    } else {
        memcpy(out, w->scales + 4 * at, (size_t)have * sizeof *out);
        i = have;
    }
    for (; i < n; i++)
        out[i] = out[have - 1];
}

/* Groups that end inside a block: which one each lane of each block belongs to. */
static void spread_scales(const tile *t, int64_t b, int64_t n, int outputs, run *at) {
    int64_t group = t->w->group, first = b * CLB_BLOCK / group, phase = b * CLB_BLOCK % group;
    int64_t groups = ((b + n) * CLB_BLOCK - 1) / group - first + 1;
    int32_t base = 0, size = (int32_t)(group < CLB_BLOCK ? group : CLB_BLOCK);
    int32_t reciprocal = (65535 + size) / size; /* exact for the quotients of 0..63 */
    int32_t input[CLB_LANES];
    for (int l = 0; l < CLB_LANES; l++)
        input[l] = (int32_t)clb_lane_input(t->w->format, l);
    for (int64_t k = 0; k < n; k++) {
        int32_t border = (int32_t)(group - phase < CLB_BLOCK ? group - phase : CLB_BLOCK);
        for (int l = 0; l < CLB_LANES; l++) {
            int32_t past = input[l] - border, whole = past * reciprocal >> 16;
            at->lane[k][l] = past < 0 ? 0 : 1 + whole;
        }
        at->base[k] = base;
        for (phase += CLB_BLOCK; phase >= group; phase -= group)
            base++;
    }
    for (int i = 0; i < outputs; i++)
        load_scales(t->w, t->o + i * t->apart, first, groups + CLB_LANES, at->group[i]);
}

/* Makes the run at block b ready and returns its length. */
CLB_APART int64_t begin_run(const tile *t, int64_t b, int outputs, int rows, run *at) {
    const int64_t size = clb_block_bytes(t->w->format), row_bytes = t->w->row_bytes;
    const int64_t whole = row_bytes / size; /* blocks whose every byte is there */
    int64_t end = b < whole ? whole : t->x->blocks, n = end - b < CHUNK ? end - b : CHUNK;
    for (int i = 0; i < outputs; i++) {
        at->bytes[i] = t->w->data + (t->o + i * t->apart) * row_bytes + b * size;
        if (b == whole) {
            memset(at->tail[i], 0, CLB_BLOCK);
            memcpy(at->tail[i], at->bytes[i], (size_t)(row_bytes - b * size));
            at->bytes[i] = at->tail[i];
        }
    }
    for (int j = 0; j < rows; j++) {
        int64_t block = (t->r + j) * t->x->blocks + b;
        at->cells[j] = t->x->cells + block;
        at->scale[j] = t->x->scale + block;
    }
    spread_scales(t, b, n, outputs, at);
    return n;
}

/* ---- quantised weights --------------------------------------------------------------------- */

CLB_INLINE void store_tile(const tile *t, const lanes *acc, int outputs, int rows) {
    float *y = t->y + t->r * t->y_stride + t->o, sum[SIDE * SIDE];
    int n = 0;
    CLB_UNROLL
    for (; n + 4 <= outputs * rows; n += 4)
        lanes_fold_four(acc + n, sum + n);
    CLB_UNROLL
    for (; n < outputs * rows; n++)
        sum[n] = lanes_fold(acc[n]);
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        CLB_UNROLL
        for (int j = 0; j < rows; j++)
            y[j * t->y_stride + i * t->apart] = sum[i * rows + j];
    }
}

CLB_INLINE packed load_block(int32_t format, const uint8_t *p) {
    if (format == CLB_INT4)
        return packed_int4(p);
    if (format == CLB_INT8)
        return packed_int8(p);
    int8_t values[CLB_BLOCK];
    if (format == CLB_INT3)
        clb_unpack_int3(p, values);
    else
        clb_unpack_int2(p, values);
    return packed_int8((const uint8_t *)values);
}

/* Block k of a run: outputs x rows times sixteen exact integers, scaled into acc. */
CLB_INLINE void spread_step(const run *at, int64_t k, int32_t format, int outputs, int rows,
                            lanes *acc) {
    packed w[SIDE];
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        w[i] = load_block(format, at->bytes[i] + k * clb_block_bytes(format));
    }
    CLB_UNROLL
    for (int j = 0; j < rows; j++) {
        CLB_UNROLL
        for (int i = 0; i < outputs; i++) {
            lanes d = packed_dot(w[i], at->cells[j] + k, format == CLB_INT4);
            lanes scale = lanes_mul(lanes_pick(at->group[i] + at->base[k], at->lane[k]),
                                    lanes_splat(at->scale[j] + k));
            acc[i * rows + j] = lanes_fma(d, scale, acc[i * rows + j]);
        }
    }
}

CLB_INLINE void spread_tile(const tile *t, int32_t format, int outputs, int rows) {
    lanes acc[SIDE * SIDE];
    run at;
    CLB_UNROLL
    for (int n = 0; n < outputs * rows; n++)
        acc[n] = lanes_zero();
    for (int64_t b = 0, n; b < t->x->blocks; b += n) {
        n = begin_run(t, b, outputs, rows, &at);
        for (int64_t k = 0; k < n; k++)
            spread_step(&at, k, format, outputs, rows, acc);
    }
    store_tile(t, acc, outputs, rows);
}

/* ---- quantised weights, one scale a block -------------------------------------------------- */

/* out[k] = of * x[k]: a weight scale that covers several blocks. Whole lanes are read and written:
   past n come other blocks' scales or the activations' padding, overwritten or never used. */
CLB_INLINE void same_scale(float of, const float *x, int64_t n, float *out) {
    for (int64_t k = 0; k < n; k += CLB_LANES)
        lanes_store(out + k, lanes_mul(lanes_splat(&of), lanes_load(x + k)));
}

/* scale[j][k]: output t->o + i's weight scale times row t->r + j's activation scale, blocks
   [b, b + n). Where each block has its own, sixteen are read while the matrix has so many. */
CLB_INLINE void block_scales(const tile *t, int i, int64_t b, int64_t n, int rows,
                             float scale[SIDE][CHUNK + CLB_LANES]) {
    const clb_matrix *w = t->w;
    const float *x = t->x->scale + t->r * t->x->blocks + b;
    const int half = w->scale_format == CLB_F16;
    const int64_t size = half ? 2 : 4, per = w->group / CLB_BLOCK; /* blocks a scale; 0: all */
    const int64_t at = (t->o + i * t->apart) * w->row_scales + (per ? b / per : 0);
    const int64_t left_in_matrix = w->rows * w->row_scales - at;
    const uint8_t *p = w->scales + at * size;
    int64_t k = 0, left = per ? per - b % per : n;
    for (; per == 1 && k < n && k + CLB_LANES <= left_in_matrix; k += CLB_LANES) {
        lanes of = half ? lanes_load_f16(p + 2 * k) : lanes_load_f32(p + 4 * k);
        CLB_UNROLL
        for (int j = 0; j < rows; j++)
            lanes_store(scale[j] + k, lanes_mul(of, lanes_load(x + j * t->x->blocks + k)));
    }
    p += k * size; /* not 0 only when a block is a scale */
    for (int64_t count; k < n; k += count, left = per, p += size) {
        float of = stored_scale(p, w->scale_format);
        count = left < n - k ? left : n - k;
        CLB_UNROLL
        for (int j = 0; j < rows; j++)
            same_scale(of, x + j * t->x->blocks + k, count, scale[j] + k);
    }
}

typedef struct scales { /* of outputs x rows: both factors multiplied, or a weight's alone */
    float (*both)[SIDE][CHUNK + CLB_LANES]; /* [output][row][block], or NULL and.. */
    float (*of)[FEW];                       /* [output][block, or 0 for all] */
} scales;

CLB_INLINE lanes scale_at(const scales *s, int each, int i, int j, int64_t k, const float *x) {
    if (s->both)
        return lanes_splat(&s->both[i][j][k]);
    return lanes_mul(lanes_splat(&s->of[i][each ? k : 0]), lanes_splat(x));
}

/* Blocks [b, b + n) of outputs x rows; `bytes` is block b of output 0, output 1 is `next` away. */
CLB_INLINE void block_steps(const tile *t, const uint8_t *bytes, int64_t next, int64_t b, int64_t n,
                            int32_t format, int outputs, int rows, const scales *scale, int each,
                            lanes *acc) {
    const int64_t blocks = t->x->blocks;
    const clb_cell *cells = t->x->cells + t->r * blocks + b;
    const float *x = t->x->scale + t->r * blocks + b;
    for (int64_t k = 0; k < n; k++) {
        CLB_UNROLL
        for (int i = 0; i < outputs; i++) {
            packed w = load_block(format, bytes + i * next + k * clb_block_bytes(format));
            if (format == CLB_INT4 && rows == 1)
                CLB_READ_AGAIN;
            CLB_UNROLL
            for (int j = 0; j < rows; j++) {
                lanes d = packed_dot(w, cells + j * blocks + k, format == CLB_INT4);
                acc[i * rows + j] = lanes_fma(d, scale_at(scale, each, i, j, k, x + j * blocks + k),
                                              acc[i * rows + j]);
            }
        }
    }
}

/* The last block of each output, when bytes of it are missing: from a copy with zeros. */
CLB_INLINE void cut_block(const tile *t, int32_t format, int outputs, int rows,
                          const scales *scale, lanes *acc) {
    const int64_t row_bytes = t->w->row_bytes, whole = row_bytes / clb_block_bytes(format);
    uint8_t tail[SIDE][CLB_BLOCK] = {{0}};
    for (int i = 0; i < outputs; i++)
        memcpy(tail[i],
               t->w->data + (t->o + i * t->apart) * row_bytes + whole * clb_block_bytes(format),
               (size_t)(row_bytes - whole * clb_block_bytes(format)));
    block_steps(t, tail[0], CLB_BLOCK, whole, 1, format, outputs, rows, scale, 0, acc);
}

CLB_INLINE void block_tile(const tile *t, int32_t format, int outputs, int rows) {
    const int64_t row_bytes = t->w->row_bytes, size = clb_block_bytes(format);
    const int64_t whole = row_bytes / size, blocks = t->x->blocks;
    const uint8_t *bytes = t->w->data + t->o * row_bytes;
    float both[SIDE][SIDE][CHUNK + CLB_LANES];
    const scales scale = {both, NULL};
    lanes acc[SIDE * SIDE];
    CLB_UNROLL
    for (int n = 0; n < outputs * rows; n++)
        acc[n] = lanes_zero();
    for (int64_t b = 0, n; b < blocks; b += n) {
        n = b < whole ? (whole - b < CHUNK ? whole - b : CHUNK) : 1;
        for (int i = 0; i < outputs; i++)
            block_scales(t, i, b, n, rows, both[i]);
        if (b < whole)
            block_steps(t, bytes + b * size, t->apart * row_bytes, b, n, format, outputs, rows,
                        &scale, 1, acc);
        else
            cut_block(t, format, outputs, rows, &scale, acc);
    }
    store_tile(t, acc, outputs, rows);
}

/* The same for rows of few blocks, where making scales ready would take as long as the products:
   each block has its own (`each`), or the row has one. */
CLB_INLINE void short_tile(const tile *t, int32_t format, int each, int outputs, int rows) {
    const clb_matrix *w = t->w;
    const int64_t whole = w->row_bytes / clb_block_bytes(format), count = each ? w->row_scales : 1;
    const int64_t size = w->scale_format == CLB_F16 ? 2 : 4;
    float of[SIDE][FEW];
    scales scale = {NULL, of};
    lanes acc[SIDE * SIDE];
    CLB_UNROLL
    for (int n = 0; n < outputs * rows; n++)
        acc[n] = lanes_zero();
    CLB_UNROLL
    for (int i = 0; i < outputs; i++) {
        const uint8_t *p = w->scales + (t->o + i * t->apart) * w->row_scales * size;
        for (int64_t k = 0; k < count; k++)
            of[i][k] = stored_scale(p + k * size, w->scale_format);
    }
    block_steps(t, w->data + t->o * w->row_bytes, t->apart * w->row_bytes, 0, whole, format,
                outputs, rows, &scale, each, acc);
    if (whole < t->x->blocks) {
        for (int i = 0; each && i < outputs; i++)
            of[i][0] = of[i][whole];
        cut_block(t, format, outputs, rows, &scale, acc);
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

CLB_INLINE void any_tile(const tile *t, int32_t format, int spread, int outputs, int rows) {
    if (format <= CLB_F16)
        float_tile(t, format, outputs, rows);
    else if (spread)
        spread_tile(t, format, outputs, rows);
    else if (format < CLB_INT3 && t->w->row_scales == 1 && t->x->blocks <= SHORT)
        short_tile(t, format, 0, outputs, rows);
    else if (format < CLB_INT3 && t->w->group == CLB_BLOCK && t->x->blocks <= FEW)
        short_tile(t, format, 1, outputs, rows);
    else
        block_tile(t, format, outputs, rows);
}

/* `count` outputs from t.o on, in tiles of `wide` and then of one. Outputs of a tile are as far
   apart as can be: streams from distant pages are fetched ahead side by side, 15 GB/s with four
   of them against 11 with one and 7 with four inside a page (Zen 3). */
CLB_INLINE void tile_row(tile t, int64_t count, int32_t format, int spread, int wide, int rows) {
    int64_t end = t.o + count;
    t.apart = count / wide;
    for (int64_t k = 0; k < t.apart; k++, t.o++)
        any_tile(&t, format, spread, wide, rows);
    t.o += (wide - 1) * t.apart;
    for (t.apart = 1; t.o < end; t.o++)
        any_tile(&t, format, spread, 1, rows);
}

/* A few rows pass over all outputs at once; more of them take a strip of outputs after the other,
   in panels of rows that stay in the second-level cache. `wide`: outputs of a tile at 1,
   2, 3 and 4 rows. */
CLB_INLINE void linear_tiles(tile t, int64_t first, int64_t last, int32_t format, int spread,
                             const int *wide) {
    const int64_t rows = t.x->rows, row_size = t.x->blocks * (int64_t)sizeof(clb_cell);
    const int64_t fits = PANEL_BYTES / row_size / SIDE * SIDE, panel = fits > SIDE ? fits : SIDE;
    const int64_t step = rows < SIDE ? last - first : STRIP;
    for (int64_t r = 0; r < rows; r += panel) {
        int64_t end = r + panel < rows ? r + panel : rows;
        for (t.o = first; t.o < last; t.o += step) {
            int64_t count = last - t.o < step ? last - t.o : step;
            for (t.r = r; t.r < end; t.r += SIDE) {
                switch (end - t.r) {
                case 1: tile_row(t, count, format, spread, wide[0], 1); break;
                case 2: tile_row(t, count, format, spread, wide[1], 2); break;
                case 3: tile_row(t, count, format, spread, wide[2], 3); break;
                default: tile_row(t, count, format, spread, wide[3], 4);
                }
            }
        }
    }
}

#define SPREAD_WIDE 4, 2, 1, 1 /* outputs share the work of spreading scales over lanes */

#define CLB_LINEAR(name, format, spread, ...)                                                      \
    static void name(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,          \
                     float *y, int64_t y_stride) {                                                 \
        static const int wide[4] = {__VA_ARGS__};                                                  \
        linear_tiles((tile){w, x, 0, 1, 0, y, y_stride}, first, last, format, spread, wide);       \
    }

CLB_LINEAR(linear_f32, CLB_F32, 0, TILE_WIDE)
CLB_LINEAR(linear_bf16, CLB_BF16, 0, TILE_WIDE)
CLB_LINEAR(linear_f16, CLB_F16, 0, 1, 1, 1, 1)
CLB_LINEAR(int8_block, CLB_INT8, 0, TILE_WIDE)
CLB_LINEAR(int8_spread, CLB_INT8, 1, SPREAD_WIDE)
CLB_LINEAR(int4_block, CLB_INT4, 0, TILE_WIDE)
CLB_LINEAR(int4_spread, CLB_INT4, 1, SPREAD_WIDE)
CLB_LINEAR(linear_int3, CLB_INT3, 0, 1, 1, 1, 1)
CLB_LINEAR(linear_int2, CLB_INT2, 0, 1, 1, 1, 1)

/* A group of whole blocks (or a whole row) has one scale a block; others have one a lane. */
static void linear_int8(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                        float *y, int64_t y_stride) {
    (w->group % CLB_BLOCK ? int8_spread : int8_block)(w, x, first, last, y, y_stride);
}

static void linear_int4(const clb_matrix *w, const clb_acts *x, int64_t first, int64_t last,
                        float *y, int64_t y_stride) {
    (w->group % CLB_BLOCK ? int4_spread : int4_block)(w, x, first, last, y, y_stride);
}

#define CLB_LINEAR_ENTRIES                                                                         \
    .linear = {linear_f32, linear_bf16, linear_f16, linear_int8, linear_int4, linear_int3,         \
               linear_int2}

#endif
