/* Maps the file of its argument to read it, touches all pages, and prints "ready". Waits until its input
 * ends, and prints how many KiB of the file are mapped by PMDs. */
#include "check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

int main(int count, char **words)
{
    CHECK(count == 2);
    int fd = open(words[1], O_RDONLY);
    struct stat stat;
    CHECK(fd >= 0 && fstat(fd, &stat) == 0);
    const volatile char *bytes = mmap(NULL, stat.st_size, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(bytes != MAP_FAILED);
    unsigned long sum = 0;
    for (long at = 0; at < stat.st_size; at += 4096)
        sum += (unsigned char)bytes[at];
    puts("ready");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    unsigned long again = 0, huge = 0, value;
    for (long at = 0; at < stat.st_size; at += 4096)
        again += (unsigned char)bytes[at];
    CHECK(again == sum);
    char line[512];
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps != NULL);
    while (fgets(line, sizeof line, smaps))
        if (sscanf(line, "FilePmdMapped: %lu", &value) == 1)
            huge += value;
    printf("%lu\n", huge);
    return 0;
}
