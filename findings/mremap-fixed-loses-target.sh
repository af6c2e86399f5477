#!/usr/bin/env bash
# Kernel: an mremap(2) to a fixed address that fails with EFAULT has unmapped what was there, on Linux 6.1.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu (6.18 does as 7.3).
# Expected: mremap(2), MREMAP_FIXED: what is mapped at the new address is unmapped, as a part of the move. Of a call that
#   fails one expects that nothing has changed.
# Happens: on 6.1 the target is unmapped first, and the old range is checked afterwards. A range of two mappings, or with a
#   hole, gives EFAULT: the source stays, and what was at the target is lost. On 7.3 the range is checked first; and a
#   range of several mappings is moved where its size stays, also one with a hole.
# Matters: who moves memory over memory in use (a garbage collector, a growing table, a library that advises memory and so
#   splits its mappings) cannot fall back to a copy after EFAULT: the target is a hole by then.
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
static const char *const ranges[] = {"one mapping", "two mappings", "with a hole"};

static const char *at(char *address, char content) {
    unsigned char resident;
    if (mincore(address, PAGE, &resident)) return "unmapped";
    return *address == content ? "as before" : "replaced";
}

static void move(int range, unsigned long pages) {
    struct utsname name;
    uname(&name);
    char *from = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mmap(NULL, 8 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *to = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(from, 1, 8 * PAGE);
    memset(to, 2, 8 * PAGE);
    if (range == TWO) mprotect(from + PAGE, PAGE, PROT_READ);
    if (range == HOLE) munmap(from + PAGE, PAGE);
    char *now = mremap(from, 4 * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    int error = errno;
    printf("@%s: %s, 4 to %lu pages: %s; source %s, target %s\n", name.release, ranges[range], pages,
           now == MAP_FAILED ? strerrorname_np(error) : "moved", at(from, 1), at(to, 2));
}

int main(void) {
    for (int range = ONE; range <= HOLE; range++) {
        move(range, 4);
        move(range, 6);
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
6.1.0-50-cloud-amd64: one mapping, 4 to 4 pages: moved; source unmapped, target replaced
6.1.0-50-cloud-amd64: one mapping, 4 to 6 pages: moved; source unmapped, target replaced
6.1.0-50-cloud-amd64: two mappings, 4 to 4 pages: EFAULT; source as before, target unmapped
6.1.0-50-cloud-amd64: two mappings, 4 to 6 pages: EFAULT; source as before, target unmapped
6.1.0-50-cloud-amd64: with a hole, 4 to 4 pages: EFAULT; source as before, target unmapped
6.1.0-50-cloud-amd64: with a hole, 4 to 6 pages: EFAULT; source as before, target unmapped
7.3.4+deb13-cloud-amd64: one mapping, 4 to 4 pages: moved; source unmapped, target replaced
7.3.4+deb13-cloud-amd64: one mapping, 4 to 6 pages: moved; source unmapped, target replaced
7.3.4+deb13-cloud-amd64: two mappings, 4 to 4 pages: moved; source unmapped, target replaced
7.3.4+deb13-cloud-amd64: two mappings, 4 to 6 pages: EFAULT; source as before, target as before
7.3.4+deb13-cloud-amd64: with a hole, 4 to 4 pages: moved; source unmapped, target replaced
7.3.4+deb13-cloud-amd64: with a hole, 4 to 6 pages: EFAULT; source as before, target as before
SEEN
