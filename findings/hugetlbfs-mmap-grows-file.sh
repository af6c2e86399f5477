#!/usr/bin/env bash
# Kernel: mapping a file of hugetlbfs makes the file longer, even privately; its size obeys other rules too.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu (6.18 does the same).
# Expected: mmap(2) does not change a file. Memory behind its end gives SIGBUS. The size of a file of hugetlbfs
#   is a multiple of its page size: ftruncate(2) to another size fails with EINVAL.
# Happens: a writable mapping past the end, MAP_SHARED or MAP_PRIVATE, sets the size to the mapping's end.
#   A read-only mapping does not. fallocate(2) of 1 byte makes a file of 1 byte. read(2) works, but write(2),
#   splice(2) and sendfile(2) fail with EINVAL.
# Matters: a reader that maps a whole shared segment privately changes the size that others see by fstat(2);
#   a tool cannot tell by EINVAL of ftruncate that a size is impossible; a copy of such a file, or into it,
#   needs read(2) and mmap(2).
# Source: seen; Documentation/admin-guide/mm/hugetlbpage.rst only says that write(2) is not supported.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get cpio dpkg-deb gcc qemu-system-x86_64

cat >"$folder/init.c" <<'C'
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#define MIB (1UL << 20)

static const char *kernel;

static const char *said(long result) { return result < 0 ? strerrorname_np(errno) : "works"; }

static long size(int file) {
    struct stat state;
    fstat(file, &state);
    return state.st_size;
}

static void map(const char *what, int file, int protection, int flags) {
    void *at = mmap(NULL, 4 * MIB, protection, flags, file, 0);
    printf("@%s: mmap of 4 MiB, %s: %s, size %ld\n", kernel, what, said(at == MAP_FAILED ? -1 : 0), size(file));
    munmap(at, 4 * MIB);
}

int main(void) {
    struct utsname name;
    char bytes[64];
    mkdir("/proc", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    uname(&name);
    kernel = name.release;
    FILE *pool = fopen("/proc/sys/vm/nr_hugepages", "w");
    fputs("8", pool);
    fclose(pool);
    for (int private = 0; private < 2; private++) {
        int file = memfd_create("file", MFD_HUGETLB);
        const char *result = said(ftruncate(file, 1));
        printf("@%s: ftruncate to 1: %s, size %ld\n", kernel, result, size(file));
        result = said(fallocate(file, 0, 0, 1));
        printf("@%s: fallocate of 1: %s, size %ld\n", kernel, result, size(file));
        map("PROT_READ, MAP_SHARED", file, PROT_READ, MAP_SHARED);
        if (private) map("PROT_WRITE, MAP_PRIVATE", file, PROT_READ | PROT_WRITE, MAP_PRIVATE);
        else map("PROT_WRITE, MAP_SHARED", file, PROT_READ | PROT_WRITE, MAP_SHARED);
        if (private) continue;
        int other = memfd_create("other", 0), ends[2];
        off_t from = 0;
        if (pipe(ends) != 0) return 1;
        printf("@%s: pread %s", kernel, said(pread(file, bytes, sizeof bytes, 0)));
        printf(", pwrite %s", said(pwrite(file, bytes, sizeof bytes, 0)));
        printf(", sendfile %s", said(sendfile(other, file, &from, sizeof bytes)));
        printf(", splice %s\n", said(splice(file, &from, ends[1], NULL, sizeof bytes, 0)));
    }
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: ftruncate to 1: EINVAL, size 0
6.1.0-50-cloud-amd64: fallocate of 1: works, size 1
6.1.0-50-cloud-amd64: mmap of 4 MiB, PROT_READ, MAP_SHARED: works, size 1
6.1.0-50-cloud-amd64: mmap of 4 MiB, PROT_WRITE, MAP_SHARED: works, size 4194304
6.1.0-50-cloud-amd64: pread works, pwrite EINVAL, sendfile EINVAL, splice EINVAL
6.1.0-50-cloud-amd64: ftruncate to 1: EINVAL, size 0
6.1.0-50-cloud-amd64: fallocate of 1: works, size 1
6.1.0-50-cloud-amd64: mmap of 4 MiB, PROT_READ, MAP_SHARED: works, size 1
6.1.0-50-cloud-amd64: mmap of 4 MiB, PROT_WRITE, MAP_PRIVATE: works, size 4194304
7.3.4+deb13-cloud-amd64: ftruncate to 1: EINVAL, size 0
7.3.4+deb13-cloud-amd64: fallocate of 1: works, size 1
7.3.4+deb13-cloud-amd64: mmap of 4 MiB, PROT_READ, MAP_SHARED: works, size 1
7.3.4+deb13-cloud-amd64: mmap of 4 MiB, PROT_WRITE, MAP_SHARED: works, size 4194304
7.3.4+deb13-cloud-amd64: pread works, pwrite EINVAL, sendfile EINVAL, splice EINVAL
7.3.4+deb13-cloud-amd64: ftruncate to 1: EINVAL, size 0
7.3.4+deb13-cloud-amd64: fallocate of 1: works, size 1
7.3.4+deb13-cloud-amd64: mmap of 4 MiB, PROT_READ, MAP_SHARED: works, size 1
7.3.4+deb13-cloud-amd64: mmap of 4 MiB, PROT_WRITE, MAP_PRIVATE: works, size 4194304
SEEN
