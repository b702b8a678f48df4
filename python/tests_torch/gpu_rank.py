"""One rank of a test with torch's tensors in the memory of a GPU: ``gpu_rank.py FUNCTION RANKS RANK FOLDER``. `tools/gpu/tensors` runs it."""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import serval
import serval.distributed  # noqa: F401
from serval.collective import Group

what, ranks, rank, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
GPU = torch.device("cuda", rank % torch.cuda.device_count() if os.environ.get("GPUS") == "all" else 0)


def inputs(shape, dtype, seed):
    """Of all ranks."""
    made = []
    for other in range(ranks):
        generator = torch.Generator().manual_seed(100 * other + seed)
        if dtype == torch.int32:
            made.append(torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=dtype))
        else:
            made.append(torch.randn(shape, generator=generator) * 1e3)
    return made


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


def sums():
    checked = 0
    for seed, shape in enumerate([(1,), (16,), (3, 5, 7), (0,), (262_144,), (262_145,), (100_003,), (4_000_000,), (16 << 20,)]):
        for dtype in (torch.float32, torch.int32):
            given = inputs(shape, dtype, seed)
            ours = given[rank].to(GPU)
            dist.all_reduce(ours)
            # Torch's own sum, on the GPU. The sum of two floats is the same in either order.
            theirs = given[0].to(GPU)
            for other in given[1:]:
                theirs += other.to(GPU)
            host = given[rank].clone()
            dist.all_reduce(host)
            if ranks == 2 or dtype == torch.int32:
                assert torch.equal(bits(ours), bits(theirs)), (shape, dtype, "differs from torch's sum")
                assert torch.equal(bits(ours), bits(host)), (shape, dtype, "differs from the sum in host memory")
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-1)
            first = ours.clone()
            dist.broadcast(first, src=0)
            assert torch.equal(bits(first), bits(ours)), "the ranks have different bits"
            checked += ours.numel()
    print(f"{checked} elements right")


def moves():
    """Broadcasts and gathers of every type."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64):
        for shape in ((1000,), (3, 400_000)):
            for root in range(ranks):
                given = [each.to(dtype) for each in inputs(shape, torch.float32, 7)]
                ours = given[rank].to(GPU)
                dist.broadcast(ours, src=root)
                assert torch.equal(bits(ours), bits(given[root])), (dtype, shape)
            places = [torch.empty(shape, dtype=dtype, device=GPU) for _ in range(ranks)]
            dist.all_gather(places, given[rank].to(GPU))
            assert all(torch.equal(bits(place), bits(each)) for place, each in zip(places, given)), (dtype, shape)
            together = torch.empty((ranks * shape[0], *shape[1:]), dtype=dtype, device=GPU)
            dist.all_gather_into_tensor(together, given[rank].to(GPU))
            assert torch.equal(bits(together), bits(torch.cat(given)))
    dist.barrier()


def streams():
    """The caller's stream has a lot to do before the tensor is complete, and goes on with the result."""
    much = torch.randn(4096, 4096, device=GPU)

    def compute(tensor, times, number):
        nonlocal much
        for _ in range(times):
            much = much @ much
            much /= much.norm()
        tensor += (much.sum().isnan() * 0) + number

    # The first launch of a kernel loads its code, which waits for all streams.
    compute(torch.zeros(3_000_000, device=GPU), 2, rank)
    # On the default stream, and on others.
    for stream in (torch.cuda.default_stream(GPU), torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for turn, asynchronous in enumerate([False, True, True]):
                tensor = torch.zeros(3_000_000, device=GPU)
                compute(tensor, 40, rank + turn)
                assert not stream.query(), "the stream has nothing to do: the test shows nothing"
                work = dist.all_reduce(tensor, async_op=asynchronous)
                if asynchronous:
                    if turn == 1:
                        assert work.wait()
                    else:
                        assert work.get_future().wait()[0] is not None
                result = tensor * 2
                expected = 2.0 * (sum(range(ranks)) + ranks * turn)
                assert torch.equal(result, torch.full_like(result, expected)), (stream, turn)
    many = [torch.full((100_000,), float(rank + at), device=GPU) for at in range(20)]
    works = [dist.all_reduce(each, async_op=True) for each in many]
    last = torch.ones(4, device=GPU)
    dist.all_reduce(last)
    assert all(work.wait() for work in works)
    for at, each in enumerate(many):
        assert torch.equal(each, torch.full_like(each, float(sum(range(ranks)) + ranks * at))), at
    assert last.tolist() == [float(ranks)] * 4


def learns():
    """Data-parallel training gives the weights of training on all data, and the same bits on all ranks."""
    generator = torch.Generator().manual_seed(1)
    features, targets = torch.randn(60, 5, generator=generator).to(GPU), torch.randn(60, 2, generator=generator).to(GPU)

    def train(model, features, targets):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()

    torch.manual_seed(2)
    alone, together = torch.nn.Linear(5, 2).to(GPU), torch.nn.Linear(5, 2).to(GPU)
    together.load_state_dict(alone.state_dict())
    train(alone, features, targets)
    train(torch.nn.parallel.DistributedDataParallel(together), features[rank::ranks], targets[rank::ranks])
    torch.testing.assert_close(together.weight, alone.weight)
    first = together.weight.detach().clone()
    dist.broadcast(first, src=0)
    assert torch.equal(first, together.weight)


def is_refused(call, error, part):
    try:
        call()
    except error as refused:
        assert part in str(refused), refused
    else:
        raise AssertionError(f"it was not refused: {part}")


class Forged:
    """Says anything about a tensor."""

    def __init__(self, tensor, **wrong):
        self.tensor = tensor
        stream = torch.cuda.current_stream(tensor.device).cuda_stream or 1
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "version": 3, "stream": stream, **wrong}


def refusals():
    table = torch.zeros(100, 100, device=GPU)
    is_refused(lambda: dist.all_reduce(table[:, 1]), ValueError, "contiguous tensors on a GPU")
    is_refused(lambda: dist.broadcast(table.t(), src=0), ValueError, "contiguous tensors on a GPU")
    # Some versions of torch refuse a conjugated view themselves.
    is_refused(lambda: dist.broadcast(torch.zeros(4, device=GPU, dtype=torch.complex64).conj(), src=0), (ValueError, RuntimeError), "con")
    is_refused(lambda: dist.all_reduce(table.double()), TypeError, "sums float32 and int32")
    is_refused(lambda: dist.all_reduce(table.bfloat16()), TypeError, "sums float32 and int32")
    is_refused(lambda: dist.all_reduce(table, op=dist.ReduceOp.MAX), ValueError, "ReduceOp.SUM")
    is_refused(lambda: dist.broadcast(table.to_sparse(), src=0), ValueError, "dense tensors")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        is_refused(lambda: dist.all_reduce(table), RuntimeError, "captured in a CUDA graph")
        table += 0
    with Group.shared("forged", ranks=ranks, rank=rank, folder=folder) as group:
        def refused(array, part, **options):
            is_refused(lambda: group.all_reduce(array, **options), serval.CollectiveError, part)

        # Torch takes memory of the driver in pieces of several MiB.
        tensor = torch.ones(1000, device=GPU)
        for wrong in [{"shape": (1 << 30,)}, {"shape": (1 << 60,)}, {"data": (tensor.data_ptr() + 4, False), "shape": (1 << 30,)}]:
            refused(Forged(tensor, **wrong), "its shape or its address is wrong")
        large = torch.empty(256 << 20, dtype=torch.uint8, device=GPU)
        gone = Forged(large.view(torch.float32))
        gone.tensor, address = None, large.data_ptr()
        del large
        torch.cuda.empty_cache()
        refused(gone, "it was freed, or this process never allocated it")
        host = torch.ones(1000)
        refused(Forged(tensor, data=(host.data_ptr(), False)), "give an array that")
        pinned = torch.ones(1000).pin_memory()
        refused(Forged(tensor, data=(pinned.data_ptr(), False)), "is host memory")
        driver, managed = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
        assert driver.cuMemAllocManaged(ctypes.byref(managed), ctypes.c_size_t(4000), 1) == 0
        refused(Forged(tensor, data=(managed.value, False)), "is managed memory")
        assert driver.cuMemFree_v2(managed) == 0
        refused(torch.ones(4, device=GPU, requires_grad=True), "cannot be used")
        refused(Forged(tensor, typestr="<f8"), "sums float32 or int32")
        refused(Forged(tensor, stream=0), "its stream is 0")
        # The group can still be used, and torch's tensor names no stream itself.
        assert tensor.__cuda_array_interface__["version"] == 2
        tensor += rank
        group.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, float(sum(range(ranks)) + ranks)))
        assert address
    assert torch.cuda.current_device() == GPU.index
    dist.all_reduce(table)
    assert not table.any()


def cupy_arrays():
    """Their interface names a stream."""
    try:
        import cupy
    except ImportError as error:
        print("CuPy is not installed: not checked:", error)
        return
    with Group.shared("cupy", ranks=ranks, rank=rank, folder=folder) as group:
        for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
            with stream:
                array = cupy.arange(1_000_000, dtype=cupy.int32) * (rank + 1)
                group.all_reduce(array)
                total = cupy.arange(1_000_000, dtype=cupy.int32) * sum(range(1, ranks + 1))
                assert bool((array == total).all())
                array += rank
                group.broadcast(array, root=ranks - 1)
                assert bool((array == total + ranks - 1).all())
                is_refused(lambda: group.all_reduce(array[::2]), serval.CollectiveError, "is not contiguous")
        managed = cupy.ndarray(1000, cupy.int32, cupy.cuda.malloc_managed(4000))
        is_refused(lambda: group.all_reduce(managed), serval.CollectiveError, "is managed memory")


def did(work):
    """The names of what the GPU does for a function."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}


def quiet():
    """No kernel runs on the GPU for a call."""
    tensor = torch.ones(5_000_000, device=GPU)
    dist.all_reduce(tensor)
    if not any("kernel" in name for name in did(lambda: tensor.add_(1))):
        print("the profiler does not show kernels here: not checked")
        return
    names = did(lambda: (dist.all_reduce(tensor), dist.broadcast(tensor, src=0)))
    print("the GPU did:", sorted(names))
    assert not any("kernel" in name for name in names), names


def disagrees():
    try:
        dist.all_reduce(torch.zeros(8 if rank else 4, device=GPU) if rank < 2 else torch.zeros(4))
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason)
    assert torch.ones(4, device=GPU).sum().item() == 4


def mixes():
    try:
        dist.broadcast(torch.zeros(4, device=GPU if rank else "cpu"), src=0)
        dist.barrier()
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason)


def dies():
    tensor = torch.zeros(64 << 20, device=GPU)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.all_reduce(tensor)
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason, f"after {time.monotonic() - began:.2f} s")
    assert torch.ones(4, device=GPU).sum().item() == 4
    os._exit(0)


def measures():
    for count in (16, 262_144, 16 << 20):
        for device in (GPU, torch.device("cpu")):
            tensor, times = torch.zeros(count, device=device), []
            for _ in range(30):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(tensor)
                times.append(time.perf_counter() - began)
            print(f"{4 * count} bytes, {device.type}: median {sorted(times)[15] * 1e6:.1f} us")


torch.cuda.set_device(GPU)
dist.init_process_group("serval", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
globals()[what]()
dist.destroy_process_group()
