"""One rank of the comparison (benches/collective/compare): ``all_reduce`` of ``torch.distributed``, measured and checked.

    torch_rank.py BACKEND BYTES ROUNDS STORE RANK RANKS

Prints a line of JSON: quantiles of the duration of a call, and the number of wrong elements.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

backend, count, rounds, rank, ranks = sys.argv[1], int(sys.argv[2]) // 4, int(sys.argv[3]), int(sys.argv[5]), int(sys.argv[6])
if backend == "serval":
    import serval.distributed  # noqa: F401 - registers the backend

torch.set_num_threads(1)
dist.init_process_group(backend, store=dist.FileStore(sys.argv[4], ranks), rank=rank, world_size=ranks)
place = torch.arange(count) % 7
given = (place + rank).to(torch.float32)
expected = (place * ranks + ranks * (ranks - 1) // 2).to(torch.float32)
data = given.clone()
times, wrong = [], 0
for at in range(-(rounds // 10) - 1, rounds):
    data.copy_(given)
    began = time.perf_counter_ns()
    dist.all_reduce(data)
    ended = time.perf_counter_ns()
    if at >= 0:
        times.append((ended - began) / 1e3)
    wrong += int((data != expected).sum())
dist.barrier()
times.sort()
print(json.dumps({"p50_us": times[rounds // 2], "p99_us": times[rounds * 99 // 100], "wrong": wrong}))
dist.destroy_process_group()
