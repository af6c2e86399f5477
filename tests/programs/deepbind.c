/* A library bound deeply (dlopen(3) and dlmopen(3) with RTLD_DEEPBIND) frees and resizes the
 * program's blocks, and the program frees the library's. `deepbind LIBRARY` */
#include "check.h"

#include <dlfcn.h>
#include <link.h>

static void exchange(void *library)
{
    static const size_t sizes[] = {16, 100, 1000, 5000, 200000, 3 * MIB};
    void (*free_theirs)(void *) = dlsym(library, "free_theirs");
    void *(*resize_theirs)(void *, size_t) = dlsym(library, "resize_theirs");
    void *(*give)(size_t) = dlsym(library, "give");
    CHECK(free_theirs != NULL && resize_theirs != NULL && give != NULL);
    for (int round = 0; round < 100; round++) {
        for (size_t at = 0; at < sizeof sizes / sizeof *sizes; at++) {
            size_t size = sizes[at];
            char *block = malloc(size);
            CHECK(block != NULL);
            paint(block, size, 1);
            free_theirs(block);
            block = malloc(size);
            CHECK(block != NULL);
            paint(block, size, 2);
            block = resize_theirs(block, size + 100);
            CHECK(block != NULL && block[0] == 2);
            free(block);
            block = give(size);
            CHECK(block != NULL);
            paint(block, size, 3);
            free(block);
        }
    }
}

/* Returns the path by which the dynamic loader knows a library. */
static const char *path(void *library)
{
    struct link_map *map = NULL;
    CHECK(dlinfo(library, RTLD_DI_LINKMAP, &map) == 0);
    return map->l_name;
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    /* Enough that small blocks no longer come from glibc. */
    static char *blocks[40000];
    for (size_t at = 0; at < 40000; at++)
        CHECK((blocks[at] = malloc(100)) != NULL);

    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_DEEPBIND);
    CHECK(library != NULL);
    exchange(library);
    CHECK(dlclose(library) == 0);

    library = dlmopen(LM_ID_BASE, arguments[1], RTLD_LAZY | RTLD_DEEPBIND);
    CHECK(library != NULL);
    exchange(library);

    /* The caller's object decides the search path: only the program has a RUNPATH. */
    const char *name = strrchr(arguments[1], '/') + 1;
    CHECK(dlopen(name, RTLD_NOW) == library);
    CHECK(strcmp(path(library), arguments[1]) == 0);
    CHECK(dlclose(library) == 0);
    void *(*open_from_here)(const char *, int) = dlsym(library, "open_from_here");
    CHECK(open_from_here("libnot_beside_the_library.so", RTLD_NOW) == NULL);
    CHECK(dlerror() != NULL);
    CHECK(open_from_here("$ORIGIN/libbound_deeply.so", RTLD_NOW) == library);
    CHECK(dlopen(NULL, RTLD_NOW) != NULL);

    /* Refused flags stay refused. */
    CHECK(dlopen(arguments[1], RTLD_DEEPBIND) == NULL);
    CHECK(dlerror() != NULL);
    for (size_t at = 0; at < 40000; at++)
        free(blocks[at]);
    puts("deep");
    return 0;
}
