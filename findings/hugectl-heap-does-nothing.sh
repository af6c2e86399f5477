#!/usr/bin/env bash
# libhugetlbfs: `hugectl --heap` and `--thp` do nothing with glibc 2.34 and later, in silence.
#
# Versions: libhugetlbfs 2.24 with glibc 2.41 (Debian 13).
# Expected: hugectl(8) --heap puts malloc's heap on hugetlb pages, and --thp aligns it for THP; where it
#   cannot, it prints a warning, as it does for an empty pool.
# Happens: glibc 2.34 removed the hook __morecore. The library finds that out when it starts, says so at
#   verbosity INFO (3) only, and lets the program run with a plain heap: no output, exit status 0. The
#   manual pages of 2.24 still describe HUGETLB_MORECORE without a word of it.
# Matters: start scripts with hugectl "work", and all measurements with them since 2021 compare base pages with
#   base pages. glibc's own tunable glibc.malloc.hugetlb replaces it.
# Source: glibc 2.34's NEWS (removal of __morecore); issue #52 of libhugetlbfs, which the message names.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get dpkg-deb gcc
[[ $(cat /sys/kernel/mm/transparent_hugepage/enabled) == *'[madvise]'* ]] || skip "the THP mode of this host is not madvise"

cat >"$folder/heap.c" <<'C'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
    char line[200];
    long huge = 0, hugetlb = 0;
    for (int i = 0; i < 800; i++) memset(malloc(100000), 1, 100000);
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "AnonHugePages: %ld kB", &huge);
        sscanf(line, "Private_Hugetlb: %ld kB", &hugetlb);
    }
    printf("80 MB of malloc: %ld KiB transparent huge, %ld KiB hugetlb\n", huge, hugetlb);
}
C
gcc -o "$folder/heap" "$folder/heap.c"
fetch trixie libhugetlbfs0=2.24-1+b1 libhugetlbfs-bin=2.24-1+b1 libc6=2.41-12+deb13u5
libraries=$folder/trixie/usr/lib/x86_64-linux-gnu
with=("$libraries/ld-linux-x86-64.so.2" --library-path "$libraries")
{
    for option in --heap --thp; do
        "${with[@]}" "$folder/trixie/usr/bin/hugectl" "$option" --dry-run true 2>&1 | grep -o 'HUGETLB_MORECORE=.*'
    done
    # The environment of hugectl, with the libc of Debian 13.
    for morecore in yes thp; do
        HUGETLB_MORECORE=$morecore "${with[@]}" --preload "$libraries/libhugetlbfs.so.0" "$folder/heap" 2>&1 &&
            echo "HUGETLB_MORECORE=$morecore: exit status 0"
    done
    HUGETLB_VERBOSE=3 HUGETLB_MORECORE=yes "${with[@]}" --preload "$libraries/libhugetlbfs.so.0" "$folder/heap" 2>&1 |
        grep -o 'INFO: Not setting up morecore.*'
} | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
HUGETLB_MORECORE='yes'
HUGETLB_MORECORE='thp'
80 MB of malloc: 0 KiB transparent huge, 0 KiB hugetlb
HUGETLB_MORECORE=yes: exit status 0
80 MB of malloc: 0 KiB transparent huge, 0 KiB hugetlb
HUGETLB_MORECORE=thp: exit status 0
INFO: Not setting up morecore because it's not available (see issue #52).
SEEN
