// Averages neighbours on two large grids, with an exchange of edges each step: MPI_STENCIL's ranks.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { WIDTH = 4096, HEIGHT = 4096, STEPS = 20 };

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    double *now = malloc(sizeof *now * WIDTH * (HEIGHT + 2));
    double *next = malloc(sizeof *next * WIDTH * (HEIGHT + 2));
    if (!now || !next)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < (size_t)WIDTH * (HEIGHT + 2); i++)
        now[i] = next[i] = (double)(i % 1000 + (size_t)rank);
    int up = (rank + 1) % ranks, down = (rank + ranks - 1) % ranks;
    for (int step = 0; step < STEPS; step++) {
        MPI_Sendrecv(now + WIDTH * HEIGHT, WIDTH, MPI_DOUBLE, up, 0, now, WIDTH, MPI_DOUBLE, down, 0,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Sendrecv(now + WIDTH, WIDTH, MPI_DOUBLE, down, 1, now + WIDTH * (HEIGHT + 1), WIDTH, MPI_DOUBLE, up, 1,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (size_t y = 1; y <= HEIGHT; y++)
            for (size_t x = 1; x < WIDTH - 1; x++) {
                size_t i = y * WIDTH + x;
                next[i] = 0.25 * (now[i - 1] + now[i + 1] + now[i - WIDTH] + now[i + WIDTH]);
            }
        double *swap = now;
        now = next;
        next = swap;
    }
    double sum = 0, total;
    for (size_t i = WIDTH; i < (size_t)WIDTH * (HEIGHT + 1); i++)
        sum += now[i];
    MPI_Reduce(&sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    double seconds = MPI_Wtime() - start;
    int pid = getpid(), pids[64];
    MPI_Gather(&pid, 1, MPI_INT, pids, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("%.4f %.3f", seconds, total);
        for (int i = 0; i < ranks && i < 64; i++)
            printf(" %d", pids[i]);
        puts("");
        fflush(stdout);
        getchar();
    }
    // The ranks are inspected before rank 0 has read a byte.
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
}
