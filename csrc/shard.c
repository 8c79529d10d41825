/* Shard files: opened, mapped, checked against their promised size, read ahead. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "core.h"
#include "system.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; older kernels answer EINVAL and pages come by fault */
#endif

static void close_copy(clb_copy *copy) {
    if (copy->fd >= 0) close(copy->fd);
    if (copy->direct_fd >= 0) close(copy->direct_fd);
    free(copy->path);
    *copy = (clb_copy){.fd = -1, .direct_fd = -1};
}

static int32_t open_copy(clb_copy *copy, const char *path, int64_t size, clb_error *error) {
    struct stat st;
    copy->path = strdup(path);
    if (!copy->path) return clb_fail(error, CLB_NO_MEMORY, "out of memory opening %s", path);
    copy->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (copy->fd < 0) return clb_fail(error, CLB_IO, "cannot open %s: %s", path, strerror(errno));
    if (fstat(copy->fd, &st))
        return clb_fail(error, CLB_IO, "cannot stat %s: %s", path, strerror(errno));
    if (st.st_size != size || size <= 0)
        return clb_fail(error, CLB_IO, "%s has %lld bytes, %lld when its header was read: "
                        "it changed; open the container again", path, (long long)st.st_size,
                        (long long)size);
    copy->direct_fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (copy->direct_fd < 0 && (errno == EMFILE || errno == ENFILE)) /* others: not offered here */
        return clb_fail(error, CLB_IO, "cannot open %s: %s", path, strerror(errno));
    return CLB_OK;
}

int32_t clb_shard_add(clb_shard *shard, int32_t drive, const char *path, clb_error *error) {
    int32_t code = open_copy(&shard->copy[drive], path, shard->size, error);
    if (code) close_copy(&shard->copy[drive]);
    return code;
}

int32_t clb_shard_open(clb_shard *shard, const char *path, int64_t size, clb_error *error) {
    *shard = (clb_shard){.size = size};
    for (int i = 0; i < CLB_DRIVES; i++) shard->copy[i].fd = shard->copy[i].direct_fd = -1;
    int32_t code = clb_shard_add(shard, 0, path, error);
    if (code) return code;
    void *map = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, shard->copy[0].fd, 0);
    if (map == MAP_FAILED)
        return clb_fail(error, CLB_IO, "cannot map %s: %s", path, strerror(errno));
    madvise(map, (size_t)size, MADV_RANDOM); /* readahead beyond an expert is waste */
    shard->map = map;
    return CLB_OK;
}

void clb_shard_close(clb_shard *shard) {
    if (shard->map) munmap((void *)shard->map, (size_t)shard->size);
    for (int i = 0; i < CLB_DRIVES; i++) close_copy(&shard->copy[i]);
}

static int32_t read_copy(const clb_copy *copy, int64_t offset, int64_t n, uint8_t *out,
                         clb_error *error) {
    while (n > 0) {
        ssize_t got = pread(copy->fd, out, (size_t)(n < (1 << 30) ? n : 1 << 30), offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return clb_fail(error, CLB_IO, "reading %s at byte %lld: %s", copy->path,
                            (long long)offset, strerror(errno));
        if (got == 0)
            return clb_fail(error, CLB_IO, "%s ends at byte %lld, %lld bytes early: the file was "
                            "cut; restore it and try again", copy->path, (long long)offset,
                            (long long)n);
        out += got;
        offset += got;
        n -= got;
    }
    return CLB_OK;
}

int32_t clb_shard_read(const clb_shard *shard, int64_t offset, int64_t n, uint8_t *out,
                       clb_error *error) {
    int32_t code = read_copy(&shard->copy[0], offset, n, out, error);
    for (int i = 1; code && i < CLB_DRIVES; i++)
        if (shard->copy[i].fd >= 0) code = read_copy(&shard->copy[i], offset, n, out, error);
    return code;
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
