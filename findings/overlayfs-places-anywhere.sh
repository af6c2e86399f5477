#!/usr/bin/env bash
# Kernel: a file in huge folios is mapped by base pages through overlayfs, which places it at any address.
#
# Versions: Debian's kernel 7.3.4 under qemu (6.18 does the same, over ext4).
# Expected: overlayfs has no page cache of its own. A file that the file system below has in huge folios, and
#   maps by them, is mapped so through overlayfs too: it is the same memory.
# Happens: mmap(2) without an address asks the file for one (get_unmapped_area). tmpfs, ext4, xfs and btrfs answer
#   with one at which PMDs fit; overlayfs has no answer, and the kernel takes the next free page. With an
#   address of the program's choice the same file is mapped by PMDs.
# Matters: the files of a container are on overlayfs. Model weights and indexes that came in by huge folios
#   gain nothing there, and tools that look at the page cache see nothing wrong.
# Source: seen; ovl_file_operations (fs/overlayfs/file.c) has no get_unmapped_area.
set -euo pipefail

# shellcheck source=findings/common
. "$(dirname "${BASH_SOURCE[0]}")/common"

need apt-get cpio dpkg-deb gcc qemu-system-x86_64 xz

cat >"$folder/init.c" <<'C'
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#define MIB (1UL << 20)

/* KiB of the mapping at an address that PMDs map. */
static long huge(const char *at) {
    char line[300];
    unsigned long start = 0, end = 0;
    long huge = 0, value;
    FILE *file = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, file)) {
        unsigned long first, last;
        if (sscanf(line, "%lx-%lx ", &first, &last) == 2) start = first, end = last;
        int is_here = start <= (unsigned long)at && (unsigned long)at < end;
        if (is_here && sscanf(line, "ShmemPmdMapped: %ld kB", &value) == 1) huge += value;
    }
    fclose(file);
    return huge;
}

static void map(const char *kernel, const char *path, void *place) {
    int file = open(path, O_RDONLY);
    char *at = mmap(place, 8 * MIB, PROT_READ, MAP_SHARED | (place ? MAP_FIXED_NOREPLACE : 0), file, 0);
    if (at == MAP_FAILED) { perror(path); return; }
    volatile char sum = 0;
    for (size_t i = 0; i < 8 * MIB; i += 4096) sum += at[i];
    printf("@%s: %s%s: %s, %ld of 8192 KiB mapped by PMDs\n", kernel, path, place ? " at an address of ours" : "",
           (unsigned long)at % (2 * MIB) == 0 ? "aligned" : "not aligned", huge(at));
    munmap(at, 8 * MIB);
    close(file);
}

int main(void) {
    struct utsname name;
    mkdir("/proc", 0700);
    mkdir("/low", 0700);
    mkdir("/merged", 0700);
    mount("proc", "/proc", "proc", 0, NULL);
    int module = open("/overlay.ko", O_RDONLY);
    if (syscall(SYS_finit_module, module, "", 0) != 0) perror("overlay");
    if (mount("low", "/low", "tmpfs", 0, "huge=always") != 0) perror("tmpfs");
    mkdir("/low/upper", 0700);
    mkdir("/low/work", 0700);
    mkdir("/low/lower", 0700);
    const char *folders = "lowerdir=/low/lower,upperdir=/low/upper,workdir=/low/work";
    if (mount("none", "/merged", "overlay", 0, folders) != 0) perror("mount");
    char *bytes = malloc(8 * MIB);
    memset(bytes, 1, 8 * MIB);
    int file = open("/low/upper/data", O_CREAT | O_WRONLY, 0600);
    if (write(file, bytes, 8 * MIB) != 8 * MIB) perror("write");
    close(file);
    uname(&name);
    map(name.release, "/low/upper/data", NULL);
    map(name.release, "/merged/data", NULL);
    map(name.release, "/merged/data", (void *)(1UL << 40));
    reboot(RB_AUTOBOOT);
}
C
gcc -O1 -static -o "$folder/init" "$folder/init.c" || skip "gcc builds no static program"
only='*/overlay.ko*' fetch trixie-backports linux-modules-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1
xz -dc "$(find "$folder/trixie-backports" -name 'overlay.ko*')" >"$folder/overlay.ko"
carried=(overlay.ko)
boot trixie-backports linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1 | tee "$folder/seen"
diff - "$folder/seen" <<SEEN
7.3.4+deb13-cloud-amd64: /low/upper/data: aligned, 8192 of 8192 KiB mapped by PMDs
7.3.4+deb13-cloud-amd64: /merged/data: not aligned, 0 of 8192 KiB mapped by PMDs
7.3.4+deb13-cloud-amd64: /merged/data at an address of ours: aligned, 8192 of 8192 KiB mapped by PMDs
SEEN
