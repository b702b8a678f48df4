"""Served functions: what they get, what clients get, and what happens when they fail."""

import logging
import socket
import threading
import time

import numpy
import pytest
import serval
from conftest import eventually

ANY = "udp://127.0.0.1:0"


def upper(messages):
    return [message.upper() for message in messages]


def ask(server, message, timeout=10.0):
    with serval.Client(server.url, timeout=timeout) as client:
        return client.ask(message)


def is_dropped(server, message=b"x"):
    """Asks, and waits until the message counts as dropped."""
    before = sum(server.stats()["dropped"].values())
    with serval.Client(server.url, timeout=0.01) as client, pytest.raises(serval.ReplyTimeout):
        client.ask(message)
    eventually("the message is dropped", lambda: sum(server.stats()["dropped"].values()) > before)


def test_a_function_answers_over_udp_and_tcp():
    with serval.serve(upper, listen=[ANY, "tcp://127.0.0.1:0"]) as server:
        assert [url.partition(":")[0] for url in server.urls] == ["udp", "tcp"]
        messages = [b"message %d" % number for number in range(500)]
        for url in server.urls:
            with serval.Client(url, timeout=10) as client:
                assert client.ask_many(messages, in_flight=32) == upper(messages)
                assert client.ask(b"") == b""
        stats = server.stats()
        assert stats["messages"] == stats["replies"] == 1002
        assert sum(stats["closed"].values()) == stats["calls"]
        replies = lambda: server.metrics().total("serval_replies_total", service="upper")
        eventually("the last reply is counted", lambda: replies() == 1002)
    assert server.engine.exit_code == 0
    assert server.engine.report["services"][0]["replied"] == 1002


def test_parameters_of_the_service_reach_the_program():
    params = {"name": "a text", "n": 3}
    with serval.serve(upper, listen=ANY, settings={"service": {"params": params}}) as server:
        assert server.params == params
    assert server.params == params
    with serval.serve(upper, listen=ANY) as server:
        assert server.params == {}


@pytest.mark.parametrize("framing", ["length:u16", "length:u32", "line", "line-crlf", "fixed:5", "raw"])
def test_framings(framing):
    with serval.serve(upper, listen="tcp://127.0.0.1:0", framing=framing) as server:
        with serval.Client(server.url, framing=framing, timeout=10) as client:
            assert client.ask_many([b"hello", b"again"]) == [b"HELLO", b"AGAIN"]


def test_shared_memory_ports_open(tmp_path):
    path = f"shm://{tmp_path}/port"
    with serval.serve(upper, listen=[ANY, path]) as server:
        assert server.urls[1] == path
        assert ask(server, b"a") == b"A"


def test_batches_close_because_they_are_full_or_late_or_idle():
    sizes, gate = [], threading.Event()

    def wait_once(messages):
        gate.wait(30)
        sizes.append(len(messages))
        return messages

    with serval.serve(wait_once, listen=ANY, batch=8, max_delay_us=1000) as server:
        with serval.Client(server.url, timeout=30) as client:
            asking = threading.Thread(target=lambda: client.ask_many([b"x"] * 100, in_flight=100))
            asking.start()
            # The first batch is in the function, the others wait in the ring.
            accepted = "serval_requests_accepted_total"
            eventually("all requests wait", lambda: server.metrics().total(accepted) == 100)
            gate.set()
            asking.join()
        closed = server.stats()["closed"]
        assert max(sizes) == 8 and sum(sizes) == 100
        assert closed["full"] >= 11 and closed["idle"] + closed["delay"] >= 1
    with serval.serve(upper, listen=ANY, max_delay_us=0) as server:
        ask(server, b"x")
        assert server.stats()["closed"] == {"full": 0, "delay": 1, "idle": 0}
    with serval.serve(upper, listen=ANY, max_delay_us=1_000_000, idle_us=1) as server:
        ask(server, b"x")
        assert server.stats()["closed"] == {"full": 0, "delay": 0, "idle": 1}


def test_replies_may_be_any_bytes_like_object():
    def mixed(messages):
        kinds = {b"a": bytearray(b"1"), b"b": memoryview(b"22"), b"c": numpy.float32([1, 2]), b"d": b"4"}
        return tuple(kinds[bytes(message)] for message in messages)

    with serval.serve(mixed, listen=ANY) as server, serval.Client(server.url, timeout=10) as client:
        assert client.ask_many([b"a", b"b", b"c", b"d"]) == [b"1", b"22", numpy.float32([1, 2]).tobytes(), b"4"]
    with serval.serve(lambda messages: (m for m in messages), listen=ANY) as server:
        assert ask(server, b"a generator") == b"a generator"


def test_none_means_that_no_reply_is_wanted():
    with serval.serve(lambda messages: [None] * len(messages), listen=ANY) as server:
        with serval.Client(server.url, timeout=0.01) as client, pytest.raises(serval.ReplyTimeout):
            client.ask(b"log this")
        eventually("it is consumed", lambda: server.stats()["consumed"] == 1)
        eventually("the engine knows", lambda: server.metrics().total("serval_consumed_total") == 1)


def test_long_messages_use_the_arena():
    message = bytes(range(256)) * 200
    with serval.serve(upper, listen=["tcp://127.0.0.1:0", ANY], max_message_bytes=60_000) as server:
        for url in server.urls:
            with serval.Client(url, timeout=10) as client:
                assert client.ask_many([message] * 20, in_flight=2) == [message.upper()] * 20


def test_arrays_batch_first():
    shapes = []

    def scale(batch):
        shapes.append((batch.shape, batch.dtype))
        batch *= 3
        return batch[:, :2]

    with serval.serve(scale, listen=ANY, dtype="<f4", shape=(4,), reply_shape=(2,)) as server:
        with serval.Client(server.url, timeout=10) as client:
            rows = [numpy.float32([n, 2 * n, 0, 0]) for n in range(100)]
            replies = client.ask_many([row.tobytes() for row in rows])
        assert replies == [numpy.float32([3 * n, 6 * n]).tobytes() for n in range(100)]
        assert all(shape[1:] == (4,) and dtype == numpy.float32 for shape, dtype in shapes)
        # A message of another length is dropped alone.
        is_dropped(server, b"short")
        assert server.stats()["dropped"]["bad_length"] == 1
        assert not server.stats()["errors"]


FAILURES = [
    ("raises", lambda messages: 1 / 0, serval.FunctionRaised, "ZeroDivisionError"),
    ("exits", lambda messages: exit(3), serval.FunctionRaised, "SystemExit"),
    ("too few", lambda messages: [], serval.ReplyCountError, "0 replies to 1 messages"),
    ("too many", lambda messages: messages * 2, serval.ReplyCountError, "2 replies to 1 messages"),
    ("nothing", lambda messages: None, serval.ReplyTypeError, "returned NoneType, not a list"),
    ("one bytes", lambda messages: b"x", serval.ReplyTypeError, "returned bytes, not a list"),
    ("text", lambda messages: ["x"], serval.ReplyTypeError, "reply that is str, not bytes-like"),
    ("too long", lambda messages: [bytes(1025)], serval.ReplyTooLong, "1025 bytes, max_reply_bytes is 1024"),
    ("an exception", lambda messages: [KeyError("k")], serval.FunctionRaised, "returned KeyError: 'k' for a message"),
    ("a generator raises", lambda messages: (1 / 0 for m in messages), serval.FunctionRaised, "ZeroDivisionError"),
    ("wrong error reply", lambda messages: [serval.ErrorReply(3)], serval.ReplyTypeError, "reply that is int"),
    ("error reply of itself", lambda messages: [serval.ErrorReply(serval.ErrorReply(b""))], serval.ReplyTypeError, "ErrorReply"),
]


@pytest.mark.parametrize("function, kind, text", [f[1:] for f in FAILURES], ids=[f[0] for f in FAILURES])
def test_a_function_that_fails_loses_its_batch_and_goes_on(function, kind, text, caplog):
    def sometimes(messages):
        return function(messages) if messages[0] == b"fail" else messages

    with serval.serve(sometimes, listen=ANY) as server:
        is_dropped(server, b"fail")
        assert isinstance(server.last_error, kind) and text in str(server.last_error)
        assert server.last_error.messages == 1
        is_dropped(server, b"fail")
        is_dropped(server, b"fail")
        assert ask(server, b"fine") == b"fine"
        stats = server.stats()
        assert stats["errors"] == {kind.__name__: 3}
        reason = "reply_too_long" if kind is serval.ReplyTooLong else "kernel_drop"
        assert stats["dropped"][reason] == 3
        dropped = lambda: server.metrics().total("serval_dropped_total", reason=reason)
        eventually("the engine counts them", lambda: dropped() == 3)
    # The first one and the second: not one line for each.
    logged = [record for record in caplog.records if record.name == "serval" and record.levelno == logging.ERROR]
    assert len(logged) == 2


ARRAY_FAILURES = [
    ("list", lambda batch: [1.0], serval.ReplyTypeError, "returned list, not a numpy.ndarray"),
    ("dtype", lambda batch: batch.astype("f8"), serval.ReplyTypeError, "dtype float64, reply_dtype is float32"),
    ("count", lambda batch: batch[:0], serval.ReplyShapeError, "(0, 4), the first dimension has to be 1"),
    ("scalar", lambda batch: batch.sum(), serval.ReplyTypeError, "not a numpy.ndarray"),
    ("shape", lambda batch: batch[:, :3], serval.ReplyShapeError, "(1, 3), expected (1, 4)"),
]


@pytest.mark.parametrize("function, kind, text", [f[1:] for f in ARRAY_FAILURES], ids=[f[0] for f in ARRAY_FAILURES])
def test_arrays_that_do_not_fit_are_refused_with_shape_and_dtype(function, kind, text):
    with serval.serve(function, listen=ANY, dtype="f4", shape=(4,), reply_shape=(4,)) as server:
        is_dropped(server, bytes(16))
        error = server.last_error
        assert type(error) is kind and text in str(error), str(error)
        if kind is serval.ReplyShapeError:
            assert error.shape is not None and error.dtype == "float32"


def test_on_error_stop_ends_the_server_with_the_error():
    with pytest.raises(serval.FunctionRaised) as raised:
        with serval.serve(lambda messages: 1 / 0, listen=ANY, on_error="stop") as server:
            with serval.Client(server.url, timeout=0.01) as client, pytest.raises(serval.ClientError):
                client.ask(b"x")
            server.wait(30)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_on_error_may_be_a_function():
    errors = []
    with serval.serve(lambda messages: [1], listen=ANY, on_error=errors.append) as server:
        is_dropped(server)
    assert [type(error) for error in errors] == [serval.ReplyTypeError] and errors[0].index == 0


class Batches:
    """Batches of the size of the test's choice: the first call, of a message of its own, holds the function up until they wait."""

    def __init__(self, function):
        self.function, self.gate, self.sizes = function, threading.Event(), []

    def __call__(self, messages):
        if messages[0] == b"wait":
            assert self.gate.wait(60)
            return messages
        self.sizes.append(len(messages))
        return self.function(messages)

    def ask(self, messages, **options):
        """The replies to messages that come as one batch, ``None`` for those that are dropped, and the statistics."""
        settings = {"service": {"request_timeout_ms": 300_000}}
        options = {"call_timeout": 100.0, "settings": settings, **options}
        with serval.serve(self, listen=ANY, batch=len(messages), **options) as server:
            accepted = lambda: server.metrics().total("serval_requests_accepted_total")
            address = server.url[6:].split(":")
            clients = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(len(messages) + 1)]
            try:
                for client in clients:
                    client.connect((address[0], int(address[1])))
                clients[0].send(b"wait")
                eventually("the function waits", lambda: server.stats()["calls"] == 1)
                # One socket of the server receives them, in this order.
                for client, message in zip(clients[1:], messages):
                    client.send(message)
                eventually("they wait", lambda: accepted() == len(clients))
                self.gate.set()
                done = lambda: server.stats()["replies"] + sum(server.stats()["dropped"].values()) == len(messages) + 1
                eventually("all are answered or dropped", done)
                left = lambda: server.metrics().total("serval_replies_total") == server.stats()["replies"]
                eventually("the replies are sent", left)
                for client in clients:
                    client.setblocking(False)
                return [received(client) for client in clients[1:]], server.stats(), server.last_error
            finally:
                for client in clients:
                    client.close()


def received(client):
    try:
        return client.recv(65536)
    except BlockingIOError:
        return None


def one_fails(failing):
    """A function that calls ``failing`` if one of its messages is `bad`."""
    return lambda messages: failing(messages) if b"bad" in messages else upper(messages)


ONE_OF_MANY = [
    ("raises", one_fails(lambda messages: 1 / 0), serval.FunctionRaised, "ZeroDivisionError"),
    ("exits", one_fails(lambda messages: exit(3)), serval.FunctionRaised, "SystemExit"),
    ("empties its list and raises", one_fails(lambda messages: messages.clear() or 1 / 0), serval.FunctionRaised, "ZeroDivisionError"),
    ("leaves it out", lambda messages: [m.upper() for m in messages if m != b"bad"], serval.ReplyCountError, "0 replies to 1 messages"),
    ("returns nothing", one_fails(lambda messages: None), serval.ReplyTypeError, "returned NoneType"),
]
#: Here the place of the reply says which message it is.
ONE_REPLY = [
    ("text", lambda messages: ["x" if m == b"bad" else m.upper() for m in messages], serval.ReplyTypeError, "is str"),
    ("too long", lambda messages: [bytes(2000) if m == b"bad" else m.upper() for m in messages], serval.ReplyTooLong, "2000 bytes"),
    ("an exception", lambda messages: [ValueError("no") if m == b"bad" else m.upper() for m in messages], serval.FunctionRaised, "ValueError: no"),
]
MANY = [b"m%d" % number for number in range(64)]


@pytest.mark.parametrize("function, kind, text", [f[1:] for f in ONE_OF_MANY], ids=[f[0] for f in ONE_OF_MANY])
def test_a_message_with_which_the_function_fails_is_dropped_alone(function, kind, text, caplog):
    messages = [*MANY[:40], b"bad", *MANY[41:]]
    batches = Batches(function)
    replies, stats, error = batches.ask(messages)
    assert replies == [None if m == b"bad" else m.upper() for m in messages]
    assert batches.sizes == [64] + [1] * 64
    assert stats["dropped"]["kernel_drop"] == 1 and stats["retried"] == 64
    assert stats["errors"] == {kind.__name__: 1}
    assert type(error) is kind and text in str(error) and (error.index, error.messages) == (40, 1)
    assert [record.message.endswith("the message is dropped") for record in caplog.records if record.name == "serval"] == [True]


@pytest.mark.parametrize("function, kind, text", [f[1:] for f in ONE_REPLY], ids=[f[0] for f in ONE_REPLY])
def test_a_wrong_reply_costs_its_message_alone(function, kind, text):
    messages = [*MANY[:40], b"bad", *MANY[41:]]
    batches = Batches(function)
    replies, stats, error = batches.ask(messages)
    assert replies == [None if m == b"bad" else m.upper() for m in messages]
    assert batches.sizes == [64] and stats["retried"] == 0
    reason = "reply_too_long" if kind is serval.ReplyTooLong else "kernel_drop"
    assert stats["dropped"][reason] == 1 and stats["errors"] == {kind.__name__: 1}
    assert type(error) is kind and text in str(error) and error.index == 40


def test_a_function_that_fails_only_with_batches_answers_all(caplog):
    def alone(messages):
        if len(messages) > 1:
            raise RuntimeError("one at a time")
        return upper(messages)

    replies, stats, error = Batches(alone).ask(MANY)
    assert replies == upper(MANY)
    assert sum(stats["dropped"].values()) == 0 and stats["errors"] == {"FunctionRaised": 1}
    assert error.messages == 64 and error.index is None
    assert [record.message.endswith("each message alone was answered") for record in caplog.records if record.name == "serval"] == [True]


@pytest.mark.parametrize("raises", [False, True])
def test_a_message_may_get_an_error_reply(raises, caplog):
    def number(message):
        return b"%d" % (2 * int(message)) if message.isdigit() else serval.ErrorReply(b"ERR " + message)

    def double(messages):
        replies = [number(message) for message in messages]
        for reply in replies:
            if raises and isinstance(reply, serval.ErrorReply):
                raise reply
        return replies

    replies, stats, error = Batches(double).ask([b"1", b"x", b"3", b"y"])
    assert replies == [b"2", b"ERR x", b"6", b"ERR y"]
    assert stats["errors"] == {"ErrorReply": 2} and sum(stats["dropped"].values()) == 0
    assert error is None and not [record for record in caplog.records if record.name == "serval"]
    assert stats["retried"] == (4 if raises else 0)


def test_a_function_that_yields_for_ever_is_cut_off():
    yielded = []

    def endless(messages):
        while True:
            yielded.append(len(messages))
            yield b"x"

    replies, stats, error = Batches(endless).ask([b"m"] * 8)
    assert replies == [None] * 8
    # One reply more than messages, of the batch and then of each message.
    assert yielded == [8] * 9 + [1] * 16
    assert type(error) is serval.ReplyCountError and "more than 1 replies to 1 messages" in str(error)
    assert "Batches" in str(error), "the function is named"
    assert stats["errors"] == {"ReplyCountError": 8} and stats["dropped"]["kernel_drop"] == 8


def test_the_time_limit_is_that_of_each_call():
    def slow(messages):
        time.sleep(0.5)
        if len(messages) > 1:
            raise RuntimeError("one at a time")
        return messages

    # Together they take longer than a call may.
    replies, stats, error = Batches(slow).ask([b"m"] * 8, call_timeout=3.0)
    assert replies == [b"m"] * 8 and stats["errors"] == {"FunctionRaised": 1} and stats["generations"] == 1


def test_a_row_with_which_the_function_fails_is_dropped_alone():
    gate, sizes = threading.Event(), []

    def halve(batch):
        if (batch[:, 0] == 0).any():
            assert gate.wait(60)
            return batch
        sizes.append(len(batch))
        bad = (batch < 0).any()
        batch /= 2
        if bad:
            raise ValueError("negative")
        return batch

    rows = [numpy.float32([n, n]) for n in range(1, 17)]
    rows[5] *= -1
    with serval.serve(halve, listen="tcp://127.0.0.1:0", framing="fixed:8", dtype="f4", shape=(2,), batch=16) as server:
        clients = [serval.Client(server.url, framing="fixed:8", timeout=60) for _ in range(17)]
        replies = [None] * 17

        def ask(number, row):
            try:
                replies[number] = clients[number].ask(row.tobytes())
            except serval.ConnectionLost:
                pass

        accepted = lambda: server.metrics().total("serval_requests_accepted_total")
        asking = []
        for number, row in enumerate([numpy.float32([0, 0]), *rows]):
            asking.append(threading.Thread(target=ask, args=(number, row)))
            asking[-1].start()
            eventually("it is accepted", lambda: accepted() == number + 1)
            if number == 0:
                eventually("the function waits", lambda: server.stats()["calls"] == 1)
        gate.set()
        for thread in asking:
            thread.join()
        for client in clients:
            client.close()
        # The function has changed its array before it failed; the next calls get the messages as they were.
        assert replies[1:] == [None if row[0] < 0 else (row / 2).tobytes() for row in rows]
        assert sizes == [16] + [1] * 16
        assert server.stats()["dropped"]["kernel_drop"] == 1 and server.last_error.index == 5
        assert server.last_error.shape == (1, 2)


def test_a_call_that_does_not_return_is_reported_and_others_are_served():
    gate = threading.Event()

    def hang(messages):
        if messages[0] == b"hang":
            gate.wait(60)
        return messages

    with serval.serve(hang, listen=ANY, call_timeout=0.3) as server, serval.serve(upper, listen=ANY) as other:
        with serval.Client(server.url, timeout=0.01) as client, pytest.raises(serval.ReplyTimeout):
            client.ask(b"hang")
        eventually("it is reported", lambda: server.stats()["errors"] == {"CallTimeout": 1})
        assert isinstance(server.last_error, serval.CallTimeout) and server.last_error.messages == 1
        lost = lambda: server.metrics().total("serval_dropped_total", reason="accelerator_lost")
        eventually("its request is dropped", lambda: lost() == 1)
        assert ask(other, b"a") == b"A"
        gate.set()
        eventually("it serves again", lambda: server.stats()["generations"] == 2)
        up = lambda: server.metrics().total("serval_accelerator_up") == 1
        eventually("the engine knows", up)
        assert ask(server, b"again") == b"again"


def test_a_server_with_a_call_that_does_not_return_can_be_closed():
    gate = threading.Event()
    server = serval.serve(lambda messages: gate.wait(60) and messages, listen=ANY, call_timeout=0.2)
    with serval.Client(server.url, timeout=0.01) as client, pytest.raises(serval.ReplyTimeout):
        client.ask(b"hang")
    eventually("it is reported", lambda: server.stats()["errors"] == {"CallTimeout": 1})
    server.close()
    assert server.wait(0)
    gate.set()


def test_a_server_is_used_without_with_and_closed_twice():
    server = serval.serve(upper, listen=ANY)
    assert not server.wait(0)
    assert ask(server, b"a") == b"A"
    server.close()
    server.close()
    assert server.wait(0)


WRONG = [
    (dict(), "either `listen` or `attach`"),
    (dict(listen=ANY, attach="/x"), "either `listen` or `attach`"),
    (dict(listen=ANY, batch=0), "batch is 0, must be an integer in [1, 16384]"),
    (dict(listen=ANY, max_delay_us=-1), "max_delay_us is -1"),
    (dict(listen=ANY, call_timeout=0), "call_timeout is 0 s"),
    (dict(listen=ANY, call_timeout=1801), "must be in [0.001, 1800]"),
    (dict(listen=ANY, on_error="ignore"), "must be \"drop\", \"stop\" or a function"),
    (dict(listen=ANY, shape=(3,)), "need `dtype`"),
    (dict(listen=ANY, dtype="nonsense"), "dtype: "),
    (dict(listen=ANY, dtype="O"), "no fixed size"),
    (dict(listen=ANY, dtype="f4", shape=(0,)), "every size must be positive"),
    (dict(listen=ANY, framing="nonsense"), "framing"),
    (dict(listen="http://127.0.0.1:80"), "http"),
    (dict(listen=ANY, settings={"service": {"nonsense": 1}}), "nonsense"),
    (dict(listen=ANY, settings={"services": {}}), "there are engine, limits and service"),
]


@pytest.mark.parametrize("arguments, text", WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_wrong_arguments_are_refused_with_their_correction(arguments, text):
    with pytest.raises(serval.ConfigError) as raised:
        serval.serve(upper, **arguments)
    assert text in str(raised.value)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(serval.ConfigError, match="NoneType, which cannot be called"):
        serval.serve(None, listen=ANY)


def test_a_port_that_is_taken_is_named():
    with serval.serve(upper, listen="tcp://127.0.0.1:0") as server:
        port = server.url.rpartition(":")[2]
        with pytest.raises(serval.EngineError, match=port):
            serval.serve(upper, listen=f"tcp://127.0.0.1:{port}")


def test_other_threads_run_while_a_server_is_idle():
    with serval.serve(upper, listen=ANY) as server:
        ticks, deadline = 0, time.monotonic() + 0.2
        while time.monotonic() < deadline:
            ticks += 1
        assert ticks > 1000
        assert ask(server, b"a") == b"A"


class RaisingList(list):
    def __iter__(self):
        raise RuntimeError("of the user")


class Odd:
    shape = None
    dtype = None


@pytest.mark.parametrize("replies", [RaisingList([b"x"]), Odd(), [Odd()]], ids=["list", "object", "element"])
def test_a_reply_whose_own_methods_fail_loses_only_its_batch(replies):
    with serval.serve(lambda messages: replies if messages[0] == b"fail" else messages, listen=ANY) as server:
        is_dropped(server, b"fail")
        assert isinstance(server.last_error, serval.ReplyTypeError)
        assert ask(server, b"fine") == b"fine"


def test_an_error_in_the_loop_around_the_function_ends_the_server(monkeypatch):
    def broken(self, host, error, count, alone):
        raise RuntimeError("of the loop")

    monkeypatch.setattr(serval._serve.Server, "_failed", broken)
    with pytest.raises(serval.Error, match="of the loop"):
        with serval.serve(lambda messages: [], listen=ANY) as server:
            with serval.Client(server.url, timeout=0.01) as client, pytest.raises(serval.ClientError):
                client.ask(b"x")
            server.wait(30)
