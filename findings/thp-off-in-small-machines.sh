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

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

skip() {
    echo "SKIP: $*"
    exit 77
}

need() {
    local program
    [ "$(uname -m)" = x86_64 ] || skip "this host is not x86-64"
    for program; do command -v "$program" >/dev/null || skip "there is no $program"; done
}

# Unpacks NAME=VERSION of a suite of Debian in $folder/SUITE, with an apt of its own.
fetch() {
    local suite=$1 root=$folder/apt-$1 mirror file apt
    shift
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sed -n 1p)
    [ -n "$mirror" ] || skip "the host's apt knows no archive of Debian"
    mkdir -p "$root"/{lists,cache,deb} "$folder/$suite"
    : >"$root/status"
    echo "deb $mirror $suite main" >"$root/sources"
    apt=(-qq -o "Dir::Etc::sourcelist=$root/sources" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$root/lists" -o "Dir::State::status=$root/status" -o "Dir::Cache=$root/cache"
        -o APT::Sandbox::User=root -o APT::Architecture=amd64 -o APT::Architectures=amd64)
    apt-get "${apt[@]}" update || skip "the lists of $suite cannot be fetched"
    (cd "$root/deb" && apt-get "${apt[@]}" download "$@") || skip "$suite does not hold all of: $*"
    for file in "$root"/deb/*.deb; do
        dpkg-deb --fsys-tarfile "$file" | tar -x -C "$folder/$suite" --wildcards ${only:+"$only"}
    done
    rm -rf "$root"
}

# Boots the kernel NAME=VERSION of a suite under qemu, with "$folder/init" as its only program.
# Prints the lines of that program that begin with @.
machine=()
boot() {
    local only='*/vmlinuz*'
    fetch "$1" "$2"
    (cd "$folder" && echo init | cpio -oH newc --quiet >initrd)
    timeout 50 qemu-system-x86_64 -accel tcg -cpu max -m 768 "${machine[@]}" -nodefaults -no-reboot -display none -serial stdio \
        -kernel "$(find "$folder/$1" -name 'vmlinuz*' -type f)" -initrd "$folder/initrd" \
        -append 'console=ttyS0 quiet panic=-1' </dev/null 2>&1 | tr -d '\r' | sed -n 's/^@//p' ||
        skip "$2 does not come to its end in 50 s"
}

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
