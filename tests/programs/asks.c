/* Requests MIB in blocks of KIB without touching them: asks MIB KIB. */
#include "check.h"

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    size_t size = strtoull(argv[2], NULL, 10) * KIB;
    for (size_t left = strtoull(argv[1], NULL, 10) * MIB / size; left > 0; left--)
        CHECK(malloc(size) != NULL);
    return 0;
}
