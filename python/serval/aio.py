"""The client for asyncio (and uvloop): ``serval.aio.Client``."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from ._base import DATAGRAM_BYTES_MAX, READ_BYTES, ClientBase
from ._errors import ConnectionLost, Error, FramingError, ReplyTimeout
from ._framing import Framing, as_bytes

if TYPE_CHECKING:
    from ._types import Buffer

__all__ = ["Client"]


class Client(ClientBase):
    """Asks a server over UDP or TCP; any number of tasks of one event loop may share it.

    >>> async with serval.aio.Client("udp://127.0.0.1:9000") as client:
    ...     await client.ask(b"hello")

    The arguments are those of :class:`serval.Client`. Over UDP every request has a new socket; over TCP the requests of all tasks share one
    connection, on which the server replies in order.
    """

    def __init__(
        self, url: str, *, framing: str = "length:u32", timeout: float = 1.0, reply_bytes: int | None = None
    ) -> None:
        super().__init__(url, framing=framing, timeout=timeout, reply_bytes=reply_bytes)
        self._stream: _Stream | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the sockets. The next request opens new ones."""
        self._addresses = []
        if self._stream is not None:
            await self._stream.close(ConnectionLost(f"the client of {self.url} was closed"))
            self._stream = None

    async def ask(self, message: Buffer, *, timeout: float | None = None) -> bytes:
        """Sends one message and returns its reply; raises as :meth:`serval.Client.ask` does."""
        payload = as_bytes(message)
        exchange = self._ask_datagram if self._scheme == "udp" else self._ask_stream
        try:
            async with asyncio.timeout(self.timeout if timeout is None else timeout):
                return await exchange(payload)
        except Error:
            raise
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from None

    async def ask_many(
        self, messages: Iterable[Buffer], *, in_flight: int = 64, timeout: float | None = None
    ) -> list[bytes]:
        """Sends messages, at most ``in_flight`` at a time, and returns their replies in the order of the messages; ``timeout`` is that of
        each request. Raises as :meth:`serval.Client.ask_many` does."""
        todo = self._encoded(messages, in_flight)
        replies: list[bytes | None] = [None] * len(todo)
        positions = iter(range(len(todo)))

        async def work() -> None:
            for position in positions:
                try:
                    replies[position] = await self.ask(todo[position], timeout=timeout)
                except ReplyTimeout:
                    pass

        workers = [asyncio.ensure_future(work()) for _ in range(min(in_flight, len(todo)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._complete(replies)

    async def _ask_datagram(self, message: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        # A late or duplicate reply finds its socket closed.
        with await self._connect(socket.SOCK_DGRAM) as user:
            await loop.sock_sendall(user, message)
            return await loop.sock_recv(user, DATAGRAM_BYTES_MAX)

    async def _ask_stream(self, message: bytes) -> bytes:
        encoded = self._framing.encode(message)
        async with self._connecting:
            if self._stream is None or self._stream.is_over:
                self._stream = _Stream(await self._connect(socket.SOCK_STREAM), self._framing, self.url)
            stream = self._stream
            if not self._framing.delimits:
                return await stream.ask(encoded)
        return await stream.ask(encoded)

    async def _connect(self, kind: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        found = self._addresses or await loop.getaddrinfo(self._host, self._port, type=kind)
        if kind == socket.SOCK_DGRAM:
            self._addresses = found
        for last, (family, kind, protocol, _, address) in enumerate(found, 1):
            opened = socket.socket(family, kind, protocol)
            with self._attempt(opened, last == len(found)):
                opened.setblocking(False)
                await loop.sock_connect(opened, address)
                if kind == socket.SOCK_STREAM:
                    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return opened
        raise ConnectionLost(f"{self.url} has no address")


class _Stream:
    """A connection with requests in flight, whose replies come in order."""

    def __init__(self, stream: socket.socket, framing: Framing, url: str) -> None:
        self._socket = stream
        self._framing = framing
        self._url = url
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._sending = asyncio.Lock()
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self.is_over = False

    async def ask(self, encoded: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[bytes] = loop.create_future()
        async with self._sending:
            if self.is_over:
                raise ConnectionLost(f"{self._url} closed the connection")
            self._waiting.append(reply)
            try:
                await loop.sock_sendall(self._socket, encoded)
            except asyncio.CancelledError:
                self._end(ConnectionLost(f"a request to {self._url} was given up while it was sent"))
                raise
            except OSError as error:
                self._end(ConnectionLost(f"{self._url}: {error}"))
        # A request that is given up stays in the queue, so its late reply reaches nobody else.
        return await reply

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        received = bytearray()
        try:
            while read := await loop.sock_recv(self._socket, READ_BYTES):
                received += read
                while self._waiting and (reply := self._framing.decode(received)) is not None:
                    future = self._waiting.popleft()
                    if not future.done():
                        future.set_result(reply)
                if received and not self._waiting:
                    raise FramingError(f"{self._url} sent bytes that no request asked for")
            self._end(ConnectionLost(f"{self._url} closed the connection"))
        except FramingError as error:
            self._end(error)
        except OSError as error:
            self._end(ConnectionLost(f"{self._url}: {error}"))
        finally:
            self._socket.close()

    def _end(self, error: Error) -> None:
        self.is_over = True
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
        self._reader.cancel()

    async def close(self, error: Error) -> None:
        """Ends the connection; requests in flight get the error."""
        self._end(error)
        await asyncio.wait([self._reader])
