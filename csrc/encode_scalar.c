/* The encoder's loops in plain C, for any processor. */
#include <stddef.h>
#include "encode_lanes.h"
#include "encode_rows.h"

clb_encode_fn *clb_encode_scalar(void) {
    return encode_rows;
}

int64_t clb_encode_scratch(const clb_encoding *e) {
    return place_scratch(e, NULL, NULL);
}
