/* Rotary angles: one code for every instruction set, so that no libm version moves a token. */
#include <math.h>
#include <string.h>
#include "kernels.h"

/* Taylor series on |r| <= pi/4: what is left out is below 1e-13, the result is a float. */
static double sine(double r) {
    const double s = r * r;
    double p = fma(s, 1.0 / 6227020800.0, -1.0 / 39916800.0);
    p = fma(p, s, 1.0 / 362880.0);
    p = fma(p, s, -1.0 / 5040.0);
    p = fma(p, s, 1.0 / 120.0);
    p = fma(p, s, -1.0 / 6.0);
    return fma(p * s, r, r);
}

static double cosine(double r) {
    const double s = r * r;
    double p = fma(s, -1.0 / 87178291200.0, 1.0 / 479001600.0);
    p = fma(p, s, -1.0 / 3628800.0);
    p = fma(p, s, 1.0 / 40320.0);
    p = fma(p, s, -1.0 / 720.0);
    p = fma(p, s, 1.0 / 24.0);
    p = fma(p, s, -0.5);
    return fma(p, s, 1.0);
}

/* angle = k pi/2 + r: pi/2 in two doubles and exact products (fma) keep r good to 1e-16 while
   |angle| < 2^31, far beyond any context. */
static void rotation(float angle, float *out) {
    const double magic = 0x1.8p52; /* adding it rounds to an integer, half to even */
    double shifted = fma((double)angle, 0x1.45f306dc9c883p-1, magic), k = shifted - magic;
    double r = fma(k, -0x1.921fb54442d18p+0, (double)angle);
    r = fma(k, -0x1.1a62633145c07p-54, r);
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits); /* the low bits of the sum are k modulo 4 */
    double s = sine(r), c = cosine(r);
    double cosines[4] = {c, -s, -c, s}, sines[4] = {s, c, -s, -c};
    out[0] = (float)cosines[bits & 3];
    out[1] = (float)sines[bits & 3];
}

void clb_rope_angles(int64_t position, const float *inv_freq, int64_t half, float *out) {
    for (int64_t j = 0; j < half; j++)
        rotation((float)position * inv_freq[j], out + 2 * j);
}
