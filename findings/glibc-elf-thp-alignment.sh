#!/usr/bin/env bash
# glibc 2.44: glibc.elf.thp=1 advises no library that is linked with 4 KiB alignment, as distributions link all on x86-64.
#
# Versions: libc6 2.44-3 (Debian experimental); a library of 8 MiB of text, linked by binutils in two ways; Linux 6.18.
# Expected: the loader advises MADV_HUGEPAGE for text that spans whole blocks of 2 MiB, where they are aligned in
#   file and memory. The kernel (6.7 and later) maps large files at aligned addresses, so this holds here.
# Happens: only segments whose p_align is at least 2 MiB are advised. The default of ld for x86-64 is
#   max-page-size=4096 (since binutils 2.31, -z separate-code), so nothing of such a library is, although it
#   lies aligned. With -z max-page-size=0x200000 all is.
# Matters: the tunable on an unchanged distribution is without effect and without a message; text needs a relink first.
# Source: seen; ld(1), -z max-page-size.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get dpkg-deb gcc
[[ $(cat /sys/kernel/mm/transparent_hugepage/enabled) != *'[never]'* ]] || skip "the THP mode of this host is never"

cat >"$folder/text.S" <<'ASSEMBLY'
.text
.globl text
.type text, @function
text:
    ret
.fill 8388608, 1, 0x90
.section .note.GNU-stack, "", @progbits
ASSEMBLY
cat >"$folder/use.c" <<'C'
#include <stdio.h>
#include <string.h>

void text(void);

int main(void) {
    unsigned long start, end, blocks = 0;
    char line[600], mode[8];
    text();
    FILE *file = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx %4s", &start, &end, mode) == 3)
            blocks = strstr(line, "/libtext.so") && mode[2] == 'x' ? (end >> 21) - ((start + (1 << 21) - 1) >> 21) : 0;
        if (blocks > 0 && strncmp(line, "VmFlags:", 8) == 0)
            printf("%s whole blocks of text, %s\n", blocks >= 3 ? "3 or more" : "too few", strstr(line, " hg") ? "advised" : "not advised");
    }
}
C
fetch experimental libc6=2.44-3
libraries=$folder/experimental/usr/lib/x86_64-linux-gnu
for option in max-page-size=0x1000 max-page-size=0x200000; do
    gcc -shared -nostdlib -Wl,-z,"$option" -o "$folder/libtext.so" "$folder/text.S"
    gcc -O1 -o "$folder/use" "$folder/use.c" "$folder/libtext.so"
    for value in 0 1; do
        printf '%s, glibc.elf.thp=%s: ' "$option" "$value"
        GLIBC_TUNABLES=glibc.elf.thp=$value "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$folder" "$folder/use"
    done
done | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
max-page-size=0x1000, glibc.elf.thp=0: 3 or more whole blocks of text, not advised
max-page-size=0x1000, glibc.elf.thp=1: 3 or more whole blocks of text, not advised
max-page-size=0x200000, glibc.elf.thp=0: 3 or more whole blocks of text, not advised
max-page-size=0x200000, glibc.elf.thp=1: 3 or more whole blocks of text, advised
SEEN
