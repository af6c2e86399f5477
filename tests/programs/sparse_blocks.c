/*
 * A program that touches the first byte of each of its blocks, and prints its peak.
 */
#include "check.h"

int main(void)
{
    for (int at = 0; at < 8000; at++) {
        char *block = malloc(64 * KIB);
        CHECK(block);
        *block = 1;
    }
    usleep(500000);
    char line[256];
    long peak = 0;
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    while (fgets(line, sizeof line, status))
        sscanf(line, "VmHWM: %ld kB", &peak);
    printf("peak=%ld\n", peak * 1024);
    return 0;
}
