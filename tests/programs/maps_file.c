/* Maps the file of its first argument to read it, with MAP_POPULATE if the second is "populate", moves
 * the mapping, and prints a sum of its bytes and the KiB of it that are mapped by PMDs, as "SUM HUGE".
 * Third argument: "truncate" shortens the file and reads behind its end; "behind" maps more than it has. */
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

int main(int count, char **words)
{
    CHECK(count == 4);
    int fd = open(words[1], O_RDWR);
    struct stat stat;
    CHECK(fd >= 0 && fstat(fd, &stat) == 0);
    size_t size = stat.st_size, mapped = size;
    if (strcmp(words[3], "behind") == 0)
        mapped += 4 * MIB;
    int flags = MAP_SHARED | (strcmp(words[2], "populate") == 0 ? MAP_POPULATE : 0);
    errno = 0;
    unsigned char *at = mmap(NULL, mapped, PROT_READ, flags, fd, 0);
    CHECK(at != MAP_FAILED && errno == 0);
    unsigned long sum = 0;
    for (size_t i = 0; i < size; i += 512)
        sum = sum * 31 + at[i];
    unsigned long huge = 0, value;
    char line[512];
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps != NULL);
    while (fgets(line, sizeof line, smaps))
        if (sscanf(line, "FilePmdMapped: %lu", &value) == 1)
            huge += value;
    /* The mapping is one for mremap(2). */
    void *place = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mremap(at, mapped, mapped, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
    CHECK(((unsigned char *)place)[size - 512] == *((unsigned char *)place + size - 512));
    printf("%lu %lu\n", sum, huge);
    fflush(stdout);
    if (strcmp(words[3], "truncate") == 0)
        CHECK(ftruncate(fd, size / 2) == 0);
    return ((volatile unsigned char *)place)[size - 1] == 0 && strcmp(words[3], "whole") == 0;
}
