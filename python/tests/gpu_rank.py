"""One rank of a test with arrays in the memory of a GPU: ``gpu_rank.py FUNCTION RANKS RANK FOLDER``.

The driver is ``libcuda.so.1``: that of a GPU (`tools/gpu/tensors`), or the fake one of the tests, whose memory is the process's own.
"""

import array
import ctypes
import os
import signal
import sys

import serval
from serval.collective import Group

what, ranks, rank, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
cuda = ctypes.CDLL("libcuda.so.1")
word, size = ctypes.c_uint64, ctypes.c_size_t


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, f"{name}: {code}"


def created(name, *arguments):
    handle = word()
    call(name, ctypes.byref(handle), *arguments)
    return handle.value


call("cuInit", 0)
context = created("cuDevicePrimaryCtxRetain", 0)
call("cuCtxSetCurrent", word(context))
STREAM = created("cuStreamCreate", 1)


class Memory:
    """Memory of the GPU, with the content of an array."""

    def __init__(self, data):
        self.code, self.count, self.bytes = data.typecode, len(data), len(data) * data.itemsize
        self.address = created("cuMemAlloc_v2", size(max(self.bytes, 1)))
        self.typestr = {"f": "<f4", "i": "<i4", "d": "<f8", "B": "|u1"}[self.code]
        self.stream = STREAM
        self.write(data)

    @property
    def __cuda_array_interface__(self):
        place = {"data": (self.address, False), "shape": (self.count,), "typestr": self.typestr}
        return {"version": 3, "strides": None, "stream": self.stream, **place}

    def write(self, data):
        call("cuMemcpyHtoDAsync_v2", word(self.address), word(data.buffer_info()[0]), size(self.bytes), word(STREAM))
        call("cuStreamSynchronize", word(STREAM))

    def read(self):
        data = array.array(self.code, bytes(self.bytes))
        call("cuMemcpyDtoHAsync_v2", word(data.buffer_info()[0]), word(self.address), size(self.bytes), word(STREAM))
        call("cuStreamSynchronize", word(STREAM))
        return data

    def free(self):
        call("cuMemFree_v2", word(self.address))


class Forged:
    """Says anything."""

    def __init__(self, memory, **wrong):
        self.__cuda_array_interface__ = {**memory.__cuda_array_interface__, **wrong}


def numbers(code, count, of=rank):
    """Different ones of each rank; sums of the floats are rounded."""
    values = [(at * 7919 + of * 104729) % 2000003 - 1000001 for at in range(10007)]
    pattern = array.array(code, values if code == "i" else [value * 1.1 for value in values])
    return (pattern * (count // len(pattern) + 1))[:count]


def sums(group):
    # Up to several pieces.
    for count in (0, 1, 16, 1000, 262144, 300001, 1100000):
        for code in "fi":
            host = numbers(code, count)
            memory = Memory(host)
            group.all_reduce(memory)
            group.all_reduce(host)
            assert memory.read().tobytes() == host.tobytes(), (count, code)
            host = numbers(code, count)
            memory.write(host)
            group.broadcast(memory, root=1)
            assert memory.read().tobytes() == numbers(code, count, 1).tobytes(), (count, code)
            memory.free()
    group.barrier()
    # A broadcast has every type, and an all-reduce the one that it is told.
    memory = Memory(array.array("B", [rank] * 1001))
    group.broadcast(memory)
    assert memory.read().tobytes() == bytes(1001)
    memory.free()
    memory = Memory(array.array("d", [0.0] * 8))
    group.all_reduce(memory, dtype="int32")
    memory.free()


def is_refused(group, forged, *parts, call="all_reduce", **options):
    try:
        getattr(group, call)(forged, **options)
    except serval.CollectiveError as error:
        assert error.reason == "argument", error
        for part in parts:
            assert part in str(error), f"{part!r} is not in: {error}"
    else:
        raise AssertionError(f"it was not refused: {parts}")


def refusals(group):
    memory = Memory(numbers("f", 1000))
    freed = Memory(numbers("f", 1000))
    freed.free()
    outside = "its shape or its address is wrong"
    # Real allocations are rounded up, by less than this.
    for wrong in [{"shape": (64 << 20,)}, {"data": (memory.address + 4, False), "shape": (64 << 20,)}, {"shape": (1 << 60,)}]:
        is_refused(group, Forged(memory, **wrong), outside)
    is_refused(group, freed, "it was freed, or this process never allocated it")
    for address in (1, 4096, 1 << 47, (1 << 64) - 4):
        is_refused(group, Forged(memory, data=(address, False)), "give an array that")
    host = array.array("f", bytes(4000))
    is_refused(group, Forged(memory, data=(host.buffer_info()[0], False)), "give an array that")
    for wrong, part in [
        ({"typestr": "<f8"}, "sums float32 or int32"),
        ({"typestr": ">f4"}, "sums float32 or int32"),
        ({"typestr": "float"}, "no valid __cuda_array_interface__"),
        ({"typestr": "<f99999999999"}, "no valid __cuda_array_interface__"),
        ({"shape": (-1,)}, "no valid __cuda_array_interface__"),
        ({"shape": (1 << 62, 4)}, "more than any memory"),
        ({"shape": None}, "no valid __cuda_array_interface__"),
        ({"data": None}, "no valid __cuda_array_interface__"),
        ({"data": (-1, False)}, "no valid __cuda_array_interface__"),
        ({"data": (1 << 64, False)}, "no valid __cuda_array_interface__"),
        ({"data": (memory.address, True)}, "is read-only"),
        ({"mask": memory}, "has a mask"),
        ({"strides": (8,)}, "is not contiguous"),
        ({"shape": (10, 10), "strides": (4, 40)}, "is not contiguous"),
        ({"shape": (10, 10), "strides": (4,)}, "is not contiguous"),
        ({"stream": 0}, "its stream is 0"),
        ({"stream": "one"}, "is no handle of a CUDA stream"),
        ({"version": 2}, "give it as stream="),
        ({"version": "x"}, "no valid __cuda_array_interface__"),
    ]:
        is_refused(group, Forged(memory, **wrong), part)
    is_refused(group, memory, "no handle of a CUDA stream", stream=-1)
    is_refused(group, memory, "the root 9 is not in", call="broadcast", root=9)
    # The group can still be used, with what is unusual and sound.
    memory.write(numbers("f", 1000))
    for sound in [
        {"strides": (4,)},
        {"shape": (10, 1, 100), "strides": (400, 12, 4)},
        {"stream": None},
        {"stream": 1},
        {"stream": 2},
        {"data": (0, False), "shape": (0,)},
        {"data": (memory.address + 400, False), "shape": (900,)},
    ]:
        group.all_reduce(Forged(memory, **sound))
    group.all_reduce(Forged(memory, version=2), stream=0)
    first = memory.read()
    group.broadcast(memory)
    assert memory.read().tobytes() == first.tobytes()


def ordered(group):
    """The caller's stream has not written the array when the call begins."""
    data, late = numbers("i", 1000), numbers("i", 1000)
    memory, pinned = Memory(array.array("i", bytes(4000))), late.buffer_info()[0]
    call("cuMemHostRegister_v2", word(pinned), size(4000), 0)
    for stream in (None, STREAM):
        memory.stream = None if stream else STREAM
        call("cuMemcpyHtoDAsync_v2", word(memory.address), word(pinned), size(4000), word(STREAM))
        group.all_reduce(memory, stream=stream)
        # Its own result, on the same stream, comes after it.
        data = numbers("i", 1000)
        group.all_reduce(data)
        assert memory.read().tobytes() == data.tobytes()
    call("cuMemHostUnregister", word(pinned))


def mixed(group):
    data = numbers("f", 2)
    try:
        group.broadcast(data if rank else Memory(data))
        group.barrier()
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason)


def disagree(group):
    memory = Memory(numbers("f", 1000 + rank))
    try:
        group.all_reduce(memory)
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason)
    # No copy uses it.
    memory.free()


def killed(group):
    memory = Memory(numbers("f", 4 << 20))
    group.all_reduce(memory)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(memory)
        group.all_reduce(memory)
    except serval.CollectiveError as error:
        print("CollectiveError", error.reason)
    memory.free()


def forks(group):
    memory = Memory(numbers("i", 1000))
    group.all_reduce(memory)
    child = os.fork()
    if child == 0:
        is_refused(group, memory, "fork")
        del group
        os._exit(42)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    group.all_reduce(memory)


with Group.shared("gpu", ranks=ranks, rank=rank, folder=folder) as formed:
    globals()[what](formed)
