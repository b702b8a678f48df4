"""Clients and engines: both kinds of client against an engine, and against servers that do not behave."""

import asyncio
import random
import socket
import threading
from pathlib import Path

import pytest
import serval
import serval.aio
from conftest import eventually
from serval._framing import Framing

CONFIG = {
    "schema": 1,
    "service": [{"name": "echo", "listen": ["udp://127.0.0.1:0", "tcp://127.0.0.1:0"], "framing": "length:u16", "kernel": "echo"}],
}
MESSAGES = [b"message %d" % number for number in range(300)]


@pytest.fixture
def echo():
    with serval.Engine(CONFIG) as engine:
        yield engine


def test_configurations_are_files_text_and_dicts(tmp_path, echo):
    from serval import _toml

    text = _toml.dumps(CONFIG)
    path = tmp_path / "service.toml"
    path.write_text(text)
    for config in [text, path, str(path)]:
        with serval.Engine(config) as engine:
            assert serval.Client(engine.urls["echo"][0], timeout=10).ask(b"x") == b"x"
        assert engine.exit_code == 0 and engine.report["messages"] == 1


def test_wrong_configurations_are_refused_with_their_correction():
    wrong = {**CONFIG, "service": [{**CONFIG["service"][0], "kernel": "ecko"}]}
    for config, text in [(wrong, "ecko"), ("schema = \n", "line 1"), ("/nonexistent/file.toml", "nonexistent"), ({"schema": 1, "x": object()}, "object")]:
        with pytest.raises(serval.ConfigError) as raised:
            serval.Engine(config)
        assert text in str(raised.value)


def test_metrics_are_a_dict(echo):
    with serval.Client(echo.urls["echo"][0], timeout=10) as client:
        client.ask_many(MESSAGES)
    total = lambda: echo.metrics().total("serval_replies_total", service="echo")
    eventually("replies are counted", lambda: total() == 300)
    assert echo.metrics()['serval_replies_total{service="echo"}'] == 300
    assert echo.metrics().total("serval_replies_total", service="other") == 0


def test_a_client_asks_over_udp_and_tcp(echo):
    for url in echo.urls["echo"]:
        with serval.Client(url, framing="length:u16", timeout=10) as client:
            assert client.ask(bytearray(b"x")) == b"x"
            assert client.ask_many(iter(MESSAGES), in_flight=40) == MESSAGES
            assert client.ask_many([]) == []
            with pytest.raises(TypeError):
                client.ask("text")


def test_tasks_share_a_client(echo):
    async def ask(url):
        async with serval.aio.Client(url, framing="length:u16", timeout=10) as client:
            assert await client.ask(b"x") == b"x"
            assert await client.ask_many(MESSAGES, in_flight=40) == MESSAGES
            replies = await asyncio.gather(*(client.ask(message) for message in MESSAGES[:50]))
            assert replies == MESSAGES[:50]

    for url in echo.urls["echo"]:
        asyncio.run(ask(url))


class Peer:
    """A server that misbehaves: for each connection or datagram it runs a function."""

    def __init__(self, kind, answer):
        self.socket = socket.socket(socket.AF_INET, kind)
        self.socket.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            self.socket.listen()
        scheme = "udp" if kind == socket.SOCK_DGRAM else "tcp"
        self.url = f"{scheme}://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, args=(kind, answer), daemon=True)

    def run(self, kind, answer):
        try:
            while True:
                if kind == socket.SOCK_DGRAM:
                    message, source = self.socket.recvfrom(65536)
                    answer(self.socket, message, source)
                else:
                    connection, _ = self.socket.accept()
                    with connection:
                        answer(connection)
        except OSError:
            pass

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.socket.shutdown(socket.SHUT_RD) if self.socket.type == socket.SOCK_STREAM else None
        if self.socket.type == socket.SOCK_DGRAM:
            # Wakes the thread.
            self.socket.settimeout(0)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                other.sendto(b"", self.socket.getsockname())
        self.thread.join(10)
        self.socket.close()


def ask_both(url, message, error, text="", **options):
    """Both clients raise the same."""
    with serval.Client(url, **options) as client, pytest.raises(error) as raised:
        client.ask(message)
    assert text in str(raised.value)

    async def ask():
        async with serval.aio.Client(url, **options) as client:
            await client.ask(message)

    with pytest.raises(error) as raised:
        asyncio.run(ask())
    assert text in str(raised.value)


def test_a_silent_server_times_out():
    with Peer(socket.SOCK_DGRAM, lambda *_: None) as peer:
        ask_both(peer.url, b"x", serval.ReplyTimeout, timeout=0.05)
        with serval.Client(peer.url, timeout=0.05) as client, pytest.raises(serval.ReplyTimeout) as raised:
            client.ask_many([b"x", b"y"])
        assert raised.value.replies == [None, None]
    with Peer(socket.SOCK_STREAM, lambda connection: connection.recv(100) and connection.recv(100)) as peer:
        ask_both(peer.url, b"x", serval.ReplyTimeout, timeout=0.05)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        ask_both(f"tcp://127.0.0.1:{port}", b"x", serval.ConnectionLost, "cannot be reached")
    ask_both("tcp://nonexistent.invalid:1", b"x", serval.ConnectionLost)


def test_a_server_that_closes_or_speaks_nonsense():
    with Peer(socket.SOCK_STREAM, lambda connection: connection.recv(100)) as peer:
        ask_both(peer.url, b"x", serval.ConnectionLost, "closed the connection", timeout=10)
    with Peer(socket.SOCK_STREAM, lambda connection: connection.recv(100) and connection.send(b"\xff" * 8)) as peer:
        ask_both(peer.url, b"x", serval.FramingError, "another framing", timeout=10)


def test_a_late_datagram_is_not_the_reply_to_another_request():
    kept = []

    def late(peer, message, source):
        # Every reply comes with the next request.
        kept.append((message, source))
        if len(kept) > 1:
            peer.sendto(*kept[-2])
            peer.sendto(*kept[-1])

    with Peer(socket.SOCK_DGRAM, late) as peer, serval.Client(peer.url, timeout=0.1) as client:
        with pytest.raises(serval.ReplyTimeout):
            client.ask(b"first")
        assert client.ask(b"second", timeout=10) == b"second"


def test_replies_are_the_same_however_the_stream_is_split():
    numbers = random.Random(3)
    for name in ["length:u16", "length:u32", "line", "line-crlf", "fixed:7"]:
        framing = Framing(name)
        messages = [numbers.randbytes(7 if name == "fixed:7" else numbers.randint(0, 300)) for _ in range(200)]
        if name.startswith("line"):
            messages = [message.replace(b"\n", b" ").replace(b"\r", b" ") for message in messages]
        stream = b"".join(map(framing.encode, messages))
        received, replies, position = bytearray(), [], 0
        while position < len(stream):
            size = numbers.choice([1, 2, 3, 500])
            received += stream[position : position + size]
            position += size
            while (reply := framing.decode(received)) is not None:
                replies.append(reply)
        assert replies == messages and not received


def test_garbage_from_a_server_is_a_reply_or_an_error_and_bounded():
    numbers = random.Random(4)
    for name in ["length:u16", "length:u32", "line", "fixed:7"]:
        for _ in range(300):
            framing, received = Framing(name), bytearray(numbers.randbytes(numbers.randint(0, 2000)))
            size = len(received)
            try:
                while (reply := framing.decode(received)) is not None:
                    assert len(reply) <= size
            except serval.FramingError:
                pass


def test_framing_errors_are_the_callers():
    with Peer(socket.SOCK_STREAM, lambda connection: connection.recv(100)) as peer:
        for framing, message in [("fixed:4", b"x"), ("line", b"a\nb"), ("length:u16", bytes(70_000))]:
            ask_both(peer.url, message, serval.FramingError, framing, framing=framing)


@pytest.mark.parametrize("url", ["", "udp://", "udp://127.0.0.1", "http://127.0.0.1:1", "udp://127.0.0.1:99999", "udp://127.0.0.1:1/x"])
def test_wrong_addresses(url):
    with pytest.raises(serval.ConfigError, match="udp://HOST:PORT|no address"):
        serval.Client(url)


def test_wrong_options_of_clients():
    for options in [dict(framing="memcached"), dict(framing="fixed:0"), dict(framing="fixed:4", reply_bytes=0), dict(timeout=0)]:
        with pytest.raises(serval.ConfigError):
            serval.Client("tcp://127.0.0.1:1", **options)


def test_a_user_of_the_types():
    """`mypy --strict` accepts typed_user.py, and it runs."""
    import typed_user

    assert typed_user.main() == [b"A", b"B"]
    assert (Path(serval.__file__).parent / "py.typed").exists()


def test_a_duplicate_datagram_is_not_the_reply_to_another_request():
    def twice(peer, message, source):
        peer.sendto(message, source)
        peer.sendto(message, source)

    messages = [b"a", b"b", b"c", b"d"]
    with Peer(socket.SOCK_DGRAM, twice) as peer:
        with serval.Client(peer.url, timeout=10) as client:
            assert [client.ask(message) for message in messages] == messages
            assert client.ask_many(messages, in_flight=2) == messages

        async def ask():
            async with serval.aio.Client(peer.url, timeout=10) as client:
                assert [await client.ask(message) for message in messages] == messages
                assert await client.ask_many(messages, in_flight=2) == messages

        asyncio.run(ask())


def test_bytes_that_no_request_asked_for_end_the_connection():
    # The next connection gets the next reply.
    def answer(connection):
        connection.recv(100)
        connection.sendall(b"first\nunasked\n")
        connection.recv(100)

    with Peer(socket.SOCK_STREAM, answer) as peer:
        with serval.Client(peer.url, framing="line", timeout=10) as client:
            assert [client.ask(b"x"), client.ask(b"x")] == [b"first", b"first"]

        async def ask():
            async with serval.aio.Client(peer.url, framing="line", timeout=10) as client:
                assert [await client.ask(b"x"), await client.ask(b"x")] == [b"first", b"first"]

        asyncio.run(ask())
