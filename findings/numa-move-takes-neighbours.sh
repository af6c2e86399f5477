#!/usr/bin/env bash
# Kernel: moving one base page of a THP to another node moves 2 MiB, and move_pages(2) reports what is no more.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu with two nodes (6.12 does the same).
# Expected: move_pages(2) and mbind(2) with MPOL_MF_MOVE move the pages that were named; a status says on which
#   node a page is. mbind(2) of 4 KiB, whose policy holds for 4 KiB, splits the huge page and moves 4 KiB.
# Happens: both move the whole huge page, 511 pages that were not named. move_pages(2) keeps it huge, mbind(2)
#   leaves it mapped by base pages. A list that names two pages of one huge page with two nodes returns 0 and
#   the statuses 1 and 0, and both pages end on node 0: the huge page moved twice.
# Matters: a balancer that places pages one by one by their access counts (or a per-thread first page in a shared
#   heap) moves its neighbours' data back and forth as soon as the heap is huge, and its statuses agree.
# Source: move_pages(2) and mbind(2) of man-pages 6.03 do not mention huge pages in this; seen.
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
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#define MIB (1UL << 20)
#define PAGES 512
enum { MPOL_BIND = 2, MPOL_MF_MOVE = 2 };

static const char *said(long result) { return result < 0 ? strerrorname_np(errno) : "0"; }

static int on_node(char *block, int node) {
    void *pages[PAGES];
    int states[PAGES], count = 0;
    for (int i = 0; i < PAGES; i++) pages[i] = block + 4096 * i;
    syscall(SYS_move_pages, 0, PAGES, pages, NULL, states, 0);
    for (int i = 0; i < PAGES; i++) count += states[i] == node;
    return count;
}

static long huge(void) {
    char line[200];
    long huge = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (fgets(line, sizeof line, file)) sscanf(line, "AnonHugePages: %ld kB", &huge);
    fclose(file);
    return huge;
}

/* A huge page, on node 0. */
static char *block(void) {
    char *at = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    at = (char *)(((unsigned long)at + 2 * MIB - 1) & -(2 * MIB));
    madvise(at, 2 * MIB, MADV_HUGEPAGE);
    memset(at, 1, 2 * MIB);
    return at;
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
    unsigned long node0 = 1, node1 = 2;
    syscall(SYS_set_mempolicy, MPOL_BIND, &node0, 64);

    char *at = block();
    printf("@%s: a block of 512 pages: %d on node 0, huge %ld KiB\n", name.release, on_node(at, 0), huge());
    void *pages[2] = {at + 100 * 4096};
    int nodes[2] = {1}, states[2] = {-1, -1};
    const char *result = said(syscall(SYS_move_pages, 0, 1, pages, nodes, states, MPOL_MF_MOVE));
    printf("@%s: move_pages of 1 page to node 1: %s, status %d; %d on node 1, huge %ld KiB\n", name.release, result,
           states[0], on_node(at, 1), huge());
    munmap(at, 2 * MIB);

    at = block();
    result = said(syscall(SYS_mbind, at + 100 * 4096, 4096, MPOL_BIND, &node1, 64, MPOL_MF_MOVE));
    printf("@%s: mbind of 4 KiB to node 1: %s; %d on node 1, huge %ld KiB\n", name.release, result, on_node(at, 1), huge());
    munmap(at, 2 * MIB);

    at = block();
    pages[0] = at, pages[1] = at + 4096, nodes[0] = 1, nodes[1] = 0;
    result = said(syscall(SYS_move_pages, 0, 2, pages, nodes, states, MPOL_MF_MOVE));
    printf("@%s: move_pages of page 0 to node 1, page 1 to node 0: %s, statuses %d %d; %d on node 1\n", name.release,
           result, states[0], states[1], on_node(at, 1));
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
machine=(-smp 2 -object memory-backend-ram,id=m0,size=384M -object memory-backend-ram,id=m1,size=384M
    -numa node,memdev=m0,cpus=0 -numa node,memdev=m1,cpus=1)
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: a block of 512 pages: 512 on node 0, huge 2048 KiB
6.1.0-50-cloud-amd64: move_pages of 1 page to node 1: 0, status 1; 512 on node 1, huge 2048 KiB
6.1.0-50-cloud-amd64: mbind of 4 KiB to node 1: 0; 512 on node 1, huge 0 KiB
6.1.0-50-cloud-amd64: move_pages of page 0 to node 1, page 1 to node 0: 0, statuses 1 0; 0 on node 1
7.3.4+deb13-cloud-amd64: a block of 512 pages: 512 on node 0, huge 2048 KiB
7.3.4+deb13-cloud-amd64: move_pages of 1 page to node 1: 0, status 1; 512 on node 1, huge 2048 KiB
7.3.4+deb13-cloud-amd64: mbind of 4 KiB to node 1: 0; 512 on node 1, huge 0 KiB
7.3.4+deb13-cloud-amd64: move_pages of page 0 to node 1, page 1 to node 0: 0, statuses 1 0; 0 on node 1
SEEN
