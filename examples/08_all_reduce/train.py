"""Data-parallel training with serval.collective: each rank has a part of the data, and gradients are summed over all ranks.

    python train.py [RANKS]

Starts the ranks as processes of this machine, which use shared memory.
"""

import subprocess
import sys
import tempfile

import numpy as np
from serval.collective import Group

STEPS, RATE = 200, 0.1


def train(group: Group) -> np.ndarray:
    """Linear regression: finds the weights from which the targets were made."""
    random = np.random.default_rng(7)
    weights_of_targets = random.normal(size=5)
    inputs = random.normal(size=(800, 5))
    targets = inputs @ weights_of_targets
    inputs, targets = inputs[group.rank :: group.ranks], targets[group.rank :: group.ranks]

    # Rank 0 chooses where all begin.
    weights = np.random.default_rng(group.rank).normal(size=5).astype(np.float32)
    group.broadcast(weights, root=0)
    for _ in range(STEPS):
        errors = inputs @ weights - targets
        gradient = (inputs.T @ errors).astype(np.float32)
        group.all_reduce(gradient)
        weights -= RATE / 800 * gradient
    assert np.allclose(weights, weights_of_targets, atol=1e-4), (weights, weights_of_targets)
    return weights


def main() -> None:
    if len(sys.argv) == 4:
        rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        with Group.shared("train", ranks=ranks, rank=rank, folder=folder) as group:
            print(train(group).tobytes().hex())
        return
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__]
        processes = [
            subprocess.Popen([*command, str(rank), str(ranks), folder], stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0].strip() for process in processes]
    if any(process.returncode for process in processes) or len(set(outputs)) != 1:
        sys.exit("error: a rank failed, or the ranks have different weights")
    print(f"{STEPS} steps, the same weights on {ranks} ranks: {np.frombuffer(bytes.fromhex(outputs[0]), np.float32)}")


if __name__ == "__main__":
    main()
