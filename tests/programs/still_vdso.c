/*
 * Holds memory, makes its vDSO non-executable, once or alternately, and ends with its input.
 *
 *   still_vdso MIB once|flickers
 */
#include "check.h"

#include <pthread.h>
#include <sys/auxv.h>
#include <sys/mman.h>

/* The whole vDSO: the kernel does not split it. */
static size_t size = 4096;

static void *flicker(void *vdso)
{
    for (;;) {
        CHECK(mprotect(vdso, size, PROT_READ) == 0);
        usleep(300);
        CHECK(mprotect(vdso, size, PROT_READ | PROT_EXEC) == 0);
        usleep(300);
    }
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    memset(malloc(atoi(argv[1]) * MIB), 1, atoi(argv[1]) * MIB);
    void *vdso = (void *)getauxval(AT_SYSINFO_EHDR);
    while (mprotect(vdso, size, PROT_READ) != 0)
        CHECK(vdso && (size += 4096) < MIB);
    pthread_t thread;
    if (!strcmp(argv[2], "flickers"))
        CHECK(pthread_create(&thread, NULL, flicker, vdso) == 0);
    CHECK(write(1, "ready\n", 6) == 6);
    char byte;
    CHECK(read(0, &byte, 1) == 0);
    return 0;
}
