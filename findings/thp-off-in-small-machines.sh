#!/usr/bin/env bash
# Kernel: a machine of less than 512 MiB starts with THP `never`, and `enabled` is not all there is to set.
#
# Versions: Debian's kernels 6.1.176 and 7.3.4 under qemu with 448 and 768 MiB (built with THP `always`).
# Expected: the mode after boot is that of CONFIG_TRANSPARENT_HUGEPAGE_ALWAYS; to write `madvise` to `enabled` gives
#   the same state as on any other machine.
# Happens: below 512 MiB of memory the kernel clears all THP flags at boot: `enabled` and `defrag` are `never`,
#   use_zero_page and khugepaged/defrag are 0. To write `enabled` sets that flag alone: huge pages are
#   allocated without compaction, khugepaged included.
# Matters: tests of huge pages in a small VM, a microVM or a kdump kernel measure base pages, or huge pages that
#   come only while memory is not fragmented; the same image with more memory behaves otherwise.
# Source: mm/huge_memory.c, hugepage_init(): "By default disable transparent hugepages on smaller systems";
#   Documentation/admin-guide/mm/transhuge.rst does not mention it.
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

static void show(const char *kernel, const char *when) {
    static const char *names[] = {"enabled", "defrag", "use_zero_page", "khugepaged/defrag"};
    printf("@%s: %s:", kernel, when);
    for (int i = 0; i < 4; i++) {
        char path[200], text[200] = "";
        snprintf(path, sizeof path, "/sys/kernel/mm/transparent_hugepage/%s", names[i]);
        FILE *file = fopen(path, "r");
        if (file == NULL || fgets(text, sizeof text, file) == NULL) continue;
        fclose(file);
        char *chosen = strchr(text, '[');
        chosen = strtok(chosen ? chosen + 1 : text, "]\n");
        printf(" %s=%s", names[i], chosen);
    }
    printf("\n");
}

int main(void) {
    struct utsname name;
    mkdir("/sys", 0700);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    uname(&name);
    show(name.release, "after boot");
    FILE *mode = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "w");
    fputs("madvise", mode);
    fclose(mode);
    show(name.release, "enabled set to madvise");
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
for megabytes in 448 768; do
    machine=(-m "$megabytes")
    echo "with $megabytes MiB"
    boot bookworm linux-image-6.1.0-50-cloud-amd64=6.1.176-1
    boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
done | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
with 448 MiB
6.1.0-50-cloud-amd64: after boot: enabled=never defrag=never use_zero_page=0 khugepaged/defrag=0
6.1.0-50-cloud-amd64: enabled set to madvise: enabled=madvise defrag=never use_zero_page=0 khugepaged/defrag=0
7.3.4+deb13-cloud-amd64: after boot: enabled=never defrag=never use_zero_page=0 khugepaged/defrag=0
7.3.4+deb13-cloud-amd64: enabled set to madvise: enabled=madvise defrag=never use_zero_page=0 khugepaged/defrag=0
with 768 MiB
6.1.0-50-cloud-amd64: after boot: enabled=always defrag=madvise use_zero_page=1 khugepaged/defrag=1
6.1.0-50-cloud-amd64: enabled set to madvise: enabled=madvise defrag=madvise use_zero_page=1 khugepaged/defrag=1
7.3.4+deb13-cloud-amd64: after boot: enabled=always defrag=madvise use_zero_page=1 khugepaged/defrag=1
7.3.4+deb13-cloud-amd64: enabled set to madvise: enabled=madvise defrag=madvise use_zero_page=1 khugepaged/defrag=1
SEEN
