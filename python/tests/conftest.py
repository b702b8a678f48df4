"""Every test leaves no process, thread or descriptor behind, and ends within a time limit."""

import faulthandler
import os
import threading
import time

import pytest

#: Ends a test that hangs, with the stacks of all threads.
LIMIT_SECONDS = 120


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def eventually(what, condition, seconds=30):
    """Waits until a condition holds; the limit is for tests that fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    threads, before = set(threading.enumerate()), descriptors()
    yield
    faulthandler.cancel_dump_traceback_later()
    eventually("threads ended", lambda: set(threading.enumerate()) <= threads)
    eventually("descriptors closed", lambda: descriptors() <= before)


def pytest_terminal_summary(terminalreporter, exitstatus):
    """The counts in the form of `cargo test`, which `cargo xtask ci` adds up."""
    count = lambda outcome: len(terminalreporter.stats.get(outcome, []))
    failed = count("failed") + count("error")
    verdict = "FAILED" if exitstatus else "ok"
    terminalreporter.write_line(f"test result: {verdict}. {count('passed')} passed; {failed} failed; 0 ignored;")
