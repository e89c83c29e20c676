/* The entries of an open folder, one fstatat each, without the objects that Python makes of each. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#define st_ctim st_ctimespec
#endif

enum { LONGEST = 1025 }; /* bytes of a name, with the zero that ends it: Darwin has the longest */

static int64_t nanoseconds(struct timespec time) {
    return (int64_t)((uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec);
}

/* Open what a descriptor stands for once more, which stays open itself. 0: failed, errno says why. */
void *open_entries(int folder) {
    int own = fcntl(folder, F_DUPFD_CLOEXEC, 0);
    DIR *opened = own < 0 ? 0 : fdopendir(own);
    if (opened)
        rewinddir(opened);
    else if (own >= 0)
        close(own);
    return opened;
}

/* Read on: at most `most` entries whose names, each ended by a zero, take at most `room` bytes. kinds: the type in the
   mode of each entry, or an errno less than zero. stamps: size, modification, change, inode. used: bytes of the names.
   Returns how many; none at the end; an errno less than zero. */
int64_t read_entries(void *opened, int64_t most, int64_t room, char *names, int64_t *kinds, int64_t *stamps,
                     int64_t *used) {
    int folder = dirfd(opened);
    int64_t count = 0;
    *used = 0;
    while (count < most && room - *used >= LONGEST) {
        errno = 0;
        struct dirent *entry = readdir(opened);
        if (!entry && errno)
            return -errno;
        if (!entry)
            break;
        const char *name = entry->d_name;
        if (!strcmp(name, ".") || !strcmp(name, ".."))
            continue;
        struct stat status;
        int failed = fstatat(folder, name, &status, 0);
        kinds[count] = failed ? -errno : (int64_t)(status.st_mode & S_IFMT);
        if (failed)
            memset(&status, 0, sizeof status);
        int64_t stamp[4] = {status.st_size, nanoseconds(status.st_mtim), nanoseconds(status.st_ctim),
                            (int64_t)status.st_ino};
        memcpy(stamps + 4 * count++, stamp, sizeof stamp);
        size_t length = strlen(name) + 1;
        memcpy(names + *used, name, length);
        *used += (int64_t)length;
    }
    return count;
}

void close_entries(void *opened) { closedir(opened); }
