"""Functions on the path of messages, from Python."""

import os
import socket
import subprocess
import sys

import pytest
import serval
from conftest import eventually
from serval import functions

CONFIG = """
schema = 1
[[service]]
name = "echo"
listen = "udp://127.0.0.1:0"
kernel = "echo"
[[service.function]]
name = "file"
function = "passthrough"
"""
MODULE = os.path.join(os.path.dirname(__file__), "../../functions/threshold.wasm")
NINE = (9).to_bytes(4, "big")


@pytest.fixture
def engine():
    with serval.Engine(CONFIG) as engine:
        yield engine


def names(engine):
    return [found["name"] for found in functions.list_functions(engine)]


@pytest.mark.parametrize("function", ["threshold", MODULE])
def test_a_function_lives_as_long_as_its_context(engine, function):
    params = {"offset": 0}
    with serval.Client(engine.urls["echo"][0], timeout=20) as client:
        with functions.create(engine, function, "limits", params=params, deadline_us=1_000_000) as limits:
            assert names(engine) == ["file", "limits"]
            with pytest.raises(serval.EngineError, match="is not attached"):
                limits.read()
            with limits.attach("echo", before="file"):
                assert names(engine) == ["limits", "file"]
                assert client.ask(NINE) == NINE
                assert limits.read()["sum"] == 9
                assert limits.write("high", 100)["high"] == 100
                limits.replace(params={"offset": 0, "high": 50})
                assert (limits.read()["high"], limits.read()["sum"]) == (50, 9)
                assert limits.reset()["sum"] == 0
                with pytest.raises(serval.EngineError, match="has no setting"):
                    limits.write("sum", 1)
            limits.attach("echo").__exit__(None, None, None)
            with pytest.raises(serval.EngineError, match="there is no service"):
                limits.attach("none")
            limits.attach("echo")
        assert names(engine) == ["file"]
        assert client.ask(NINE) == NINE


def test_mistakes_are_sentences(engine, tmp_path):
    for function, why in [
        ("nothing", "no built-in function"),
        (tmp_path / "none.wasm", "cannot be read"),
        (tmp_path, "no built-in function"),
    ]:
        with pytest.raises(serval.EngineError, match=why):
            functions.create(engine, function, "f")
    with pytest.raises(serval.EngineError, match="no server answers"):
        functions.create(tmp_path / "control.sock", "passthrough", "f")
    with functions.create(engine.control, "passthrough", "f"):
        with pytest.raises(serval.EngineError, match="has created a function"):
            functions.create(engine.control, "passthrough", "f")


@pytest.mark.parametrize("keep", [False, True])
def test_a_process_that_ends_takes_its_function_with_it_unless_it_is_kept(engine, keep):
    code = (
        "import os, sys; from serval import functions;"
        "f = functions.create(sys.argv[1], 'passthrough', 'f', keep=sys.argv[2] == 'True');"
        "f.attach('echo'); print(f.id, flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", code, engine.control, str(keep)]
    number = int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    if keep:
        assert number in [found["id"] for found in functions.list_functions(engine)]
    else:
        eventually("it ends", lambda: names(engine) == ["file"])


def test_a_ring_has_what_the_function_delivers(engine):
    with functions.create(engine, "deliver", "ring", deadline_us=1_000_000) as function:
        with pytest.raises(serval.EngineError, match="not a power of two"):
            function.ring(entries=3)
        with function.ring(entries=8, message_bytes=64) as ring, function.attach("echo"):
            assert ring.read() == []
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                _, _, port = engine.urls["echo"][0].rpartition(":")
                client.connect(("127.0.0.1", int(port)))
                for number in range(500):
                    client.send(b"%d" % number)
                    (found,) = ring.read(timeout=60)
                    assert found == (b"%d" % number, 0, number, client.getsockname())
                for number in range(20):
                    client.send(b"%d" % number)
                counted = lambda: functions.list_functions(engine)[-1]["counters"]
                eventually("all are counted", lambda: counted()["delivered"] + counted()["ring_full"] == 520)
                assert counted()["ring_full"] == 12
                assert [found.message for found in ring.read()] == [b"%d" % number for number in range(8)]
            with pytest.raises(serval.EngineError, match="is attached to service"):
                function.ring()
        with pytest.raises(serval.EngineError, match="closed"):
            ring.read()


def test_a_function_names_a_dictionary(engine):
    with functions.create(engine, MODULE, "known", dictionary="sessions", dictionary_kib=32) as function:
        with function.attach("echo"):
            found = [found for found in functions.list_functions(engine) if found["name"] == "known"]
            assert [(of["dictionary"], of["dictionary_kib"]) for of in found] == [("sessions", 32)]
    with pytest.raises(serval.EngineError, match="is no name"):
        functions.create(engine, MODULE, "known", dictionary="a b")
