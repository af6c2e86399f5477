#!/usr/bin/env bash
# mimalloc: MIMALLOC_ALLOW_THP=0 turns THP off for the whole process, and for all programs that it starts.
#
# Versions: libmimalloc3 3.6.0 (Debian sid), libc6 2.43.
# Expected: an option of an allocator concerns the allocator's memory: it would not be advised, or
#   MADV_NOHUGEPAGE. Programs that the process starts without mimalloc are as before.
# Happens: mimalloc calls prctl(PR_SET_THP_DISABLE). All memory of the process has base pages, and
#   MADV_COLLAPSE fails with EINVAL. The kernel keeps the flag across fork and execve, so a shell with
#   mimalloc preloaded starts children without THP: neither the library nor the variable is left in them.
#   3.0.1 (Debian 13) accepts the same variable in silence, and does nothing.
# Matters: "THP_enabled: 0" in /proc/PID/status has its cause in a parent. MADV_HUGEPAGE of another
#   allocator or of the program still returns 0, and gives no huge page.
# Source: prctl(2), PR_SET_THP_DISABLE ("inherited by a child created via fork(2) and preserved across execve(2)").
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get dpkg-deb gcc
[[ $(cat /sys/kernel/mm/transparent_hugepage/enabled) != *'[never]'* ]] || skip "the THP mode of this host is never"

cat >"$folder/child.c" <<'C'
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define MIB (1UL << 20)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

int main(void) {
    char *at = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *block = (char *)(((unsigned long)at + 2 * MIB - 1) & -(2 * MIB));
    int disabled = prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), advised = madvise(at, 4 * MIB, MADV_HUGEPAGE);
    memset(at, 1, 4 * MIB);
    int collapsed = madvise(block, 2 * MIB, MADV_COLLAPSE) == 0 ? 0 : errno;
    char line[200];
    long huge = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (fgets(line, sizeof line, file)) sscanf(line, "AnonHugePages: %ld kB", &huge);
    printf("PR_GET_THP_DISABLE %d, MADV_HUGEPAGE %d, MADV_COLLAPSE %s, huge memory: %s\n", disabled, advised,
           collapsed == 0 ? "0" : strerrorname_np(collapsed), huge > 0 ? "yes" : "no");
}
C
gcc -w -D_GNU_SOURCE -o "$folder/child" "$folder/child.c"
fetch sid libmimalloc3=3.6.0+ds-1 libc6=2.43-7
fetch trixie libmimalloc3=3.0.1+ds-2.1 libc6=2.41-12+deb13u5
for suite in sid trixie; do
    libraries=$folder/$suite/usr/lib/x86_64-linux-gnu
    shell=("$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" --preload "$libraries/libmimalloc.so.3" /bin/sh -c)
    echo "$suite, child of a shell with mimalloc: $(env "${shell[@]}" "$folder/child; :")"
    echo "$suite, the same, MIMALLOC_ALLOW_THP=0: $(MIMALLOC_ALLOW_THP=0 "${shell[@]}" "unset MIMALLOC_ALLOW_THP; $folder/child; :")"
done 2>&1 | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
sid, child of a shell with mimalloc: PR_GET_THP_DISABLE 0, MADV_HUGEPAGE 0, MADV_COLLAPSE 0, huge memory: yes
sid, the same, MIMALLOC_ALLOW_THP=0: PR_GET_THP_DISABLE 1, MADV_HUGEPAGE 0, MADV_COLLAPSE EINVAL, huge memory: no
trixie, child of a shell with mimalloc: PR_GET_THP_DISABLE 0, MADV_HUGEPAGE 0, MADV_COLLAPSE 0, huge memory: yes
trixie, the same, MIMALLOC_ALLOW_THP=0: PR_GET_THP_DISABLE 0, MADV_HUGEPAGE 0, MADV_COLLAPSE 0, huge memory: yes
SEEN
