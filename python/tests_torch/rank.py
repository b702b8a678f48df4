"""One rank of a test: ``rank.py FUNCTION RANKS STORE TRANSPORT RANK``."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import serval
import serval.distributed  # noqa: F401

what, ranks, path, transport, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])


def tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(100 * rank + seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def compare(_):
    gloo = dist.new_group(backend="gloo")
    for seed, shape in enumerate([(1,), (16,), (3, 5, 7), (100_000,), (0,)]):
        for dtype in (torch.float32, torch.int32):
            ours = tensor(shape, dtype, seed)
            theirs = ours.clone()
            dist.all_reduce(ours)
            dist.all_reduce(theirs, group=gloo)
            if dtype == torch.int32:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs)
            # The same bits on all ranks.
            first = ours.clone()
            dist.broadcast(first, src=0, group=gloo)
            assert torch.equal(first, ours)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16):
        ours = tensor((1000,), torch.float32).to(dtype)
        theirs = ours.clone()
        dist.broadcast(ours, src=ranks - 1)
        dist.broadcast(theirs, src=ranks - 1, group=gloo)
        assert torch.equal(ours, theirs)
    # Not contiguous: a column.
    table = tensor((50, 4), torch.float32)
    ours = table.clone()
    dist.all_reduce(ours[:, 1])
    column = table[:, 1].contiguous()
    dist.all_reduce(column, group=gloo)
    torch.testing.assert_close(ours[:, 1], column)
    assert torch.equal(ours[:, 0], table[:, 0])
    dist.barrier()
    print("compared")


def asynchronous(_):
    tensors = [torch.full((1000,), float(rank + at)) for at in range(20)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    # A call in between keeps the order.
    last = torch.ones(4)
    dist.all_reduce(last)
    assert all(work.wait() for work in works) and all(work.is_success() for work in works)
    for at, each in enumerate(tensors):
        assert torch.equal(each, torch.full((1000,), float(sum(range(ranks)) + ranks * at)))
    assert torch.equal(last, torch.full((4,), float(ranks)))
    work = dist.broadcast(last, src=0, async_op=True)
    assert torch.equal(work.get_future().wait()[0], last)


def gathers(_):
    for dtype in (torch.float32, torch.int64):
        mine = torch.full((3, 2), rank, dtype=dtype)
        places = [torch.empty(3, 2, dtype=dtype) for _ in range(ranks)]
        dist.all_gather(places, mine)
        together = torch.empty(3 * ranks, 2, dtype=dtype)
        dist.all_gather_into_tensor(together, mine)
        assert torch.equal(torch.cat(places), together)
        assert together[:, 0].tolist() == [other for other in range(ranks) for _ in range(3)]
    # Torch marks negatives instead of writing them.
    negative = torch.full((4,), 1j * (rank + 1)).conj().imag
    assert negative.is_neg()
    dist.broadcast(negative, src=0)
    assert torch.equal(negative, torch.full((4,), -1.0))


def trains(_):
    """Data-parallel training gives the weights of training on all data, and the same bits on all ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(60, 5, generator=generator), torch.randn(60, 2, generator=generator)

    def train(model, inputs, targets):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    torch.manual_seed(2)
    alone = torch.nn.Linear(5, 2)
    together = torch.nn.Linear(5, 2)
    together.load_state_dict(alone.state_dict())
    train(alone, inputs, targets)
    train(torch.nn.parallel.DistributedDataParallel(together), inputs[rank::ranks], targets[rank::ranks])
    torch.testing.assert_close(together.weight, alone.weight)
    first = together.weight.detach().clone()
    dist.broadcast(first, src=0)
    assert torch.equal(first, together.weight)


def subgroups(_):
    halves = [dist.new_group([0, 1], backend="serval"), dist.new_group([2, 3], backend="serval")]
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=halves[rank // 2])
    assert value.item() == (1.0 if rank < 2 else 5.0)


def leaves_a_subgroup(_):
    """A rank ends, without the end of an interpreter, before the first call of a subgroup."""
    subgroup = dist.new_group([0, 1], backend="serval")
    dist.all_reduce(torch.zeros(4))
    if rank == 1:
        print("leaves", flush=True)
        os._exit(7)
    for group in (subgroup, None):
        try:
            dist.all_reduce(torch.zeros(4), group=group)
        except serval.CollectiveError as error:
            print("CollectiveError", error.reason, error, flush=True)
    os._exit(0)


def refusals(_):
    for call in [
        lambda: dist.reduce(torch.zeros(4), 0),
        lambda: dist.reduce_scatter(torch.zeros(4), [torch.zeros(4)] * ranks),
        lambda: dist.send(torch.zeros(4), 1 - rank),
    ]:
        try:
            call()
        except NotImplementedError as refused:
            assert "the backend serval has no" in str(refused)
        else:
            raise AssertionError("it was not refused")
    for call, error in [
        (lambda: dist.all_reduce(torch.zeros(4, dtype=torch.float64)), TypeError),
        (lambda: dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX), ValueError),
        (lambda: dist.broadcast(torch.zeros(4).to_sparse(), src=0), ValueError),
        # As one of a GPU: torch asks the backend, and no memory is touched.
        (lambda: serval.distributed._check(torch.zeros(4, device="meta")), ValueError),
    ]:
        try:
            call()
        except error as refused:
            assert "serval" in str(refused)
        else:
            raise AssertionError("it was not refused")
    dist.barrier()


def disagree(_):
    try:
        dist.all_reduce(torch.zeros(3 + rank))
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason)


def dies(_):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.zeros(100_000))
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason, error)
        sys.exit(0)


def abandons(_):
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.zeros(4), async_op=True)
        # The other rank calls when this process has ended.
        sys.exit(0)
    sys.stdin.read()
    try:
        # What the other rank had sent may be enough for the first call.
        for _ in range(2):
            dist.all_reduce(torch.zeros(4))
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason)


def forks(_):
    dist.all_reduce(torch.zeros(4), async_op=True).wait()
    child = os.fork()
    if child == 0:
        for asynchronous in (False, True):
            try:
                dist.all_reduce(torch.zeros(4), async_op=asynchronous)
            except serval.CollectiveError as error:
                assert error.reason == "argument" and "fork" in str(error), error
            else:
                os._exit(1)
        sys.exit(42)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    last = torch.ones(4)
    dist.all_reduce(last)
    assert torch.equal(last, torch.full((4,), float(ranks)))


def elsewhere(_):
    value = torch.full((4,), float(rank))
    dist.all_reduce(value)
    assert value.tolist() == [sum(range(ranks))] * 4
    print("summed")


def exits(_):
    dist.all_reduce(torch.zeros(1000))
    sys.exit(0)


os.environ["SERVAL_TRANSPORT"] = transport
if what == "elsewhere":
    # This rank is on another machine, which shares the folder of temporary files.
    fake = sys.argv[6]
    if rank == 1 and fake == "host":
        serval.distributed._host = lambda: "another machine"
    if rank == 1 and fake == "memory":
        # As if its host had the same identity, and other memory.
        machine = serval.distributed._reads
        serval.distributed._reads = lambda path: None if path.startswith("/dev/shm/") else machine(path)
    if rank == 0 and fake == "none":
        serval.distributed._MEMORY = "/nowhere"

    def shared(*_arguments, **_options):
        raise AssertionError("it uses shared memory")

    serval.distributed.collective.Group.shared = shared
dist.init_process_group("serval", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
assert dist.get_backend() == "serval"
globals()[what](None)
dist.destroy_process_group()
