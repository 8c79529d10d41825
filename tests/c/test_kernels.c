/* Every table against the scalar one, by bytes, on random ragged shapes. Buffers have exactly the
   size that is allowed to be read, at odd addresses, so that the sanitizers see every other access.

   cc -std=c11 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -ffp-contract=off
      -Wall -Wextra -Werror -Icsrc -o build/test_kernels tests/c/test_kernels.c
      csrc/kernels*.c csrc/angles.c -lm && build/test_kernels

   The first argument is the number of rounds (default 400), the second the seed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "numerics.h"

static uint64_t state = 1;
static int failures;

/* ---- random numbers ------------------------------------------------------------------------ */

static uint64_t draw(void) { /* xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(2685821657736338717);
}

static int64_t below(int64_t n) {
    return (int64_t)((draw() >> 11) % (uint64_t)n);
}

static float uniform(void) { /* -1..1 */
    return (float)((double)(draw() >> 11) * 0x1p-52 - 1.0);
}

static float any_finite(void) {
    float x;
    do
        x = clb_bits_float((uint32_t)(draw() >> 32));
    while (!isfinite(x));
    return x;
}

/* Kinds of vectors: plain, a wide range, any finite float, subnormal, zero, zero blocks. */
static void fill_floats(float *x, int64_t n, int kind) {
    for (int64_t i = 0; i < n; i++) {
        switch (kind) {
        case 0: x[i] = uniform(); break;
        case 1: x[i] = ldexpf(uniform(), (int)below(60) - 30); break;
        case 2: x[i] = any_finite(); break;
        case 3: x[i] = uniform() * 0x1p-126f; break;
        case 4: x[i] = below(2) ? 0.0f : -0.0f; break;
        default: x[i] = i / 64 % 2 ? 0.0f : uniform() * 8; break;
        }
    }
}

static void *exact(int64_t n) { /* n bytes, and an error for the sanitizer one byte further */
    void *p = malloc((size_t)n);
    if (!p) {
        fprintf(stderr, "no memory for %lld bytes\n", (long long)n);
        exit(2);
    }
    return p;
}

static float *exact_floats(int64_t n) {
    return exact(n * 4);
}

/* A NaN's sign and payload are not promised; everything else is. */
static int same_bits(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (clb_float_bits(a[i]) != clb_float_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])))
            return 0;
    return 1;
}

static void expect(int ok, const char *isa, const char *what, int64_t a, int64_t b, int64_t c) {
    if (ok)
        return;
    failures++;
    printf("FAILED %s: %s (%lld, %lld, %lld)\n", isa, what, (long long)a, (long long)b,
           (long long)c);
}

/* ---- matrices ------------------------------------------------------------------------------ */

static int64_t row_bytes_of(int format, int64_t cols) {
    const int64_t bytes[CLB_FORMATS] = {4 * cols, 2 * cols, 2 * cols, cols, (cols + 1) / 2,
                                        (cols + 63) / 64 * 24, (cols + 3) / 4};
    return bytes[format];
}

static int64_t random_group(int format) {
    const int64_t groups[] = {0,   8,   16,  32, 48, 64, 96, 128, 192,
                              256, 512, 4, 12, 20, 72, 100, 320, 1024};
    switch (format) {
    case CLB_INT3: return 64;
    case CLB_INT8: return groups[below(18)];
    case CLB_INT4: return groups[below(11)];
    default: return 0;
    }
}

static void fill_weights(clb_matrix *w, uint8_t *data) {
    int64_t n = w->rows * w->row_bytes;
    for (int64_t i = 0; i < n; i++)
        data[i] = (uint8_t)draw();
    for (int64_t i = 1; i < n && w->format == CLB_BF16; i += 2)
        data[i] = (uint8_t)(below(2) << 7 | (0x38 + below(14)));
    for (int64_t i = 1; i < n && w->format == CLB_F16; i += 2)
        data[i] &= 0xbb; /* no infinities; subnormals stay */
    for (int64_t i = 0; i < n && w->format == CLB_F32; i += 4) {
        float x = below(16) ? ldexpf(uniform(), (int)below(20) - 10) : any_finite();
        memcpy(data + i, &x, 4);
    }
}

static void fill_scales(const clb_matrix *w, uint8_t *scales) {
    for (int64_t i = 0; i < w->rows * w->row_scales; i++) {
        if (w->scale_format == CLB_F16) {
            uint16_t half = (uint16_t)(draw() & 0xbbff);
            memcpy(scales + 2 * i, &half, 2);
        } else {
            float x = below(8) ? uniform() : below(2) ? any_finite() : uniform() * 0x1p-130f;
            memcpy(scales + 4 * i, &x, 4);
        }
    }
}

typedef struct trial { /* one linear; data and scales end with their blocks, at any alignment */
    clb_matrix w;
    clb_acts x;
    uint8_t *data, *scales;
} trial;

/* Room for x's rows as integers, and what the table makes of them. */
static void quantise(const clb_kernels *t, clb_acts *x, int32_t format) {
    x->q = exact(x->rows * x->blocks * CLB_BLOCK);
    x->scale = exact_floats(x->rows * x->padded);
    x->nibble_offset = exact_floats(x->rows * x->padded);
    for (int64_t r = 0; r < x->rows; r++)
        t->quantize(x, r, format);
}

static void free_quantised(clb_acts *x) {
    free(x->q);
    free(x->scale);
    free(x->nibble_offset);
}

static trial random_trial(int format) {
    trial c = {.w = {.format = format, .scale_format = below(2) ? CLB_F16 : CLB_F32}};
    c.w.rows = 1 + below(10);
    c.w.cols = below(4) ? 1 + below(400) : 64 * (1 + below(40));
    c.w.group = random_group(format);
    c.w.row_bytes = row_bytes_of(format, c.w.cols);
    c.w.row_scales = format <= CLB_F16 ? 0 : c.w.group ? (c.w.cols + c.w.group - 1) / c.w.group : 1;
    int64_t skew = below(16), scale_skew = below(16);
    int64_t scale_bytes = c.w.rows * c.w.row_scales * (c.w.scale_format == CLB_F16 ? 2 : 4);
    c.data = exact(skew + c.w.rows * c.w.row_bytes);
    c.scales = exact(scale_skew + scale_bytes);
    fill_weights(&c.w, c.data + skew);
    fill_scales(&c.w, c.scales + scale_skew);
    c.w.data = c.data + skew;
    c.w.scales = c.scales + scale_skew;
    c.x = clb_acts_of(NULL, c.w.cols + below(3), 1 + below(9), c.w.cols);
    float *x = exact_floats((c.x.rows - 1) * c.x.x_stride + c.w.cols);
    for (int64_t r = 0; r < c.x.rows; r++)
        fill_floats(x + r * c.x.x_stride, r + 1 < c.x.rows ? c.x.x_stride : c.w.cols,
                    (int)below(6));
    c.x.x = x;
    if (format > CLB_F16)
        quantise(clb_kernels_scalar(), &c.x, format);
    return c;
}

static void free_trial(trial *c) {
    free(c->data);
    free(c->scales);
    free((void *)c->x.x);
    free_quantised(&c->x);
}

/* All rows at once, rows one by one, and a range of outputs: the bits of the scalar table. */
static void check_linear(const clb_kernels *t, int format) {
    trial c = random_trial(format);
    int64_t stride = c.w.rows + below(3), n = (c.x.rows - 1) * stride + c.w.rows;
    int64_t first = below(c.w.rows), last = first + 1 + below(c.w.rows - first);
    float *want = exact_floats(n), *got = exact_floats(n), *part = exact_floats(n);
    for (int64_t i = 0; i < n; i++)
        want[i] = got[i] = part[i] = -7;
    clb_kernels_scalar()->linear[format](&c.w, &c.x, 0, c.w.rows, want, stride);
    t->linear[format](&c.w, &c.x, 0, c.w.rows, got, stride);
    expect(same_bits(want, got, n), t->isa, "linear", format, c.w.cols, c.w.group);
    t->linear[format](&c.w, &c.x, first, last, part, stride);
    for (int64_t i = 0; i < n; i++)
        if (i % stride < first || i % stride >= last)
            want[i] = -7;
    expect(same_bits(want, part, n), t->isa, "range of outputs", format, first, last);
    for (int64_t r = 0; r < c.x.rows; r++) {
        clb_acts one = c.x;
        one.rows = 1;
        one.x += r * c.x.x_stride;
        if (format > CLB_F16) {
            one.q += r * c.x.blocks * CLB_BLOCK;
            one.scale += r * c.x.padded;
            one.nibble_offset += r * c.x.padded;
        }
        t->linear[format](&c.w, &one, 0, c.w.rows, part, stride);
        expect(same_bits(got + r * stride, part, c.w.rows), t->isa, "one row", format, r,
               c.x.rows);
    }
    float *row = exact_floats(c.w.cols), *same = exact_floats(c.w.cols);
    clb_kernels_scalar()->dequantize(&c.w, c.w.rows - 1, 1, row);
    t->dequantize(&c.w, c.w.rows - 1, 1, same);
    expect(same_bits(row, same, c.w.cols), t->isa, "dequantize", format, c.w.cols, c.w.group);
    free(row);
    free(same);
    free(want);
    free(got);
    free(part);
    free_trial(&c);
}

/* ---- numerics ------------------------------------------------------------------------------ */

static void check_quantize(const clb_kernels *t, const float *x, int64_t n) {
    const int32_t formats[] = {CLB_INT4, CLB_INT8};
    for (int f = 0; f < 2; f++) {
        clb_acts want = clb_acts_of(x, n, 1, n), got = want;
        quantise(clb_kernels_scalar(), &want, formats[f]);
        quantise(t, &got, formats[f]);
        expect(!memcmp(want.q, got.q, (size_t)(want.blocks * CLB_BLOCK)), t->isa, "quantize q", f,
               n, 0);
        expect(same_bits(want.scale, got.scale, want.padded), t->isa, "quantize scale", f, n, 0);
        expect(same_bits(want.nibble_offset, got.nibble_offset, want.padded), t->isa,
               "quantize nibble offsets", f, n, 0);
        free_quantised(&want);
        free_quantised(&got);
    }
}

enum { FUNCTIONS = 14 };
static const char *const function_names[FUNCTIONS] = {
    "dot", "axpy", "scale", "add", "rmsnorm", "layernorm", "softmax", "sigmoid", "swiglu", "rope",
    "index_scores", "dots", "to_f16", "axpys"};

/* out [n + 1]: what function number f makes of a, b, c [n] each. */
static void apply(const clb_kernels *t, int f, const float *a, const float *b, const float *c,
                  int64_t n, float *out) {
    memcpy(out, a, (size_t)n * 4);
    out[n] = 0;
    switch (f) {
    case 0: out[n] = t->dot(a, b, n); break;
    case 1: t->axpy(b[0], c, out, n); break;
    case 2: t->scale(b[0], out, n); break;
    case 3: t->add(b, out, n); break;
    case 4: t->rmsnorm(a, b, 1e-5f, n, out); break;
    case 5: t->layernorm(a, b, c, 1e-6f, n, out); break;
    case 6: t->softmax(out, n); break;
    case 7: t->sigmoid(out, n, out); break; /* in place */
    case 8: t->swiglu(a, b, n, out); break;
    case 9: t->rope(out, b, n / 2); break;
    case 10: t->index_scores(a, b, 5, n / 5, c, n / 5 ? 5 : 0, out); break; /* five of each */
    case 11: {
        const float *x[7];
        for (int i = 0; i < 7; i++)
            x[i] = a + i * (n / 7);
        t->dots(x, n / 7 ? 7 : 0, b, n / 7, out);
        break;
    }
    case 12: t->to_f16(a, n, (uint8_t *)out); break;
    default: { /* both vectors, shifted, as seven of half the length */
        const float *x[7] = {b, c, b + 1, c + 1, b + 2, c + 2, b};
        t->axpys(c, x, n > 7 ? 7 : 0, out, n / 2);
    }
    }
}

static void check_numerics(const clb_kernels *t) {
    int64_t n = below(4) ? 1 + below(300) : 16 * (1 + below(40));
    float *v[3], *want = exact_floats(n + 1), *got = exact_floats(n + 1);
    for (int i = 0; i < 3; i++) {
        v[i] = exact_floats(n);
        fill_floats(v[i], n, (int)below(6));
    }
    for (int f = 0; f < FUNCTIONS; f++) {
        apply(clb_kernels_scalar(), f, v[0], v[1], v[2], n, want);
        apply(t, f, v[0], v[1], v[2], n, got);
        expect(same_bits(want, got, n + 1), t->isa, function_names[f], n, 0, 0);
    }
    check_quantize(t, v[0], n);
    for (int i = 0; i < 3; i++)
        free(v[i]);
    free(want);
    free(got);
}

/* ---- accuracy against the C library ---------------------------------------------------------- */

static void check_exp(int64_t rounds) {
    double worst = 0;
    for (int64_t i = 0; i < rounds; i++) {
        float x = i % 4 ? uniform() * 90 : any_finite(), y = exp_one(x);
        double want = exp((double)x);
        if (want < 0x1p-126)
            expect(y == 0 || y >= 0x1p-126f, "exp", "no subnormal", i, 0, 0);
        else if (want > 0x1.fffffefp127)
            expect(isinf(y), "exp", "overflow", i, 0, 0);
        else
            worst = fmax(worst, fabs(y - want) / ldexp(1, ilogb(want) - 23));
    }
    expect(worst < 1.1, "exp", "more than 1.1 ulp", (int64_t)(worst * 1000), 0, 0);
    expect(exp_one(0.0f) == 1 && exp_one(-INFINITY) == 0 && isinf(exp_one(INFINITY)) &&
           isnan(exp_one(NAN)), "exp", "special values", 0, 0, 0);
    expect(sigmoid_one(-INFINITY) == 0 && sigmoid_one(INFINITY) == 1 && sigmoid_one(0) == 0.5f &&
           sigmoid_one(-200.0f) == 0 && isnan(sigmoid_one(NAN)), "sigmoid", "special", 0, 0, 0);
}

static void check_angles(int64_t rounds) {
    for (int64_t i = 0; i < rounds; i++) {
        float frequency = (float)ldexp(fabs(uniform()), -(int)below(24)), out[2];
        int64_t position = below(INT64_C(1) << (1 + below(21)));
        double angle = (double)((float)position * frequency);
        clb_rope_angles(position, &frequency, 1, out);
        expect(fabs(out[0] - cos(angle)) < 0x1p-24 && fabs(out[1] - sin(angle)) < 0x1p-24, "angles",
               "error above half a unit in the last place of 1", position, 0, 0);
    }
}

int main(int argc, char **argv) {
    int64_t rounds = argc > 1 ? atoll(argv[1]) : 400;
    state = argc > 2 ? (uint64_t)atoll(argv[2]) | 1 : 1;
    const clb_kernels *tables[] = {clb_kernels_scalar(), clb_kernels_avx2(),
                                   clb_kernels_avx_vnni(), clb_kernels_avx512(),
                                   clb_kernels_neon(), clb_kernels_neon_dot()};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (!tables[i])
            continue;
        for (int64_t round = 0; round < rounds; round++) {
            for (int format = 0; format < CLB_FORMATS; format++)
                check_linear(tables[i], format);
            check_numerics(tables[i]);
        }
        printf("%s: %lld rounds\n", tables[i]->isa, (long long)rounds);
    }
    check_exp(rounds * 1000);
    check_angles(rounds * 1000);
    printf("%d failures\n", failures);
    return failures != 0;
}
