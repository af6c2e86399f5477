// The text of text.c as a library.
#define LIBRARY
#include "text.c"
