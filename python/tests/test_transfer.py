"""Transfers: files, sockets, memory, stages, awaiting, failures, forks and the end of the interpreter."""

import asyncio
import gzip
import hashlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import eventually

import serval
from serval import ConfigError
from serval.transfer import REASON_NAMES, Compress, Digest, Expand, Find, Grep, Open, Seal, TransferError, Transfers

KEY = bytes(range(32))


def content(size, seed=0):
    return hashlib.shake_128(bytes([seed])).digest(size)


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain"
    path.write_bytes(content(1_500_001))
    return path


def received(connection, into):
    while piece := connection.recv(1 << 16):
        into += piece


def test_a_file_is_digested_on_its_way_through_a_socket(plain):
    ours, theirs = socket.socketpair()
    got = bytearray()
    reader = threading.Thread(target=received, args=(theirs, got))
    reader.start()
    with ours, theirs, Transfers() as transfers:
        result = transfers.run(plain, ours, Digest("sha256"), Digest("md5"), offset=5, bytes=1_000_000)
        ours.close()
        reader.join()
    expected = plain.read_bytes()[5:1_000_005]
    assert got == expected
    assert (result.read, result.written) == (1_000_000, 1_000_000)
    assert result.digest == hashlib.sha256(expected).digest()
    assert [stage.digest for stage in result.stages] == [hashlib.sha256(expected).digest(), hashlib.md5(expected).digest()]
    assert all(stage.finished for stage in result.stages)


def test_what_is_sealed_and_compressed_opens_and_expands(plain, tmp_path):
    sealed, back = tmp_path / "sealed", tmp_path / "back"
    with Transfers() as transfers:
        transfers.run(plain, sealed, Compress("gzip"), Seal(KEY))
        assert sealed.read_bytes().startswith(b"SERVSEAL")
        transfers.run(sealed, back, Open(KEY), Expand("gzip"), sync=True)
        assert back.read_bytes() == plain.read_bytes()
        packed = tmp_path / "packed"
        with pytest.raises(ValueError, match="levels of gzip are 1 to 9"):
            transfers.run(plain, packed, Compress("gzip", 10))
        transfers.run(plain, packed, Compress("gzip", 9))
        assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
        with pytest.raises(TransferError) as wrong:
            transfers.run(sealed, tmp_path / "wrong", Open(b"x" * 32))
        assert wrong.value.reason == "not_verified"
        assert isinstance(wrong.value, OSError) and isinstance(wrong.value, serval.Error)
    assert not (tmp_path / "wrong").exists(), "a file is whole, or absent"


def test_a_path_is_replaced_only_if_it_may_be(plain, tmp_path):
    sink = tmp_path / "sink"
    sink.write_bytes(b"old")
    with Transfers() as transfers:
        with pytest.raises(TransferError, match="File exists"):
            transfers.run(plain, sink, replace=False)
        assert sink.read_bytes() == b"old"
        transfers.run(plain, sink)
    assert sink.read_bytes() == plain.read_bytes()


def test_searches_and_shared_memory(tmp_path):
    memory = os.memfd_create("text")
    os.write(memory, b"one\ntwo one\nthree\n" * 1000)
    with Transfers() as transfers, open("/dev/zero", "r+b") as zero, open("/dev/null", "wb") as null:
        with pytest.raises(TransferError) as refused:
            transfers.run(memory, zero)
        assert refused.value.reason == "wrong_kind"
        assert transfers.run(memory, null, Find(b"one")).stages[0].found == 2000
        result = transfers.run(memory, tmp_path / "copy", Find(b"one", offsets=2), Grep("^t.*e", offsets=1))
    os.close(memory)
    found, lines = result.stages
    assert (found.found, found.offsets) == (2000, (0, 8))
    assert (lines.found, lines.offsets) == (2000, (4,))


def test_many_are_awaited_together(plain, tmp_path):
    async def run():
        with Transfers() as transfers:
            started = [transfers.start(plain, tmp_path / f"copy-{n}", Digest("crc32c")) for n in range(20)]
            return await asyncio.gather(*started)

    results = asyncio.run(run())
    assert len({result.digest for result in results}) == 1
    for n in range(20):
        assert (tmp_path / f"copy-{n}").read_bytes() == plain.read_bytes()


def test_a_callback_that_raises_hurts_no_other_transfer(plain, tmp_path, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: raised.append(hooked.exc_type))
    ours, theirs = socket.socketpair()
    with theirs, Transfers() as transfers:
        fails = transfers.start(theirs, tmp_path / "never", bytes=10)
        fails.when_done(lambda ended: ended.result())
        ours.close()
        eventually("it has failed", fails.done)
        assert transfers.run(plain, tmp_path / "copy").written == 1_500_001
    assert raised == [TransferError]


def test_a_cancelled_await_cancels_the_transfer():
    ours, theirs = socket.socketpair()

    async def run(transfers, sink):
        transfer = transfers.start(theirs, sink)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(transfer, 0.05)
        return transfer

    sink = os.memfd_create("sink")
    with ours, theirs, Transfers() as transfers:
        transfer = asyncio.run(run(transfers, sink))
        with pytest.raises(TransferError) as cancelled:
            transfer.wait(30)
    os.close(sink)
    assert cancelled.value.reason == "cancelled"


def test_progress_and_counts_of_a_transfer_that_fails():
    ours, theirs = socket.socketpair()
    sink = os.memfd_create("sink")
    with theirs, Transfers() as transfers:
        transfer = transfers.start(theirs, sink, bytes=10_000)
        ours.sendall(content(4000))
        eventually("4000 bytes are written", lambda: transfer.progress() == (4000, 4000))
        assert not transfer.done()
        with pytest.raises(TimeoutError):
            transfer.wait(0)
        ours.close()
        with pytest.raises(TransferError) as closed:
            transfer.wait(30)
    assert closed.value.reason == "closed"
    assert (closed.value.result.read, closed.value.result.written) == (4000, 4000)
    assert transfer.progress() == (4000, 4000)
    assert os.pread(sink, 10_000, 0) == content(4000)
    os.close(sink)


def test_wrong_arguments_are_one_sentence_and_leak_nothing(plain, tmp_path):
    sink = tmp_path / "sink"
    with Transfers() as transfers:
        for wrong in [
            lambda: transfers.start(plain, sink, Seal(32)),
            lambda: transfers.start(plain, sink, Seal(b"short")),
            lambda: transfers.start(plain, sink, Digest("md4")),
            lambda: transfers.start(plain, sink, offset=-1),
            lambda: transfers.start(plain, sink, bytes=1 << 64),
            lambda: transfers.start(plain, sink, stall=-1),
            lambda: transfers.start(object(), sink),
            lambda: transfers.start(plain, sink, sink_offset=3),
            lambda: transfers.start(-1, sink),
        ]:
            with pytest.raises((ValueError, OSError)):
                wrong()
        with pytest.raises(TransferError) as order:
            transfers.start(plain, sink, Seal(KEY), Digest("md5"))
        assert order.value.reason == "order"
        with pytest.raises(FileNotFoundError):
            transfers.start(tmp_path / "absent", sink)
    assert not sink.exists()
    with pytest.raises(ValueError, match="closed"):
        transfers.start(plain, sink)
    assert KEY.hex() not in repr(Seal(KEY)) and repr(KEY) not in repr(Seal(KEY))


def test_an_engine_in_another_process(plain, tmp_path):
    path = tmp_path / "engine"
    configuration = (
        f'schema = 1\n[transfer]\nsocket = "{path}"\n[[service]]\nname = "echo"\nlisten = "udp://127.0.0.1:0"\nkernel = "echo"\n'
    )
    with serval.Engine(configuration):
        with Transfers(path) as transfers:
            result = transfers.run(plain, tmp_path / "copy", Digest("sha256"))
            assert result.digest == hashlib.sha256(plain.read_bytes()).digest()
            assert (tmp_path / "copy").read_bytes() == plain.read_bytes()

            async def several():
                return await asyncio.gather(*(transfers.start(plain, tmp_path / f"copy-{n}") for n in range(5)))

            assert [result.written for result in asyncio.run(several())] == [1_500_001] * 5
            counter = os.eventfd(0, os.EFD_NONBLOCK)
            with Transfers(path, waits=False) as counted:
                counted.signal(counter)
                moved = counted.start(plain, tmp_path / "counted")
                assert select.select([counter], [], [], 60)[0] and os.eventfd_read(counter) == 1
                counted.reap()
                moved.wait(60)
            assert (tmp_path / "counted").read_bytes() == plain.read_bytes()
            os.close(counter)
            ours, theirs = socket.socketpair()
            cancelled = transfers.start(theirs, tmp_path / "never")
            cancelled.cancel()
            with pytest.raises(TransferError, match="cancelled"):
                cancelled.wait(60)
            waits = transfers.start(theirs, tmp_path / "never")
    with ours, theirs:
        with pytest.raises(TransferError) as ended:
            waits.wait(60)
        assert ended.value.reason in ("cancelled", "engine")
    assert not (tmp_path / "never").exists()
    with pytest.raises(TransferError, match="no transfer engine answers"):
        Transfers(tmp_path / "absent")


def test_a_fork_and_the_end_of_the_interpreter():
    program = """
import os, socket
from serval.transfer import Transfers
transfers = Transfers()
ours, theirs = socket.socketpair()
sink = os.memfd_create("sink")
waits = transfers.start(theirs, sink)
child = os.fork()
if child == 0:
    try:
        transfers.start(theirs, sink)
    except RuntimeError as error:
        assert "fork" in str(error), error
        transfers.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("ends")
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")


def test_what_was_received_before_comes_first(plain, tmp_path):
    content, sink = plain.read_bytes(), tmp_path / "sink"
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=ours.sendall, args=(content[5000:900_000],))
    sender.start()
    with ours, theirs, Transfers() as transfers:
        result = transfers.run(theirs, sink, Digest("md5"), head=content[:5000], bytes=895_000)
        sender.join()
        with pytest.raises(TransferError, match="only a socket"):
            transfers.run(plain, tmp_path / "never", head=b"a")
    assert sink.read_bytes() == content[:900_000]
    assert (result.read, result.written) == (895_000, 900_000)
    assert result.digest == hashlib.md5(content[:900_000]).digest()


def test_one_eventfd_counts_the_ends_of_several(plain, tmp_path):
    counter = os.eventfd(0, os.EFD_NONBLOCK)
    with Transfers(waits=False) as first, Transfers(waits=False) as second:
        first.signal(counter)
        second.signal(counter)
        ended = []
        for n, transfers in enumerate([first, second, second]):
            transfers.start(plain, tmp_path / f"copy-{n}").when_done(ended.append)
        counted = 0
        while counted < 3:
            assert select.select([counter], [], [], 60)[0]
            counted += os.eventfd_read(counter)
        assert counted == 3
        first.reap()
        second.reap()
        assert len(ended) == 3
        with open(plain, "rb") as no_eventfd, pytest.raises(ConfigError, match="EFD_NONBLOCK"):
            first.signal(no_eventfd.fileno())
        with pytest.raises(OSError, match="Bad file descriptor"):
            first.signal(-1)
        # The earlier one counts still.
        first.start(plain, tmp_path / "copy").wait(60)
        assert select.select([counter], [], [], 60)[0] and os.eventfd_read(counter) == 1
    with Transfers() as waits, pytest.raises(ConfigError, match="waits=False"):
        waits.signal(counter)
    os.close(counter)


def test_a_loop_of_the_program_can_wait(plain, tmp_path):
    ended = []
    with Transfers(waits=False) as transfers:
        started = [transfers.start(plain, tmp_path / f"copy-{n}", Digest("crc32c")) for n in range(3)]
        for transfer in started:
            transfer.when_done(ended.append)
        while len(ended) < 3:
            select.select([transfers.fileno()], [], [], 20)
            transfers.reap()
        assert {transfer.result().digest for transfer in ended} == {started[0].result().digest}
        # Without the loop, and one that never ends by itself.
        assert transfers.run(plain, tmp_path / "copy").written == 1_500_001
        ours, theirs = socket.socketpair()
        with ours, theirs:
            never = transfers.start(theirs, tmp_path / "never", bytes=10)
            with pytest.raises(TimeoutError):
                never.wait(0.01)
            transfers.close()
    assert never.done() and transfers.closed
    with pytest.raises(TransferError):
        never.result()


def test_the_descriptor_is_readable_while_an_end_is_to_be_taken():
    counter, count, transfers_at_a_time = os.eventfd(0, os.EFD_NONBLOCK), 0, 8
    with Transfers(waits=False) as transfers:
        transfers.signal(counter)
        for _ in range(100):
            pairs = [socket.socketpair() for _ in range(transfers_at_a_time)]
            sink = os.memfd_create("sink")
            started = [transfers.start(theirs, sink) for _, theirs in pairs]
            # The first one is waited for while others end.
            ends = threading.Thread(target=lambda started=started: [transfer.cancel() for transfer in started])
            ends.start()
            while not transfers._next(60):
                pass
            ends.join()
            while count < transfers_at_a_time:
                assert select.select([counter], [], [], 60)[0]
                count += os.eventfd_read(counter)
            for _ in range(transfers_at_a_time - 1):
                assert select.select([transfers.fileno()], [], [], 0)[0]
                assert transfers._next(0)
            assert all(transfer.done() for transfer in started)
            count = 0
            os.close(sink)
            for ours, theirs in pairs:
                ours.close()
                theirs.close()
    os.close(counter)


class Counting:
    """The native transfers, with how many have been started there, and whether a small one has begun."""

    def __init__(self, native):
        self.native, self.started, self.small = native, 0, threading.Event()

    def __getattr__(self, name):
        return getattr(self.native, name)

    def start(self, *given):
        self.started += 1
        return self.native.start(*given)

    def run_small(self, *given):
        self.small.set()
        return self.native.run_small(*given)


@pytest.fixture
def memory():
    """A file system that is local everywhere."""
    folder = Path("/dev/shm") / f"serval-test-transfer-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def of_another_process(folder):
    path = folder / "engine"
    return path, f'schema = 1\n[transfer]\nsocket = "{path}"\n[[service]]\nname = "echo"\nlisten = "udp://127.0.0.1:0"\nkernel = "echo"\n'


@pytest.mark.parametrize("there", [False, True])
def test_a_small_file_is_sent_without_an_engine(memory, there):
    path, configuration = of_another_process(memory)
    file = memory / "file"
    file.write_bytes(content(70_000))
    with serval.Engine(configuration), Transfers(path if there else None) as transfers:
        native = transfers._native = Counting(transfers._native)
        for size, started in [(1, 0), (65_536, 0), (65_537, 1)]:
            ours, theirs = socket.socketpair()
            got = bytearray()
            reader = threading.Thread(target=received, args=(theirs, got))
            reader.start()
            with theirs:
                result = transfers.run(file, ours, Digest("sha256"), Seal(KEY), offset=5, bytes=size)
                ours.close()
                reader.join()
            assert (native.started, result.read, result.written) == (started, size, len(got))
            assert result.digest == hashlib.sha256(content(70_000)[5 : 5 + size]).digest()
            sealed, opened = memory / "sealed", memory / "opened"
            sealed.write_bytes(got)
            native.started = 0
            transfers.run(sealed, opened, Open(KEY))
            assert opened.read_bytes() == content(70_000)[5 : 5 + size]
            native.started = 0
        ours, theirs = socket.socketpair()
        with theirs:
            with pytest.raises(TransferError) as short:
                transfers.run(file, ours, offset=69_000, bytes=2000)
            assert (short.value.reason, short.value.result.written, native.started) == ("file_ended", 1000, 0)
            # Another transfer is in flight, which may use the same socket.
            waits = transfers.start(theirs, memory / "sink")
            assert transfers.run(file, ours, bytes=10).written == 10
            assert native.started == 2
            ours.close()
            assert waits.wait(60).written == 1010
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="closed"):
        transfers.run(file, ours)


def test_an_interrupt_ends_a_small_transfer(memory):
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        if not done.is_set():
            done.set()
            raise Interrupted

    file = memory / "file"
    file.write_bytes(content(60_000))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(bytes(4096))
    done = threading.Event()
    before = signal.signal(signal.SIGUSR1, interrupt)
    with ours, theirs, Transfers() as transfers:
        native = transfers._native = Counting(transfers._native)

        def interrupts():
            native.small.wait(60)
            while not done.wait(0.05):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

        thread = threading.Thread(target=interrupts)
        thread.start()
        with pytest.raises(Interrupted):
            transfers.run(file, ours)
        thread.join()
        assert native.started == 0
    signal.signal(signal.SIGUSR1, before)


def sends_alone(transfers, file):
    """A thread that has begun to send a small file, and waits for room in its socket: the two ends, the thread, and what it raises."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    raised = []

    def send():
        try:
            transfers.run(file, ours)
        except TransferError as error:
            raised.append(error)

    native = transfers._native = Counting(transfers._native)
    thread = threading.Thread(target=send)
    thread.start()
    assert select.select([theirs], [], [], 60)[0] and native.started == 0
    return ours, theirs, thread, raised


@pytest.mark.parametrize("there", [False, True])
def test_a_socket_that_a_small_transfer_uses_is_busy(memory, there):
    path, configuration = of_another_process(memory)
    file = memory / "file"
    file.write_bytes(content(60_000))
    with serval.Engine(configuration), Transfers(path if there else None) as transfers:
        ours, theirs, thread, raised = sends_alone(transfers, file)
        with ours, theirs, ours.dup() as copy:
            for start in (transfers.start, transfers.run):
                for sink in (ours, copy):
                    with pytest.raises(TransferError) as busy:
                        start(file, sink, bytes=10)
                    assert busy.value.reason == "busy"
            # Another socket, and the other direction, are free.
            other, others = socket.socketpair()
            with other, others:
                assert transfers.run(file, other, bytes=10).written == 10
                assert others.recv(100) == content(60_000)[:10]
            theirs.sendall(b"back")
            assert transfers.start(ours, memory / "back", bytes=4).wait(60).written == 4
            got = b""
            while len(got) < 60_000:
                got += theirs.recv(1 << 16)
            thread.join()
            assert not raised and got == content(60_000)
            assert transfers.run(file, ours, bytes=10).written == 10
            assert theirs.recv(100) == content(60_000)[:10]


@pytest.mark.parametrize("waits", [False, True])
def test_closing_ends_a_small_transfer_of_another_thread(memory, waits):
    file = memory / "file"
    file.write_bytes(content(60_000))
    with Transfers(waits=waits) as transfers:
        ours, theirs, thread, raised = sends_alone(transfers, file)
    # Nothing takes from the socket.
    with ours, theirs:
        thread.join()
    assert [error.reason for error in raised] == ["cancelled"]


#: `rename` of a file system that does not answer as long as a file exists.
HANGS = """
#include <stdlib.h>
#include <unistd.h>
#include <sys/syscall.h>
int rename(const char *from, const char *to) {
    while (access(getenv("HANGS"), F_OK) == 0) usleep(1000);
    return (int)syscall(SYS_rename, from, to);
}
"""


@pytest.mark.parametrize("engine", ["", "engine"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_new_file_whose_file_system_hangs_holds_no_other_transfer(plain, tmp_path, engine, waits):
    library, hangs = tmp_path / "hangs.so", tmp_path / "hangs"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=HANGS, text=True, check=True)
    hangs.touch()
    path, configuration = of_another_process(tmp_path)
    program = f"""
import contextlib, os, select, serval
from serval.transfer import Digest, Transfers
with contextlib.ExitStack() as stack:
    if {bool(engine)}:
        stack.enter_context(serval.Engine({configuration!r}))
    transfers = stack.enter_context(Transfers({str(path)!r} if {bool(engine)} else None, waits={waits}))
    def ends(transfer):
        while not transfer.done():
            if {waits}:
                transfer.wait(60)
            else:
                assert select.select([transfers.fileno()], [], [], 60)[0], "nothing has ended"
                transfers.reap()
        return transfer.result()
    new = transfers.start({str(plain)!r}, {str(tmp_path / "new")!r})
    for _ in range(3):
        assert ends(transfers.start({str(plain)!r}, os.memfd_create("sink"), Digest("md5"))).written == 1_500_001
    assert not new.done() and not os.path.exists({str(tmp_path / "new")!r})
    os.remove({str(hangs)!r})
    assert ends(new).written == 1_500_001
    assert os.path.getsize({str(tmp_path / "new")!r}) == 1_500_001
print("ends")
"""
    environment = {**os.environ, "LD_PRELOAD": str(library), "HANGS": str(hangs)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


def test_a_file_that_gets_its_name_outlives_the_connection(plain, tmp_path):
    library, hangs = tmp_path / "hangs.so", tmp_path / "hangs"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=HANGS, text=True, check=True)
    path, configuration = of_another_process(tmp_path)
    program = f"""
import os, select, socket, threading, serval
from pathlib import Path
from serval.transfer import TransferError, Transfers

def ended(transfers, transfer):
    while not transfer.done():
        assert select.select([transfers.fileno()], [], [], 60)[0], "nothing has ended"
        transfers.reap()

hangs, folder = Path({str(hangs)!r}), Path({str(tmp_path)!r})
for waits in (False, True):
    hangs.touch()
    ours, theirs = socket.socketpair()
    with serval.Engine({configuration!r}):
        transfers = Transfers({str(path)!r}, waits=waits)
        names = transfers.start({str(plain)!r}, folder / f"named-{{waits}}")
        closing = transfers.start({str(plain)!r}, folder / f"closing-{{waits}}")
        moves = transfers.start(theirs, folder / f"never-{{waits}}")
        while len(transfers._native.ending_here()) < 2:
            if not waits:
                assert select.select([transfers.fileno()], [], [], 60)[0]
                transfers.reap()
    # The engine has gone.
    if waits:
        try:
            moves.wait(60)
        except TransferError:
            pass
    else:
        ended(transfers, moves)
    while not transfers.closed:
        transfers.reap() if not waits else None
    assert moves.done() and not names.done()
    # A loop waits: nothing is there to be taken.
    assert waits or not select.select([transfers.fileno()], [], [], 0)[0]
    threading.Timer(4, hangs.unlink).start()
    if not waits:
        ended(transfers, names)
    assert names.wait(60).written == 1_500_001
    transfers.close()
    assert closing.result().written == 1_500_001
    ours.close()
    theirs.close()
print("ends")
"""
    environment = {**os.environ, "LD_PRELOAD": str(library), "HANGS": str(hangs)}
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr
    for waits in (False, True):
        assert all((tmp_path / f"{name}-{waits}").read_bytes() == plain.read_bytes() for name in ("named", "closing"))
        assert not (tmp_path / f"never-{waits}").exists()


def test_reasons_have_the_numbers_of_the_c_library():
    header = Path(__file__).resolve().parents[2] / "lib/include/serval/transfer_codes.h"
    lines = header.read_text().partition("enum sv_reason {")[2].partition("SV_REASON_LAST")[0].split(",")
    names = [line.partition("=")[0].strip().removeprefix("SV_REASON_").lower() for line in lines[:-1]]
    assert names == list(REASON_NAMES)
