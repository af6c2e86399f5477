/* An MPI program: each rank fills 200 MiB of small objects, and rank 0 prints the lowest huge
 * percentage. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int huge_percent(void)
{
	FILE *file = fopen("/proc/self/smaps_rollup", "r");
	long resident = 1, huge = 0;
	char line[256];

	while (file && fgets(line, sizeof line, file))
		sscanf(line, "Rss: %ld", &resident) || sscanf(line, "AnonHugePages: %ld", &huge);
	if (file)
		fclose(file);
	return (int)(huge * 100 / resident);
}

int main(int argc, char **argv)
{
	int percent, lowest, rank;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	for (size_t i = 0, bytes = 0; bytes < 200 << 20; i++, bytes += 100 + i % 800)
		memset(malloc(100 + i % 800), 1, 100 + i % 800);
	for (int tenths = 0; (percent = huge_percent()) < 90 && tenths < 300; tenths++)
		usleep(100000);
	MPI_Reduce(&percent, &lowest, 1, MPI_INT, MPI_MIN, 0, MPI_COMM_WORLD);
	if (rank == 0)
		printf("%d\n", lowest);
	return MPI_Finalize();
}
