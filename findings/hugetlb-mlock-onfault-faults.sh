#!/usr/bin/env bash
# Kernel: MLOCK_ONFAULT and MCL_ONFAULT fault in all hugetlb memory at once, which counts as nothing locked.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu (6.12 and 6.18 do the same).
# Expected: mlock2(2) with MLOCK_ONFAULT, and mlockall(2) with MCL_FUTURE | MCL_ONFAULT, lock pages "when they are
#   faulted in" and touch none; locked memory appears in VmLck and is charged to RLIMIT_MEMLOCK.
# Happens: hugetlb mappings never get the lock flags, so "on fault" is lost and the call populates all of them:
#   it takes every page from the pool. VmLck stays 0. The limit is compared with the length of one call
#   (ENOMEM above it), but nothing is charged, so many small calls "lock" any amount.
# Matters: a sparse hugetlb reservation (a heap that maps its pool at the start) becomes full and resident because
#   the program calls mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT), which is meant to avoid just that.
# Source: mlock2(2), which names no exception; seen.
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
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1UL << 20)

static long number(const char *path, const char *field) {
    char line[400];
    long value = -1;
    FILE *file = fopen(path, "r");
    while (fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0) value = atol(line + strlen(field));
    fclose(file);
    return value;
}

static char *map(int flags) {
    return mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

static const char *said(long result) { return result < 0 ? strerrorname_np(errno) : "0"; }

static void show(const char *kernel, const char *what, const char *result) {
    printf("@%s: %s: %s; pool pages in use %ld, VmLck %ld KiB\n", kernel, what, result,
           number("/proc/meminfo", "HugePages_Total:") - number("/proc/meminfo", "HugePages_Free:"),
           number("/proc/self/status", "VmLck:"));
}

int main(void) {
    struct utsname name;
    struct rlimit mib = {MIB, MIB};
    mkdir("/proc", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    uname(&name);
    FILE *pool = fopen("/proc/sys/vm/nr_hugepages", "w");
    fputs("16", pool);
    fclose(pool);

    char *hugetlb = map(MAP_HUGETLB), *base = map(0);
    show(name.release, "mapped 4 hugetlb pages", "0");
    show(name.release, "mlock2(8 MiB of base pages, MLOCK_ONFAULT)", said(mlock2(base, 8 * MIB, MLOCK_ONFAULT)));
    munmap(base, 8 * MIB);
    show(name.release, "mlock2(4 hugetlb pages, MLOCK_ONFAULT)", said(mlock2(hugetlb, 8 * MIB, MLOCK_ONFAULT)));
    munmap(hugetlb, 8 * MIB);
    mlockall(MCL_FUTURE | MCL_ONFAULT);
    show(name.release, "mlockall(MCL_FUTURE | MCL_ONFAULT), no page mapped", "0");
    hugetlb = map(MAP_HUGETLB);
    show(name.release, "then mapped 4 hugetlb pages", said(hugetlb == MAP_FAILED ? -1 : 0));
    munlockall();
    munmap(hugetlb, 8 * MIB);

    if (fork() == 0) {
        setrlimit(RLIMIT_MEMLOCK, &mib);
        if (setgid(1000) != 0 || setuid(1000) != 0) return 1;
        hugetlb = map(MAP_HUGETLB);
        show(name.release, "a user with RLIMIT_MEMLOCK of 1 MiB: mlock(8 MiB)", said(mlock(hugetlb, 8 * MIB)));
        int failed = 0;
        for (int i = 0; i < 8; i++) failed += mlock(hugetlb + i * MIB, MIB) != 0;
        show(name.release, "the same user: 8 times mlock(1 MiB)", failed ? "failed" : "0");
        return 0;
    }
    wait(NULL);
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
{
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
} | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
6.1.0-50-cloud-amd64: mapped 4 hugetlb pages: 0; pool pages in use 0, VmLck 0 KiB
6.1.0-50-cloud-amd64: mlock2(8 MiB of base pages, MLOCK_ONFAULT): 0; pool pages in use 0, VmLck 8192 KiB
6.1.0-50-cloud-amd64: mlock2(4 hugetlb pages, MLOCK_ONFAULT): 0; pool pages in use 4, VmLck 0 KiB
6.1.0-50-cloud-amd64: mlockall(MCL_FUTURE | MCL_ONFAULT), no page mapped: 0; pool pages in use 0, VmLck 0 KiB
6.1.0-50-cloud-amd64: then mapped 4 hugetlb pages: 0; pool pages in use 4, VmLck 0 KiB
6.1.0-50-cloud-amd64: a user with RLIMIT_MEMLOCK of 1 MiB: mlock(8 MiB): ENOMEM; pool pages in use 0, VmLck 0 KiB
6.1.0-50-cloud-amd64: the same user: 8 times mlock(1 MiB): 0; pool pages in use 4, VmLck 0 KiB
7.3.4+deb13-cloud-amd64: mapped 4 hugetlb pages: 0; pool pages in use 0, VmLck 0 KiB
7.3.4+deb13-cloud-amd64: mlock2(8 MiB of base pages, MLOCK_ONFAULT): 0; pool pages in use 0, VmLck 8192 KiB
7.3.4+deb13-cloud-amd64: mlock2(4 hugetlb pages, MLOCK_ONFAULT): 0; pool pages in use 4, VmLck 0 KiB
7.3.4+deb13-cloud-amd64: mlockall(MCL_FUTURE | MCL_ONFAULT), no page mapped: 0; pool pages in use 0, VmLck 0 KiB
7.3.4+deb13-cloud-amd64: then mapped 4 hugetlb pages: 0; pool pages in use 4, VmLck 0 KiB
7.3.4+deb13-cloud-amd64: a user with RLIMIT_MEMLOCK of 1 MiB: mlock(8 MiB): ENOMEM; pool pages in use 0, VmLck 0 KiB
7.3.4+deb13-cloud-amd64: the same user: 8 times mlock(1 MiB): 0; pool pages in use 4, VmLck 0 KiB
SEEN
