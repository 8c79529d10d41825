/* Shard files: opened, mapped, checked against their promised size, read ahead. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "core.h"

#ifndef O_DIRECT
#define O_DIRECT 0 /* not Linux: direct reads are then ordinary ones */
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; older kernels answer EINVAL and pages come by fault */
#endif

int32_t clb_shard_open(clb_shard *shard, const char *path, int64_t size, clb_error *error) {
    struct stat st;
    shard->fd = shard->direct_fd = -1;
    shard->size = size;
    shard->map = NULL;
    shard->path = strdup(path);
    if (!shard->path) return clb_fail(error, CLB_NO_MEMORY, "out of memory opening %s", path);
    shard->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (shard->fd < 0) return clb_fail(error, CLB_IO, "cannot open %s: %s", path, strerror(errno));
    if (fstat(shard->fd, &st))
        return clb_fail(error, CLB_IO, "cannot stat %s: %s", path, strerror(errno));
    if (st.st_size != size || size <= 0)
        return clb_fail(error, CLB_IO, "%s has %lld bytes, %lld when its header was read: "
                        "it changed; open the container again", path, (long long)st.st_size,
                        (long long)size);
    void *map = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, shard->fd, 0);
    if (map == MAP_FAILED)
        return clb_fail(error, CLB_IO, "cannot map %s: %s", path, strerror(errno));
    shard->direct_fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    madvise(map, (size_t)size, MADV_RANDOM); /* readahead beyond an expert is waste */
    shard->map = map;
    return CLB_OK;
}

void clb_shard_close(clb_shard *shard) {
    if (shard->map) munmap((void *)shard->map, (size_t)shard->size);
    if (shard->fd >= 0) close(shard->fd);
    if (shard->direct_fd >= 0) close(shard->direct_fd);
    free(shard->path);
}

int32_t clb_shard_read(const clb_shard *shard, int64_t offset, int64_t n, uint8_t *out,
                       clb_error *error) {
    while (n > 0) {
        ssize_t got = pread(shard->fd, out, (size_t)(n < (1 << 30) ? n : 1 << 30), offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return clb_fail(error, CLB_IO, "reading %s at byte %lld: %s", shard->path,
                            (long long)offset, strerror(errno));
        if (got == 0)
            return clb_fail(error, CLB_IO, "%s ends at byte %lld, %lld bytes early: the file was "
                            "cut; restore it and try again", shard->path, (long long)offset,
                            (long long)n);
        out += got;
        offset += got;
        n -= got;
    }
    return CLB_OK;
}

int32_t clb_populate(const uint8_t *p, int64_t n, bool start) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)p & ~(page - 1), last = (uintptr_t)p + (uintptr_t)n;
    if (start) {
        madvise((void *)first, last - first, MADV_WILLNEED); /* a hint: failure costs time only */
        return CLB_OK;
    }
    if (!madvise((void *)first, last - first, MADV_POPULATE_READ)) return CLB_OK;
    return errno == EINVAL || errno == ENOSYS ? CLB_OK : CLB_IO;
}
