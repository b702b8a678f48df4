"""Transfers: one command moves bytes from a source through stages to a sink, and no Python code touches them.

>>> from serval.transfer import Digest, Seal, Transfers
>>> with Transfers() as transfers:
...     sent = transfers.run(open("data.bin", "rb"), connection, Digest("sha256"), Seal(key))
...     print(sent.written, sent.digest.hex())

A source or a sink is a file, a connected stream socket (TCP or Unix), shared memory (``os.memfd_create``), or an array in the memory of a GPU
(CuPy, Numba, torch and others with ``__cuda_array_interface__``). A sink may be a path: the file gets this name when the transfer has succeeded, so it
is whole or absent.

>>> weights = torch.empty(2**30, dtype=torch.uint8, device="cuda")
>>> await transfers.start("weights.bin", weights)

The engine is in this process, or in another one: ``Transfers("/run/serval/transfer")``. That one reaches files and sockets only.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from . import _codes as codes, _native
from ._errors import ConfigError, TransferError, describe
from ._gpu import GpuArray, gpu_array

__all__ = [
    "REASON_NAMES",
    "Compress",
    "Digest",
    "Expand",
    "Find",
    "Grep",
    "Open",
    "Result",
    "Seal",
    "StageResult",
    "Transfer",
    "TransferError",
    "Transfers",
]

#: How often the thread that waits for ends looks whether it is to stop, in seconds.
_LOOK = 1.0
#: How long the end of cancelled transfers is waited for, in seconds: of an engine in another process; and of one in this process, and of new files that
#: get their names, whose file system may not answer.
_CLOSING = 2.0
_CLOSING_OWN = 10.0
_GiB = 1 << 30
#: The words that :attr:`TransferError.reason` may be.
REASON_NAMES = codes.REASON_NAMES


@dataclass(frozen=True)
class Digest:
    """A digest of the bytes that pass."""

    algorithm: codes.Digest

    def _given(self) -> _Given:
        return ("digest", self.algorithm, b"", 0, 0)


@dataclass(frozen=True)
class Open:
    """Decrypts a sealed stream. It comes first."""

    key: bytes
    cipher: codes.Cipher = "aes-256-gcm"

    def __repr__(self) -> str:
        return f"Open({self.cipher!r})"

    def _given(self) -> _Given:
        return ("open", self.cipher, _octets(self.key, "a key"), 0, 0)


@dataclass(frozen=True)
class Seal:
    """Encrypts, with a key of 32 bytes. It comes last."""

    key: bytes
    cipher: codes.Cipher = "aes-256-gcm"

    def __repr__(self) -> str:
        return f"Seal({self.cipher!r})"

    def _given(self) -> _Given:
        return ("seal", self.cipher, _octets(self.key, "a key"), 0, 0)


@dataclass(frozen=True)
class Compress:
    """Compresses: ``"gzip"`` or ``"zstd"``, with a level from 1 to 9, or 1 for gzip and 3 for zstd."""

    format: codes.Format
    level: int | None = None

    def _given(self) -> _Given:
        option = self.format if self.level is None else f"{self.format}:{_size(self.level, 'level')}"
        return ("compress", option, b"", 0, 0)


@dataclass(frozen=True)
class Expand:
    """Expands compressed data: up to ``most_bytes`` and, beyond the first MiB, ``ratio`` bytes for each byte that went in."""

    format: codes.Format
    most_bytes: int = 64 * _GiB
    ratio: int = 100

    def _given(self) -> _Given:
        return ("expand", self.format, b"", _size(self.most_bytes, "most_bytes"), _size(self.ratio, "ratio"))


@dataclass(frozen=True)
class Find:
    """Counts a text, and reports where the first ``offsets`` of them begin."""

    text: bytes
    offsets: int = 0

    def _given(self) -> _Given:
        return ("find", "", _octets(self.text, "a text"), _size(self.offsets, "offsets"), 0)


@dataclass(frozen=True)
class Grep:
    """Counts the lines that match a regular expression, in linear time, and reports where the first ``offsets`` of them begin."""

    expression: str
    offsets: int = 0

    def _given(self) -> _Given:
        return ("grep", "", _octets(self.expression.encode(), "an expression"), _size(self.offsets, "offsets"), 0)


def _octets(given: Any, what: str) -> bytes:
    if not isinstance(given, (bytes, bytearray, memoryview)):
        raise ConfigError(f"{what} is bytes, not {describe(given)}")
    return bytes(given)


def _size(given: int, what: str) -> int:
    if not isinstance(given, int) or not 0 <= given < 1 << 63:
        raise ConfigError(f"{what} is {given!r}: it is a number from 0 to 2**63 - 1")
    return given


Stage = Digest | Open | Seal | Compress | Expand | Find | Grep
_Given = tuple[str, str, bytes, int, int]


@dataclass(frozen=True)
class StageResult:
    """What one stage did."""

    name: str
    #: Bytes that went in, and that came out.
    read: int
    made: int
    #: All bytes of the transfer went through it.
    finished: bool
    #: The digest, of a stage that computes one.
    digest: bytes | None = None
    #: How many a search has found, and where the first ones begin.
    found: int | None = None
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a transfer did. The counts are exact, also of a transfer that has failed."""

    #: Bytes taken from the source.
    read: int
    #: Bytes that the sink has.
    written: int
    stages: tuple[StageResult, ...] = ()

    @property
    def digest(self) -> bytes | None:
        """The first digest."""
        return next((stage.digest for stage in self.stages if stage.digest is not None), None)


class Transfer:
    """A transfer in flight, or one that has ended. Wait for it with :meth:`wait`, or ``await`` it."""

    def __init__(self, owner: Transfers, keeps: tuple[Any, ...]) -> None:
        self._owner = owner
        #: Arrays that must stay allocated.
        self._keeps = keeps
        self._id = 0
        self._ended = threading.Event()
        self._result: Result | None = None
        self._error: TransferError | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Result:
        """Waits for the end. Raises :class:`TransferError` if it failed, and ``TimeoutError`` if it is still in flight after ``timeout`` seconds."""
        self._owner._check_process()
        if not self._owner._wait(self._ended, timeout):
            raise TimeoutError(f"the transfer is still in flight after {timeout} s")
        return self.result()

    def result(self) -> Result:
        """What it did, after its end."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise TimeoutError("the transfer is still in flight")
        return self._result

    def progress(self) -> tuple[int, int] | None:
        """Bytes read and written so far. ``None`` if that is not known: the engine is in another process."""
        if self._ended.is_set():
            result = self._error.result if self._error is not None else self._result
            return None if result is None else (result.read, result.written)
        return self._owner._progress(self._id)

    def cancel(self) -> None:
        """Ends it; it fails with the reason ``cancelled`` and what it has done so far, if it has not ended already."""
        self._owner._cancel(self._id)

    def when_done(self, callback: Callable[[Transfer], None]) -> None:
        """Calls ``callback`` with this transfer when it has ended, on the thread that waits for ends, which it must not delay; or at
        once, if it has ended. What it raises goes to ``threading.excepthook``."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def ended(_: Transfer) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:
                # The loop is closed, so nothing waits any more.
                pass

        self.when_done(ended)
        try:
            yield from future.__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def _end(self, result: Result, error: tuple[str, int, str] | None) -> None:
        if error is None:
            self._result = result
        else:
            reason, number, text = error
            self._error = TransferError(text, reason=reason, errno=number, result=result)
        with self._lock:
            self._keeps = ()
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:  # noqa: BLE001 - other transfers wait for this thread
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))


class Transfers:
    """Starts transfers. Use it in a ``with`` block, or call :meth:`close`, which cancels what is in flight.

    ``engine`` is the path of the socket of an engine in another process (``transfer.socket`` of a server). Without it the engine is in
    this process: ``threads`` threads move bytes (2 by default), of ``in_flight`` transfers at a time, with ``memory_mib`` MiB of memory.
    A plain transfer to or from a GPU has two slots of pinned memory for each thread that it uses, of ``slot_kib`` KiB (64 to 65536) or of a size that
    suits the array.

    A thread waits for ends. With ``waits=False`` there is none, for programs with a loop of their own, such as eventlet: they call :meth:`reap` when
    the descriptor :meth:`fileno` is readable, or :meth:`Transfer.wait`.
    """

    def __init__(
        self,
        engine: str | os.PathLike[str] | None = None,
        *,
        threads: int = 2,
        in_flight: int = 256,
        memory_mib: int = 1024,
        waits: bool = True,
        slot_kib: int | None = None,
    ) -> None:
        if slot_kib is not None and not 64 <= slot_kib <= 65536:
            raise ValueError(f"slot_kib is {slot_kib}: it has to be 64 to 65536")
        path = None if engine is None else os.fspath(engine)
        try:
            self._native = _native.Transfers(path, threads, in_flight, memory_mib, slot_kib)
        except _native.TransferRefused as error:
            raise _raised(error) from None
        self._is_own = engine is None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._in_flight: dict[int, Transfer] = {}
        #: Nothing can be started any more, and it was closed.
        self._stops = False
        self._closes = False
        self._thread: threading.Thread | None = None
        if waits:
            # It has a weak reference, so that transfers that nobody closes end with their owner.
            self._thread = threading.Thread(target=_wait_for_ends, args=(weakref.ref(self), self._native), name="serval-transfers", daemon=True)
            self._thread.start()
        _OPEN.add(self)

    def start(
        self,
        source: Any,
        sink: Any,
        *stages: Stage,
        offset: int = 0,
        bytes: int | None = None,
        sink_offset: int = 0,
        stall: float | None = None,
        deadline: float | None = None,
        sync: bool = False,
        replace: bool = True,
        head: bytes = b"",
        _small: bool = False,
    ) -> Transfer:
        """Starts a transfer and returns at once.

        ``source`` and ``sink``: a path, a file or socket object or its descriptor, or an array in the memory of a GPU. Files and sockets may be
        closed as soon as this returns. An array is the transfer's until its end. ``offset`` and ``bytes`` choose a part of the source,
        ``sink_offset`` says where it goes in a file. ``stall``: seconds in which almost nothing may move (30 by default); ``deadline``: seconds in all.
        ``sync``: it succeeds when the bytes are on the disk. ``replace``: a sink that is a path may replace a file.
        ``head``: what the program has received from a source that is a socket before, at most 16 KiB; it goes first, and is not counted as read. Raises :class:`TransferError`
        if it cannot start.
        """
        keeps: list[Any] = []
        opened: list[int] = []
        if bytes is not None:
            _size(bytes, "bytes")
        given = [stage._given() for stage in stages]
        try:
            given_source = self._place(source, _size(offset, "offset"), False, keeps, opened)
            given_sink = self._place(sink, _size(sink_offset, "sink_offset"), True, keeps, opened)
            transfer = Transfer(self, tuple(keeps))
            self._check_process()
            with self._lock:
                if self._stops:
                    raise ConfigError("these transfers are closed")
            if _small and not head:
                ended = self._native.run_small(given_source, given_sink, bytes, given, stall, deadline)
                if ended is not None:
                    _end(transfer, ended)
                    return transfer
            # The number is known before the end is looked for.
            with self._lock:
                if self._stops:
                    raise ConfigError("these transfers are closed")
                transfer._id = self._native.start(given_source, given_sink, bytes, given, stall, deadline, sync, replace, _octets(head, "what was received before"))
                self._in_flight[transfer._id] = transfer
        except _native.TransferRefused as error:
            raise _raised(error) from None
        finally:
            # The engine has copies of its own.
            for descriptor in opened:
                os.close(descriptor)
        return transfer

    def run(self, source: Any, sink: Any, *stages: Stage, **options: Any) -> Result:
        """Starts a transfer and waits for its end. The arguments are those of :meth:`start`. An interrupt cancels it.

        At most 64 KiB of a file on a disk or in the memory of this machine, through nothing but digests and a seal to a socket, are read, sealed and
        sent by this thread, if no other transfer of these is in flight: the way through an engine takes longer."""
        transfer = self.start(source, sink, *stages, _small=True, **options)
        try:
            return transfer.wait()
        except BaseException:
            transfer.cancel()
            raise

    def close(self) -> None:
        """Cancels what is in flight and ends the engine, or the connection to it."""
        if self._process != os.getpid():
            self._native.close()
            return
        with self._lock:
            if self._closes:
                return
            self._stops = self._closes = True
        for transfer in list(self._in_flight.values()):
            self._cancel(transfer._id)
        try:
            self._native.stop()
        except RuntimeError:
            # The thread has closed it already.
            pass
        if self._thread is None:
            self._close()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def fileno(self) -> int:
        """A descriptor that is readable when a transfer may have ended; for ``waits=False``."""
        return self._native.fileno()

    def signal(self, eventfd: int) -> None:
        """Adds 1 to ``eventfd`` (``os.eventfd(0, os.EFD_NONBLOCK)``) for each transfer that ends, when :meth:`reap` finds it; for
        ``waits=False``. Several ``Transfers`` may have the same one, so a loop waits for one descriptor. An engine in another process does this for programs
        of its own user and of root, and then a transfer to a new file counts twice: when it has ended, and when the file has its name."""
        if self._thread is not None:
            raise ConfigError("a thread takes the ends of these transfers: make them with waits=False")
        try:
            self._native.signal(eventfd)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except _native.TransferRefused as error:
            raise _raised(error) from None

    @property
    def closed(self) -> bool:
        """Whether nothing can be started any more: they were closed, or the connection to the engine has failed."""
        return self._stops

    def reap(self) -> None:
        """Ends the transfers that have ended, and calls what :meth:`Transfer.when_done` was given. Waits for none; for ``waits=False``."""
        while self._next(0.0):
            pass

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _place(self, given: Any, offset: int, is_sink: bool, keeps: list[Any], opened: list[int]) -> Any:
        """What the native module takes. Adds what it opens to ``opened``, and what must stay allocated to ``keeps``."""
        if isinstance(given, (str, os.PathLike)):
            if is_sink:
                if offset:
                    raise ConfigError("a sink that is a path is a new file: it has no sink_offset")
                return os.fspath(given)
            descriptor = os.open(given, os.O_RDONLY | os.O_CLOEXEC)
            opened.append(descriptor)
        elif isinstance(given, int) or hasattr(given, "fileno"):
            descriptor = given if isinstance(given, int) else given.fileno()
        else:
            return self._array(given, offset, keeps)
        is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        if is_socket and offset:
            raise ConfigError("a socket has no offset")
        return (descriptor, is_socket, offset)

    def _array(self, given: Any, offset: int, keeps: list[Any]) -> GpuArray:
        array = gpu_array(given, None)
        if array is None:
            what = describe(given)
            raise ConfigError(f"{what} is no place: give a path, a file, a socket, or an array in the memory of a GPU")
        if not self._is_own:
            raise ConfigError("an engine in another process does not reach the memory of this one's GPU: use Transfers()")
        if not 0 <= offset <= array.bytes:
            raise ConfigError(f"the array ends before byte {offset}: it has {array.bytes} bytes")
        keeps.append(given)
        return GpuArray(array.owner, array.address + offset, array.bytes - offset, array.dtype, array.stream, array.event)

    def _wait(self, ended: threading.Event, timeout: float | None) -> bool:
        if self._thread is not None:
            return ended.wait(timeout)
        limit = None if timeout is None else time.monotonic() + timeout
        while not ended.is_set():
            left = _LOOK if limit is None else limit - time.monotonic()
            if left <= 0:
                return False
            self._next(min(left, _LOOK))
        return True

    def _next(self, limit: float) -> bool:
        """Whether a transfer has ended within ``limit`` seconds. Then it is told so."""
        try:
            ended = self._native.next(limit)
        except RuntimeError as error:
            self._disconnected(str(error))
            return False
        if ended is not None:
            self._ended(ended)
        return ended is not None

    def _close(self) -> None:
        """Waits for the cancelled transfers, without a thread."""
        began = time.monotonic()
        while self._in_flight and time.monotonic() < began + self._closing():
            self._next(_LOOK)
        self._give_up()
        self._native.close()

    def _closing(self) -> float:
        return _CLOSING_OWN if self._is_own or self._ending_here() else _CLOSING

    def _ending_here(self) -> set[int]:
        """Transfers that will end whatever becomes of the engine in another process: their new files get their names."""
        try:
            return set(self._native.ending_here())
        except RuntimeError:
            return set()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("the transfers belong to the parent of this process: make new ones after a fork")

    def _progress(self, number: int) -> tuple[int, int] | None:
        try:
            return self._native.progress(number)
        except RuntimeError:
            return None

    def _cancel(self, number: int) -> None:
        try:
            self._native.cancel(number)
        except RuntimeError:
            # It is closed, or the engine has ended: then so has the transfer.
            pass

    def _ended(self, ended: _native.Ended) -> None:
        with self._lock:
            transfer = self._in_flight.pop(ended[0], None)
        if transfer is not None:
            _end(transfer, ended)

    def _disconnected(self, why: str) -> None:
        """The connection has failed: nothing will end otherwise, but those whose new files get their names."""
        self._fail(why, self._ending_here())

    def _give_up(self) -> None:
        """Nothing that is in flight is waited for any longer."""
        self._fail("the transfers were closed", self._ending_here())
        self._fail("the transfers were closed while the new file got its name: it may get it still", set())

    def _fail(self, why: str, others: set[int]) -> None:
        """Fails all that are in flight but these, and nothing can be started any more."""
        with self._lock:
            self._stops = True
            failed = [self._in_flight.pop(number) for number in list(self._in_flight) if number not in others]
        for transfer in failed:
            transfer._end(Result(0, 0), ("engine", 5, why))


def _end(transfer: Transfer, ended: _native.Ended) -> None:
    _, error, read, written, stages = ended
    results = []
    for name, taken, made, finished, digest, found in stages:
        count, offsets = (None, []) if found is None else found
        results.append(StageResult(name, taken, made, finished, digest, count, tuple(offsets)))
    transfer._end(Result(read, written, tuple(results)), error)


#: Those of this process. The thread of each leaves the native module before the interpreter ends.
_OPEN: weakref.WeakSet[Transfers] = weakref.WeakSet()


def _close_all() -> None:
    for transfers in list(_OPEN):
        transfers.close()


atexit.register(_close_all)


def _wait_for_ends(owner: weakref.ref[Transfers], native: _native.Transfers) -> None:
    stopped: float | None = None
    try:
        while True:
            try:
                ended = native.next(_LOOK)
            except RuntimeError as error:
                transfers = owner()
                if transfers is not None:
                    transfers._disconnected(str(error))
                ended = None
            transfers = owner()
            if transfers is None:
                return
            if ended is not None:
                transfers._ended(ended)
            if transfers._stops and not transfers._in_flight:
                return
            if transfers._closes:
                stopped = stopped or time.monotonic()
                if time.monotonic() > stopped + transfers._closing():
                    # That engine does not answer: it cancels what is in flight when the connection has closed. Or a file system does not.
                    return
            del transfers
    finally:
        transfers = owner()
        if transfers is not None:
            transfers._give_up()
        native.close()


def _raised(error: _native.TransferRefused) -> TransferError:
    reason, number, text = error.args
    return TransferError(text, reason=reason, errno=number, result=Result(0, 0))
