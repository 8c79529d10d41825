/* Inside the core: the structs that model.c, session.c and the layer files share. */
#ifndef CLB_CORE_H
#define CLB_CORE_H
#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include "colibri.h"
#include "kernels.h"
#include "reader.h"
#include "threads.h"

/* ---- limits ------------------------------------------------------------------------------- */

enum {
    CLB_MAX_LAYERS = 512,
    CLB_MAX_EXPERTS = 4096,
    CLB_HEAD_GROUP = 8, /* heads that share one walk over the keys */
    CLB_ROW_TILE = 8,   /* rows of kv_b dequantised together: they stay in L1 */
};

/* ---- model -------------------------------------------------------------------------------- */

typedef struct clb_copy { /* of one shard, on one drive */
    char *path;
    int fd;        /* -1: there is none */
    int direct_fd; /* O_DIRECT, or -1 */
    bool buffered; /* direct reads were refused: the page cache serves it from then on */
    bool failed;   /* a read of it failed: the others are asked, while there are any */
} clb_copy;

typedef struct clb_shard {
    clb_copy copy[CLB_DRIVES]; /* 0: the model's own */
    int64_t size;
    const uint8_t *map; /* [size] */
} clb_shard;

typedef struct clb_place { /* bytes of one payload or one scale array */
    int32_t shard;
    int64_t offset, bytes;
} clb_place;

enum { CLB_EXPERT_PARTS = 6 }; /* gate, up, down: payload and scales of each */

typedef struct clb_expert {
    clb_matrix gate, up, down; /* [moe_intermediate][hidden] twice, [hidden][moe_intermediate] */
    clb_place part[CLB_EXPERT_PARTS];
} clb_expert;

typedef struct clb_residency clb_residency; /* experts.c: which experts are in memory */

typedef struct clb_layer {
    clb_tensor spec[CLB_ROLES];
    bool given[CLB_ROLES];
    clb_matrix w[CLB_ROLES];     /* in memory once loaded */
    const float *v[CLB_ROLES];   /* norms, biases: f32 */
    uint8_t *memory;             /* owns what w and v point to */
    clb_expert *experts;         /* [experts], views into the mapped shards */
    bool sparse, loaded;
    uint8_t index_kind;
    int64_t dense_bytes;         /* weights read by one step, routed experts excluded */
    int64_t expert_bytes;        /* one routed expert, scales included */
} clb_layer;

struct clb_model {
    clb_config config; /* its pointers are NULL; see the arrays below */
    float *inv_freq;   /* [rope / 2] */
    const clb_kernels *kernels;
    clb_pool *pool;
    clb_shard *shards;
    int32_t shard_count;
    int64_t layer_count; /* layers + has_mtp */
    clb_layer *layers;   /* [layer_count] */
    clb_layer top;       /* embedding, final norm, head */
    clb_residency *residency;
    pid_t owner; /* a fork of it has neither the threads nor a ring of its own */
    pthread_mutex_t step; /* one step at a time: the pool and the residency serve one caller */
};

/* ---- activations and scratch ---------------------------------------------------------------- */

typedef struct clb_input { /* rows that feed one or more matrices, quantised when first asked */
    clb_acts form[2];      /* by clb_order */
    bool ready[2];
} clb_input;

typedef struct clb_selection { /* the keys one row attends to */
    int32_t count;
    bool dense;     /* 0..count-1; else the ascending list */
    int32_t *index; /* [index_topk, or the context if that is less] */
} clb_selection;

typedef struct clb_route { /* the experts of one row, ascending */
    int32_t *expert; /* [rows][experts_per_token] */
    float *weight;   /* [rows][experts_per_token] */
} clb_route;

typedef struct clb_pair {
    int32_t expert, row;
    float weight;
} clb_pair;

struct clb_scratch { /* one pass at a time uses it, of any sessions that ask for no more */
    clb_model *model;
    int64_t context, max_rows, bytes;
    struct clb_row *rows;              /* [max_rows] of the pass that runs */
    float *angles;                     /* [max_rows][rope / 2][2] */
    float *x, *normed, *branch;        /* [max_rows][hidden] */
    float *concat;                     /* [max_rows][2 * hidden], MTP only */
    float *q_latent;                   /* [max_rows][q_lora] */
    float *query;                      /* [max_rows][heads * (nope + rope)] */
    float *absorbed;                   /* [heads][ROW_BLOCK or fewer][kv_lora + rope] */
    float *heads_out;                  /* [max_rows][heads * v_head] */
    float *new_keys;                   /* [max_rows][the wider of both caches] */
    float *wide_keys;                  /* [threads][CLB_KEY_TILE][the same] of a cache in f16 */
    float *index_query;                /* [max_rows][index_heads * index_dim] */
    float *index_weight;               /* [max_rows][index_heads] */
    float *index_score;                /* [ROW_BLOCK][context] */
    uint64_t *index_order;             /* [threads][context] */
    float *gate, *up;                  /* the widest MLP's rows, or the pairs' */
    float *router;                     /* [max_rows][experts] */
    float *shared;                     /* [max_rows][hidden] the shared expert's */
    float *pair_out;                   /* [pair_rows][hidden] */
    clb_pair *pairs;                   /* [max_rows * experts_per_token] */
    struct clb_lease *leases;          /* [experts] */
    struct clb_run *runs;              /* [experts] */
    int32_t *active_runs;              /* [experts] */
    int32_t *active_pairs;             /* [pair_rows] */
    clb_selection *selected;           /* [max_rows] */
    int32_t *selected_index;           /* [max_rows][keys chosen at most] */
    float *of_threads;                 /* [threads][thread_floats] */
    int64_t thread_floats;
    int64_t pair_rows;
    clb_input in_hidden, in_latent, in_mixed, in_heads, in_mlp, in_pairs, in_inner, in_head;
    clb_input in_concat;
};

typedef struct clb_cache { /* the keys of one layer, by position */
    int32_t format; /* CLB_F32 or CLB_F16 */
    int64_t width;
    uint8_t *rows;  /* [context][width]; NULL: the layer has none */
} clb_cache;

struct clb_session {
    clb_model *model;
    clb_scratch *scratch; /* perhaps others' too */
    int64_t context, max_rows, length, mtp_length, bytes;
    int64_t step_start, step_rows; /* the last step, until its uses of experts are counted */
    int64_t layer_count; /* the model's */
    clb_cache *kv;         /* [layer_count] of width kv_lora + rope */
    clb_cache *index_keys; /* [layer_count] of width index_dim, full layers only */
    int64_t window, window_rows; /* first position and most rows of `hidden` */
    float *hidden;       /* [window_rows][hidden] post-norm: the last step's rows, and before them
                            those that the MTP cache lacks */
    clb_selection mtp_seed;  /* set of the last absorbed row, for shared drafts */
    int32_t *mtp_seed_index; /* [keys chosen at most] */
    clb_route *routes;       /* [layer_count] */
    int32_t *captured;       /* [layer_count][max_rows][index_topk + 1] or NULL */
    atomic_int cancelled;
    int32_t watch_fd;
    clb_report *report; /* or NULL */
    void *who;
    clb_counters counters, work[CLB_WORKS]; /* all of it; by what was asked for */
};

/* ---- model.c ------------------------------------------------------------------------------ */

/* One caller at a time; an error for a report that calls the model whose step it tells of, and in
   a fork of the process that made it. */
int32_t clb_lock(clb_model *m, clb_error *error);
void clb_unlock(clb_model *m);
/* The same for what computes: floats are as C begins with them until clb_end. */
int32_t clb_begin(clb_model *m, fenv_t *was, clb_error *error);
void clb_end(clb_model *m, const fenv_t *was);

/* Whatever this thread has set, rounding and denormals are as C begins with them from now on; `was`
   is for fesetenv to give back. */
static inline void clb_default_floats(fenv_t *was) {
    fegetenv(was);
    fesetenv(FE_DFL_ENV);
}

/* ---- error.c ------------------------------------------------------------------------------ */

int32_t clb_fail(clb_error *error, int32_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool clb_mul(int64_t a, int64_t b, int64_t *product); /* false on overflow or a negative factor */

/* ---- memory.c ----------------------------------------------------------------------------- */

void *clb_zeroed(int64_t bytes); /* zeros, committed as they are touched; NULL: none left */
void clb_zeroed_free(void *memory);
void *clb_paged(int64_t bytes); /* in huge pages where there are any, for free(); NULL: none left */

typedef struct clb_taken { /* what failed or overflowed is noticed once, at the end */
    int64_t bytes;
    bool failed;
} clb_taken;

/* Zeroed, so that rows that are never touched cost no memory. */
void *clb_take(clb_taken *taken, int64_t count, int64_t width, int64_t item);
float *clb_take_floats(clb_taken *taken, int64_t count, int64_t width);
int32_t clb_fail_memory(const clb_taken *taken, int64_t context, clb_error *error);

/* ---- shard.c ------------------------------------------------------------------------------ */

int32_t clb_shard_open(clb_shard *shard, const char *path, int64_t size, clb_error *error);
int32_t clb_shard_add(clb_shard *shard, int32_t drive, const char *path, clb_error *error);
void clb_shard_close(clb_shard *shard);
/* Where one copy cannot be read, the next one is. */
int32_t clb_shard_read(const clb_shard *shard, int64_t offset, int64_t n, uint8_t *out,
                       clb_error *error);
/* Mapped pages [p, p + n): start reading them, or have them all read; an I/O error is reported. (A
   file that is cut or a disk that fails after that is a signal, as with any mapping.) */
int32_t clb_populate(const uint8_t *p, int64_t n, bool start);

/* ---- tensor.c ----------------------------------------------------------------------------- */

int32_t clb_tensor_check(const clb_tensor *tensor, clb_matrix *shape, clb_error *error);
bool clb_is_float(int32_t format);
int64_t clb_scale_bytes(const clb_matrix *w);
int64_t clb_matrix_bytes(const clb_matrix *w); /* payload and scales */

/* ---- linear.c ----------------------------------------------------------------------------- */

int32_t clb_input_new(clb_input *input, int64_t capacity, int64_t cols, int64_t *bytes);
void clb_input_free(clb_input *input);
void clb_input_set(clb_input *input, const float *x, int64_t stride, int64_t rows, int64_t cols);
/* The form of the input that w's format wants, quantising it if that has not happened yet. */
const clb_acts *clb_input_form(const clb_model *model, clb_input *input, int32_t format);
void clb_project(const clb_model *model, const clb_matrix *w, clb_input *input, float *y,
                 int64_t y_stride);

/* ---- cache.c -------------------------------------------------------------------------------- */

int64_t clb_cache_row_bytes(const clb_cache *cache);
/* key: [width], rounded to what the cache holds. */
void clb_cache_put(const clb_kernels *k, const clb_cache *cache, int64_t position,
                   const float *key);
/* Keys [first, first + n) of a cache in f16, as floats [n][width]. */
void clb_cache_widen(const clb_kernels *k, const clb_cache *cache, int64_t first, int64_t n,
                     float *out);
/* The same of any cache: where they lie in it, or widened into room. */
static inline const float *clb_cache_rows(const clb_kernels *k, const clb_cache *cache,
                                          int64_t first, int64_t n, float *room) {
    if (cache->format == CLB_F32) return (const float *)cache->rows + first * cache->width;
    clb_cache_widen(k, cache, first, n, room);
    return room;
}

/* ---- pass.c --------------------------------------------------------------------------------- */

typedef struct clb_part { /* one session's rows in a pass */
    clb_session *session;
    int64_t n, position; /* so many, from that row of its caches on */
    int32_t work;        /* CLB_PLAIN .. */
    int64_t first;       /* of them in the pass */
    clb_counters own;    /* what these rows alone cost */
} clb_part;

typedef struct clb_row {
    clb_part *part;
    int64_t position; /* for RoPE; and where its keys lie in its session's caches */
} clb_row;

typedef struct clb_pass { /* rows of a session, or of several that share a scratch, side by side */
    clb_model *model;
    clb_scratch *scratch;
    clb_part *parts;
    int64_t part_count, n; /* n: rows of all parts */
    bool frozen;           /* no keys are written, the selection is given (shared draft) */
    clb_counters counters; /* what all parts cost together */
} clb_pass;

clb_pass clb_pass_of(clb_part *parts, int64_t count);
/* Fills scratch->rows and their angles; for no more rows than the scratch has room for. */
void clb_pass_lay(clb_pass *p);
/* Only the last row goes on; what is known of it moves to row 0. */
void clb_pass_last(clb_pass *p);
/* Adds what was counted to the sessions: what parts cost together, by their numbers of rows. */
void clb_pass_charge(clb_pass *p);
/* The experts of row r, [experts_per_token]. */
clb_route clb_route_of(const clb_pass *p, int64_t r, int64_t number);
/* The highest position of rows [first, first + n). */
int64_t clb_last_position(const clb_pass *p, int64_t first, int64_t n);
bool clb_cancelled(const clb_pass *p); /* any of its sessions */
/* So much of main layer `number` is done. */
void clb_tell(const clb_pass *p, int64_t number, double share);

/* ---- the parts of a layer ------------------------------------------------------------------ */

/* Keys and values of the rows in scratch->in_hidden go to the caches. */
void clb_write_keys(clb_pass *p, const clb_layer *layer, int64_t number);
/* branch = attention of the rows in in_hidden, whose keys are in the caches. */
void clb_attend(clb_pass *p, const clb_layer *layer, int64_t number);
void clb_index_write(clb_pass *p, const clb_layer *layer, int64_t number);
/* Fills `selected` for the rows in in_hidden and in_latent. */
void clb_index_select(clb_pass *p, const clb_layer *layer, int64_t number);
void clb_route_rows(clb_pass *p, const clb_layer *layer, int64_t number);
int32_t clb_moe(clb_pass *p, clb_layer *layer, int64_t number, clb_error *error);
void clb_mlp(clb_pass *p, const clb_layer *layer, float *y);
/* normed = norm(x), as the input of the layer's attention. */
void clb_attention_input(clb_pass *p, const clb_layer *layer);
/* From clb_attention_input on: x += attention; x += mlp(norm(x)). */
int32_t clb_layer_finish(clb_pass *p, int64_t number, clb_error *error);
int32_t clb_check_loaded(const clb_model *m, clb_error *error);
int32_t clb_check_ids(const clb_session *s, const int32_t *ids, int64_t n, clb_error *error);
void clb_embed(const clb_model *m, const int32_t *ids, int64_t n, float *out);
void clb_add_rows(clb_pass *p, const float *branch);
void clb_head(clb_pass *p, const float *hidden, int64_t n, float *logits);
void clb_rmsnorm_rows(const clb_model *m, const float *x, const float *gain, int64_t n, float *y,
                      int64_t y_stride);
/* [thread_floats] of a thread's own. */
float *clb_thread_scratch(const clb_scratch *t, int32_t thread);
/* [CLB_KEY_TILE][the width of a key] of a thread's own. */
float *clb_thread_keys(const clb_scratch *t, int32_t thread);
int64_t clb_keys_chosen(const clb_config *c, int64_t context); /* by one row, at most */

#endif
