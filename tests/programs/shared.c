/* Shared memory of each kind: `shared KIND MIB HUGE_MIB SECONDS [punch]`. Writes to all of it,
 * from the parent and from a forked child, waits until at least HUGE_MIB are huge (or for
 * SECONDS), and checks each byte. `punch` first punches a hole of 64 KiB in the last MiB but
 * one. Prints the huge MiB, the allocated KiB of a memfd, and the offset of the address in a
 * huge page. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static size_t huge_kib(const void *at) {
    FILE *smaps = fopen("/proc/self/smaps", "re");
    CHECK(smaps != NULL);
    char line[512];
    int here = 0;
    size_t found = 0, kib;
    while (fgets(line, sizeof line, smaps) != NULL) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            here = start <= (unsigned long)at && (unsigned long)at < end;
        else if (here && sscanf(line, "ShmemPmdMapped: %zu", &kib) == 1)
            found = kib;
        else if (here && (sscanf(line, "Shared_Hugetlb: %zu", &kib) == 1 || sscanf(line, "Private_Hugetlb: %zu", &kib) == 1))
            found += kib;
    }
    fclose(smaps);
    return found;
}

static int fd = -1;

static unsigned char *map(const char *kind, size_t length) {
    int protection = PROT_READ | PROT_WRITE;
    if (strcmp(kind, "shmget") == 0) {
        int id = shmget(IPC_PRIVATE, length, IPC_CREAT | 0600);
        CHECK(id >= 0);
        void *at = shmat(id, NULL, 0);
        shmctl(id, IPC_RMID, NULL);
        CHECK(at != (void *)-1);
        return at;
    }
    if (strcmp(kind, "memfd") == 0)
        fd = memfd_create("shared", MFD_CLOEXEC);
    if (strcmp(kind, "shm_open") == 0) {
        char name[64];
        snprintf(name, sizeof name, "/jumbo-test-%d", getpid());
        fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
        shm_unlink(name);
    }
    if (strcmp(kind, "anonymous") != 0) {
        CHECK(fd >= 0);
        CHECK(ftruncate(fd, (off_t)length) == 0);
    }
    void *at = mmap(NULL, length, protection, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

int main(int argc, char **argv) {
    CHECK(argc >= 5);
    size_t length = (size_t)atol(argv[2]) << 20, wanted = (size_t)atol(argv[3]) << 10;
    unsigned char *memory = map(argv[1], length);
    /* The parent writes to the first half, the child to the second. */
    for (size_t at = 0; at < length / 2; at += 4096)
        memory[at] = (unsigned char)(at >> 12) | 1;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (size_t at = length / 2; at < length; at += 4096)
            memory[at] = (unsigned char)(at >> 12) | 1;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    /* None of them lives until a scan, and after them the program neither forks nor maps. */
    for (int i = 0; i < 10; i++) {
        child = fork();
        CHECK(child >= 0);
        if (child == 0)
            _exit(0);
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    size_t hole = argc > 5 ? length - 2 * MIB : length, hole_end = argc > 5 ? hole + 64 * KIB : length;
    if (argc > 5)
        CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)hole, 64 * KIB) == 0);
    time_t end = time(NULL) + atol(argv[4]);
    size_t huge;
    while ((huge = huge_kib(memory)) < wanted && time(NULL) < end) {
        struct timespec pause = {0, 20 * 1000 * 1000};
        nanosleep(&pause, NULL);
        /* Changed all the time, during any move. */
        for (size_t at = 0; at < length; at += 4096)
            if (at < hole || at >= hole_end)
                memory[at + 8]++;
    }
    for (size_t at = 0; at < length; at += 4096)
        if (at < hole || at >= hole_end)
            CHECK(memory[at] == ((unsigned char)(at >> 12) | 1));
    struct stat file = {0};
    CHECK(fd < 0 || fstat(fd, &file) == 0);
    printf("huge=%zu\nthere=%zu\nplace=%zu\n", huge >> 10, (size_t)file.st_blocks / 2,
           (size_t)memory & 0x1fffff);
    return 0;
}
