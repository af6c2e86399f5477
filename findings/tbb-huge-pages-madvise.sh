#!/usr/bin/env bash
# oneTBB's allocator: "use huge pages" succeeds with THP `madvise`, and advises nothing.
#
# Versions: libtbbmalloc2 2021.8.0 (Debian 12) and 2022.1.0 (Debian 13); 2023.1.0 does the same.
# Expected: with the THP mode `madvise`, scalable_allocation_mode(TBBMALLOC_USE_HUGE_PAGES, 1) makes the
#   allocator call madvise(2), as the mode asks for; or it returns TBBMALLOC_NO_EFFECT where it cannot help.
# Happens: it returns TBBMALLOC_OK, and TBB_VERSION=1 prints "huge pages requested". The library does not
#   even import madvise(2). It knows THP only as the exact line "[always] madvise never" (where memory is
#   huge anyway) and then aligns its mappings; otherwise it uses hugetlb pages or nothing.
# Matters: most distributions of servers set `madvise`. TBB_MALLOC_USE_HUGE_PAGES=1 gives no huge page there
#   without a hugetlb pool, and the status that is there to say so does not.
# Source: oneTBB's documentation of scalable_allocation_mode lists TBBMALLOC_NO_EFFECT; the line is in the
#   library's strings.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get dpkg-deb gcc nm strings
[[ $(cat /sys/kernel/mm/transparent_hugepage/enabled) == *'[madvise]'* ]] || skip "the THP mode of this host is not madvise"
grep -q '^HugePages_Total: *0$' /proc/meminfo || skip "this host has a hugetlb pool"

cat >"$folder/use.c" <<'C'
#include <stdio.h>
#include <string.h>

int scalable_allocation_mode(int mode, long value);
void *scalable_malloc(size_t bytes);

int main(void) {
    char line[400];
    int advised = 0;
    long huge = -1;
    int result = scalable_allocation_mode(0 /* TBBMALLOC_USE_HUGE_PAGES */, 1);
    memset(scalable_malloc(64 << 20), 1, 64 << 20);
    FILE *file = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, file)) advised += strncmp(line, "VmFlags", 7) == 0 && strstr(line, " hg");
    file = fopen("/proc/self/smaps_rollup", "r");
    while (fgets(line, sizeof line, file)) sscanf(line, "AnonHugePages: %ld kB", &huge);
    printf("scalable_allocation_mode gives %d, %d advised mappings, %ld KiB huge of 64 MiB\n", result, advised, huge);
}
C
fetch bookworm libtbbmalloc2=2021.8.0-2+deb12u1 libc6=2.36-9+deb12u14 libstdc++6=12.2.0-14+deb12u1 libgcc-s1=12.2.0-14+deb12u1
fetch trixie libtbbmalloc2=2022.1.0-1+deb13u1 libc6=2.41-12+deb13u5 libstdc++6=14.2.0-19 libgcc-s1=14.2.0-19
for suite in bookworm trixie; do
    libraries=$folder/$suite/usr/lib/x86_64-linux-gnu
    gcc -o "$folder/use" "$folder/use.c" "$libraries/libtbbmalloc.so.2" -Wl,--allow-shlib-undefined
    loader=$(find "$folder/$suite" -name ld-linux-x86-64.so.2 -path '*x86_64-linux-gnu*')
    run=("$loader" --library-path "$libraries:${loader%/*}")
    TBB_VERSION=1 "${run[@]}" "$folder/use" 2>&1 | grep -E '[:]\s(VERSION|huge)|gives'
    echo "imports of madvise: $(nm -D "$libraries/libtbbmalloc.so.2" | grep -c madvise || true)"
    echo "mode it knows: $(strings "$libraries/libtbbmalloc.so.2" | grep 'madvise never')"
done | tr -s '\t' ' ' | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
TBBmalloc: VERSION 2021.8
TBBmalloc: huge pages requested
scalable_allocation_mode gives 0, 0 advised mappings, 0 KiB huge of 64 MiB
imports of madvise: 0
mode it knows: [alwa%cs] madvise never
TBBmalloc: VERSION 2022.1.0
TBBmalloc: huge pages requested
scalable_allocation_mode gives 0, 0 advised mappings, 0 KiB huge of 64 MiB
imports of madvise: 0
mode it knows: [alwa%cs] madvise never
SEEN
