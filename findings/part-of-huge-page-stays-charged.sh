#!/usr/bin/env bash
# Kernel: memory that MADV_DONTNEED drops of a huge page leaves RSS and memory.stat, but not memory.current.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu, control groups v2 (6.18 with v1 does the same).
# Expected: madvise(2): the resident set size of the calling process will be immediately reduced; the pages are freed.
#   So a control group has that memory again.
# Happens: of 32 huge pages three quarters each are dropped. RSS, and `anon` in memory.stat, fall by 48 MiB;
#   memory.current stays: a huge page is charged until it is split, which the kernel puts off until the group, or the
#   host, is short of memory. MADV_COLD of a page of each splits them, and then the same call frees the memory at once.
# Matters: allocators that give back parts of huge pages (jemalloc, mimalloc, Go) look small by RSS, and full to
#   whoever watches memory.current: autoscalers, kubelet's eviction, memory.peak.
# Source: seen; madvise(2) of man-pages 6.9; "memory.current" in the kernel's admin-guide/cgroup-v2.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get cpio dpkg-deb gcc qemu-system-x86_64

cat >"$folder/init.c" <<'C'
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/utsname.h>

#define MIB (1UL << 20)
enum { PAGES = 32 };

static void put(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    fputs(text, file);
    fclose(file);
}

/* A number of a file, in units of `unit` bytes, rounded to 8 MiB. */
static long mib(const char *path, const char *field, unsigned long unit) {
    char line[400];
    long value = 0;
    FILE *file = fopen(path, "r");
    while (fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0) value = atol(line + strlen(field));
    fclose(file);
    return (value * unit + 4 * MIB) / (8 * MIB) * 8;
}

static void say(const char *kernel, const char *when) {
    printf("@%s: %s: RSS %ld, anon %ld, memory.current %ld MiB\n", kernel, when, mib("/proc/self/status", "RssAnon:", 1024),
           mib("/group/a/memory.stat", "anon ", 1), mib("/group/a/memory.current", "", 1));
}

static void drop(char *at, int splits) {
    for (int page = 0; page < PAGES; page++) {
        char *huge = at + page * 2 * MIB;
        if (splits) madvise(huge, 4096, MADV_COLD);
        madvise(huge, 3 * MIB / 2, MADV_DONTNEED);
    }
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mkdir("/sys", 0700);
    mkdir("/group", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    mount("none", "/group", "cgroup2", 0, NULL);
    uname(&name);
    put("/sys/kernel/mm/transparent_hugepage/enabled", "madvise");
    put("/group/cgroup.subtree_control", "+memory");
    mkdir("/group/a", 0700);
    put("/group/a/cgroup.procs", "0");
    for (int splits = 0; splits < 2; splits++) {
        char *all = mmap(NULL, (PAGES + 1) * 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char *at = (char *)(((unsigned long)all + 2 * MIB - 1) & -(2 * MIB));
        madvise(at, PAGES * 2 * MIB, MADV_HUGEPAGE);
        memset(at, 1, PAGES * 2 * MIB);
        say(name.release, "filled");
        drop(at, splits);
        say(name.release, splits ? "dropped after MADV_COLD" : "dropped");
        munmap(all, (PAGES + 1) * 2 * MIB);
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
6.1.0-50-cloud-amd64: filled: RSS 64, anon 64, memory.current 64 MiB
6.1.0-50-cloud-amd64: dropped: RSS 16, anon 16, memory.current 64 MiB
6.1.0-50-cloud-amd64: filled: RSS 64, anon 64, memory.current 64 MiB
6.1.0-50-cloud-amd64: dropped after MADV_COLD: RSS 16, anon 16, memory.current 16 MiB
7.3.4+deb13-cloud-amd64: filled: RSS 64, anon 64, memory.current 64 MiB
7.3.4+deb13-cloud-amd64: dropped: RSS 16, anon 16, memory.current 64 MiB
7.3.4+deb13-cloud-amd64: filled: RSS 64, anon 64, memory.current 64 MiB
7.3.4+deb13-cloud-amd64: dropped after MADV_COLD: RSS 16, anon 16, memory.current 16 MiB
SEEN
