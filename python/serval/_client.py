"""The synchronous client."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from ._base import DATAGRAM_BYTES_MAX, READ_BYTES, ClientBase
from ._errors import ConnectionLost
from ._framing import as_bytes

if TYPE_CHECKING:
    from ._types import Buffer


class Client(ClientBase):
    """Asks a server over UDP or TCP, one thread at a time.

    >>> with serval.Client("udp://127.0.0.1:9000") as client:
    ...     client.ask(b"hello")

    Over UDP every request has a new socket, which is closed with the reply, so a late or duplicate reply is not the reply to another request.
    Over TCP requests share one connection, on which the server replies in order.

    :param url: ``udp://HOST:PORT`` or ``tcp://HOST:PORT``.
    :param framing: of the TCP connection, as in the server's configuration. With ``raw`` a reply is what one read returns, and only
        one request is in flight.
    :param timeout: seconds to wait for a reply, and for a connection.
    :param reply_bytes: with ``fixed:N``, the length of replies if it is not N.
    """

    def __init__(
        self, url: str, *, framing: str = "length:u32", timeout: float = 1.0, reply_bytes: int | None = None
    ) -> None:
        super().__init__(url, framing=framing, timeout=timeout, reply_bytes=reply_bytes)
        #: The connection, while no request uses it.
        self._free: list[socket.socket] = []
        self._received = bytearray()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the sockets. The next request opens new ones."""
        while self._free:
            self._free.pop().close()
        self._addresses = []
        self._received.clear()

    def ask(self, message: Buffer, *, timeout: float | None = None) -> bytes:
        """Sends one message and returns its reply.

        :raises ReplyTimeout: no reply within ``timeout`` seconds (default: that of the client).
        :raises ConnectionLost: the server cannot be reached or closed the connection.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        replies: list[bytes | None] = [None]
        exchange = self._exchange if self._scheme == "udp" else self._pipeline
        exchange([as_bytes(message)], replies, 1, deadline)
        reply = replies[0]
        if reply is None:
            raise self._late()
        return reply

    def ask_many(
        self, messages: Iterable[Buffer], *, in_flight: int = 64, timeout: float | None = None
    ) -> list[bytes]:
        """Sends messages, at most ``in_flight`` at a time, and returns their replies in the order of the messages.

        :param timeout: seconds without any reply after which those that lack are given up.
        :raises ReplyTimeout: replies lack; its ``replies`` has those that arrived.
        :raises ConnectionLost: the server cannot be reached or closed the connection.
        """
        todo = self._encoded(messages, in_flight)
        replies: list[bytes | None] = [None] * len(todo)
        patience = self.timeout if timeout is None else timeout
        if self._scheme == "udp":
            self._exchange(todo, replies, in_flight, None, patience)
        elif not self._framing.delimits:
            for index, message in enumerate(todo):
                replies[index] = self.ask(message, timeout=patience)
        else:
            self._pipeline(todo, replies, in_flight, None, patience)
        return self._complete(replies)

    def _connect(self) -> socket.socket:
        kind = socket.SOCK_DGRAM if self._scheme == "udp" else socket.SOCK_STREAM
        try:
            found = self._addresses or socket.getaddrinfo(self._host, self._port, type=kind)
        except OSError as error:
            raise ConnectionLost(f"{self.url}: {error}") from None
        if kind == socket.SOCK_DGRAM:
            self._addresses = found
        for last, (family, kind, protocol, _, address) in enumerate(found, 1):
            opened = socket.socket(family, kind, protocol)
            with self._attempt(opened, last == len(found)):
                opened.settimeout(self.timeout)
                opened.connect(address)
                if kind == socket.SOCK_STREAM:
                    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    opened.setblocking(False)
                return opened
        raise ConnectionLost(f"{self.url} has no address")

    def _exchange(
        self,
        messages: list[bytes],
        replies: list[bytes | None],
        in_flight: int,
        deadline: float | None,
        patience: float = 0.0,
    ) -> None:
        """Datagrams: each in a new socket. Without a deadline gives up after ``patience`` seconds without a reply."""
        limit = deadline if deadline is not None else time.monotonic() + patience
        waiting: dict[int, tuple[socket.socket, int]] = {}
        position = 0
        poll = selectors.PollSelector()
        try:
            while True:
                while position < len(messages) and len(waiting) < in_flight:
                    user = self._connect()
                    waiting[user.fileno()] = (user, position)
                    poll.register(user, selectors.EVENT_READ)
                    user.send(messages[position])
                    position += 1
                if not waiting:
                    return
                left = limit - time.monotonic()
                ready = poll.select(left) if left > 0 else []
                if not ready and time.monotonic() >= limit:
                    return
                for key, _ in ready:
                    user, index = waiting[key.fd]
                    replies[index] = user.recv(DATAGRAM_BYTES_MAX)
                    poll.unregister(user)
                    del waiting[key.fd]
                    user.close()
                if ready and deadline is None:
                    limit = time.monotonic() + patience
        except OSError as error:
            raise self._lost(error) from None
        finally:
            poll.close()
            for user, _ in waiting.values():
                user.close()

    def _pipeline(
        self,
        messages: list[bytes],
        replies: list[bytes | None],
        in_flight: int,
        deadline: float | None,
        patience: float = 0.0,
    ) -> None:
        """A stream, with up to ``in_flight`` requests on it. The connection is kept only if every request has its reply."""
        encoded = [self._framing.encode(message) for message in messages]
        if not self._free:
            self._received.clear()
        stream = self._free.pop() if self._free else self._connect()
        limit = deadline if deadline is not None else time.monotonic() + patience
        position, answered, unsent = 0, 0, b""
        poll = selectors.PollSelector()
        try:
            poll.register(stream, selectors.EVENT_READ)
            while answered < len(encoded):
                room = min(len(encoded), answered + in_flight)
                if room > position:
                    unsent += b"".join(encoded[position:room])
                    position = room
                if unsent:
                    try:
                        unsent = unsent[stream.send(unsent) :]
                    except BlockingIOError:
                        pass
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                poll.modify(stream, events)
                left = limit - time.monotonic()
                ready = poll.select(left) if left > 0 else []
                if not ready:
                    if time.monotonic() >= limit:
                        return
                    continue
                if not ready[0][1] & selectors.EVENT_READ:
                    continue
                read = stream.recv(READ_BYTES)
                if not read:
                    raise ConnectionLost(f"{self.url} closed the connection before reply {answered}")
                self._received += read
                while answered < position and (reply := self._framing.decode(self._received)) is not None:
                    replies[answered] = reply
                    answered += 1
                    if deadline is None:
                        limit = time.monotonic() + patience
            # Bytes that nobody asked for would be taken for the next reply.
            if not self._received:
                self._free.append(stream)
        except OSError as error:
            raise self._lost(error) from None
        finally:
            poll.close()
            if stream not in self._free:
                stream.close()
                self._received.clear()
