#!/usr/bin/env bash
# Kernel: a block of huge pages that realloc grows by mremap(2) loses all of them, but on new kernels for multiples of 2 MiB.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu (6.12 and 6.18 do as 7.3).
# Expected: mremap(2) moves huge pages as they are, by their page table entries; growing by one page changes that page.
# Happens: if the mapping cannot grow in place, the kernel picks an address for the new length, aligned to 4 KiB
#   and right below another mapping: all huge pages lose their huge mapping, and cannot get it back where
#   they are. Only for a multiple of 2 MiB does 7.3 pick an aligned address, and all stay huge; 6.1 does not.
# Matters: glibc's realloc of large blocks is such an mremap(2), with lengths of 4 KiB granularity (its header
#   of 16 bytes makes a power of two one page longer). A buffer that doubles by realloc loses them each time.
#   Seen on 6.18: glibc 2.41 with glibc.malloc.hugetlb=1, realloc of 64 MiB to 72: 62 MiB huge before, 6 after.
# Source: seen. glibc: mremap_chunk in malloc.c.
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

static long huge(void) {
    char line[200];
    long huge = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (fgets(line, sizeof line, file)) sscanf(line, "AnonHugePages: %ld kB", &huge);
    fclose(file);
    return huge;
}

static void grow(const char *kernel, size_t length) {
    char *all = mmap(NULL, 16 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *at = (char *)(((unsigned long)all + 2 * MIB - 1) & -(2 * MIB));
    /* What lies behind stays: the block cannot grow in place. */
    mprotect(at, 8 * MIB, PROT_READ | PROT_WRITE);
    madvise(at, 8 * MIB, MADV_HUGEPAGE);
    memset(at, 1, 8 * MIB);
    long before = huge();
    char *moved = mremap(at, 8 * MIB, length, MREMAP_MAYMOVE);
    printf("@%s: mremap of 8192 KiB to %zu: %s, %s; huge before %ld KiB, after %ld KiB\n", kernel, length / 1024,
           said(moved == MAP_FAILED ? -1 : 0), (unsigned long)moved % (2 * MIB) == 0 ? "aligned" : "not aligned", before, huge());
    munmap(moved, length);
    munmap(all, 16 * MIB);
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
    grow(name.release, 16 * MIB);
    grow(name.release, 8 * MIB + 4096);
    grow(name.release, 16 * MIB + 4096);
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: mremap of 8192 KiB to 16384: 0, not aligned; huge before 8192 KiB, after 0 KiB
6.1.0-50-cloud-amd64: mremap of 8192 KiB to 8196: 0, not aligned; huge before 8192 KiB, after 0 KiB
6.1.0-50-cloud-amd64: mremap of 8192 KiB to 16388: 0, not aligned; huge before 8192 KiB, after 0 KiB
7.3.4+deb13-cloud-amd64: mremap of 8192 KiB to 16384: 0, aligned; huge before 8192 KiB, after 8192 KiB
7.3.4+deb13-cloud-amd64: mremap of 8192 KiB to 8196: 0, not aligned; huge before 8192 KiB, after 0 KiB
7.3.4+deb13-cloud-amd64: mremap of 8192 KiB to 16388: 0, not aligned; huge before 8192 KiB, after 0 KiB
SEEN
