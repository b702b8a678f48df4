"""Processes, threads and descriptors: ends of every kind leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import serval
from conftest import descriptors, eventually

ANY = "udp://127.0.0.1:0"
ROOT = Path(__file__).resolve().parents[2]


def same(messages):
    return messages


def ask(server, message):
    with serval.Client(server.url, timeout=10) as client:
        return client.ask(message)


def runs(pid):
    """Whether a process exists and is not only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def program(text, **options):
    """A Python program in a process of its own; its standard output is a pipe."""
    # Jobs in the background of a shell without job control ignore SIGINT, and so do their children.
    text = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + text
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, **options)


SERVES = """
import serval, sys
server = serval.serve(lambda messages: messages, listen="udp://127.0.0.1:0")
print(server.engine.pid, server.url, flush=True)
"""


def test_the_death_of_the_engine_is_noticed():
    with pytest.raises(serval.EngineError, match="ended by itself") as raised:
        with serval.serve(same, listen=ANY) as server:
            assert ask(server, b"a") == b"a"
            os.kill(server.engine.pid, signal.SIGKILL)
            server.wait(30)
    assert raised.value.exit_code == -signal.SIGKILL


def test_the_death_of_the_process_ends_the_engine():
    process = program(SERVES + "server.wait()")
    engine = int(process.stdout.readline().split()[0])
    assert runs(engine)
    process.kill()
    process.wait()
    eventually("the engine ends", lambda: not runs(engine))
    process.stdout.close()


def test_a_forked_child_does_not_keep_the_engine_alive():
    process = program(SERVES + "import os, time\nif os.fork() == 0: time.sleep(60)\nprint('forked', flush=True)\nserver.wait()")
    engine = int(process.stdout.readline().split()[0])
    assert process.stdout.readline() == "forked\n"
    child = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = [int(pid) for pid in child.read_text().split() if int(pid) != engine]
    process.kill()
    process.wait()
    eventually("the engine ends", lambda: not runs(engine))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    process.stdout.close()


@pytest.mark.parametrize("ends", ["", "raise SystemExit(0)", "import os; os.kill(os.getpid(), 2)"])
def test_a_program_that_ends_without_close_drains_and_ends(ends):
    process = program(SERVES + ends, stderr=subprocess.DEVNULL)
    engine = int(process.stdout.readline().split()[0])
    assert process.wait(60) == (-signal.SIGINT if "kill" in ends else 0)
    assert not runs(engine)
    process.stdout.close()


def test_a_program_ends_while_a_call_does_not_return():
    for hangs in ["while True: pass", "time.sleep(1000)"]:
        text = f"import time\ndef hang(messages):\n    {hangs}\n" + SERVES.replace("lambda messages: messages", "hang, call_timeout=0.2")
        text += "try: serval.Client(server.url, timeout=0.01).ask(b'x')\nexcept serval.ReplyTimeout: pass"
        process = program(text, stderr=subprocess.DEVNULL)
        engine = int(process.stdout.readline().split()[0])
        assert process.wait(60) == 0
        assert not runs(engine)
        process.stdout.close()


def test_ctrl_c_in_a_terminal_drains_and_ends():
    # Like a terminal, to the whole group.
    waits = """
try:
    print("waiting", flush=True)
    server.wait()
except KeyboardInterrupt:
    server.close()
    print(server.engine.exit_code)
"""
    process = program(SERVES + waits, process_group=0)
    engine = int(process.stdout.readline().split()[0])
    assert process.stdout.readline() == "waiting\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.read() == "0\n"
    assert process.wait(60) == 0 and not runs(engine)
    process.stdout.close()


def external(folder):
    """The configuration of an engine to whose accelerator a program attaches."""
    return {
        "schema": 1,
        "accelerator": [{"name": "own", "kind": "process", "launch": "external", "attach": str(folder / "own.sock")}],
        "service": [{"name": "same", "listen": ANY, "accelerator": "own", "kernel": "python", "mqueues": 3}],
    }


def test_a_function_attaches_to_a_running_engine_again_and_again(tmp_path):
    # The engine accepts the next program later each time.
    rounds = 6
    with serval.Engine(external(tmp_path)) as engine:
        socket = tmp_path / "own.sock"
        with serval.Client(engine.urls["same"][0], timeout=0.5) as client:
            for number in range(rounds):
                with serval.serve(same, attach=socket, name="same") as server:
                    assert server.engine is None and server.urls == []
                    up = lambda: engine.metrics().total("serval_accelerator_up") == 1
                    eventually("the engine accepts it", up)
                    messages = [b"%d %d" % (number, n) for n in range(9)]
                    assert client.ask_many(messages, timeout=30) == messages
                if number == 2:
                    threads, before = threading.active_count(), descriptors()
        assert threading.active_count() <= threads and descriptors() <= before
        assert engine.metrics().total("serval_accelerator_generation") == rounds


def test_a_forked_child_writes_nothing_into_the_rings(tmp_path):
    from serval._native import HostCall

    with serval.Engine(external(tmp_path)) as engine:
        host = HostCall(str(tmp_path / "own.sock"), "same", 64, 0, 0, 10_000)
        eventually("it is attached", lambda: engine.metrics().total("serval_accelerator_up") == 1)
        replies = []

        def ask():
            with serval.Client(engine.urls["same"][0], timeout=30) as client:
                replies.append(client.ask(b"question"))

        asking = threading.Thread(target=ask)
        asking.start()
        assert host.next() == [b"question"]
        child = os.fork()
        if child == 0:
            try:
                host.reply([b"of the child"])
            except RuntimeError:
                pass
            host.release()
            del host
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert host.reply([b"answer"]) is None
        host.close()
        assert host.next() is None
        asking.join()
        assert replies == [b"answer"]
        assert host.detach(10.0)
        host.release()


def test_servers_come_and_go_and_leave_nothing():
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    rounds = 1000 if os.environ.get("SERVAL_LONG") else 20
    for number in range(rounds):
        with serval.serve(same, listen=ANY) as server:
            assert ask(server, b"a") == b"a"
        if number == rounds // 2:
            threads, before, memory = threading.active_count(), descriptors(), resident()
    assert threading.active_count() <= threads and descriptors() <= before
    assert resident() - memory < (16 << 20)


def test_thousands_of_host_calls_leave_nothing():
    from serval._native import HostCall

    tasks = lambda: len(os.listdir("/proc/self/task"))
    before, threads = descriptors(), tasks()
    for _ in range(10_000 if os.environ.get("SERVAL_LONG") else 2000):
        host = HostCall("/nonexistent/socket", "s", 64, 50, 10, 1000)
        host.close()
        assert host.next() is None
        host.detach(0.0)
        host.release()
        assert host.next() is None
    eventually("descriptors closed", lambda: descriptors() <= before)
    eventually("their threads ended", lambda: tasks() <= threads)


def test_no_engine_at_the_socket_is_reported(monkeypatch):
    monkeypatch.setattr("serval._serve._ATTACH_PATIENCE", 0.2)
    with pytest.raises(serval.EngineError, match="/nonexistent/socket"):
        serval.serve(same, attach="/nonexistent/socket")


@pytest.mark.parametrize("extra", [[], ["--arrays"]])
def test_the_example_checks_itself(extra):
    check = ROOT / "examples" / "05_python" / "check.py"
    for corrupt, code in [([], 0), (["--corrupt"], 1)]:
        command = [sys.executable, str(check), "--json", "--messages", "300", *extra, *corrupt]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == code, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["checked"] == 600 and (result["wrong"] > 0) == bool(corrupt)


def test_the_command_is_installed():
    command = Path(sys.executable).parent / "serval"
    done = subprocess.run([command, "version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "0.1.0" in done.stdout


def test_an_import_loads_nothing_heavy():
    heavy = "numpy torch asyncio subprocess tempfile urllib.parse ctypes serval._native".split()
    text = f"import sys; before = set(sys.modules); import serval; print(*(set(sys.modules) - before).intersection({heavy}))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stdout + done.stderr


def test_a_server_with_waiting_batches_can_be_closed():
    # In a process of its own: a thread that keeps the interpreter's lock would stop the tests too.
    text = """
import serval, socket, time
def slow(messages):
    time.sleep(0.05)
    return messages
server = serval.serve(slow, listen="udp://127.0.0.1:0", batch=1, settings={"engine": {"drain_ms": 100}})
host, port = server.url[6:].split(":")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    for _ in range(500):
        client.sendto(b"x", (host, int(port)))
while server.stats()["calls"] < 2:
    time.sleep(0.005)
server.close()
print("closed", flush=True)
"""
    process = program(text)
    try:
        assert process.communicate(timeout=60)[0] == "closed\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_a_forked_child_that_exits_leaves_the_engine_its_sockets():
    text = """
import os, serval, sys
config = {"schema": 1, "service": [{"name": "echo", "listen": "udp://127.0.0.1:0", "kernel": "echo"}]}
with serval.Engine(config) as engine:
    child = os.fork()
    if child == 0:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    print(engine.metrics().total("serval_accelerator_up") >= 0, flush=True)
"""
    process = program(text)
    assert process.communicate(timeout=60)[0] == "True\n" and process.returncode == 0


def test_a_close_that_is_interrupted_is_finished_by_the_next(monkeypatch):
    server = serval.serve(same, listen=ANY)
    folder, interrupted = server._folder, []

    def interrupt(path):
        if not interrupted:
            interrupted.append(path)
            raise KeyboardInterrupt
        remove(path)

    remove = serval._serve.remove_folder
    monkeypatch.setattr("serval._serve.remove_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    assert os.path.exists(folder) and not server.wait(0)
    server.close()
    assert server.wait(0) and not os.path.exists(folder)
