"""Data-parallel training with torch: DistributedDataParallel over the backend serval.

    torchrun --nproc-per-node 2 train_torch.py
"""

import serval.distributed  # noqa: F401 - registers the backend
import torch
import torch.distributed as dist

dist.init_process_group("serval")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
inputs = torch.randn(800, 5)
targets = inputs @ torch.randn(5, 1)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs[rank::ranks]), targets[rank::ranks])
    loss.backward()
    optimizer.step()
dist.all_reduce(loss := loss.detach())
if rank == 0:
    print(f"loss of the last step, mean of {ranks} ranks: {loss.item() / ranks:.2e}")
dist.destroy_process_group()
