/* Forks COUNT times with MIB of heap; prints CPU microseconds and page faults per fork, of
 * parent and child. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static double micros(const struct rusage *used) {
  return (used->ru_utime.tv_sec + used->ru_stime.tv_sec) * 1e6 + used->ru_utime.tv_usec + used->ru_stime.tv_usec;
}

int main(int count, char **arguments) {
  const int forks = count > 1 ? atoi(arguments[1]) : 1000;
  const size_t bytes = count > 2 ? (size_t)atoi(arguments[2]) << 20 : 0;
  char *heap = malloc(bytes + 1);
  memset(heap, 1, bytes + 1);
  struct rusage before, after, children;
  getrusage(RUSAGE_SELF, &before);
  for (int done = 0; done < forks; done++) {
    const pid_t child = fork();
    if (child == 0) _exit(0);
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return 1;
  }
  getrusage(RUSAGE_SELF, &after);
  getrusage(RUSAGE_CHILDREN, &children);
  if (heap[bytes] != 1) return 2;
  printf("%.1f %.1f %.1f\n", (micros(&after) - micros(&before) + micros(&children)) / forks,
         (double)(after.ru_minflt - before.ru_minflt) / forks, (double)children.ru_minflt / forks);
  return 0;
}
