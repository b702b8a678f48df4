/* One rank of the comparison (benches/collective/compare): MPI_Allreduce of float32, measured and checked.
 *
 *     mpi BYTES ROUNDS
 *
 * Rank 0 prints a line of JSON: quantiles of the duration of a call, and the number of wrong elements of all ranks.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 3) {
        fprintf(stderr, "usage: mpi BYTES ROUNDS\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int count = atoi(argv[1]) / 4, rounds = atoi(argv[2]);
    float *input = malloc(count * sizeof(float) + 1), *sum = malloc(count * sizeof(float) + 1);
    double *times = malloc(rounds * sizeof(double));
    if (count < 1 || rounds < 1 || !input || !sum || !times) {
        fprintf(stderr, "mpi: wrong arguments or no memory\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    for (int at = 0; at < count; at++) input[at] = (float)(rank + at % 7);

    long wrong = 0;
    for (int round = -(rounds / 10 + 1); round < rounds; round++) {
        double began = MPI_Wtime();
        MPI_Allreduce(input, sum, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double ended = MPI_Wtime();
        if (round >= 0) times[round] = ended - began;
        for (int at = 0; at < count; at++) {
            wrong += sum[at] != (float)(ranks * (ranks - 1) / 2 + ranks * (at % 7));
            sum[at] = -1;
        }
    }
    qsort(times, rounds, sizeof(double), compare);
    double mine[2] = {times[rounds / 2] * 1e6, times[(long)rounds * 99 / 100] * 1e6}, slowest[2];
    long all_wrong;
    MPI_Reduce(mine, slowest, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&wrong, &all_wrong, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("{\"p50_us\": %.3f, \"p99_us\": %.3f, \"wrong\": %ld}\n", slowest[0], slowest[1], all_wrong);
    MPI_Finalize();
    return 0;
}
