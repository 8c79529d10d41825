/* A small pool. Work is cut into chunks of outputs (rows, heads, columns); a sum is never split. */
#ifndef CLB_THREADS_H
#define CLB_THREADS_H
#include <stdint.h>

typedef struct clb_pool clb_pool;
typedef void clb_task(void *arg, int64_t begin, int64_t end, int32_t thread);

clb_pool *clb_pool_new(int32_t threads); /* NULL when memory or threads run out */
void clb_pool_free(clb_pool *pool);
int32_t clb_pool_threads(const clb_pool *pool);
/* Runs task over [0, n) in chunks of at least `grain`; returns when all are done. */
void clb_parallel(clb_pool *pool, int64_t n, int64_t grain, clb_task *task, void *arg);

#endif
