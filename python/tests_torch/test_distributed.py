"""``serval.distributed`` against Gloo: the same calls on both backends, in processes that torch's own store brings together.

Needs torch: `make -C python test-torch`.
"""

import pathlib
import subprocess
import sys
import tempfile

import pytest

RANK = pathlib.Path(__file__).with_name("rank.py")


def run(what, ranks=3, transport="auto", expect=0):
    """Runs a function of rank.py as every rank; the outputs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(RANK), what, str(ranks), f"{folder}/store", transport]
        started = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(ranks)
        ]
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


def test_what_is_not_supported_is_refused_and_the_group_goes_on():
    run("refusals", ranks=2)


def test_ranks_that_disagree_get_an_exception_each():
    for output in run("disagree", ranks=2):
        assert "CollectiveError disagreement" in output or "CollectiveError group_ended" in output


def test_a_rank_that_ends_without_destroying_the_group_leaves_in_order():
    run("exits", ranks=2)
