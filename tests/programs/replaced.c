/* Changes the mapping of pages within a block, frees the block, and fills blocks of the same size:
 *
 *   replaced file|private|moved|unmapped|sealed|attached|shrunk
 *
 * Prints what the file and the segment of shared memory have then. Exit code 77 where the kernel cannot. */
#include "check.h"

#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>

#ifndef SYS_mseal
#define SYS_mseal 462
#endif

#define SIZE MIB
#define PART (64 * KIB)

static char *how;
static int is(const char *what) { return strcmp(how, what) == 0; }

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    how = argv[1];
    int file = memfd_create("data", 0), segment = shmget(IPC_PRIVATE, PART, 0600 | IPC_CREAT);
    CHECK(file >= 0 && segment >= 0 && ftruncate(file, PART) == 0 && pwrite(file, "precious", 9, 0) == 9);
    char *shared = shmat(segment, NULL, 0);
    CHECK(shared != (void *)-1 && shmctl(segment, IPC_RMID, NULL) == 0);
    strcpy(shared, "precious");

    char *block = aligned_alloc(4 * KIB, SIZE);
    CHECK(block != NULL);
    memset(block, 1, SIZE);
    char *part = block + 128 * KIB;
    if (is("file") || is("shrunk"))
        CHECK(mmap(part, PART, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == part);
    if (is("private"))
        CHECK(mmap(part, PART, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == part);
    if (is("moved")) {
        char *to = mmap(NULL, PART, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(to != MAP_FAILED && mremap(part, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
    }
    if (is("unmapped"))
        CHECK(munmap(part, PART) == 0);
    if (is("sealed")) {
        CHECK(mprotect(part, PART, PROT_READ) == 0);
        if (syscall(SYS_mseal, part, PART, 0) != 0)
            return 77;
    }
    if (is("attached"))
        CHECK(shmat(segment, part, SHM_REMAP) == part);
    if (is("shrunk"))
        block = realloc(block, 64 * KIB + SIZE / 8);
    free(block);
    for (int i = 0; i < 16; i++) {
        char *other = malloc(SIZE);
        CHECK(other != NULL);
        memset(other, 7, SIZE);
    }
    char text[9];
    CHECK(pread(file, text, sizeof text, 0) == sizeof text);
    printf("file %s, segment %s\n", text, shared);
    return 0;
}
