"""Groups without torch: sums, broadcasts and barriers of threads and of processes, and how they fail."""

import array
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import serval
from conftest import eventually
from serval.collective import Group, Listener


@pytest.fixture(autouse=True)
def no_cycles(leaves_nothing_behind):
    """The tracebacks of expected exceptions hold listeners, in cycles."""
    yield
    gc.collect()


def ranks_of(count, work, *, over="tcp"):
    """Runs ``work(group)`` as every rank; the results in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as threads:
        listeners = [Listener("127.0.0.1") for _ in range(count)]
        addresses = [listener.address() for listener in listeners]

        def run(rank):
            if over == "shm":
                group = Group.shared("test", ranks=count, rank=rank, folder=folder)
            else:
                group = Group.tcp("test", rank=rank, listener=listeners[rank], addresses=addresses)
            with group:
                return work(group)

        return list(threads.map(run, range(count)))


@pytest.mark.parametrize("over", ["tcp", "shm"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_sums_broadcasts_and_barriers(over, dtype):
    inputs = [np.random.default_rng(rank).integers(-1000, 1000, 5000).astype(dtype) for rank in range(3)]

    def work(group):
        data = inputs[group.rank].copy()
        group.all_reduce(data)
        total = data.copy()
        data += group.rank
        group.broadcast(data, root=2)
        group.barrier()
        return total, data

    results = ranks_of(3, work, over=over)
    for total, copied in results:
        assert np.array_equal(total, sum(inputs))
        assert np.array_equal(copied, sum(inputs) + 2)


def test_other_buffers():
    def work(group):
        numbers = array.array("i", [1, 2, 3])
        group.all_reduce(numbers)
        group.all_reduce(memoryview(numbers))
        raw = bytearray(np.ones(4, np.float32).tobytes())
        group.all_reduce(raw, dtype="float32")
        group.all_reduce(np.zeros(0, np.float32))
        return list(numbers), np.frombuffer(raw, np.float32).tolist()

    assert ranks_of(2, work) == [([4, 8, 12], [2.0] * 4)] * 2


def test_wrong_arguments_leave_the_group_usable():
    def work(group):
        with pytest.raises(serval.CollectiveError, match="float32 or int32") as caught:
            group.all_reduce(np.zeros(4))
        assert caught.value.reason == "argument"
        with pytest.raises(ValueError, match="writable"):
            group.all_reduce(bytes(8), dtype="int32")
        with pytest.raises(ValueError, match="contiguous"):
            group.all_reduce(np.zeros(8, np.float32)[::2])
        with pytest.raises(serval.CollectiveError, match="the root 7"):
            group.broadcast(bytearray(4), root=7)
        for limit in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                group.barrier(limit=limit)
        group.barrier(limit=float("inf"))
        return True

    assert all(ranks_of(2, work))


def test_a_disagreement_has_a_reason_on_all_ranks():
    def work(group):
        with pytest.raises(serval.CollectiveError) as caught:
            group.all_reduce(np.zeros(3 + group.rank // 2, np.float32))
        with pytest.raises(serval.CollectiveError, match="in an earlier call"):
            group.barrier()
        return caught.value.reason

    reasons = ranks_of(3, work)
    assert "disagreement" in reasons
    assert set(reasons) <= {"disagreement", "group_ended"}


def test_a_closed_group_says_so():
    group = Group.tcp("test", rank=0, listener=Listener("127.0.0.1"), addresses=["127.0.0.1:1"])
    group.barrier()
    group.close()
    with pytest.raises(serval.CollectiveError, match="closed"):
        group.barrier()


@pytest.mark.parametrize("over", ["tcp", "shm"])
def test_another_thread_ends_a_call(over):
    def work(group):
        if group.rank == 1:
            # Its barrier fails because the other rank has ended the group, not at its limit.
            with pytest.raises(serval.CollectiveError) as caught:
                group.barrier()
            return caught.value.reason
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(group.broadcast, bytearray(8), root=1)
            group.abort()
            with pytest.raises(serval.CollectiveError) as caught:
                call.result()
        return caught.value.reason

    first, second = ranks_of(2, work, over=over)
    # "argument": the group was closed before the call began.
    assert first in ("interrupted", "argument", "disagreement", "group_ended")
    assert second in ("rank_lost", "rank_left", "group_ended", "disagreement")


RANK = """
import signal, sys
import numpy as np
from serval.collective import Group
rank, folder = int(sys.argv[1]), sys.argv[2]
# Tests that run in the background of a shell have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
group = Group.shared("test", ranks=2, rank=rank, folder=folder)
group.barrier()
print("ready", flush=True)
if rank == 0:
    group.all_reduce(np.ones(4, np.float32), limit=600)
else:
    sys.stdin.read()
"""


def start(rank, folder):
    command = [sys.executable, "-c", RANK, str(rank), folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_and_a_signal_end_a_call():
    for end in ("kill the other", "interrupt"):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [start(rank, folder) for rank in range(2)]
            for rank in ranks:
                assert rank.stdout.readline() == "ready\n"
            time.sleep(0.05)
            if end == "interrupt":
                ranks[0].send_signal(signal.SIGINT)
            else:
                ranks[1].kill()
            _, said = ranks[0].communicate(timeout=100)
            assert ("KeyboardInterrupt" if end == "interrupt" else "rank 1 was lost") in said, said
            ranks[1].kill()
            ranks[1].communicate()


class Stop(Exception):
    """What the handler of a signal raises."""


def stop_at(number):
    def handler(_number, _frame):
        raise Stop

    return signal.signal(number, handler)


def test_a_signal_ends_the_forming_of_a_group():
    listener = Listener("127.0.0.1")
    host, port = listener.address().split(":")

    def interrupt():
        # That a stranger is refused shows that the group is being formed.
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes(80))
            assert stranger.recv(1) == b""
        os.kill(os.getpid(), signal.SIGUSR1)

    before = stop_at(signal.SIGUSR1)
    try:
        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(interrupt)
            with pytest.raises(Stop):
                Group.tcp("test", rank=0, listener=listener, addresses=[listener.address(), "127.0.0.1:1"], limit=600)
            other.result()
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
            place = pathlib.Path(folder, "rank-0")

            def interrupt_when_it_listens():
                eventually("the rank listens", place.exists)
                os.kill(os.getpid(), signal.SIGUSR1)

            other = thread.submit(interrupt_when_it_listens)
            with pytest.raises(Stop):
                Group.shared("test", ranks=2, rank=0, folder=folder, limit=600)
            other.result()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_forming_of_a_group_has_a_limit():
    with pytest.raises(serval.CollectiveError, match="did not connect in time: 1") as caught:
        Group.tcp("test", rank=0, listener=Listener("127.0.0.1"), addresses=["127.0.0.1:1", "127.0.0.1:2"], limit=0.1)
    assert caught.value.reason == "forming"


FORK = """
import os, sys
import numpy as np
import serval
from serval.collective import Group
rank, folder = int(sys.argv[1]), sys.argv[2]
group = Group.shared("test", ranks=2, rank=rank, folder=folder)
group.barrier()
child = os.fork()
if child == 0:
    try:
        group.barrier()
    except serval.CollectiveError as error:
        assert error.reason == "argument" and "fork" in str(error), error
        group.close()
        del group
        # The interpreter ends in order: what is left of the group is dropped.
        sys.exit(42)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
data = np.ones(4, np.float32)
group.all_reduce(data)
assert data.tolist() == [2.0] * 4
print("summed", flush=True)
if rank == 1 and os.fork() == 0:
    # A child that lives on does not keep its parent's connections open.
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
if rank == 1:
    os.kill(os.getpid(), 9)
try:
    group.barrier(limit=600)
except serval.CollectiveError as error:
    print(error.reason, flush=True)
"""


def test_a_fork_has_no_part_of_its_parents_group():
    with tempfile.TemporaryDirectory() as folder:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = [subprocess.Popen([sys.executable, "-c", FORK, str(rank), folder], **pipes) for rank in range(2)]
        first, _ = ranks[0].communicate(timeout=100)
        assert first == "summed\nrank_lost\n", first
        # The child ends with its standard input.
        second, _ = ranks[1].communicate(timeout=100)
        assert second.splitlines() == ["summed", "child"], second


EXIT = """
import sys, threading, time
from serval.collective import CollectiveError, Group
rank, folder = int(sys.argv[1]), sys.argv[2]
group = Group.shared("test", ranks=2, rank=rank, folder=folder)
group.barrier()
if rank == 1:
    # Its standard input ends when the other rank has ended, which has sent enough for one more barrier.
    sys.stdin.read()
    try:
        group.barrier(limit=600)
        group.barrier(limit=600)
    except CollectiveError as error:
        print(error.reason)
    sys.exit(0)
begun = threading.Event()
def call():
    begun.set()
    try:
        group.barrier(limit=600)
    except CollectiveError as error:
        print(error.reason, flush=True)
threading.Thread(target=call, daemon=True).start()
begun.wait()
# Most probably the thread waits for the other rank.
time.sleep(0.2)
if sys.argv[3] == "abort":
    group.abort()
"""


@pytest.mark.parametrize("how", ["exit", "abort"])
def test_a_process_that_ends_or_aborts_waits_for_no_call(how):
    with tempfile.TemporaryDirectory() as folder:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-c", EXIT]
        first, second = (subprocess.Popen([*command, str(rank), folder, how], **pipes) for rank in range(2))
        outputs = [each.communicate(timeout=100)[0] for each in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], outputs
        assert outputs[1] in ("rank_lost\n", "rank_left\n", "group_ended\n"), outputs


SUBGROUP = """
import os, sys
import numpy as np
from serval.collective import CollectiveError, Group, Listener
over, rank, folder, names = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
def form(name):
    if over == "shm":
        place = os.path.join(folder, name)
        os.makedirs(place, exist_ok=True)
        return Group.shared(name, ranks=2, rank=rank, folder=place)
    listener = Listener("127.0.0.1")
    print(listener.address(), flush=True)
    return Group.tcp(name, rank=rank, listener=listener, addresses=sys.stdin.readline().split())
group, subgroup = form("group"), form("subgroup")
group.all_reduce(np.ones(4, np.float32))
if rank == 1:
    # Before its first call of the subgroup, and without the end of an interpreter.
    os._exit(7)
print("formed", flush=True)
sys.stdin.readline()
for each in (subgroup, group):
    for call in (lambda: each.all_reduce(np.ones(4, np.float32), limit=600), lambda: each.barrier(limit=600)):
        try:
            call()
            print("it succeeded", flush=True)
        except CollectiveError as error:
            print(error.reason, "rank 1 was lost" in str(error), flush=True)
"""


@pytest.mark.parametrize("over", ["tcp", "shm"])
def test_a_rank_that_exits_before_a_subgroups_first_call_ends_both_groups(over):
    with tempfile.TemporaryDirectory() as folder:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-c", SUBGROUP, over]
        ranks = [subprocess.Popen([*command, str(rank), folder], **pipes) for rank in range(2)]
        for _ in range(2 if over == "tcp" else 0):
            addresses = " ".join(rank.stdout.readline().strip() for rank in ranks)
            for rank in ranks:
                print(addresses, file=rank.stdin, flush=True)
        second, _ = ranks[1].communicate(timeout=100)
        assert (ranks[1].returncode, second) == (7, "")
        assert ranks[0].stdout.readline() == "formed\n"
        first, _ = ranks[0].communicate("\n", timeout=100)
        # Neither waits for its limit; a later call says what ended the group.
        lines = first.splitlines()
        assert len(lines) == 4 and all(line.endswith(" True") for line in lines), first
        assert [line.split()[0] for line in lines[::2]] == ["rank_lost"] * 2, first


def test_the_interpreter_runs_while_a_call_waits():
    began = threading.Event()

    def work(group):
        if group.rank == 0:
            began.set()
            group.barrier()
        else:
            began.wait()
            group.barrier()

    ranks_of(2, work)


def test_the_example_trains_on_two_ranks():
    example = pathlib.Path(__file__).parents[2] / "examples/08_all_reduce/train.py"
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "the same weights on 2 ranks" in ran.stdout


def test_the_package_imports_no_torch():
    code = "import sys, serval, serval.collective; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
