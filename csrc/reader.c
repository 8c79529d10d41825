#include "reader.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#ifdef IORING_FEAT_RW_CUR_POS /* came with IORING_OP_READ, in Linux 5.6 */
#define CLB_URING 1
#include <sys/mman.h>
#include <sys/syscall.h>
#endif
#endif

enum {
    IN_FLIGHT = 256, /* entries of the ring; a power of two */
    TRIES = 1 << 20, /* of handing reads to a ring that has no room or memory just now */
    LOOKS = 1 << 20, /* for a read that cannot be waited for, NAP nanoseconds apart */
    NAP = 50000,
    READERS = 8,     /* threads, when there is no ring: enough depth for one or two NVMe drives */
};

typedef struct ring { /* io_uring's shared memory, mapped */
    int fd;
    void *rings, *entries;
    size_t rings_bytes, entries_bytes;
    _Atomic unsigned *sq_tail, *cq_head, *cq_tail;
    unsigned *sq_array, sq_mask, cq_mask;
    void *cqes;
} ring;

typedef struct queue { /* reads by index, first in first out; never more than IN_FLIGHT */
    clb_read *item[IN_FLIGHT];
    uint32_t head, tail;
} queue;

struct clb_reader {
    bool uring;
    bool worker; /* io_uring: hand every read to a kernel worker */
    int32_t in_flight;
    ring ring;
    pthread_t threads[READERS];
    int32_t thread_count;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    queue todo, finished;
    bool stop;
};

/* ---- io_uring ------------------------------------------------------------------------------- */

#ifdef CLB_URING
static bool map_ring(ring *r, const struct io_uring_params *p) {
    size_t sq = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
    if ((p->features & needed) != needed) return false; /* Linux before 5.6: threads read */
    r->rings_bytes = sq > cq ? sq : cq;
    r->entries_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    r->rings = mmap(NULL, r->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
                    IORING_OFF_SQ_RING);
    r->entries = mmap(NULL, r->entries_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      r->fd, IORING_OFF_SQES);
    if (r->rings == MAP_FAILED || r->entries == MAP_FAILED) return false;
    uint8_t *base = r->rings;
    r->sq_tail = (_Atomic unsigned *)(void *)(base + p->sq_off.tail);
    r->cq_head = (_Atomic unsigned *)(void *)(base + p->cq_off.head);
    r->cq_tail = (_Atomic unsigned *)(void *)(base + p->cq_off.tail);
    r->sq_array = (unsigned *)(void *)(base + p->sq_off.array);
    memcpy(&r->sq_mask, base + p->sq_off.ring_mask, sizeof r->sq_mask);
    memcpy(&r->cq_mask, base + p->cq_off.ring_mask, sizeof r->cq_mask);
    r->cqes = base + p->cq_off.cqes;
    return true;
}

static bool ring_open(ring *r) {
    struct io_uring_params p = {0};
    r->rings = r->entries = MAP_FAILED;
    r->fd = (int)syscall(__NR_io_uring_setup, IN_FLIGHT, &p);
    return r->fd >= 0 && map_ring(r, &p);
}

static void ring_close(ring *r) {
    if (r->rings != MAP_FAILED) munmap(r->rings, r->rings_bytes);
    if (r->entries != MAP_FAILED) munmap(r->entries, r->entries_bytes);
    if (r->fd >= 0) close(r->fd);
}

static int ring_enter(ring *r, unsigned submit, unsigned wait) {
    int n;
    do {
        n = (int)syscall(__NR_io_uring_enter, r->fd, submit, wait,
                         wait ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
    } while (n < 0 && errno == EINTR);
    return n;
}

static bool may_pass(int why) { return why == EAGAIN || why == EBUSY || why == ENOMEM; }

/* False: the system refused it, and it is not in flight. */
static bool ring_submit(ring *r, clb_read *read, bool worker) {
    unsigned tail = atomic_load_explicit(r->sq_tail, memory_order_relaxed), at = tail & r->sq_mask;
    struct io_uring_sqe *e = (struct io_uring_sqe *)r->entries + at;
    memset(e, 0, sizeof *e);
    e->opcode = IORING_OP_READ;
    e->fd = read->fd;
    e->off = (uint64_t)read->offset;
    e->addr = (uint64_t)(uintptr_t)read->out;
    e->len = read->length;
    e->user_data = (uint64_t)(uintptr_t)read;
    e->flags = worker ? IOSQE_ASYNC : 0;
    r->sq_array[at] = at;
    atomic_store_explicit(r->sq_tail, tail + 1, memory_order_release);
    for (int tries = 0; tries < TRIES; tries++) {
        int taken = ring_enter(r, 1, 0);
        if (taken > 0) return true;
        if (taken < 0 && !may_pass(errno)) break;
        sched_yield();
    }
    atomic_store_explicit(r->sq_tail, tail, memory_order_release); /* taken back */
    return false;
}

static clb_read *ring_next(ring *r, bool wait) {
    for (int looks = 0;;) {
        unsigned head = atomic_load_explicit(r->cq_head, memory_order_relaxed);
        if (head != atomic_load_explicit(r->cq_tail, memory_order_acquire)) {
            struct io_uring_cqe *cqe = (struct io_uring_cqe *)r->cqes + (head & r->cq_mask);
            clb_read *read = (clb_read *)(uintptr_t)cqe->user_data;
            read->result = cqe->res;
            atomic_store_explicit(r->cq_head, head + 1, memory_order_release);
            return read;
        }
        if (!wait) return NULL;
        if (ring_enter(r, 0, 1) >= 0) continue;
        if (++looks == LOOKS) return NULL; /* what is in flight arrives without being waited for */
        nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
    }
}
#else
static bool ring_open(ring *r) { (void)r; return false; }
static void ring_close(ring *r) { (void)r; }
static bool ring_submit(ring *r, clb_read *read, bool worker) {
    (void)r, (void)read, (void)worker;
    return false;
}
static clb_read *ring_next(ring *r, bool wait) { (void)r; (void)wait; return NULL; }
#endif

/* ---- reading threads ------------------------------------------------------------------------ */

static void push(queue *q, clb_read *read) { q->item[q->tail++ % IN_FLIGHT] = read; }
static clb_read *pop(queue *q) {
    return q->head == q->tail ? NULL : q->item[q->head++ % IN_FLIGHT];
}

static int32_t read_now(const clb_read *read) {
    ssize_t n;
    do {
        n = pread(read->fd, read->out, read->length, read->offset);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : (int32_t)n;
}

static void *reader_main(void *arg) {
    clb_reader *r = arg;
    pthread_mutex_lock(&r->lock);
    while (!r->stop) {
        clb_read *read = pop(&r->todo);
        if (!read) {
            pthread_cond_wait(&r->work, &r->lock);
            continue;
        }
        pthread_mutex_unlock(&r->lock);
        read->result = read_now(read);
        pthread_mutex_lock(&r->lock);
        push(&r->finished, read);
        pthread_cond_signal(&r->done);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

static bool start_threads(clb_reader *r) {
    while (r->thread_count < READERS) {
        if (pthread_create(&r->threads[r->thread_count], NULL, reader_main, r))
            return r->thread_count > 0;
        r->thread_count++;
    }
    return true;
}

static void threads_submit(clb_reader *r, clb_read *read) {
    pthread_mutex_lock(&r->lock);
    push(&r->todo, read);
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->lock);
}

static clb_read *threads_next(clb_reader *r, bool wait) {
    pthread_mutex_lock(&r->lock);
    clb_read *read = pop(&r->finished);
    while (!read && wait) {
        pthread_cond_wait(&r->done, &r->lock);
        read = pop(&r->finished);
    }
    pthread_mutex_unlock(&r->lock);
    return read;
}

/* ---- both ----------------------------------------------------------------------------------- */

clb_reader *clb_reader_new(bool uring, bool worker) {
    clb_reader *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->uring = uring;
    r->worker = worker;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->work, NULL);
    pthread_cond_init(&r->done, NULL);
    if (uring ? ring_open(&r->ring) : start_threads(r)) return r;
    clb_reader_free(r);
    return NULL;
}

void clb_reader_free(clb_reader *r) {
    if (!r) return;
    while (r->in_flight > 0 && clb_reader_next(r, true)) continue; /* their buffers go away next */
    if (r->uring) ring_close(&r->ring);
    pthread_mutex_lock(&r->lock);
    r->stop = true;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
    for (int32_t i = 0; i < r->thread_count; i++) pthread_join(r->threads[i], NULL);
    pthread_cond_destroy(&r->work);
    pthread_cond_destroy(&r->done);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

void clb_reader_submit(clb_reader *r, clb_read *read) {
    r->in_flight++;
    if (!r->uring) {
        threads_submit(r, read);
    } else if (!ring_submit(&r->ring, read, r->worker)) {
        read->result = read_now(read);
        push(&r->finished, read);
    }
}

clb_read *clb_reader_next(clb_reader *r, bool wait) {
    if (r->in_flight == 0) return NULL;
    clb_read *read = r->uring ? pop(&r->finished) : threads_next(r, wait);
    if (!read && r->uring) read = ring_next(&r->ring, wait);
    if (read) r->in_flight--;
    return read;
}
