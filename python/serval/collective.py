"""Groups of processes that sum, broadcast and wait together, without torch.

>>> from serval.collective import Group, Listener
>>> listener = Listener("10.0.0.1", 7000)
>>> with Group.tcp("training", rank=0, listener=listener, addresses=["10.0.0.1:7000", "10.0.0.2:7000"]) as group:
...     group.all_reduce(array)      # a NumPy array of float32 or int32, in place

A call runs on the calling thread and releases the interpreter's lock; do not use the array in another thread meanwhile. For torch see
:mod:`serval.distributed`.

Arrays may be in the memory of a GPU (CuPy, Numba, torch and others with ``__cuda_array_interface__``). The copy engines read one after what its
stream has been given before the call, and have written it when the call returns. All ranks have to do the same with an array: it is in
the memory of a GPU on all of them, or on none.
"""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Any

from . import _native
from ._errors import CollectiveError
from ._gpu import GpuArray, gpu_array

__all__ = ["CollectiveError", "Group", "Listener"]

#: How long a call may take, in seconds.
LIMIT = 60.0
#: How long forming a group may take.
FORMING = 30.0

Listener = _native.Listener

#: Groups of this process, whose descriptors a fork closes.
_FORMED: weakref.WeakSet[Group] = weakref.WeakSet()


def _forget() -> None:
    for group in list(_FORMED):
        group._native.forget()


os.register_at_fork(after_in_child=_forget)


def _raised(error: _native.GroupError) -> CollectiveError:
    reason, text = error.args
    return CollectiveError(text, reason=reason)


def _summed(array: GpuArray) -> str:
    if array.dtype is None:
        raise CollectiveError("an all-reduce sums float32 or int32: convert the array, or give dtype", reason="argument")
    return array.dtype


class Group:
    """One rank of a group. All ranks make the same calls in the same order. A call that fails ends the group.

    A group belongs to the process that formed it. In a fork of that process every call raises :class:`CollectiveError`.
    """

    def __init__(self, native: _native.Group, ranks: int, rank: int) -> None:
        self._native = native
        _FORMED.add(self)
        #: The number of ranks.
        self.ranks = ranks
        #: This rank, from 0.
        self.rank = rank

    @classmethod
    def tcp(cls, name: str, *, rank: int, listener: Listener, addresses: list[str], limit: float = FORMING) -> Group:
        """Forms a group over TCP: ``addresses`` (``HOST:PORT``) are those of all ranks in order, ``listener`` is this rank's own."""
        try:
            native = _native.Group.tcp(name, rank, listener, addresses, limit)
        except _native.GroupError as error:
            raise _raised(error) from None
        return cls(native, len(addresses), rank)

    @classmethod
    def shared(cls, name: str, *, ranks: int, rank: int, folder: str, limit: float = FORMING) -> Group:
        """Forms a group of processes of this machine over shared memory. They find each other in ``folder``, which exists."""
        try:
            native = _native.Group.shared(name, ranks, rank, folder, limit)
        except _native.GroupError as error:
            raise _raised(error) from None
        return cls(native, ranks, rank)

    def all_reduce(
        self, buffer: Any, *, dtype: str | None = None, stream: int | None = None, limit: float = LIMIT
    ) -> None:
        """Replaces a writable, contiguous buffer by its sum over all ranks.

        ``dtype``: ``"float32"`` or ``"int32"``; by default that of the buffer, such as a NumPy array's or ``array.array``'s. For an array in the
        memory of a GPU ``stream`` is the handle of the CUDA stream that writes it, by default the one that the array or torch names.
        """
        array = gpu_array(buffer, stream)
        if array is not None:
            self._call(self._native.all_reduce_gpu, array, dtype or _summed(array), limit)
            return
        view = memoryview(buffer)
        if dtype is None:
            dtype = {"f": "float32", "i": "int32", "l": "int32"}.get(view.format) if view.itemsize == 4 else None
            if dtype is None:
                raise CollectiveError(
                    f"an all-reduce sums float32 or int32, not elements of format {view.format!r}: convert the array, or give dtype",
                    reason="argument",
                )
        self._call(self._native.all_reduce, view, dtype, limit)

    def broadcast(self, buffer: Any, *, root: int = 0, stream: int | None = None, limit: float = LIMIT) -> None:
        """Replaces a writable, contiguous buffer by the one of rank ``root``. ``stream``: as for :meth:`all_reduce`."""
        array = gpu_array(buffer, stream)
        if array is not None:
            self._call(self._native.broadcast_gpu, array, root, limit)
            return
        self._call(self._native.broadcast, memoryview(buffer), root, limit)

    def barrier(self, *, limit: float = LIMIT) -> None:
        """Returns after all ranks have called it."""
        self._call(self._native.barrier, limit)

    @staticmethod
    def _call(call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except _native.GroupError as error:
            raise _raised(error) from None

    def close(self) -> None:
        """Leaves the group. The other ranks cannot make further calls."""
        self._native.close()

    def abort(self) -> None:
        """Leaves the group at once: a call in another thread fails with the reason ``interrupted``."""
        self._native.abort()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
