#!/usr/bin/env bash
# Kernel: MADV_DONTNEED on hugetlb memory rounds its length down, and reports success.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu (6.18 and 6.12 do the same).
# Expected: the length is rounded up to whole huge pages, as madvise(2) says ("the range length is
#   rounded up to a multiple of the underlying Huge TLB page size"); or EINVAL, as munmap(2) gives
#   for the same arguments.
# Happens: the length is rounded down. Less than one page: 0 is returned, and nothing is dropped.
#   1.5 pages: only the first is. Four calls have four rules for a length of 4 KiB: MADV_DONTNEED
#   rounds down, mremap(2) rounds up, munmap(2) and mprotect(2) refuse.
# Matters: an allocator that frees by MADV_DONTNEED, and takes 0 for "is zero now", hands out old
#   data as zeroed memory once its heap is on hugetlb pages; and the pool gets no page back.
# Source: madvise(2) of man-pages 6.03, MADV_DONTNEED; Linux 6.1, "mm,madvise,hugetlb: fix unexpected
#   data loss with MADV_DONTNEED on hugetlbfs" changed up to down.
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
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#define MIB (1UL << 20)

static const char *said(long result) { return result < 0 ? strerrorname_np(errno) : "0"; }

static char *pages(void) {
    char *at = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    if (at == MAP_FAILED) return NULL;
    memset(at, 7, 4 * MIB);
    return at;
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    FILE *pool = fopen("/proc/sys/vm/nr_hugepages", "w");
    fputs("8", pool);
    fclose(pool);
    uname(&name);
    char *at = pages();
    const char *result = said(madvise(at, 4096, MADV_DONTNEED));
    printf("@%s: MADV_DONTNEED of 4 KiB: %s, first byte %d\n", name.release, result, at[0]);
    result = said(madvise(at, 3 * MIB, MADV_DONTNEED));
    printf("@%s: MADV_DONTNEED of 3 MiB: %s, first bytes of the pages %d %d\n", name.release, result, at[0], at[2 * MIB]);
    at = pages();
    result = said(munmap(at, 4096));
    printf("@%s: munmap of 4 KiB: %s\n", name.release, result);
    result = said(mprotect(at, 4096, PROT_READ));
    printf("@%s: mprotect of 4 KiB: %s\n", name.release, result);
    result = said(mremap(at, 4 * MIB, 4096, 0) == MAP_FAILED ? -1 : 0);
    unsigned char resident[512];
    printf("@%s: mremap to 4 KiB: %s, 2 MiB are still mapped: %s\n", name.release, result,
           mincore(at, 2 * MIB, resident) == 0 ? "yes" : "no");
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: MADV_DONTNEED of 4 KiB: 0, first byte 7
6.1.0-50-cloud-amd64: MADV_DONTNEED of 3 MiB: 0, first bytes of the pages 0 7
6.1.0-50-cloud-amd64: munmap of 4 KiB: EINVAL
6.1.0-50-cloud-amd64: mprotect of 4 KiB: EINVAL
6.1.0-50-cloud-amd64: mremap to 4 KiB: 0, 2 MiB are still mapped: yes
7.3.4+deb13-cloud-amd64: MADV_DONTNEED of 4 KiB: 0, first byte 7
7.3.4+deb13-cloud-amd64: MADV_DONTNEED of 3 MiB: 0, first bytes of the pages 0 7
7.3.4+deb13-cloud-amd64: munmap of 4 KiB: EINVAL
7.3.4+deb13-cloud-amd64: mprotect of 4 KiB: EINVAL
7.3.4+deb13-cloud-amd64: mremap to 4 KiB: 0, 2 MiB are still mapped: yes
SEEN
