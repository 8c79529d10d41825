/* How bytes arrive: many reads in flight at once, through io_uring or, where that is missing, a
   few reading threads. One caller at a time. */
#ifndef CLB_READER_H
#define CLB_READER_H
#include <stdbool.h>
#include <stdint.h>

typedef struct clb_reader clb_reader;

typedef struct clb_read {
    int fd;
    int64_t offset;
    uint32_t length;
    uint8_t *out;   /* [length] */
    int32_t tag;    /* the caller's */
    int32_t result; /* bytes read, or -errno, once done */
} clb_read;

/* worker: IOSQE_ASYNC. Without it a buffered read that hits the page cache is copied inside the
   submitting call. NULL: out of memory, or io_uring is not offered here. */
clb_reader *clb_reader_new(bool uring, bool worker);
void clb_reader_free(clb_reader *reader);
/* Puts a read in flight, of at most 256 at any time; it must stay valid until done. What
   the system refuses is read at once. */
void clb_reader_submit(clb_reader *reader, clb_read *read);
/* The next finished read; NULL when wait is false and none is done, when nothing is in flight, or
   when what is in flight does not arrive for a minute and cannot be waited for. */
clb_read *clb_reader_next(clb_reader *reader, bool wait);

#endif
