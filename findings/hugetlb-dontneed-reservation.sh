#!/usr/bin/env bash
# Kernel: on Linux 6.1, MADV_DONTNEED on private hugetlb memory gives its reservation away; on 6.12 it does not.
#
# Versions: Debian's kernels 6.1.176 and 6.12.117 under qemu (6.18 and 7.3 do as 6.12).
# Expected: mmap(2) with MAP_HUGETLB reserves all pages of the mapping, so that no later touch of it fails: what
#   MADV_DONTNEED drops can be faulted in again, as the reservation is the mapping's.
# Happens: on 6.1 a page that was touched and dropped returns to the pool unreserved. Another process takes it,
#   and the first one's next touch finds the pool empty: MADV_POPULATE_WRITE fails with EFAULT, a plain
#   store would get SIGBUS. On 6.12 the reservation comes back with MADV_DONTNEED, and the other's mmap(2)
#   fails with ENOMEM.
# Matters: an allocator that frees by MADV_DONTNEED on a hugetlb heap can be killed at its next allocation on
#   Debian 12's kernel, and cannot on Debian 13's.
# Source: seen; Documentation/mm/hugetlbfs_reserv.rst describes reservations, and not this.
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
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1UL << 20)

static const char *said(long result) { return result < 0 ? strerrorname_np(errno) : "0"; }

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static char *map(void) {
    return mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
}

static long pool(const char *field) {
    char line[200];
    long value = -1;
    FILE *file = fopen("/proc/meminfo", "r");
    while (fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0) value = atol(line + strlen(field));
    fclose(file);
    return value;
}

static void show(const char *kernel, const char *what, const char *result) {
    printf("@%s: %s: %s; free %ld, reserved %ld\n", kernel, what, result, pool("HugePages_Free:"),
           pool("HugePages_Rsvd:"));
    fflush(stdout);
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    uname(&name);
    FILE *file = fopen("/proc/sys/vm/nr_hugepages", "w");
    fputs("4", file);
    fclose(file);
    char *at = map();
    show(name.release, "mmap of all 4 pages", said(at == MAP_FAILED ? -1 : 0));
    memset(at, 1, 8 * MIB);
    show(name.release, "touched", "0");
    show(name.release, "MADV_DONTNEED", said(madvise(at, 8 * MIB, MADV_DONTNEED)));
    int done[2], end[2];
    if (pipe(done) != 0 || pipe(end) != 0) return 1;
    pid_t other = fork();
    if (other == 0) {
        char *own = map();
        if (own != MAP_FAILED) memset(own, 1, 8 * MIB);
        show(name.release, "another process: mmap of 4 pages, touched", own == MAP_FAILED ? said(-1) : "0");
        close(done[1]);
        close(end[1]);
        char byte;
        return read(end[0], &byte, 1) != 0;
    }
    char byte;
    close(done[1]);
    if (read(done[0], &byte, 1) != 0) return 1;
    show(name.release, "MADV_POPULATE_WRITE of the first mapping", said(madvise(at, 8 * MIB, MADV_POPULATE_WRITE)));
    close(end[1]);
    waitpid(other, NULL, 0);
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie linux-image-6.12.117+deb13-cloud-amd64=6.12.117-1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: mmap of all 4 pages: 0; free 4, reserved 4
6.1.0-50-cloud-amd64: touched: 0; free 0, reserved 0
6.1.0-50-cloud-amd64: MADV_DONTNEED: 0; free 4, reserved 0
6.1.0-50-cloud-amd64: another process: mmap of 4 pages, touched: 0; free 0, reserved 0
6.1.0-50-cloud-amd64: MADV_POPULATE_WRITE of the first mapping: EFAULT; free 0, reserved 0
6.12.117+deb13-cloud-amd64: mmap of all 4 pages: 0; free 4, reserved 4
6.12.117+deb13-cloud-amd64: touched: 0; free 0, reserved 0
6.12.117+deb13-cloud-amd64: MADV_DONTNEED: 0; free 4, reserved 4
6.12.117+deb13-cloud-amd64: another process: mmap of 4 pages, touched: ENOMEM; free 4, reserved 4
6.12.117+deb13-cloud-amd64: MADV_POPULATE_WRITE of the first mapping: 0; free 0, reserved 0
SEEN
