#!/usr/bin/env bash
# Kernel: MADV_COLD and MADV_PAGEOUT of one base page split its huge page, also where nothing can be paged out.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu, without swap (6.12 and 6.18 do the same).
# Expected: MADV_COLD is a hint about reclaim order, without any effect on the mapping; MADV_PAGEOUT without swap has
#   nothing to do for anonymous memory. Neither changes huge pages.
# Happens: both return 0 and split the huge page into 512 base pages at once (thp_split_page in /proc/vmstat), as
#   MADV_FREE does. MADV_PAGEOUT frees nothing. MADV_WILLNEED and MADV_POPULATE_WRITE of the same base page
#   leave it whole.
# Matters: a daemon that hints cold memory by process_madvise(2) in ranges of base pages takes the huge pages apart on
#   a host without swap, for no gain. It is also a way to split a THP without any change of its data.
# Source: seen; madvise(2) of man-pages 6.03 does not mention it.
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

static long number(const char *path, const char *field) {
    char line[400];
    long value = 0;
    FILE *file = fopen(path, "r");
    while (fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0) value = atol(line + strlen(field));
    fclose(file);
    return value;
}

static void try(const char *kernel, int advice, const char *name) {
    char *all = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *at = (char *)(((unsigned long)all + 2 * MIB - 1) & -(2 * MIB));
    madvise(at, 2 * MIB, MADV_HUGEPAGE);
    memset(at, 1, 2 * MIB);
    long before = number("/proc/self/smaps_rollup", "AnonHugePages:"), splits = number("/proc/vmstat", "thp_split_page ");
    const char *result = said(madvise(at + 4096, 4096, advice));
    printf("@%s: %s of 4 KiB: %s; huge before %ld KiB, after %ld KiB, pages split %ld\n", kernel, name, result, before,
           number("/proc/self/smaps_rollup", "AnonHugePages:"), number("/proc/vmstat", "thp_split_page ") - splits);
    munmap(all, 4 * MIB);
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mkdir("/sys", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    uname(&name);
    FILE *mode = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "w");
    fputs("madvise", mode);
    fclose(mode);
    try(name.release, MADV_WILLNEED, "MADV_WILLNEED");
    try(name.release, MADV_COLD, "MADV_COLD");
    try(name.release, MADV_PAGEOUT, "MADV_PAGEOUT");
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: MADV_WILLNEED of 4 KiB: 0; huge before 2048 KiB, after 2048 KiB, pages split 0
6.1.0-50-cloud-amd64: MADV_COLD of 4 KiB: 0; huge before 2048 KiB, after 0 KiB, pages split 1
6.1.0-50-cloud-amd64: MADV_PAGEOUT of 4 KiB: 0; huge before 2048 KiB, after 0 KiB, pages split 1
7.3.4+deb13-cloud-amd64: MADV_WILLNEED of 4 KiB: 0; huge before 2048 KiB, after 2048 KiB, pages split 0
7.3.4+deb13-cloud-amd64: MADV_COLD of 4 KiB: 0; huge before 2048 KiB, after 0 KiB, pages split 1
7.3.4+deb13-cloud-amd64: MADV_PAGEOUT of 4 KiB: 0; huge before 2048 KiB, after 0 KiB, pages split 1
SEEN
