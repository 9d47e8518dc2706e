/* A disk that misbehaves on demand, for files below one folder.
 *
 * Preloaded into a process, it stands between the process and the kernel's file calls. What it
 * does is decided by a control page that every process maps and the test writes: see
 * faulty_disk.py, which holds the same list of fields. Files elsewhere, sockets and pipes are
 * passed through untouched.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    _Atomic int64_t rate;          /* bytes per second; 0: no limit */
    _Atomic int64_t stalled;       /* 1: calls wait until it is 0 again */
    _Atomic int64_t space;         /* bytes until the disk is full; negative: endless */
    _Atomic int64_t fail_write;    /* k: the k-th write from now fails with EIO; 0: none */
    _Atomic int64_t fail_sync;     /* the same for fsync and fdatasync */
    _Atomic int64_t n_waiting;     /* calls that a stall holds now */
    _Atomic int64_t n_bytes;       /* bytes taken */
    _Atomic int64_t n_writes;      /* write calls seen */
    _Atomic int64_t n_syncs;       /* sync calls seen */
    _Atomic int64_t n_failed;      /* errors given */
    _Atomic int64_t free_at_ns;    /* when a limited disk has done what it took; monotonic */
    _Atomic int64_t n_links;       /* link calls seen */
    _Atomic int64_t fail_close;    /* as fail_write, for closing a file that is not a folder */
    int64_t unused[19];
    char only[64];                 /* stalls and errors strike paths that hold this text */
};

static struct control *control;
static char folder[PATH_MAX];
static size_t folder_length;
/* Filled at the first use: other libraries may write before this one has begun. */
#define REAL(name)                                                       \
    static __typeof__(&name) real_##name##_;                            \
    static __typeof__(&name) find_##name(void) {                        \
        if (!real_##name##_)                                            \
            real_##name##_ = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        return real_##name##_;                                          \
    }
REAL(write)
REAL(writev)
REAL(pwrite)
REAL(fsync)
REAL(fdatasync)
REAL(link)
REAL(linkat)
REAL(close)
REAL(posix_fallocate)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTY_DISK_CONTROL"), *where = getenv("FAULTY_DISK_FOLDER");
    if (!path || !where || strlen(where) >= sizeof folder) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED) return;
    strcpy(folder, where);
    folder_length = strlen(folder);
    control = page;
}

static int below(const char *path, size_t length) {
    return length >= folder_length && memcmp(path, folder, folder_length) == 0 &&
           (length == folder_length || path[folder_length] == '/');
}

enum { ELSEWHERE, SPARED, MEANT };

/* Returns whether a file lies below the folder, and whether stalls and errors are meant for it. */
static int place(int fd) {
    if (!control) return ELSEWHERE;
    int before = errno;
    char name[32], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    errno = before;
    if (length <= 0 || !below(path, (size_t)length)) return ELSEWHERE;
    path[length] = 0;
    return strstr(path, control->only) ? MEANT : SPARED;
}

static void nap(void) {
    struct timespec few_ms = {0, 2000000};
    nanosleep(&few_ms, NULL);
}

static void wait_while_stalled(int where) {
    if (where != MEANT || !control->stalled) return;
    control->n_waiting++;
    while (control->stalled) nap();
    control->n_waiting--;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Every process draws on one disk: the time at which it is free again is shared. */
static void wait_for_turn(int64_t nbytes) {
    int64_t rate = control->rate;
    if (rate <= 0) return;
    int64_t cost = (int64_t)((double)nbytes * 1e9 / (double)rate), free_at = control->free_at_ns;
    int64_t until;
    do {
        int64_t from = now_ns();
        until = (free_at > from ? free_at : from) + cost;
    } while (!atomic_compare_exchange_weak(&control->free_at_ns, &free_at, until));
    while (now_ns() < until && control->rate == rate) nap();
    if (control->rate != rate) control->free_at_ns = 0;
}

static int strikes(_Atomic int64_t *countdown) {
    int64_t left = *countdown;
    while (left > 0)
        if (atomic_compare_exchange_weak(countdown, &left, left - 1)) return left == 1;
    return 0;
}

static int fails(int code) {
    control->n_failed++;
    errno = code;
    return -1;
}

/* Returns how many bytes the disk takes, -1 with errno when it refuses. */
static ssize_t admit(int where, size_t wanted) {
    control->n_writes++;
    wait_while_stalled(where);
    if (where == MEANT && strikes(&control->fail_write)) return fails(EIO);
    int64_t taken, space = control->space;
    do {
        if (space < 0) {
            taken = (int64_t)wanted;
            break;
        }
        taken = space < (int64_t)wanted ? space : (int64_t)wanted;
    } while (!atomic_compare_exchange_weak(&control->space, &space, space - taken));
    if (taken == 0 && wanted) return fails(ENOSPC);
    wait_for_turn(taken);
    wait_while_stalled(where);
    control->n_bytes += taken;
    return taken;
}

static int sync_refused(int where) {
    control->n_syncs++;
    wait_while_stalled(where);
    return where == MEANT && strikes(&control->fail_sync) ? fails(EIO) : 0;
}

ssize_t write(int fd, const void *data, size_t nbytes) {
    int where = place(fd);
    if (where == ELSEWHERE) return find_write()(fd, data, nbytes);
    ssize_t taken = admit(where, nbytes);
    return taken < 0 ? -1 : find_write()(fd, data, (size_t)taken);
}

ssize_t pwrite(int fd, const void *data, size_t nbytes, off_t offset) {
    int where = place(fd);
    if (where == ELSEWHERE) return find_pwrite()(fd, data, nbytes, offset);
    ssize_t taken = admit(where, nbytes);
    return taken < 0 ? -1 : find_pwrite()(fd, data, (size_t)taken, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int where = place(fd);
    if (where == ELSEWHERE) return find_writev()(fd, parts, count);
    size_t wanted = 0;
    for (int i = 0; i < count; i++) wanted += parts[i].iov_len;
    ssize_t taken = admit(where, wanted);
    if (taken < 0) return -1;
    if ((size_t)taken == wanted) return find_writev()(fd, parts, count);
    /* A short write, as a disk gives that is nearly full: whole parts, then a piece of one. */
    size_t left = (size_t)taken;
    int whole = 0;
    while (whole < count && parts[whole].iov_len <= left) left -= parts[whole++].iov_len;
    if (whole) return find_writev()(fd, parts, whole);
    return find_write()(fd, parts[0].iov_base, left);
}

int fsync(int fd) {
    int where = place(fd);
    if (where == ELSEWHERE) return find_fsync()(fd);
    return sync_refused(where) ? -1 : find_fsync()(fd);
}

int fdatasync(int fd) {
    int where = place(fd);
    if (where == ELSEWHERE) return find_fdatasync()(fd);
    return sync_refused(where) ? -1 : find_fdatasync()(fd);
}

static void note_link(const char *target) {
    if (!control || !below(target, strlen(target))) return;
    control->n_links++;
    wait_while_stalled(strstr(target, control->only) ? MEANT : SPARED);
}

int link(const char *source, const char *target) {
    note_link(target);
    return find_link()(source, target);
}

int linkat(int source_fd, const char *source, int fd, const char *target, int flags) {
    note_link(target);
    return find_linkat()(source_fd, source, fd, target, flags);
}

int close(int fd) {
    struct stat what;
    int refused = control && control->fail_close > 0 && place(fd) == MEANT && fstat(fd, &what) == 0 &&
                  S_ISREG(what.st_mode) && strikes(&control->fail_close);
    int done = find_close()(fd);
    return refused ? fails(EIO) : done;
}

int posix_fallocate(int fd, off_t offset, off_t nbytes) {
    wait_while_stalled(place(fd));
    return find_posix_fallocate()(fd, offset, nbytes);
}
