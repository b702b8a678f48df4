/* All-reduce through MPI: `openmpi BYTES ROUNDS` under mpirun. Rank 0 prints the median and the 99th percentile in microseconds, as JSON. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3)
        MPI_Abort(MPI_COMM_WORLD, 2);
    int count = atoi(argv[1]) / 4, rounds = atoi(argv[2]), wrong = 0;
    float *data = malloc(4 * count + 4), *sum = malloc(4 * count + 4);
    double *times = malloc(rounds * sizeof *times);
    for (int i = 0; i < count; i++)
        data[i] = rank + i % 7;
    for (int round = -rounds / 10; round < rounds; round++) {
        double began = MPI_Wtime();
        MPI_Allreduce(data, sum, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (round >= 0)
            times[round] = MPI_Wtime() - began;
    }
    for (int i = 0; i < count; i++)
        wrong += sum[i] != (float)(ranks * (ranks - 1) / 2 + ranks * (i % 7));
    qsort(times, rounds, sizeof *times, compare);
    if (rank == 0)
        printf("{\"wrong\": %d, \"p50_us\": %.3f, \"p99_us\": %.3f}\n", wrong, 1e6 * times[rounds / 2],
               1e6 * times[rounds * 99 / 100]);
    MPI_Finalize();
    return wrong != 0;
}
