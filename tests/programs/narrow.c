/*
 * 64 MiB in mappings of 1 MiB, apart from each other, and 256 MiB of addresses that stay empty.
 */
#define _GNU_SOURCE
#include "check.h"

#include <sys/mman.h>

int main(void)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    CHECK(mmap(NULL, 256 * MIB, PROT_READ | PROT_WRITE, flags | MAP_32BIT, -1, 0) != MAP_FAILED);
    for (uintptr_t at = 0; at < 256 * MIB; at += 4 * MIB) {
        void *place = (void *)(0x100000000000 + at);
        CHECK(mmap(place, MIB, PROT_READ | PROT_WRITE, flags | MAP_FIXED_NOREPLACE, -1, 0) == place);
        memset(place, 1, MIB);
    }
    /* The report samples the peak, on a busy machine too. */
    usleep(2000000);
    return 0;
}
