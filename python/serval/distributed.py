# mypy: ignore-errors
# (torch is not installed where types are checked.)
"""``torch.distributed`` over Serval's collectives: importing this module registers the backend ``serval``.

>>> import torch.distributed as dist
>>> import serval.distributed
>>> dist.init_process_group("serval")
>>> dist.all_reduce(tensor)

``all_reduce`` (sum of float32 or int32), ``broadcast`` and ``barrier`` of 1 to 8 ranks, for tensors on the CPU. Ranks that all can
enter one folder of a machine use shared memory, others TCP. Environment:

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
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.futures import Future

from . import collective
from ._errors import CollectiveError

__all__ = ["ProcessGroup"]

_DTYPES = {torch.float32: "float32", torch.int32: "int32"}
#: Groups that are open, so that the end of the interpreter leaves them in order.
_OPEN: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


class _Work(dist._Work):
    """The outcome of a call: a future of the worker thread, or a call that has ended already."""

    def __init__(self, result, call=None) -> None:
        super().__init__()
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
            self._future = Future()

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
        return self._run(tensors, options, lambda group, buffer: group.all_reduce(buffer, dtype=dtype, limit=self._seconds))

    def broadcast(self, tensors, opts=None):
        options = opts or dist.BroadcastOptions()
        [tensor] = tensors
        _check(tensor)
        root = options.rootRank
        return self._run(tensors, options, lambda group, buffer: group.broadcast(buffer, root=root, limit=self._seconds))

    def barrier(self, opts=None):
        return self._run([], opts or dist.BarrierOptions(), lambda group, _: group.barrier(limit=self._seconds))

    def shutdown(self) -> None:
        """Leaves the group, after the calls in flight; ``destroy_process_group`` calls it."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._group is not None:
            self._group.close()

    def abort(self) -> None:
        self.shutdown()

    def _run(self, tensors, options, call) -> _Work:
        """Calls on this thread, or, for ``async_op``, on a thread that makes all such calls in order."""
        if self._group is None:
            return _Work(tensors)
        if not options.asyncOp and (self._pending is None or self._pending.done()):
            _on_buffer(self._group, tensors, call)
            return _Work(tensors)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "serval-collective")
        self._pending = self._worker.submit(_on_buffer, self._group, tensors, call)
        return _Work(tensors, self._pending)


def _check(tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"the backend serval needs dense tensors on the CPU, not {tensor.layout} on {tensor.device}: use tensor.cpu()")


def _on_buffer(group, tensors, call) -> None:
    if not tensors:
        return call(group, None)
    tensor = tensors[0].detach()
    dense = tensor.contiguous()
    count = dense.numel() * dense.element_size()
    buffer = (ctypes.c_ubyte * count).from_address(dense.data_ptr()) if count else bytearray()
    call(group, buffer)
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
    folder = None
    try:
        if rank == 0:
            folder = tempfile.mkdtemp(prefix="serval-") if transport != "tcp" else ""
            if folder:
                with open(os.path.join(folder, "name"), "w", encoding="ascii") as file:
                    file.write(name)
            store.set("folder", folder or "-")
        at = store.get("folder").decode()
        sees = transport != "tcp" and _reads(os.path.join(at, "name")) == name
        listener = collective.Listener(_own_address())
        store.set(f"rank {rank}", f"{int(sees)} {listener.address()}")
        places = [store.get(f"rank {other}").decode().split() for other in range(ranks)]
        if all(sees == "1" for sees, _ in places):
            group = collective.Group.shared(name, ranks=ranks, rank=rank, folder=at, limit=seconds)
            # Rank 0 removes the folder, in which the others may still be finding each other.
            group.barrier(limit=seconds)
            return group
        if transport == "shm":
            raise CollectiveError(
                "SERVAL_TRANSPORT is shm, but not all ranks see the folder of rank 0: start them on one machine, or use tcp", reason="forming"
            )
        addresses = [address for _, address in places]
        return collective.Group.tcp(name, rank=rank, listener=listener, addresses=addresses, limit=seconds)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


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


@atexit.register
def _leave() -> None:
    for group in list(_OPEN):
        group.shutdown()


dist.Backend.register_backend("serval", _create, devices=["cpu"])
