#!/usr/bin/env bash
# Kernel: mremap(2) to the same or a smaller size succeeds over several mappings, and over a hole.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu (6.18 does the same).
# Expected: mremap(2), EFAULT: an address of the old range is invalid, or the mappings that cover it are of different
#   types. So a call that changes nothing (old size = new size) tells whether a range is one mapping.
# Happens: such a call returns the address, whatever lies behind the first page: another mapping, or nothing. The same
#   for a smaller size. Only growth is checked, which changes the mapping if it is one.
# Matters: a library that moves or grows the memory of its program, or asks whether another one has split it, has no
#   call that tells without a change: it reads /proc/self/maps, or asks by PROCMAP_QUERY (Linux 6.11).
# Source: seen; mremap(2) of man-pages 6.9.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get cpio dpkg-deb gcc qemu-system-x86_64

cat >"$folder/init.c" <<'C'
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/reboot.h>
#include <sys/utsname.h>

#define PAGE 4096UL

enum { ONE, TWO, HOLE };
static const char *const ranges[] = {"one mapping", "two mappings", "a hole behind a page"};

static const char *resized(int range, unsigned long pages) {
    char *at = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (range == TWO) mprotect(at + PAGE, PAGE, PROT_READ);
    if (range == HOLE) munmap(at + PAGE, PAGE);
    char *now = mremap(at, 2 * PAGE, pages * PAGE, MREMAP_MAYMOVE);
    return now == MAP_FAILED ? strerrorname_np(errno) : now == at ? "the same address" : "another address";
}

int main(void) {
    struct utsname name;
    uname(&name);
    for (int range = ONE; range <= HOLE; range++)
        printf("@%s: %s: 2 to 2 pages: %s; 2 to 1: %s; 2 to 3: %s\n", name.release, ranges[range], resized(range, 2),
               resized(range, 1), resized(range, 3));
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: one mapping: 2 to 2 pages: the same address; 2 to 1: the same address; 2 to 3: another address
6.1.0-50-cloud-amd64: two mappings: 2 to 2 pages: the same address; 2 to 1: the same address; 2 to 3: EFAULT
6.1.0-50-cloud-amd64: a hole behind a page: 2 to 2 pages: the same address; 2 to 1: the same address; 2 to 3: EFAULT
7.3.4+deb13-cloud-amd64: one mapping: 2 to 2 pages: the same address; 2 to 1: the same address; 2 to 3: another address
7.3.4+deb13-cloud-amd64: two mappings: 2 to 2 pages: the same address; 2 to 1: the same address; 2 to 3: EFAULT
7.3.4+deb13-cloud-amd64: a hole behind a page: 2 to 2 pages: the same address; 2 to 1: the same address; 2 to 3: EFAULT
SEEN
