#include "threads.h"
#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

/* Spins this often before sleeping: 20 to 100 microseconds, about the gap between two matrices. */
enum { SPINS = 4000, MAX_CHUNKS = (1 << 20) - 1 };

typedef struct worker {
    clb_pool *pool;
    pthread_t id;
    int32_t index;
} worker;

struct clb_pool {
    int32_t threads; /* the caller included */
    worker *workers; /* [threads - 1] */
    /* generation (24 bits), chunks (20), next chunk (20): one word, so that a late worker can
       never take a chunk of a job it did not see begin */
    _Atomic uint64_t ticket;
    _Atomic int64_t pending; /* chunks not yet finished */
    clb_task *task;
    void *arg;
    int64_t n, chunk;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    _Atomic int32_t sleepers;
    _Atomic bool caller_sleeps, stop;
};

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t ticket_of(uint64_t generation, uint64_t chunks, uint64_t next) {
    return generation << 40 | chunks << 20 | next;
}

static void finish_chunk(clb_pool *pool) {
    if (atomic_fetch_sub(&pool->pending, 1) == 1 && atomic_load(&pool->caller_sleeps)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->lock);
    }
}

static void work(clb_pool *pool, uint64_t generation, int32_t thread) {
    uint64_t ticket = atomic_load(&pool->ticket);
    while (ticket >> 40 == generation) {
        uint64_t next = ticket & MAX_CHUNKS;
        if (next >= (ticket >> 20 & MAX_CHUNKS)) return;
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1)) continue;
        int64_t begin = (int64_t)next * pool->chunk, end = begin + pool->chunk;
        pool->task(pool->arg, begin, end < pool->n ? end : pool->n, thread);
        finish_chunk(pool);
        ticket = atomic_load(&pool->ticket);
    }
}

static bool has_news(clb_pool *pool, uint64_t seen) {
    return atomic_load(&pool->ticket) >> 40 != seen || atomic_load(&pool->stop);
}

static void wait_for_news(clb_pool *pool, uint64_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (has_news(pool, seen)) return;
        pause_cpu();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!has_news(pool, seen)) pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *arg) {
    worker *self = arg;
    fesetenv(FE_DFL_ENV); /* the thread that made this one may round otherwise */
    uint64_t seen = 0;
    for (;;) {
        wait_for_news(self->pool, seen);
        if (atomic_load(&self->pool->stop)) return NULL;
        seen = atomic_load(&self->pool->ticket) >> 40;
        work(self->pool, seen, self->index);
    }
}

static void wait_until_done(clb_pool *pool) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&pool->pending) == 0) return;
        pause_cpu();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_sleeps, true);
    while (atomic_load(&pool->pending) > 0) pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->lock);
}

void clb_parallel(clb_pool *pool, int64_t n, int64_t grain, clb_task *task, void *arg) {
    if (n <= 0) return;
    int64_t chunk = grain > 0 ? grain : 1;
    if (pool->threads == 1 || n <= chunk) {
        task(arg, 0, n, 0);
        return;
    }
    /* about four chunks a thread: enough to even out a disturbed core */
    int64_t even = (n + 4 * pool->threads - 1) / (4 * pool->threads);
    if (even > chunk) chunk = even;
    pool->task = task;
    pool->arg = arg;
    pool->n = n;
    pool->chunk = chunk;
    uint64_t chunks = (uint64_t)((n + chunk - 1) / chunk);
    uint64_t generation = ((atomic_load(&pool->ticket) >> 40) + 1) & 0xffffff;
    atomic_store(&pool->pending, (int64_t)chunks);
    atomic_store(&pool->ticket, ticket_of(generation, chunks, 0));
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    work(pool, generation, 0);
    wait_until_done(pool);
}

clb_pool *clb_pool_new(int32_t threads) {
    clb_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = 1;
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    if (!pool->workers) {
        clb_pool_free(pool);
        return NULL;
    }
    for (int32_t i = 0; i + 1 < threads; i++) {
        worker *w = &pool->workers[i];
        w->pool = pool;
        w->index = i + 1;
        if (pthread_create(&w->id, NULL, worker_main, w)) {
            clb_pool_free(pool);
            return NULL;
        }
        pool->threads++;
    }
    return pool;
}

void clb_pool_free(clb_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i + 1 < pool->threads; i++) pthread_join(pool->workers[i].id, NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int32_t clb_pool_threads(const clb_pool *pool) { return pool->threads; }
