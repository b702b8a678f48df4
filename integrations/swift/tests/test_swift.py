"""The parts of the module that need no server; `measure --check` compares whole servers."""

import io
import socket
import tempfile
import types

import pytest
import serval_swift as swift
from eventlet import hubs, wsgi
from eventlet.greenio import GreenSocket

BODY = bytes(range(256)) * 1000
#: Keeps a descriptor open, from its first use on.
hubs.get_hub()


def refusal(reason, read=0):
    return swift.TransferError(
        "busy", reason=reason, errno=11, result=types.SimpleNamespace(read=read, written=0)
    )


def given_body(before, buffer_bytes):
    """A body of which a reader's buffer has these bytes before."""
    reader = io.BufferedReader(io.BytesIO(before + BODY), buffer_bytes)
    assert reader.read(len(before)) == before
    return swift.Body(wsgi.Input(reader, len(BODY), None))


@pytest.fixture
def writer(monkeypatch):
    """A writer, with what Swift's own code has written."""
    written = []
    monkeypatch.setattr(
        swift.diskfile.DiskFileWriter, "write", lambda self, chunk: written.append(chunk)
    )
    made = swift.DiskFileWriter.__new__(swift.DiskFileWriter)
    made.manager_ = types.SimpleNamespace(
        client_timeout=10, max_upload_time=60, engine=lambda: None
    )
    made._diskfile = types.SimpleNamespace(manager=made.manager_)
    made._fd, made.written = -1, written
    return made


def put(writer, body):
    writer._body, body.left_to_writer = body, True
    writer.write(body.read(65536))
    return b"".join(writer.written)


def test_a_body_that_a_transfer_cannot_be_given_is_written_by_swift_every_byte_once(writer):
    body = given_body(b"head", 32768)
    assert put(writer, body) == BODY and body.left() == 0 and body.read(1) == b""


@pytest.mark.parametrize("reason", swift.REFUSALS)
def test_a_body_that_the_engine_has_no_room_for_is_written_by_swift(writer, reason):
    def refuses(*_, **__):
        raise refusal(reason)

    writer.manager_.engine = lambda: types.SimpleNamespace(run=refuses)
    body = given_body(b"", 4096)
    body.given.get_socket = lambda: None
    assert put(writer, body) == BODY and body.left() == 0


def test_a_transfer_that_has_taken_bytes_is_not_repeated(writer):
    def fails(*_, **__):
        raise refusal("closed", read=7)

    writer.manager_.engine = lambda: types.SimpleNamespace(run=fails)
    body = given_body(b"", 4096)
    body.given.get_socket = lambda: None
    with pytest.raises(swift.ChunkReadError):
        put(writer, body)
    assert writer.written == []


@pytest.fixture
def reader():
    """A reader of 1 000 000 bytes, with the transfers that were asked of its engine."""
    asked, closed = [], []
    engine = types.SimpleNamespace(
        run=lambda file, to, *stages, **options: asked.append(
            (to, stages, options["offset"], options["bytes"])
        )
    )
    made = swift.DiskFileReader.__new__(swift.DiskFileReader)
    made._diskfile = types.SimpleNamespace(
        manager=types.SimpleNamespace(engine=lambda: engine, client_timeout=10)
    )
    made._obj_size, made._suppress_file_closing, made._keep_cache = 1_000_000, False, True
    made.asked, made.closed, made.engine, made.close = (
        asked,
        closed,
        engine,
        lambda: closed.append(1),
    )
    with tempfile.TemporaryFile() as made._fp, socket.socket() as client:
        made.client = swift._REQUEST.socket = client
        yield made
    swift._REQUEST.socket = None


def test_one_range_of_an_object_is_a_transfer(reader):
    assert b"".join(reader.app_iter_range(1000, 900_000)) == b""
    assert reader.asked == [(reader.client.fileno(), (), 1000, 899_000)] and reader.closed == [1]


@pytest.mark.parametrize(
    ("begin", "end", "of_several"),
    [(0, 1_000_000, False), (5, 5 + swift.SMALL - 1, False), (1000, 900_000, True)],
)
def test_a_whole_object_a_small_range_and_one_of_several_are_none(reader, begin, end, of_several):
    reader._suppress_file_closing = of_several
    reader.app_iter_range(begin, end)
    assert reader.asked == []


def test_a_range_that_the_engine_has_no_room_for_is_sent_by_swift(reader, monkeypatch):
    def refuses(*_, **__):
        raise refusal("too_many")

    reader.engine.run = refuses
    monkeypatch.setattr(
        swift.diskfile.DiskFileReader,
        "app_iter_range",
        lambda self, begin, end: iter([b"by Swift"]),
    )
    assert b"".join(reader.app_iter_range(1000, 900_000)) == b"by Swift"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("disk_full", swift.DiskFileNoSpace),
        ("stalled", swift.ChunkReadTimeout),
        ("deadline", swift.ChunkReadTimeout),
        ("reset", swift.ChunkReadError),
        ("host_error", swift.TransferError),
    ],
)
def test_errors_are_those_that_swift_knows(reason, kind):
    assert isinstance(swift._of_swift(refusal(reason)), kind)


@pytest.mark.parametrize(
    ("verb", "length", "more", "is_wrapped"),
    [
        ("PUT", swift.SMALL, {}, True),
        ("PUT", swift.SMALL - 1, {}, False),
        ("GET", swift.SMALL, {}, False),
        ("PUT", swift.SMALL, {"HTTP_X_BACKEND_OBJ_MULTIPART_MIME_BOUNDARY": "a"}, False),
    ],
)
def test_the_bodies_of_long_puts_are_left_to_the_writer(verb, length, more, is_wrapped):
    with GreenSocket() as client:
        given = wsgi.Input(io.BufferedReader(io.BytesIO(b"")), length, client)
        env = {"REQUEST_METHOD": verb, "wsgi.input": given, **more}
        assert swift.filter_factory({})(lambda env, start: [b"done"])(env, None) == [b"done"]
        assert isinstance(env["wsgi.input"], swift.Body) == is_wrapped
        assert swift._REQUEST.socket is client and (swift._REQUEST.body is not None) == is_wrapped
    swift._REQUEST.socket = swift._REQUEST.body = None


def test_a_body_over_tls_is_left_to_swift():
    given = wsgi.Input(io.BufferedReader(io.BytesIO(b"")), swift.SMALL, object())
    env = {"REQUEST_METHOD": "PUT", "wsgi.input": given}
    swift.Filter(lambda env, start: [])(env, None)
    assert env["wsgi.input"] is given and swift._REQUEST.socket is None
