/* CRC-32 as zlib has it, by carry-less multiplication where the processor can, else by tables. */
#include <stdbool.h>
#include <string.h>
#include "colibri.h"

#define POLYNOMIAL 0xedb88320u
enum { STEP = 16 };

/* ---- tables: sixteen bytes a step ------------------------------------------------------------ */

static uint32_t one_byte(uint32_t rest) {
    for (int bit = 0; bit < 8; bit++)
        rest = rest >> 1 ^ (rest & 1 ? POLYNOMIAL : 0);
    return rest;
}

/* table[k][b]: the remainder of byte b followed by k zero bytes. */
static void fill_table(uint32_t table[STEP][256]) {
    for (uint32_t b = 0; b < 256; b++)
        table[0][b] = one_byte(b);
    for (int k = 1; k < STEP; k++)
        for (uint32_t b = 0; b < 256; b++)
            table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 255];
}

static uint32_t by_tables(const uint8_t *data, int64_t n, uint32_t rest) {
    uint32_t table[STEP][256];
    if (n >= 4 * STEP) fill_table(table);
    for (; n >= 4 * STEP; n -= STEP, data += STEP) {
        uint32_t word[STEP / 4], next = 0;
        memcpy(word, data, sizeof word);
        word[0] ^= rest;
        for (int i = 0; i < STEP; i++)
            next ^= table[STEP - 1 - i][word[i / 4] >> 8 * (i % 4) & 255];
        rest = next;
    }
    for (; n > 0; n--)
        rest = rest >> 8 ^ one_byte((rest ^ *data++) & 255);
    return rest;
}

/* ---- carry-less multiplication: sixty-four bytes a step ------------------------------------ */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define CLMUL __attribute__((target("pclmul,sse4.1")))

static bool has_clmul(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

static CLMUL __m128i load(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)p);
}

/* a x^d + b modulo the polynomial, d the distance the pair of constants stands for. */
static CLMUL __m128i fold(__m128i a, __m128i by, __m128i b) {
    __m128i low = _mm_clmulepi64_si128(a, by, 0x00), high = _mm_clmulepi64_si128(a, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), b);
}

/* x^(d + 32) and x^(d - 32) modulo the polynomial, bits reversed, for d = 512 and d = 128. What is
   left in the end is sixteen bytes with the same remainder. */
static CLMUL uint32_t by_clmul(const uint8_t *data, int64_t n, uint32_t rest) {
    const __m128i far = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i near = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i a[4];
    uint8_t left[STEP];
    for (int k = 0; k < 4; k++)
        a[k] = load(data + STEP * k);
    a[0] = _mm_xor_si128(a[0], _mm_cvtsi32_si128((int)rest));
    for (data += 4 * STEP, n -= 4 * STEP; n >= 4 * STEP; data += 4 * STEP, n -= 4 * STEP)
        for (int k = 0; k < 4; k++)
            a[k] = fold(a[k], far, load(data + STEP * k));
    for (int k = 1; k < 4; k++)
        a[0] = fold(a[0], near, a[k]);
    for (; n >= STEP; data += STEP, n -= STEP)
        a[0] = fold(a[0], near, load(data));
    _mm_storeu_si128((__m128i *)left, a[0]);
    return by_tables(data, n, by_tables(left, STEP, 0));
}

#else

static bool has_clmul(void) {
    return false;
}

static uint32_t by_clmul(const uint8_t *data, int64_t n, uint32_t rest) {
    return by_tables(data, n, rest);
}

#endif

uint32_t clb_crc32(const uint8_t *data, int64_t n, uint32_t crc, int32_t plain) {
    if (plain || n < 4 * STEP || !has_clmul()) return ~by_tables(data, n, ~crc);
    return ~by_clmul(data, n, ~crc);
}
