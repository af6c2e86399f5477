/* A 32-bit program, without headers and start files of a 32-bit C library. */
int puts(const char *);
void exit(int);
void *malloc(unsigned);

__attribute__((force_align_arg_pointer)) void _start(void)
{
    char *block = malloc(8 << 20);
    block[0] = 1;
    puts("32 bits");
    exit(7);
}
