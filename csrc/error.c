/* Errors: a code and a sentence, never an exit. */
#include <stdarg.h>
#include <stdio.h>
#include "core.h"

int32_t clb_fail(clb_error *error, int32_t code, const char *format, ...) {
    if (error) {
        va_list args;
        error->code = code;
        va_start(args, format);
        vsnprintf(error->text, sizeof error->text, format, args);
        va_end(args);
    }
    return code;
}

bool clb_mul(int64_t a, int64_t b, int64_t *product) {
    return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, product);
}
