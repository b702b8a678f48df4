"""The object server of OpenStack Swift: a transfer engine moves and digests the objects, and no
Python code touches their bytes.

In ``swift.conf``, for each policy of replicated objects::

    [storage-policy:0]
    diskfile_module = egg:serval-swift#serval

In ``object-server.conf``::

    [pipeline:main]
    pipeline = healthcheck recon serval object-server

    [filter:serval]
    use = egg:serval-swift#swift

    [DEFAULT]
    # An engine in another process, which all workers share (transfer.socket of a Serval server).
    # Without it each worker has its own.
    serval_engine = /run/serval/transfer
    # Threads of a worker's own engine.
    serval_threads = 2

A PUT whose length is known goes from the socket through MD5 to the file, a GET of a whole object
from the file through MD5 to the socket, and a GET of one range from the file to the socket.
Everything else is done by Swift's own code: small objects and ranges, bodies in chunks, several
parts of one object, erasure coding. Files on disk are those of Swift, so the module can be taken
out again.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import Logger
from typing import Any

from eventlet import corolocal, hubs, spawn, tpool, wsgi
from eventlet.event import Event
from eventlet.greenio import GreenSocket
from eventlet.patcher import original
from eventlet.timeout import Timeout
from swift.common.exceptions import ChunkReadError, ChunkReadTimeout, DiskFileNoSpace
from swift.common.utils import drop_buffer_cache, fdatasync
from swift.obj import diskfile

from serval.transfer import Digest, Result, Stage, Transfer, TransferError, Transfers

__all__ = ["DiskFileManager", "filter_factory"]

#: Shorter bodies are read by Python code: an engine costs more than it saves.
SMALL = 128 << 10
#: How often the page cache of a long transfer is looked after, in seconds.
LOOK = 1.0
#: Bytes that a transfer can be given that were received before.
HEAD_MAX = 16 << 10

#: An engine has too much to do for one more transfer.
REFUSALS = ("too_many", "too_much_memory")

_CHUNK = 64 << 10
#: An application, and what a server calls it with (PEP 3333).
_Environment = dict[str, Any]
_Application = Callable[[_Environment, Callable[..., Any]], Iterable[bytes]]

_ENGINES: dict[tuple[int, str | None, int], Engine] = {}
_REQUEST = corolocal.local()


class Engine:
    """The transfers of a worker. Its green threads wait for the ends of theirs while others run."""

    def __init__(self, path: str | None, threads: int) -> None:
        self.transfers = Transfers(path, threads=threads, waits=False)
        self._reaper = spawn(self._reap)

    @staticmethod
    def of(path: str | None, threads: int) -> Engine:
        """That of this process: workers are forked."""
        key = (os.getpid(), path, threads)
        engine = _ENGINES.get(key)
        if engine is None or not engine.works():
            engine = _ENGINES[key] = Engine(path, threads)
        return engine

    def works(self) -> bool:
        return not self._reaper.dead

    def run(
        self,
        source: Any,
        sink: Any,
        *stages: Stage,
        look: Callable[[Transfer], None] | None = None,
        **options: Any,
    ) -> Result:
        """Waits for the end of a transfer; calls ``look`` with it from time to time."""
        ended = Event()
        transfer = self.transfers.start(source, sink, *stages, **options)
        transfer.when_done(lambda _: ended.send())
        try:
            while not transfer.done():
                with Timeout(LOOK, False):
                    ended.wait()
                if look is not None and not transfer.done():
                    look(transfer)
        finally:
            # Who is interrupted may close the descriptors only when nothing uses them.
            if not transfer.done():
                transfer.cancel()
                ended.wait()
        return transfer.result()

    def _reap(self) -> None:
        """Ends when the connection to the engine has failed: then so have all transfers."""
        while not self.transfers.closed:
            hubs.trampoline(self.transfers.fileno(), read=True)
            self.transfers.reap()


class Rest(bytes):
    """A chunk of a request's body that has not been received: all the rest of it."""


class Body:
    """``wsgi.input`` of a PUT. A writer can ask for a :class:`Rest` instead of chunks."""

    def __init__(self, given: wsgi.Input) -> None:
        self.given = given
        self.left_to_writer = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.given, name)

    def left(self) -> int:
        return self.given.content_length - self.given.position

    def read(self, *length: int) -> bytes:
        if self.left_to_writer and self.left():
            return Rest(b"the rest")
        return self.given.read(*length)

    def buffered(self, limit: float) -> bytes | None:
        """The bytes that have been received by now, in buffers of this process; `None`, and nothing
        is taken, if that is more than a transfer can be given. Asks for the body if its sender
        waits for that."""
        with ChunkReadTimeout(limit):
            self.given.read(0)
            there = min(len(self.given.rfile.peek()), self.left())
            return None if there > HEAD_MAX else self.given.read(there)


class Filter:
    """Lets the writer of a PUT reach the body of its request."""

    def __init__(self, app: _Application) -> None:
        self.app = app

    def __call__(self, env: _Environment, start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = env.get("wsgi.input")
        in_parts = "HTTP_X_BACKEND_OBJ_MULTIPART_MIME_BOUNDARY" in env
        # Not of TLS: a transfer would send plain bytes into its socket.
        _REQUEST.socket = _REQUEST.body = None
        if isinstance(given, wsgi.Input) and isinstance(given.get_socket(), GreenSocket):
            _REQUEST.socket = given.get_socket()
            is_long = not given.chunked_input and (given.content_length or 0) >= SMALL
            if env["REQUEST_METHOD"] == "PUT" and is_long and not in_parts:
                env["wsgi.input"] = _REQUEST.body = Body(given)
        return self.app(env, start_response)


def filter_factory(global_conf: Mapping[str, str], **local_conf: str) -> type[Filter]:
    """For ``paste.deploy``."""
    return Filter


class DiskFileWriter(diskfile.DiskFileWriter):
    """Writes a body that has not been received by a transfer."""

    manager: DiskFileManager
    _body: Body
    _md5_of_transfer: str | None = None

    def open(self) -> diskfile.BaseDiskFileWriter:
        body: Body | None = getattr(_REQUEST, "body", None)
        _REQUEST.body = None
        opened = super().open()
        if body is not None and body.position == 0 and self._size == body.content_length:
            if self.manager.engine() is not None:
                body.left_to_writer = True
                self._body = body
        return opened

    def write(self, chunk: bytes) -> None:
        if not isinstance(chunk, Rest):
            super().write(chunk)
            return
        self._body.left_to_writer = False
        head = self._body.buffered(self.manager.client_timeout)
        if head is None or self._body.left() < SMALL or not self._transfer(head):
            self._copy(head or b"")

    def _transfer(self, head: bytes) -> bool:
        """Whether an engine has written the body. It may refuse, and then it has taken nothing."""
        body, engine = self._body, self.manager.engine()
        if engine is None:
            return False
        try:
            done = engine.run(
                body.get_socket(),
                self._fd,
                Digest("md5"),
                bytes=body.left(),
                head=head,
                stall=self.manager.client_timeout,
                deadline=self.manager.max_upload_time,
                look=self._sync,
            )
        except TransferError as error:
            if error.reason in REFUSALS and error.result.read == error.result.written == 0:
                return False
            body.given.position += error.result.read
            raise _of_swift(error) from error
        body.given.position += done.read
        self._upload_size, self._md5_of_transfer = done.written, _md5(done)
        return True

    def _copy(self, chunk: bytes) -> None:
        """Writes the body as Swift does."""
        limit = time.monotonic() + self.manager.max_upload_time
        super().write(chunk)
        while left := self._body.left():
            with ChunkReadTimeout(self.manager.client_timeout):
                received = self._body.read(min(left, _CHUNK))
            if not received:
                raise ChunkReadError("the connection was closed")
            if time.monotonic() > limit:
                raise ChunkReadTimeout(None)
            super().write(received)

    def chunks_finished(self) -> tuple[int, str]:
        if self._md5_of_transfer is None:
            return super().chunks_finished()
        return self._upload_size, self._md5_of_transfer

    def _sync(self, transfer: Transfer) -> None:
        """What a long transfer has written goes to the disk while it runs."""
        written = (transfer.progress() or (0, 0))[1]
        if written - self._last_sync >= self._bytes_per_sync:
            tpool.execute(fdatasync, self._fd)
            drop_buffer_cache(self._fd, self._last_sync, written - self._last_sync)
            self._last_sync = written


class DiskFileReader(diskfile.DiskFileReader):
    """Sends a whole object, or one range of it, by a transfer."""

    manager: DiskFileManager
    _engine: Engine | None = None
    _dropped = 0

    def can_zero_copy_send(self) -> bool:
        return self._can_send(self._obj_size)

    def zero_copy_send(self, wsockfd: int) -> None:
        self._started_at_0 = True
        checks = random.random() < self._etag_validate_frac
        try:
            done = self._send(wsockfd, 0, self._obj_size, *([Digest("md5")] if checks else []))
            self._bytes_read, self._read_to_eof = done.read, True
            self._md5_of_sent_bytes = _md5(done) if checks else None
        finally:
            self.close()

    def app_iter_range(self, start: int | None, stop: int | None) -> Iterable[bytes]:
        """Swift asks for a range of several in this way, too: their bytes stand between headers of
        its own."""
        end = self._obj_size if stop is None else min(stop, self._obj_size)
        start = start or 0
        is_whole = start == 0 and end == self._obj_size
        if self._suppress_file_closing or is_whole or not self._can_send(end - start):
            return super().app_iter_range(start, stop)
        return self._send_range(_REQUEST.socket, start, end)

    def _send_range(self, client: socket.socket, start: int, end: int) -> Iterator[bytes]:
        from swift.obj.server import EventletPlungerString

        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            # The headers go first.
            yield EventletPlungerString()
            # As Swift has it: a file that is too short for a range from its begin is damaged.
            self._started_at_0 = start == 0
            try:
                self._send(client.fileno(), start, end - start)
                yield b""
            except TransferError as error:
                # The engine is busy, and has sent nothing.
                if error.reason not in REFUSALS:
                    raise
                _uncork(client.fileno())
                yield from super().app_iter_range(start, end)
        finally:
            self.close()

    def _can_send(self, count: int) -> bool:
        if count < SMALL or getattr(_REQUEST, "socket", None) is None:
            return False
        self._engine = self.manager.engine()
        return self._engine is not None

    def _send(self, wsockfd: int, start: int, count: int, *stages: Stage) -> Result:
        """What was sent leaves the page cache."""
        assert self._engine is not None, "_can_send was asked"
        file = self._fp.fileno()
        self._dropped = start
        try:
            done = self._engine.run(
                file,
                wsockfd,
                *stages,
                offset=start,
                bytes=count,
                stall=self.manager.client_timeout,
                look=self._forget(start),
            )
            _uncork(wsockfd)
            return done
        except TransferError as error:
            self._bytes_read = error.result.read
            # The file is shorter than its metadata says: then the object is damaged.
            self._read_to_eof = error.reason == "file_ended"
            if error.errno == errno.EIO and error.reason == "host_error":
                self._quarantine(str(error))
            raise _of_swift(error) from error
        finally:
            self._drop_cache(file, self._dropped, start + count - self._dropped)

    def _forget(self, start: int) -> Callable[[Transfer], None]:
        """What a long transfer has read leaves the page cache while it runs."""

        def look(transfer: Transfer) -> None:
            read = start + (transfer.progress() or (0, 0))[0]
            self._drop_cache(self._fp.fileno(), self._dropped, read - self._dropped)
            self._dropped = read

        return look


class DiskFile(diskfile.DiskFile):
    """Files as Swift has them."""

    reader_cls = DiskFileReader
    writer_cls = DiskFileWriter


class DiskFileManager(diskfile.DiskFileManager):
    """For ``diskfile_module``."""

    diskfile_cls = DiskFile

    def __init__(self, conf: Mapping[str, str], logger: Logger) -> None:
        super().__init__(conf, logger)
        self.client_timeout = float(conf.get("client_timeout", 60))
        self.max_upload_time = float(conf.get("max_upload_time", 86400))
        self._engine_path = conf.get("serval_engine") or None
        self._engine_threads = int(conf.get("serval_threads", 2))

    def engine(self) -> Engine | None:
        """`None` if none answers: then Swift's own code moves the bytes."""
        try:
            return Engine.of(self._engine_path, self._engine_threads)
        except TransferError as error:
            self.logger.warning("objects are moved without transfers: %s", error)
            return None


def _md5(done: Result) -> str:
    assert done.digest is not None, "the transfer had a digest"
    return done.digest.hex()


def _of_swift(error: TransferError) -> Exception | Timeout:
    """The error that Swift knows for this."""
    if error.reason == "disk_full":
        return DiskFileNoSpace()
    if error.reason in ("stalled", "deadline"):
        return ChunkReadTimeout(None)
    if error.reason in ("closed", "reset"):
        return ChunkReadError(str(error))
    return error


def _uncork(number: int) -> None:
    """Sends what Swift held back together with its headers."""
    held = original("socket").socket(fileno=os.dup(number))
    try:
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
    finally:
        held.close()
