#!/usr/bin/env bash
# liburing: a fixed buffer of 4 KiB in a huge page is charged 2 MiB of RLIMIT_MEMLOCK.
#
# Versions: liburing 2.3 (Debian 12) on Debian's kernel 7.3.4 under qemu (6.1 does the same).
# Expected: io_uring_register_buffers(3) of a buffer of 4 KiB needs 4 KiB of RLIMIT_MEMLOCK: the manual page
#   says that buffers "will be charged against the user's RLIMIT_MEMLOCK" and speaks of their size.
# Happens: the kernel charges the whole huge page for its first byte, transparent or hugetlb. With a limit
#   of 1 MiB the same registration that works on base pages fails with ENOMEM.
# Matters: a program with fixed buffers that fits its limit (8 MiB by default since Linux 5.16) can fail once
#   its heap is on huge pages. Buffers side by side in one huge page are charged once for a ring; buffers
#   strewn over N huge pages cost N times 2 MiB. With CAP_IPC_LOCK nothing is charged.
# Source: io_uring_register_buffers(3); seen.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get cpio dpkg-deb gcc qemu-system-x86_64

cat >"$folder/init.c" <<'C'
#define _GNU_SOURCE
#include <errno.h>
#include <liburing.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1UL << 20)

/* Registers a buffer in memory of that kind, as a user of its own with that limit. */
static void try(const char *what, int flags, int advice, size_t bytes, size_t limit) {
    static int user = 1000;
    user++;
    if (fork() == 0) {
        char *at = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
        at = (char *)(((unsigned long)at + 2 * MIB - 1) & -(2 * MIB));
        if (flags == 0) madvise(at, 2 * MIB, advice);
        memset(at, 1, 2 * MIB);
        struct io_uring ring;
        struct iovec buffer = {at, bytes};
        struct rlimit memlock = {limit, limit};
        setrlimit(RLIMIT_MEMLOCK, &memlock);
        if (setgid(user) != 0 || setuid(user) != 0 || io_uring_queue_init(4, &ring, 0) != 0) _exit(1);
        int result = io_uring_register_buffers(&ring, &buffer, 1);
        printf("@%s, buffer of %zu KiB, RLIMIT_MEMLOCK %zu KiB: %s\n", what, bytes / 1024, limit / 1024,
               result < 0 ? strerrorname_np(-result) : "0");
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
}

int main(void) {
    mkdir("/proc", 0700);
    mkdir("/sys", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "w");
    fputs("madvise", file);
    fclose(file);
    file = fopen("/proc/sys/vm/nr_hugepages", "w");
    fputs("2", file);
    fclose(file);
    try("base pages", 0, MADV_NOHUGEPAGE, MIB / 2, MIB);
    try("transparent huge page", 0, MADV_HUGEPAGE, 4096, MIB);
    try("hugetlb page", MAP_HUGETLB, 0, 4096, MIB);
    try("transparent huge page", 0, MADV_HUGEPAGE, 4096, 3 * MIB);
    reboot(RB_AUTOBOOT);
}
C
fetch bookworm liburing-dev=2.3-3
gcc -O1 -w -static -I"$folder/bookworm/usr/include" -o "$folder/init" "$folder/init.c" \
    "$(find "$folder/bookworm" -name liburing.a)" || skip "gcc builds no static program"
boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1 | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
base pages, buffer of 512 KiB, RLIMIT_MEMLOCK 1024 KiB: 0
transparent huge page, buffer of 4 KiB, RLIMIT_MEMLOCK 1024 KiB: ENOMEM
hugetlb page, buffer of 4 KiB, RLIMIT_MEMLOCK 1024 KiB: ENOMEM
transparent huge page, buffer of 4 KiB, RLIMIT_MEMLOCK 3072 KiB: 0
SEEN
