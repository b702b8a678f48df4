"""All-reduce through torch.distributed with Gloo: `gloo.py RANK RANKS PORT BYTES ROUNDS`. Prints JSON as openmpi.c does."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

rank, ranks, port, size, rounds = map(int, sys.argv[1:])
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
pattern = torch.arange(size // 4) % 7
times = []
for turn in range(-(rounds // 10), rounds):
    data = (pattern + rank).float()
    began = time.perf_counter()
    dist.all_reduce(data)
    if turn >= 0:
        times.append(time.perf_counter() - began)
wrong = int((data != ranks * (ranks - 1) / 2 + ranks * pattern).sum())
times.sort()
if rank == 0:
    p50, p99 = (1e6 * times[rounds * share // 100] for share in (50, 99))
    print(json.dumps({"wrong": wrong, "p50_us": p50, "p99_us": p99}))
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong != 0)
