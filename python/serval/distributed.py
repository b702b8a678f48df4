# mypy: ignore-errors
# (torch is not installed where types are checked.)
"""``torch.distributed`` over Serval's collectives: importing this module registers the backend ``serval``.

>>> import torch.distributed as dist
>>> import serval.distributed
>>> dist.init_process_group("serval")
>>> dist.all_reduce(tensor)

``all_reduce`` (sum of float32 or int32), ``broadcast``, ``all_gather`` and ``barrier`` of 1 to 8 ranks, for tensors on the CPU or on GPUs: what
``DistributedDataParallel`` needs. Tensors on a GPU have to be contiguous. Its copy engines read one after what the current stream has been given
before the call, and have written it when the call returns or, with ``async_op``, when ``wait`` does. Ranks that are all on one machine use shared memory, others TCP. Environment:

* ``SERVAL_TRANSPORT``: ``auto`` (default), ``shm`` or ``tcp``.
* ``SERVAL_ADDRESS``: the address of this machine that the other ranks reach (default: the one from which it reaches ``MASTER_ADDR``).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import secrets
import shutil
import socket
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.futures import Future

from . import collective
from ._errors import CollectiveError
from ._gpu import GpuArray

__all__ = ["ProcessGroup"]

_DTYPES = {torch.float32: "float32", torch.int32: "int32"}
#: A file system in memory.
_MEMORY = "/dev/shm"
#: Groups that are open, so that the end of the interpreter leaves them.
_OPEN: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


class _Work(dist._Work):
    """The outcome of a call: a future of the worker thread, or a call that has ended already."""

    def __init__(self, result, call=None) -> None:
        super().__init__()
        # Tensors, or lists of them.
        self._result = result
        self._call = call
        self._future = None

    def wait(self, timeout=None) -> bool:
        if self._call is not None:
            self._call.result(timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        return self._call is None or self._call.done()

    def is_success(self) -> bool:
        return self.is_completed() and (self._call is None or self._call.exception() is None)

    def exception(self):
        return None if self._call is None or not self._call.done() else self._call.exception()

    def result(self):
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self):
        if self._future is None:
            self._future = Future(devices=_gpus(self._result))

            def set_outcome(call) -> None:
                error = call.exception()
                if error is None:
                    self._future.set_result(self._result)
                else:
                    self._future.set_exception(error)

            if self._call is None:
                self._future.set_result(self._result)
            else:
                self._call.add_done_callback(set_outcome)
        return self._future


class ProcessGroup(dist.ProcessGroup):
    """The group behind ``init_process_group("serval")`` and ``new_group(backend="serval")``."""

    def __init__(self, store, rank: int, ranks: int, timeout) -> None:
        super().__init__(rank, ranks)
        self._seconds = timeout.total_seconds()
        self._worker = None
        self._pending = None
        self._process = os.getpid()
        self._group = _form(store, rank, ranks, self._seconds) if ranks > 1 else None
        _OPEN.add(self)

    def getBackendName(self) -> str:
        return "serval"

    def allreduce(self, tensors, opts=None):
        options = opts or dist.AllreduceOptions()
        [tensor] = tensors
        _check(tensor)
        if options.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(f"the backend serval sums, and has no {options.reduceOp}: use ReduceOp.SUM")
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise TypeError(f"the backend serval sums float32 and int32, not {tensor.dtype}: convert the tensor")

        def call(group, buffer):
            group.all_reduce(buffer, dtype=dtype, limit=self._seconds)

        return self._run(tensors, options, _in_place(tensor, call))

    def broadcast(self, tensors, opts=None):
        options = opts or dist.BroadcastOptions()
        [tensor] = tensors
        _check(tensor)
        return self._run(tensors, options, self._broadcast(tensor, options.rootRank))

    def allgather(self, outputs, inputs, opts=None):
        [output], [tensor] = outputs, inputs
        return self._gather(outputs, output, tensor, opts)

    def all_gather_single(self, output, tensor, opts=None):
        _check(output)
        if not output.is_contiguous() or output.numel() != self.size() * tensor.numel():
            raise ValueError(f"all_gather_single needs a contiguous output of {self.size()} times the input's length")
        return self._gather(output, output.view(self.size(), tensor.numel()).unbind(), tensor.reshape(-1), opts)

    #: Its name before torch 2.15.
    _allgather_base = all_gather_single

    def barrier(self, opts=None):
        return self._run([], opts or dist.BarrierOptions(), lambda group: group.barrier(limit=self._seconds))

    def _gather(self, result, places, tensor, opts) -> _Work:
        """Each rank in turn broadcasts its tensor into its place."""
        for each in (tensor, *places):
            _check(each)
        if any((each.dtype, each.numel()) != (tensor.dtype, tensor.numel()) for each in places):
            raise ValueError("the backend serval gathers tensors of one type and length: outputs and input have to be alike")
        places[self.rank()].detach().copy_(tensor.detach())
        broadcasts = [self._broadcast(place, root) for root, place in enumerate(places)]

        def call(group):
            for broadcast in broadcasts:
                broadcast(group)

        return self._run(result, opts or dist.AllgatherOptions(), call)

    def _broadcast(self, tensor, root):
        return _in_place(tensor, lambda group, buffer: group.broadcast(buffer, root=root, limit=self._seconds))

    def shutdown(self) -> None:
        """Leaves the group, after the calls in flight; ``destroy_process_group`` calls it."""
        # A fork has neither the thread nor the group.
        if self._process != os.getpid():
            return
        if self._worker is not None:
            self._worker.shutdown()
        if self._group is not None:
            self._group.close()

    def abort(self) -> None:
        """Leaves the group at once; calls in flight fail."""
        if self._group is not None:
            self._group.abort()
        self.shutdown()

    def _run(self, result, options, call) -> _Work:
        """Calls on this thread, or, for ``async_op``, on a thread that makes all such calls in order."""
        if self._process != os.getpid():
            raise CollectiveError(
                "the process group belongs to the process that made it, not to its fork: make another one here", reason="argument"
            )
        if self._group is None:
            return _Work(result)
        if not options.asyncOp and (self._pending is None or self._pending.done()):
            call(self._group)
            return _Work(result)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "serval-collective")
        self._pending = self._worker.submit(call, self._group)
        return _Work(result, self._pending)


def _refused(operation):
    def refuse(self, *_arguments, **_options):
        raise NotImplementedError(
            f"the backend serval has no {operation}, only all_reduce, broadcast, all_gather and barrier: use a group of Gloo for it"
        )

    return refuse


# By the names of torch's methods.
for _method, _operation in {
    "reduce": "reduce",
    "gather": "gather",
    "gather_single": "gather",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather_coalesced": "all_gather_coalesced",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}.items():
    setattr(ProcessGroup, _method, _refused(_operation))


def _check(tensor) -> None:
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise ValueError(
            f"the backend serval needs dense tensors on the CPU or on a GPU, not {tensor.layout} on {tensor.device}: copy it with tensor.cpu()"
        )
    if tensor.device.type == "cuda":
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError("the backend serval needs contiguous tensors on a GPU: give tensor.contiguous().resolve_conj().resolve_neg()")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the backend serval cannot be captured in a CUDA graph: make the call outside of it")


def _gpus(result) -> list:
    """The GPUs with tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result.device] if result.is_cuda else []
    return sorted({device for each in result for device in _gpus(each)}, key=str)


def _in_place(tensor, call):
    """A call on the tensor's own memory, as a function of the group."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return lambda group: _on_host(tensor, group, call)
    count = tensor.numel() * tensor.element_size()
    # What the current stream does to the tensor precedes the call, which may be made on another thread.
    event = torch.cuda.current_stream(tensor.device).record_event()

    def on_gpu(group):
        call(group, GpuArray(tensor, tensor.data_ptr(), count, None, event=event.cuda_event))

    return on_gpu


def _on_host(tensor, group, call) -> None:
    """On a copy if the tensor is not contiguous."""
    # Torch marks conjugates and negatives instead of writing them.
    dense = tensor.contiguous().resolve_conj().resolve_neg()
    count = dense.numel() * dense.element_size()
    call(group, (ctypes.c_ubyte * count).from_address(dense.data_ptr()) if count else bytearray())
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def _form(store, rank: int, ranks: int, seconds: float) -> collective.Group:
    """Ranks exchange a secret name, and where they are, through torch's store."""
    if rank == 0:
        store.set("name", secrets.token_hex(32))
    name = store.get("name").decode()
    transport = os.environ.get("SERVAL_TRANSPORT", "auto")
    if transport not in ("auto", "shm", "tcp"):
        raise ValueError(f"SERVAL_TRANSPORT is {transport!r}: it has to be auto, shm or tcp")
    machine = _Machine(name) if rank == 0 and transport != "tcp" else None
    try:
        if rank == 0:
            store.set("machine", "\n".join([machine.host, machine.folder, machine.segment]) if machine else "-")
        proof = "-" if transport == "tcp" else _proof(name, store.get("machine").decode())
        listener = collective.Listener(_own_address())
        store.set(f"rank {rank}", f"{proof} {listener.address()}")
        places = [store.get(f"rank {other}").decode().split() for other in range(ranks)]
        if rank == 0:
            store.set("transport", "shm" if machine and all(proof == machine.nonce for proof, _ in places) else "tcp")
        if store.get("transport") == b"shm":
            folder = store.get("machine").decode().split("\n")[1]
            group = collective.Group.shared(name, ranks=ranks, rank=rank, folder=folder, limit=seconds)
            # Rank 0 removes the folder, in which the others may still be finding each other.
            group.barrier(limit=seconds)
            return group
        if transport == "shm":
            raise CollectiveError(
                "SERVAL_TRANSPORT is shm, but not all ranks share memory and the folder of rank 0: start them on one machine, or use tcp",
                reason="forming",
            )
        addresses = [address for _, address in places]
        return collective.Group.tcp(name, rank=rank, listener=listener, addresses=addresses, limit=seconds)
    finally:
        if machine:
            machine.remove()


class _Machine:
    """How other ranks prove that they are on the machine of rank 0: they read a nonce in its memory, and enter its folder.

    A folder alone may be on a file system that several machines share. Memory cannot be.
    """

    def __init__(self, name: str) -> None:
        self.host = _host()
        self.nonce = secrets.token_hex(16)
        self.segment = ""
        self.folder = tempfile.mkdtemp(prefix="serval-")
        with open(os.path.join(self.folder, "name"), "w", encoding="ascii") as file:
            file.write(name)
        try:
            descriptor, self.segment = tempfile.mkstemp(prefix="serval-", dir=_MEMORY)
        except OSError:
            # Without it nobody can prove anything, and the ranks use TCP.
            return
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(self.nonce)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.segment:
            os.unlink(self.segment)


def _host() -> str:
    """Equal in processes that share memory and paths: the start of the host kernel, and the namespaces. Empty if it is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "mnt"))])
    except OSError:
        return ""


def _proof(name: str, machine: str) -> str:
    """The nonce of rank 0, if this process is on its machine and can enter its folder."""
    host, folder, segment = machine.split("\n") if "\n" in machine else ("", "", "")
    if not host or host != _host() or _reads(os.path.join(folder, "name")) != name:
        return "-"
    return _reads(segment) or "-"


def _reads(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(200)
    except OSError:
        return None


def _own_address() -> str:
    given = os.environ.get("SERVAL_ADDRESS")
    if given:
        return given
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    # Connecting a datagram socket sends nothing; it only chooses the address from which the other one is reached.
    family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _create(store, rank: int, ranks: int, timeout) -> ProcessGroup:
    return ProcessGroup(store, rank, ranks, timeout)


def _leave() -> None:
    """Ends calls in flight, which may wait for a rank that never calls. Between calls the groups are left in order."""
    for group in list(_OPEN):
        group.abort()


# Before concurrent.futures waits for its threads, which may wait for a rank that never calls.
getattr(threading, "_register_atexit", atexit.register)(_leave)
dist.Backend.register_backend("serval", _create, devices=["cpu", "cuda"])
