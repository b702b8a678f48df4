"""``serval.distributed`` against Gloo: the same calls on both backends, in processes that torch's own store brings together.

Needs torch: `make -C python test-torch`.
"""

import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

RANK = pathlib.Path(__file__).with_name("rank.py")


def start(what, ranks, folder, transport="auto", more=()):
    """Starts a function of rank.py as every rank."""
    command = [sys.executable, str(RANK), what, str(ranks), f"{folder}/store", transport]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [subprocess.Popen([*command, str(rank), *more], **pipes, text=True) for rank in range(ranks)]


def run(what, ranks=3, transport="auto", expect=0, more=()):
    """Runs a function of rank.py as every rank; the outputs."""
    with tempfile.TemporaryDirectory() as folder:
        started = start(what, ranks, folder, transport, more)
        outputs = [rank.communicate(timeout=200)[0] for rank in started]
        for rank, output in zip(started, outputs):
            assert rank.returncode == expect, output
        return outputs


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_results_are_those_of_gloo(transport):
    outputs = run("compare", transport=transport)
    assert all("compared" in output for output in outputs)


def test_async_calls_and_subgroups():
    run("asynchronous")
    run("subgroups", ranks=4)


def test_gathers_and_data_parallel_training():
    run("gathers")
    run("trains", ranks=2)


def test_a_rank_that_is_killed_ends_the_call_of_the_others():
    with tempfile.TemporaryDirectory() as folder:
        started = start("dies", 3, folder)
        outputs = [rank.communicate(timeout=200)[0] for rank in started]
    assert started[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert "CollectiveError rank_lost" in outputs[rank] or "CollectiveError group_ended" in outputs[rank], outputs
        assert "rank 1 was lost" in outputs[rank]


def test_a_rank_that_exits_before_a_subgroups_first_call_ends_both_groups():
    with tempfile.TemporaryDirectory() as folder:
        first, second = start("leaves_a_subgroup", 2, folder)
        outputs = [rank.communicate(timeout=200)[0] for rank in (first, second)]
    assert (first.returncode, second.returncode) == (0, 7), outputs
    assert outputs[0].count("rank 1 was lost") == 2, outputs


def test_the_end_of_a_process_does_not_wait_for_a_call_without_an_answer():
    with tempfile.TemporaryDirectory() as folder:
        first, second = start("abandons", 2, folder)
        # The standard input of the second one ends after the first one has ended.
        output = first.communicate(timeout=200)[0]
        assert first.returncode == 0, output
        output = second.communicate(timeout=200)[0]
        assert "CollectiveError" in output, output


def test_what_is_not_supported_is_refused_and_the_group_goes_on():
    run("refusals", ranks=2)


def test_ranks_that_disagree_get_an_exception_each():
    for output in run("disagree", ranks=2):
        assert "CollectiveError disagreement" in output or "CollectiveError group_ended" in output


def test_a_rank_that_ends_without_destroying_the_group_leaves_in_order():
    run("exits", ranks=2)


def test_a_fork_has_no_part_of_the_process_group():
    run("forks", ranks=2)


@pytest.mark.parametrize("fake", ["host", "memory", "none"])
def test_ranks_of_two_machines_that_share_a_folder_use_tcp(fake):
    for output in run("elsewhere", ranks=3, more=[fake]):
        assert "summed" in output


def test_shared_memory_that_was_asked_for_is_refused_on_two_machines():
    for output in run("elsewhere", ranks=2, transport="shm", expect=1, more=["host"]):
        assert "SERVAL_TRANSPORT is shm, but not all ranks share memory" in output
