/* What the machine can do at best, by bare loops: the limits that the engine's speed is held to. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "core.h"
#include "system.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define CLB_WIDE_DOTS 1
#include <immintrin.h>
#endif

enum {
    MAX_THREADS = 1024,
    MAX_STREAMS = 8,
    LINE = 64,
    STRETCH = 16384,  /* lines of one stream between two looks at the clock */
    ROUNDS = 4096,    /* of dot products, likewise */
    CACHED_STEP = 1 << 28, /* bytes of a file that one mincore call looks at */
};

static double now(void) { return 1e-9 * (double)clb_now_ns(); }

/* ---- threads that begin together and work until the same moment ------------------------------ */

typedef struct crew {
    int32_t size;
    double seconds;
    atomic_int ready;
    void (*prepare)(struct crew *crew, int32_t thread);
    int64_t (*work)(struct crew *crew, int32_t thread); /* one stretch; how much it was */
    uint8_t *memory;                                    /* [size][part] */
    int64_t part, streams, ahead;
} crew;

typedef struct member {
    crew *crew;
    pthread_t id;
    int32_t thread;
    double rate;
} member;

static void *member_main(void *arg) {
    member *self = arg;
    crew *c = self->crew;
    if (c->prepare) c->prepare(c, self->thread);
    atomic_fetch_add(&c->ready, 1);
    while (atomic_load(&c->ready) < c->size) continue;
    double begin = now(), end;
    int64_t done = 0;
    do {
        done += c->work(c, self->thread);
        end = now();
    } while (end - begin < c->seconds);
    self->rate = (double)done / (end - begin);
    return NULL;
}

/* The sum of the members' rates, per second. */
static int32_t run_crew(crew *c, double *rate, clb_error *error) {
    member *members = calloc((size_t)c->size, sizeof *members);
    int32_t started = 0;
    if (!members) return clb_fail(error, CLB_NO_MEMORY, "out of memory");
    for (; started < c->size; started++) {
        members[started] = (member){.crew = c, .thread = started};
        if (pthread_create(&members[started].id, NULL, member_main, &members[started])) break;
    }
    if (started < c->size) atomic_store(&c->ready, c->size); /* let the others go, and end */
    *rate = 0;
    for (int32_t i = 0; i < started; i++) {
        pthread_join(members[i].id, NULL);
        *rate += members[i].rate;
    }
    free(members);
    if (started == c->size) return CLB_OK;
    return clb_fail(error, CLB_NO_MEMORY, "only %d of %d threads could be started", started,
                    c->size);
}

static int32_t check_crew(int32_t threads, double seconds, clb_error *error) {
    if (threads < 1 || threads > MAX_THREADS || !(seconds > 0 && seconds <= 60))
        return clb_fail(error, CLB_INVALID, "%d threads for %g seconds: 1 to %d threads and at "
                        "most 60 seconds are possible", threads, seconds, MAX_THREADS);
    return CLB_OK;
}

static uint8_t *map_memory(int64_t bytes) {
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    if (memory == MAP_FAILED) return NULL;
    clb_ask_huge_pages(memory, bytes);
    return memory;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void fill_part(crew *c, int32_t thread) {
    memset(c->memory + thread * c->part, thread + 1, (size_t)c->part);
}

typedef uint64_t words __attribute__((vector_size(16), aligned(1), may_alias));

/* Reads `lines` lines of each stream; the result keeps the compiler from leaving reads out. */
static inline __attribute__((always_inline)) uint64_t read_lines(const uint8_t *p, int64_t apart,
                                                                 int64_t lines, int64_t streams,
                                                                 int64_t ahead) {
    words a = {0}, b = {0}, c = {0}, d = {0};
    for (int64_t i = 0; i < lines; i++)
        for (int64_t s = 0; s < streams; s++) {
            const uint8_t *at = p + s * apart + i * LINE;
            const words *line = (const words *)at;
            __builtin_prefetch(at + ahead);
            a ^= line[0];
            b ^= line[1];
            c ^= line[2];
            d ^= line[3];
        }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1];
}

static int64_t read_part(crew *c, int32_t thread) {
    const uint8_t *part = c->memory + thread * c->part;
    int64_t apart = c->part / c->streams / LINE * LINE, lines = apart / LINE;
    for (int64_t first = 0; first < lines; first += STRETCH) {
        const uint8_t *p = part + first * LINE;
        int64_t n = lines - first < STRETCH ? lines - first : STRETCH;
        uint64_t all;
        switch (c->streams) {
        case 1: all = read_lines(p, apart, n, 1, c->ahead); break;
        case 2: all = read_lines(p, apart, n, 2, c->ahead); break;
        case 4: all = read_lines(p, apart, n, 4, c->ahead); break;
        default: all = read_lines(p, apart, n, MAX_STREAMS, c->ahead); break;
        }
        __asm__ volatile("" : : "r"(all));
    }
    return lines * c->streams * LINE;
}

int32_t clb_measure_read_bandwidth(int32_t threads, int64_t bytes, double seconds, int32_t streams,
                                   int32_t ahead, double *rate, clb_error *error) {
    int32_t code = check_crew(threads, seconds, error);
    if (code) return code;
    if (streams != 1 && streams != 2 && streams != 4 && streams != MAX_STREAMS)
        return clb_fail(error, CLB_INVALID, "%d streams: 1, 2, 4 or %d are possible", streams,
                        MAX_STREAMS);
    if (bytes < threads * (int64_t)CLB_HUGE_PAGE || bytes > INT64_C(1) << 40 || ahead < 0)
        return clb_fail(error, CLB_INVALID, "%lld bytes for %d threads: at least 2 MB each",
                        (long long)bytes, threads);
    crew c = {.size = threads, .seconds = seconds, .prepare = fill_part, .work = read_part,
              .part = bytes / threads / CLB_HUGE_PAGE * CLB_HUGE_PAGE, .streams = streams,
              .ahead = ahead};
    c.memory = map_memory(threads * c.part + CLB_HUGE_PAGE);
    if (!c.memory)
        return clb_fail(error, CLB_NO_MEMORY, "out of memory for %lld bytes", (long long)bytes);
    code = run_crew(&c, rate, error);
    munmap(c.memory, (size_t)(threads * c.part + CLB_HUGE_PAGE));
    return code;
}

/* ---- integer dot products -------------------------------------------------------------------- */

static int64_t dot_plain(crew *c, int32_t thread) {
    int8_t w[LINE], q[LINE];
    int32_t sum[LINE / 4] = {0};
    (void)c;
    memset(w, thread + 1, sizeof w);
    memset(q, 3, sizeof q);
    for (int64_t i = 0; i < ROUNDS; i++) {
        __asm__ volatile("" : : "r"(w), "r"(q) : "memory");
        for (int l = 0; l < LINE / 4; l++)
            for (int k = 0; k < 4; k++) sum[l] += w[4 * l + k] * q[4 * l + k];
    }
    __asm__ volatile("" : : "r"(sum) : "memory");
    return (int64_t)ROUNDS * LINE;
}

#ifdef CLB_WIDE_DOTS
/* Four weights by two activations: enough sums to hide the latency of each. */
#define CLB_EIGHT_DOTS                                                                            \
    CLB_DOT(s0, w0, q0); CLB_DOT(s1, w1, q0); CLB_DOT(s2, w2, q0); CLB_DOT(s3, w3, q0);           \
    CLB_DOT(s4, w0, q1); CLB_DOT(s5, w1, q1); CLB_DOT(s6, w2, q1); CLB_DOT(s7, w3, q1)

/* From registers: fifteen of sixteen hold weights, activations, ones and sums. */
#define CLB_DOTS_256(name, isa)                                                                    \
    __attribute__((target(isa))) static int64_t name(crew *c, int32_t thread) {                    \
        __m256i w0 = _mm256_set1_epi8((char)(thread % 8)), w1 = w0, w2 = w0, w3 = w0;              \
        __m256i q0 = _mm256_set1_epi8(-3), q1 = _mm256_set1_epi8(2), one = _mm256_set1_epi16(1);   \
        __m256i s0 = q0, s1 = q0, s2 = q0, s3 = q0, s4 = q0, s5 = q0, s6 = q0, s7 = q0;            \
        (void)c;                                                                                   \
        (void)one;                                                                                 \
        for (int64_t n = 0; n < ROUNDS; n++) {                                                     \
            __asm__ volatile("" : "+x"(w0), "+x"(w1), "+x"(w2), "+x"(w3)); /* "new" weights */     \
            CLB_EIGHT_DOTS;                                                                        \
        }                                                                                          \
        __asm__ volatile("" : : "x"(s0), "x"(s1), "x"(s2), "x"(s3), "x"(s4), "x"(s5), "x"(s6),     \
                         "x"(s7));                                                                 \
        return (int64_t)ROUNDS * 8 * 32;                                                           \
    }

#define CLB_DOT(s, w, q) \
    s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(w, q), one))
CLB_DOTS_256(dot_avx2, "avx2")
#undef CLB_DOT
#if CLB_AVX_VNNI_BUILDS
#define CLB_DOT(s, w, q) s = _mm256_dpbusd_avx_epi32(s, w, q)
CLB_DOTS_256(dot_avx_vnni, "avx2,avxvnni")
#undef CLB_DOT
#endif

__attribute__((target("avx512f,avx512vnni"))) static int64_t dot_avx512(crew *c, int32_t thread) {
    __m512i w0 = _mm512_set1_epi32(0x01010101 * (thread % 8)), w1 = w0, w2 = w0, w3 = w0;
    __m512i q0 = _mm512_set1_epi32(0x01020301), q1 = _mm512_add_epi32(q0, q0);
    __m512i q2 = _mm512_add_epi32(q0, q1), s0 = q0, s1 = q0, s2 = q0, s3 = q0, s4 = q0, s5 = q0;
    __m512i s6 = q0, s7 = q0, s8 = q0, s9 = q0, sa = q0, sb = q0;
    (void)c;
#define CLB_DOT(s, w, q) s = _mm512_dpbusd_epi32(s, w, q)
    for (int64_t n = 0; n < ROUNDS; n++) {
        __asm__ volatile("" : "+v"(w0), "+v"(w1), "+v"(w2), "+v"(w3));
        CLB_EIGHT_DOTS;
        CLB_DOT(s8, w0, q2);
        CLB_DOT(s9, w1, q2);
        CLB_DOT(sa, w2, q2);
        CLB_DOT(sb, w3, q2);
    }
#undef CLB_DOT
    __asm__ volatile("" : : "v"(s0), "v"(s1), "v"(s2), "v"(s3), "v"(s4), "v"(s5), "v"(s6), "v"(s7),
                     "v"(s8), "v"(s9), "v"(sa), "v"(sb));
    return (int64_t)ROUNDS * 12 * 64;
}
#endif

int32_t clb_measure_dot_peak(const char *isa, int32_t threads, double seconds, double *rate,
                             clb_error *error) {
    int32_t code = check_crew(threads, seconds, error);
    if (code) return code;
    const clb_kernels *table = clb_kernels_find(isa);
    if (!table)
        return clb_fail(error, CLB_INVALID, "this processor has no %s", isa ? isa : "kernels");
    crew c = {.size = threads, .seconds = seconds, .work = dot_plain};
#ifdef CLB_WIDE_DOTS
    if (!strcmp(table->isa, "avx2")) c.work = dot_avx2;
    if (!strcmp(table->isa, "avx512")) c.work = dot_avx512;
#if CLB_AVX_VNNI_BUILDS
    if (!strcmp(table->isa, "avxvnni")) c.work = dot_avx_vnni;
#endif
#endif
    return run_crew(&c, rate, error);
}

/* ---- disk ------------------------------------------------------------------------------------ */

typedef struct disk_job {
    const clb_disk_plan *plan;
    int fd;
    clb_reader *reader;
    clb_read *reads;  /* [depth] */
    uint8_t *memory;  /* [depth][piece] */
    int32_t *idle;    /* [depth] reads not in flight */
    int64_t idle_count, record, offset; /* the next piece to be read */
    int64_t total;
} disk_job;

static void submit_piece(disk_job *job) {
    const clb_disk_plan *p = job->plan;
    int32_t i = job->idle[--job->idle_count];
    int64_t left = p->record_bytes - job->offset, length = left < p->piece ? left : p->piece;
    job->reads[i] = (clb_read){.fd = job->fd, .offset = p->offsets[job->record] + job->offset,
                               .length = (uint32_t)length, .tag = i,
                               .out = job->memory + i * p->piece};
    clb_reader_submit(job->reader, &job->reads[i]);
    job->offset += length;
    if (job->offset < p->record_bytes) return;
    job->offset = 0;
    job->record++;
}

static int32_t read_records(disk_job *job, clb_error *error) {
    int64_t in_flight = 0;
    for (;;) {
        while (job->idle_count && job->record < job->plan->records) {
            submit_piece(job);
            in_flight++;
        }
        if (in_flight == 0) return CLB_OK;
        const clb_read *read = clb_reader_next(job->reader, true);
        if (!read) return clb_fail(error, CLB_IO, "the system lost a read of %s", job->plan->path);
        if (read->result < 0)
            return clb_fail(error, CLB_IO, "reading %s at byte %lld: %s", job->plan->path,
                            (long long)read->offset, strerror(-read->result));
        if (read->result == 0)
            return clb_fail(error, CLB_IO, "%s ends before byte %lld", job->plan->path,
                            (long long)read->offset);
        job->total += read->result;
        job->idle[job->idle_count++] = read->tag;
        in_flight--;
    }
}

static int32_t check_disk(const clb_disk_plan *p, clb_error *error) {
    bool aligned = p->record_bytes % CLB_PAGE == 0 && p->piece % CLB_PAGE == 0;
    for (int64_t i = 0; i < p->records; i++)
        aligned &= p->offsets[i] >= 0 && p->offsets[i] % CLB_PAGE == 0;
    if (!aligned)
        return clb_fail(error, CLB_INVALID, "records, offsets, pieces must be multiples of 4096");
    if (p->records < 1 || p->record_bytes < 1 || p->piece < 1 || p->piece > 1 << 30 ||
        p->depth < 1 || p->depth > 256)
        return clb_fail(error, CLB_INVALID, "%lld records in pieces of %lld at depth %d cannot be "
                        "read", (long long)p->records, (long long)p->piece, p->depth);
    return CLB_OK;
}

int32_t clb_measure_disk(const clb_disk_plan *plan, double *rate, clb_error *error) {
    disk_job job = {.plan = plan, .idle_count = plan->depth};
    int32_t code = check_disk(plan, error);
    if (code) return code;
    int64_t bytes = plan->depth * plan->piece + CLB_HUGE_PAGE;
    job.fd = open(plan->path, O_RDONLY | O_CLOEXEC | (plan->direct ? O_DIRECT : 0));
    if (job.fd < 0)
        return clb_fail(error, CLB_IO, "cannot open %s%s: %s", plan->path,
                        plan->direct ? " for direct reads" : "", strerror(errno));
    job.reads = calloc((size_t)plan->depth, sizeof *job.reads);
    job.idle = calloc((size_t)plan->depth, sizeof *job.idle);
    job.memory = map_memory(bytes);
    job.reader = clb_reader_new(plan->uring, !plan->direct);
    if (!job.reads || !job.idle || !job.memory || !job.reader) {
        code = clb_fail(error, CLB_NO_MEMORY, "no memory, or io_uring is not offered here");
    } else {
        memset(job.memory, 0, (size_t)bytes); /* no page faults while the clock runs */
        for (int32_t i = 0; i < plan->depth; i++) job.idle[i] = i;
        double begin = now();
        code = read_records(&job, error);
        *rate = (double)job.total / (now() - begin);
    }
    clb_reader_free(job.reader); /* waits for what is in flight */
    if (job.memory) munmap(job.memory, (size_t)bytes);
    free(job.reads);
    free(job.idle);
    close(job.fd);
    return code;
}

/* ---- page cache ------------------------------------------------------------------------------ */

int32_t clb_measure_cached(const char *path, int64_t *bytes, clb_error *error) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int64_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END), page = sysconf(_SC_PAGESIZE);
    unsigned char *seen = malloc((size_t)(CACHED_STEP / page));
    int32_t code = CLB_OK;
    *bytes = 0;
    if (size < 0) code = clb_fail(error, CLB_IO, "cannot open %s: %s", path, strerror(errno));
    else if (!seen) code = clb_fail(error, CLB_NO_MEMORY, "out of memory");
    for (int64_t at = 0; !code && at < size; at += CACHED_STEP) {
        int64_t n = size - at < CACHED_STEP ? size - at : CACHED_STEP;
        int64_t pages = (n + page - 1) / page;
        void *map = mmap(NULL, (size_t)n, PROT_READ, MAP_SHARED, fd, at);
        if (map == MAP_FAILED || mincore(map, (size_t)n, (void *)seen))
            code = clb_fail(error, CLB_IO, "cannot look at the cached pages of %s", path);
        for (int64_t i = 0; !code && i < pages; i++) *bytes += (seen[i] & 1) * page;
        if (map != MAP_FAILED) munmap(map, (size_t)n);
    }
    if (fd >= 0) close(fd);
    free(seen);
    return code;
}
