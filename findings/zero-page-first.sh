#!/usr/bin/env bash
# Kernel: MADV_COLLAPSE reports success on the huge zero page, and a later write may split it.
#
# Versions: Debian's kernels 6.12.117 and 7.3.4 under qemu (6.1 does as 6.12, 6.18 as 7.3).
# Expected: MADV_HUGEPAGE memory that is read before it is written (a scan of a new table,
#   MADV_POPULATE_READ) becomes huge by its first write, or at the latest by MADV_COLLAPSE that returns 0.
# Happens: the read maps the huge zero page. MADV_COLLAPSE then returns 0 and allocates nothing, since a
#   huge page is mapped already. On 6.12 the first write to the block splits this mapping to base pages,
#   and all later writes fault base pages. On 7.3 the first write allocates a huge page.
# Matters: on kernels before 6.13 the order of reads and writes decides about huge pages, and 0 from
#   MADV_COLLAPSE proves neither memory nor huge pages: ask again after the first write, or read smaps.
# Source: seen; man-pages describe neither case. Linux 6.13 added the allocation on write.
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
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static const char *said(long result) { return result < 0 ? strerrorname_np(errno) : "0"; }

static long smaps(const char *at, const char *field) {
    unsigned long start, end;
    int inside = 0;
    char line[400];
    FILE *file = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) inside = start <= (unsigned long)at && (unsigned long)at < end;
        if (inside && strncmp(line, field, strlen(field)) == 0) break;
    }
    fclose(file);
    return atol(line + strlen(field));
}

static void try(const char *kernel, int reads) {
    char *at = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *block = (char *)(((unsigned long)at + 2 * MIB - 1) & -(2 * MIB));
    madvise(block, 2 * MIB, MADV_HUGEPAGE);
    if (reads) {
        (void)*(volatile char *)block;
        const char *result = said(madvise(block, 2 * MIB, MADV_COLLAPSE));
        printf("@%s: read, collapsed: MADV_COLLAPSE %s, resident %ld KiB, huge %ld KiB\n", kernel, result,
               smaps(block, "Rss:"), smaps(block, "AnonHugePages:"));
    }
    for (unsigned long i = 0; i < 2 * MIB; i += 4096) block[i] = 1;
    printf("@%s: %s: resident %ld KiB, huge %ld KiB\n", kernel, reads ? "then all written" : "written alone",
           smaps(block, "Rss:"), smaps(block, "AnonHugePages:"));
    munmap(at, 4 * MIB);
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mkdir("/sys", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    FILE *mode = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "w");
    fputs("madvise", mode);
    fclose(mode);
    uname(&name);
    try(name.release, 0);
    try(name.release, 1);
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot trixie linux-image-6.12.117+deb13-cloud-amd64=6.12.117-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.12.117+deb13-cloud-amd64: written alone: resident 2048 KiB, huge 2048 KiB
6.12.117+deb13-cloud-amd64: read, collapsed: MADV_COLLAPSE 0, resident 0 KiB, huge 0 KiB
6.12.117+deb13-cloud-amd64: then all written: resident 2048 KiB, huge 0 KiB
7.3.4+deb13-cloud-amd64: written alone: resident 2048 KiB, huge 2048 KiB
7.3.4+deb13-cloud-amd64: read, collapsed: MADV_COLLAPSE 0, resident 0 KiB, huge 0 KiB
7.3.4+deb13-cloud-amd64: then all written: resident 2048 KiB, huge 2048 KiB
SEEN
