/* colibri: the core's whole public face. Python sees this header and nothing else. */
#ifndef COLIBRI_H
#define COLIBRI_H
#include <stdint.h>

/* ---- errors ------------------------------------------------------------------------------ */

enum { CLB_OK, CLB_NO_MEMORY, CLB_IO, CLB_INVALID, CLB_CANCELLED, CLB_FULL };

typedef struct clb_error {
    int32_t code;
    char text[508];
} clb_error;

/* ---- matrices ---------------------------------------------------------------------------- */

enum { CLB_F32, CLB_BF16, CLB_F16, CLB_INT8, CLB_INT4, CLB_INT3, CLB_INT2, CLB_FORMATS };

typedef struct clb_tensor { /* where a matrix [rows][cols] lies in a shard */
    int32_t format;
    int32_t scale_format; /* CLB_F32 or CLB_F16; unused by float formats */
    int64_t rows, cols;
    int64_t group;        /* inputs that share one scale; 0: the whole row */
    int32_t shard, scale_shard;
    int64_t offset, scale_offset; /* bytes from the start of the shard file */
} clb_tensor;

/* ---- model ------------------------------------------------------------------------------- */

enum { CLB_INDEX_NONE, CLB_INDEX_FULL, CLB_INDEX_SHARED };

typedef struct clb_config {
    int64_t vocab, hidden, layers, has_mtp; /* the MTP layer is layer number `layers` */
    int64_t intermediate, moe_intermediate, shared_experts;
    int64_t experts, experts_per_token, groups, groups_kept;
    int64_t heads, q_lora, kv_lora, nope, rope, v_head;
    int64_t index_heads, index_dim, index_topk;
    float rms_eps, index_eps, routed_scale;
    int32_t normalize_topk, mtp_share_index;
    const uint8_t *sparse;     /* [layers + has_mtp] 1: mixture of experts, 0: dense MLP */
    const uint8_t *index_kind; /* [layers + has_mtp] CLB_INDEX_* */
    const float *inv_freq;     /* [rope / 2] */
} clb_config;

enum { /* roles of a tensor; layer is -1 for the first three */
    CLB_EMBED, CLB_HEAD, CLB_NORM,
    CLB_INPUT_NORM, CLB_POST_NORM,
    CLB_Q_A, CLB_Q_A_NORM, CLB_Q_B, CLB_KV_A, CLB_KV_A_NORM, CLB_KV_B, CLB_O,
    CLB_INDEX_Q, CLB_INDEX_K, CLB_INDEX_K_NORM, CLB_INDEX_K_BIAS, CLB_INDEX_WEIGHTS,
    CLB_GATE, CLB_UP, CLB_DOWN, /* the dense MLP, or the shared expert of a sparse layer */
    CLB_ROUTER, CLB_ROUTER_BIAS,
    CLB_EH, CLB_E_NORM, CLB_H_NORM, CLB_HEAD_NORM, /* MTP layer only */
    CLB_ROLES
};

typedef struct clb_model clb_model; /* a fork of its process can only free it */

int32_t clb_model_new(const clb_config *config, const char *isa, int32_t threads,
                      clb_model **model, clb_error *error);
void clb_model_free(clb_model *model);
const char *clb_model_isa(const clb_model *model);
int32_t clb_isa_available(const char *isa); /* "scalar", "avx2", "avxvnni", "avx512", "neon" */

int32_t clb_model_add_shard(clb_model *model, const char *path, int64_t size, clb_error *error);
/* A copy of a shard on another drive, 1 .. CLB_DRIVES - 1: what fills slots is shared among them.
   Its bytes are taken to be the same; only their number is checked. */
enum { CLB_DRIVES = 4 };
int32_t clb_model_add_copy(clb_model *model, int32_t shard, int32_t drive, const char *path,
                           clb_error *error);
int32_t clb_model_set(clb_model *model, int32_t layer, int32_t role, const clb_tensor *tensor,
                      clb_error *error);
/* tensors: [experts][3], gate, up, down */
int32_t clb_model_set_experts(clb_model *model, int32_t layer, const clb_tensor *tensors,
                              clb_error *error);
/* Copies the dense part of one layer (-1: embedding, head, final norm) into RAM. */
int32_t clb_model_load(clb_model *model, int32_t layer, int64_t *bytes, clb_error *error);

/* How experts come into memory. MMAP: the page cache holds them; TIGHT asks for the pages at every
   use, for a container larger than memory. BUFFERED and DIRECT: slots of our own, filled through
   the page cache or past it. */
enum { CLB_IO_MMAP, CLB_IO_MMAP_TIGHT, CLB_IO_BUFFERED, CLB_IO_DIRECT };

int64_t clb_model_expert_bytes(const clb_model *model, int32_t layer); /* one routed expert */
/* One slot of the main layers' pool, or of the MTP layer's; 0 where there are no experts. */
int64_t clb_model_slot_bytes(const clb_model *model, int32_t mtp);
/* Call after the experts are set and before any step; again to change it between steps. `slots`
   are of all main layers, `mtp_slots` of the MTP layer. */
int32_t clb_model_set_residency(clb_model *model, int32_t io, int64_t slots, int64_t mtp_slots,
                                int32_t pilot, clb_error *error);
/* The pilot reads guessed experts of the next layer into spare slots while the disk is idle. ROUTER
   guesses with the next layer's router; FED takes guesses from clb_model_feed_pilot. */
enum { CLB_PILOT_OFF, CLB_PILOT_ROUTER, CLB_PILOT_FED };
enum { CLB_PILOT_SLOTS = 4 }; /* spare slots: what a disk reads during one attention */
/* guesses: [layers][count] expert ids of the main layers, for the next steps; -1: none. */
int32_t clb_model_feed_pilot(clb_model *model, const int32_t *guesses, int64_t count,
                             clb_error *error);

/* The experts in slots as (layer, expert) pairs, hottest first; returns how many there
   are, and fills at most `most`. -1: out of memory. */
int64_t clb_model_resident(clb_model *model, int32_t *pairs, int64_t most);
/* Reads experts into slots in the order given; each is then as hot as one use makes it, if it was
   colder, and hotter than those before that were colder, too. */
int32_t clb_model_warm(clb_model *model, const int32_t *pairs, int64_t n, clb_error *error);

/* ---- session ----------------------------------------------------------------------------- */

typedef struct clb_session clb_session;

enum { CLB_LOGITS_NONE, CLB_LOGITS_LAST, CLB_LOGITS_ALL };
enum { CLB_CACHE_KV, CLB_CACHE_INDEX };

typedef struct clb_counters {
    int64_t forwards, rows;                 /* step_all calls and their rows */
    int64_t expert_uses, expert_bytes;      /* distinct experts computed, and their bytes */
    int64_t expert_loads;                   /* those not in memory nor read ahead */
    int64_t read_bytes;                     /* of all experts that were read, ahead or not */
    int64_t read_wait_ns;                   /* time spent waiting for them */
    int64_t pilot_reads, pilot_bytes;       /* experts guessed and read, and their bytes; */
    int64_t pilot_useful;                   /* those then asked for */
    int64_t mirror_bytes;                   /* not read from drive 0, of all that was read */
    int64_t repeated_reads;                 /* that failed or fell short at first */
    int64_t dense_bytes, head_bytes;        /* dense and lm_head weights read */
    int64_t index_scores, attended;         /* index scores computed; keys attended, per head */
} clb_counters;

/* The memory of one step with at most so many rows, in at most such a context. Any sessions of the
   model that ask for no more may share it: one step runs at a time. It outlives them. */
typedef struct clb_scratch clb_scratch;
enum {
    CLB_ROW_BLOCK = 32,  /* rows that attention takes at once, */
    CLB_KEY_TILE = 32,   /* and keys: they stay in the second-level cache for a group of heads */
    CLB_PAIR_BLOCK = 64, /* (row, expert) pairs computed at once, or a step's rows if more */
};
int32_t clb_scratch_new(clb_model *model, int64_t context, int64_t max_rows, clb_scratch **scratch,
                        clb_error *error);
void clb_scratch_free(clb_scratch *scratch);
int64_t clb_scratch_bytes(const clb_scratch *scratch);

/* format: of the caches, CLB_F32, or CLB_F16 for half the bytes and 11 bits of each number. */
int32_t clb_session_new(clb_scratch *scratch, int64_t context, int64_t max_rows, int32_t format,
                        clb_session **session, clb_error *error);
void clb_session_free(clb_session *session);
int64_t clb_session_bytes(const clb_session *session);
int64_t clb_session_length(const clb_session *session);
int32_t clb_session_rewind(clb_session *session, int64_t length, clb_error *error);
/* After the rows of all caches were written through clb_session_cache: how many of them count. */
int32_t clb_session_restore(clb_session *session, int64_t length, int64_t mtp_length,
                            clb_error *error);
/* Cancelling: a flag any thread may set, or a file descriptor that becomes readable (-1: none);
   both are polled between layers, and before a layer waits for experts. */
void clb_session_cancel(clb_session *session, int32_t on);
void clb_session_watch(clb_session *session, int32_t fd);
/* From then on every step tells `who`, on its own thread, how much of it is done, from 0 to below
   1: after each layer, and within one whose experts are read. NULL: nobody is told.
   A report may cancel, and cannot call its model: that is an error. */
typedef void clb_report(void *who, double done);
void clb_session_report(clb_session *session, clb_report *report, void *who);
const clb_counters *clb_session_counters(const clb_session *session);
/* The same by what was asked for: a pass of one row, of several rows, an absorb, a draft. */
enum { CLB_PLAIN, CLB_VERIFY, CLB_ABSORB, CLB_DRAFT, CLB_WORKS };
const clb_counters *clb_session_work(const clb_session *session); /* [CLB_WORKS] */

/* Runs rows ids[n] at positions length.. and appends them. logits: [0 | 1 | n][vocab].
   On any error the length is unchanged and the session stays usable. */
int32_t clb_step_all(clb_session *session, const int32_t *ids, int64_t n, int32_t want,
                     float *logits, clb_error *error);
/* The same for several sessions that share a scratch, each once: rows[i] of the ids for
   sessions[i], and so with the logits; LAST is of the last one. Every row gives what it would
   give alone. On any error nothing has changed for any of them. */
enum { CLB_TOGETHER = 64 }; /* sessions at most */
int32_t clb_step_together(clb_session *const *sessions, const int64_t *rows, int64_t count,
                          const int32_t *ids, int32_t want, float *logits, clb_error *error);
/* Post-norm hidden states [..][hidden] from the row at a position on, valid until the next step;
   NULL when they are gone. Kept are max_rows of them, and with an MTP layer CLB_WAITING more. */
enum { CLB_WAITING = 512 }; /* 12 MB for GLM-5.2 */
const float *clb_session_hidden(const clb_session *session, int64_t position);

/* Views for tests, saving and traces. cache: [context][width] floats of the session's format; NULL
   when the layer has none. */
void *clb_session_cache(clb_session *session, int32_t layer, int32_t kind, int64_t *width);
/* Experts of the last step: [rows][experts_per_token], ascending ids; NULL for a dense layer. */
const int32_t *clb_session_experts(const clb_session *session, int32_t layer);
/* When set, step_all also stores every layer's index set: [layers + has_mtp][max_rows]
   [index_topk + 1], count first, then ascending positions; count -1: all keys up to the row (in a
   shared draft step: up to the last absorbed row). */
int32_t clb_session_capture(clb_session *session, int32_t on, clb_error *error);
const int32_t *clb_session_captured(const clb_session *session, int32_t layer, int64_t row);

/* ---- MTP layer --------------------------------------------------------------------------- */

/* Length of the MTP cache: row j holds (hidden of position j, token j + 1). */
int64_t clb_mtp_length(const clb_session *session);
int32_t clb_mtp_rewind(clb_session *session, int64_t length, clb_error *error);
/* Appends rows for n verified positions: hidden [n][H] post-norm of positions mtp_length..,
   next[n] the token that follows each. logits (may be NULL): of the last row; draft_hidden
   (may be NULL) [H]: its post-norm output, to be recycled by clb_mtp_draft. */
int32_t clb_mtp_absorb(clb_session *session, const float *hidden, const int32_t *next, int64_t n,
                       float *logits, float *draft_hidden, clb_error *error);
/* One draft step g >= 1 after absorb: token and recycled hidden in, logits and hidden out. */
int32_t clb_mtp_draft(clb_session *session, int32_t token, int64_t step, float *hidden,
                      float *logits, clb_error *error);

/* softmax(scale * logits)[token]; scratch: [n]. */
float clb_confidence(const float *logits, int64_t n, int64_t token, float scale, float *scratch);

/* ---- one linear, for tests and benchmarks -------------------------------------------------- */

/* y[s][rows] = W x[s][cols], with data and scales in memory; isa NULL: the best. */
int32_t clb_linear_test(const char *isa, const clb_tensor *shape, const uint8_t *data,
                        const void *scales, const float *x, int64_t s, float *y, clb_error *error);

enum {
    CLB_TEST_DOT, CLB_TEST_AXPY, CLB_TEST_RMSNORM, CLB_TEST_LAYERNORM, CLB_TEST_SOFTMAX,
    CLB_TEST_SIGMOID, CLB_TEST_SWIGLU, CLB_TEST_ROPE, CLB_TEST_INDEX_SCORES, CLB_TEST_ANGLES,
    CLB_TEST_TO_F16
};

/* One function of kernels.h on a, b, c [n] each; out [n] begins as a copy of a. DOT leaves its
   result in out[0]; AXPY is out + b[0] c; RMSNORM has gain b, LAYERNORM gain b and bias c;
   INDEX_SCORES has n heads of one dimension and n keys c; ANGLES has position b[0]; TO_F16 leaves
   n numbers of two bytes in out. */
int32_t clb_numerics_test(const char *isa, int32_t function, const float *a, const float *b,
                          const float *c, int64_t n, float *out, clb_error *error);

/* ---- encoders, for conversion -------------------------------------------------------------- */

enum {
    CLB_SOURCE_F32, CLB_SOURCE_BF16, CLB_SOURCE_F16, CLB_SOURCE_F8, CLB_SOURCE_F4, CLB_SOURCE_I8,
    CLB_SOURCE_I4
};

typedef struct clb_source { /* rows of a checkpoint's matrix, in memory, any alignment */
    int32_t dtype;
    int64_t rows, cols;
    int64_t row_bytes; /* from one row to the next */
    const uint8_t *data;
    /* F8 (e4m3) and F4 (e2m1): the value of a code times the scale of its block; I8 and I4 (no
       sign): the code less the block's zero, times its scale. Of four bits the first code is in the
       low half of a byte. Blocks count from the matrix's own row 0, of which data[0] is row
       first_row; of four bits they are an even number of weights wide, or the whole row. */
    const float *scales; /* [scale_rows][scale_cols] */
    const uint8_t *zeros; /* as many; NULL: half of the codes are negative */
    int64_t scale_rows, scale_cols, block_rows, block_cols, first_row;
} clb_source;

/* The bits of colibri/quantize.py: codes [rows][row bytes] and scales [rows][row scales] in the
   formats of `shape`; floats have no scales. search: the scale of least squared error is sought.
   One thread; isa NULL (the best), "scalar" or "avx2". */
int32_t clb_encode(const char *isa, const clb_source *source, const clb_tensor *shape,
                   int32_t search, uint8_t *codes, uint8_t *scales, clb_error *error);
/* zlib's CRC-32 of n bytes that follow those of `crc` (0: of none); plain: without the processor's
   own instructions. */
uint32_t clb_crc32(const uint8_t *data, int64_t n, uint32_t crc, int32_t plain);

/* ---- what the machine can do: the limits of a benchmark -------------------------------------- */

/* Bytes a second that `threads` threads read together from `bytes` of memory, each from 1, 2, 4 or
   8 places at once, asking `ahead` bytes in advance (0: the hardware does). */
int32_t clb_measure_read_bandwidth(int32_t threads, int64_t bytes, double seconds, int32_t streams,
                                   int32_t ahead, double *rate, clb_error *error);
/* 8-bit products with 32-bit sums a second, from registers, by the instructions of a table. */
int32_t clb_measure_dot_peak(const char *isa, int32_t threads, double seconds, double *rate,
                             clb_error *error);

typedef struct clb_disk_plan { /* offsets, record_bytes and piece: multiples of 4096 */
    const char *path;
    const int64_t *offsets; /* [records] */
    int64_t records, record_bytes;
    int64_t piece;          /* bytes of one read; a record is cut into pieces */
    int32_t depth;          /* reads in flight, at most 256 */
    int32_t direct, uring;  /* past the page cache; io_uring, else threads */
} clb_disk_plan;

/* Bytes a second of reading all the records once. */
int32_t clb_measure_disk(const clb_disk_plan *plan, double *rate, clb_error *error);
/* Bytes of a file that are in the page cache. */
int32_t clb_measure_cached(const char *path, int64_t *bytes, clb_error *error);

#endif
