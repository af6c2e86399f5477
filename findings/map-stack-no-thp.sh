#!/usr/bin/env bash
# Kernel: MAP_STACK forbids transparent huge pages.
#
# Versions: Debian's kernels 6.1.176 and 6.12.117 under qemu (6.18, 7.2 and 7.3 do as 6.12).
# Expected: nothing. mmap(2) calls the flag "a no-op on Linux", and it is set for portability.
# Happens: from Linux 6.7 on, mmap(2) with MAP_STACK marks the mapping as MADV_NOHUGEPAGE does ("nh" in
#   smaps). No fault makes it huge, not even with THP `always`, and MADV_COLLAPSE fails with EINVAL.
#   MADV_HUGEPAGE lifts the mark. Before 6.7 the flag does nothing.
# Matters: stacks of threads and coroutines, and heaps that runtimes map with MAP_STACK, lose their
#   huge pages by an upgrade of the kernel. The same EINVAL means "no whole block" elsewhere.
# Source: mmap(2) of man-pages 6.03, MAP_STACK; Linux 6.7, "mm: mmap: map MAP_STACK to VM_NOHUGEPAGE".
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

/* A line of the smaps of the mapping at an address. */
static void smaps(const char *at, const char *field, char *line) {
    unsigned long start, end;
    int inside = 0;
    FILE *file = fopen("/proc/self/smaps", "r");
    while (fgets(line, 400, file)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) inside = start <= (unsigned long)at && (unsigned long)at < end;
        if (inside && strncmp(line, field, strlen(field)) == 0) break;
    }
    fclose(file);
}

static void try(const char *kernel, int flag, const char *name) {
    char line[400];
    char *at = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flag, -1, 0);
    char *block = (char *)(((unsigned long)at + 2 * MIB - 1) & -(2 * MIB));
    memset(at, 1, 8 * MIB);
    smaps(at, "VmFlags", line);
    int marked = strstr(line, " nh") != NULL;
    smaps(at, "AnonHugePages", line);
    int huge = atoi(line + 14) > 0;
    const char *first = said(madvise(block, 2 * MIB, MADV_COLLAPSE));
    const char *advised = said(madvise(at, 8 * MIB, MADV_HUGEPAGE));
    const char *second = said(madvise(block, 2 * MIB, MADV_COLLAPSE));
    printf("@%s: %s: nh %s, huge when touched: %s, MADV_COLLAPSE %s, MADV_HUGEPAGE %s, MADV_COLLAPSE again %s\n", kernel,
           name, marked ? "yes" : "no", huge ? "yes" : "no", first, advised, second);
    munmap(at, 8 * MIB);
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mkdir("/sys", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    FILE *mode = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "w");
    fputs("always", mode);
    fclose(mode);
    uname(&name);
    try(name.release, 0, "plain");
    try(name.release, MAP_STACK, "MAP_STACK");
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie linux-image-6.12.117+deb13-cloud-amd64=6.12.117-1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: plain: nh no, huge when touched: yes, MADV_COLLAPSE 0, MADV_HUGEPAGE 0, MADV_COLLAPSE again 0
6.1.0-50-cloud-amd64: MAP_STACK: nh no, huge when touched: yes, MADV_COLLAPSE 0, MADV_HUGEPAGE 0, MADV_COLLAPSE again 0
6.12.117+deb13-cloud-amd64: plain: nh no, huge when touched: yes, MADV_COLLAPSE 0, MADV_HUGEPAGE 0, MADV_COLLAPSE again 0
6.12.117+deb13-cloud-amd64: MAP_STACK: nh yes, huge when touched: no, MADV_COLLAPSE EINVAL, MADV_HUGEPAGE 0, MADV_COLLAPSE again 0
SEEN
