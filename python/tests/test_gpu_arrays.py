"""Arrays in the memory of a GPU, with the fake driver of crates/accel. It ends a process that releases memory of a copy in progress, or leaves
anything behind. `tools/gpu/tensors` runs the same ranks on a GPU."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

RANK = pathlib.Path(__file__).with_name("gpu_rank.py")
ROOT = pathlib.Path(__file__).parents[2]
DRIVER = ROOT / "crates/accel/tests/kernels/fake_driver.cpp"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The folder of a library with the driver's name."""
    folder = tmp_path_factory.mktemp("driver")
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    command = [*compiler, f"-I{ROOT / 'device/include'}", str(DRIVER), "-o", str(folder / "libcuda.so.1"), "-ldl"]
    subprocess.run(command, check=True, timeout=600)
    return folder


def start(what, driver, folder, ranks=2, **environment):
    found = {**os.environ, "LD_LIBRARY_PATH": str(driver), **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(RANK), what, str(ranks)]
    return [subprocess.Popen([*command, str(rank), str(folder)], env=found, **pipes) for rank in range(ranks)]


def run(what, driver, folder, ranks=2, codes=None):
    started = start(what, driver, folder, ranks)
    outputs = [rank.communicate(timeout=110)[0] for rank in started]
    for rank, output, code in zip(started, outputs, codes or [0] * ranks, strict=True):
        assert rank.returncode == code, output
    return outputs


def test_sums_are_those_of_host_memory_bit_by_bit(driver, tmp_path):
    run("sums", driver, tmp_path)


def test_what_is_not_the_callers_memory_is_refused_and_the_group_goes_on(driver, tmp_path):
    run("refusals", driver, tmp_path)


def test_a_copy_comes_after_the_callers_stream(driver, tmp_path):
    run("ordered", driver, tmp_path, ranks=3)


@pytest.mark.parametrize("what", ["mixed", "disagree"])
def test_ranks_that_disagree_get_an_exception_and_their_memory(driver, tmp_path, what):
    for output in run(what, driver, tmp_path):
        assert "CollectiveError disagreement" in output or "CollectiveError group_ended" in output


def test_a_rank_that_is_killed_ends_the_call_of_the_other_one(driver, tmp_path):
    output = run("killed", driver, tmp_path, codes=[0, -signal.SIGKILL])[0]
    assert "CollectiveError rank_lost" in output


def test_a_fork_has_no_part_of_it(driver, tmp_path):
    run("forks", driver, tmp_path)


def test_a_machine_without_a_driver_gets_one_sentence(tmp_path):
    code = """
import sys
from serval.collective import Group
import serval

class Forged:
    __cuda_array_interface__ = {"version": 3, "typestr": "<f4", "shape": (1,), "data": (4096, False), "stream": None}

with Group.shared("gpu", ranks=1, rank=0, folder=sys.argv[1]) as group:
    try:
        group.all_reduce(Forged())
    except serval.CollectiveError as error:
        print(error.reason, error)
"""
    found = {**os.environ, "LD_LIBRARY_PATH": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=found, capture_output=True, text=True, timeout=110)
    assert done.stdout.startswith("argument ") and ("the GPU driver" in done.stdout or "address 0x1000" in done.stdout), done
