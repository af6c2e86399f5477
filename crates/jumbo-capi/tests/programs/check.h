// Checks with their place, errno and message.
#pragma once
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jumbo.h>

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: %s (%s; %s)\n", __FILE__, __LINE__, #condition,              \
              strerror(errno), jumbo_error());                                             \
      exit(1);                                                                             \
    }                                                                                      \
  } while (0)
