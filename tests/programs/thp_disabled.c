/* Becomes `PROGRAM ARG...` with transparent huge pages disabled for it and its children. */
#include "check.h"
#include <sys/prctl.h>

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    execvp(argv[1], argv + 1);
    return 127;
}
