/* Which tables this processor can run, and which is the best of them. */
#include <string.h>
#include "kernels.h"

const clb_kernels *clb_kernels_find(const char *isa) {
    const clb_kernels *tables[] = {/* best first */
                                   clb_kernels_avx512(), clb_kernels_avx_vnni(),
                                   clb_kernels_avx2(),
                                   clb_kernels_neon_dot(), clb_kernels_neon(),
                                   clb_kernels_scalar()};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (tables[i] && (!isa || !strcmp(isa, tables[i]->isa)))
            return tables[i];
    return NULL;
}

int32_t clb_isa_available(const char *isa) {
    return isa && clb_kernels_find(isa) != NULL;
}
