"""What the comparisons of this folder share: interleaved pairs, CPU time of processes, tables and JSON lines."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Bytes, seconds and CPU seconds of a round.
Round = tuple[int, float, float]
ROOT = Path(__file__).resolve().parent.parent.parent
TICK = os.sysconf("SC_CLK_TCK")


def arguments(description: str) -> argparse.ArgumentParser:
    """With the options that all comparisons have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs of each row")
    parser.add_argument("--json", metavar="FILE", help="write one object for each row")
    return parser


def beside(name: str, *built: str) -> str:
    """A program in the folder of the script, or one that was built."""
    for place in [Path(sys.argv[0]).resolve().parent / name, *(ROOT / path for path in built)]:
        if place.is_file():
            return str(place)
    return name


def family(*processes: int) -> dict[int, float]:
    """Processes and all their descendants, with the CPU seconds of each."""
    found: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            number = int(entry.name)
            # User and system time of all threads, also of those that have ended, and of children that have ended.
            found[number] = sum(map(int, fields[11:15])) / TICK
            children.setdefault(int(fields[1]), []).append(number)
    members: dict[int, float] = {}
    rest = list(processes)
    while rest:
        number = rest.pop()
        members[number] = found.get(number, 0.0)
        rest += children.get(number, [])
    return members


def cpu(*processes: int) -> float:
    """CPU seconds of processes and of all their descendants."""
    return sum(family(*processes).values())


def threads(name: str, *processes: int) -> int:
    """How many threads of this name they and their descendants have."""
    names = [path.read_text().strip() for process in family(*processes) for path in Path(f"/proc/{process}/task").glob("*/comm")]
    return names.count(name)


def until(what: str, done: Callable[[], object], patience: float = 60.0) -> None:
    """Waits until ``done`` returns something true."""
    limit = time.monotonic() + patience
    while not done():
        if time.monotonic() > limit:
            raise SystemExit(f"{what}: not within {patience:.0f} s")
        time.sleep(0.02)


class Started:
    """Programs that end with the ``with`` block."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Started":
        return self

    def start(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        process: subprocess.Popen[Any] = subprocess.Popen(command, **options)
        self.processes.append(process)
        return process

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Table:
    """Rows of pairs: ours against the other, in seconds and CPU seconds for the same bytes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lines: list[dict[str, Any]] = []
        print(f"{'row':<28} {'against':<24} {'rate':>18} {'CPU time':>9} {'ours GB/s':>10} {'CPU-s/GB':>9} {'theirs':>7} {'CPU-s/GB':>9}")

    def row(
        self, name: str, against: str, ours: Callable[[], Round], theirs: Callable[[], Round], **more: object
    ) -> None:
        """``ours`` and ``theirs`` do one round and return bytes, seconds and CPU seconds."""
        pairs = []
        for pair in range(self.options.pairs):
            first, second = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
            both = first(), second()
            pairs.append(both if pair % 2 == 0 else (both[1], both[0]))
        rate = [mine[0] / mine[1] / (other[0] / other[1]) for mine, other in pairs]
        cpu_ratio = [mine[2] / mine[0] / max(other[2] / other[0], 1e-12) for mine, other in pairs]
        own, others = [mine for mine, _ in pairs], [other for _, other in pairs]

        def gb(rounds: list[Round]) -> float:
            return statistics.median(size / 1e9 / seconds for size, seconds, _ in rounds)

        def per_gb(rounds: list[Round]) -> float:
            return statistics.median(spent / (size / 1e9) for size, _, spent in rounds)

        median = statistics.median(rate)
        line = {
            "row": name, "against": against, "pairs": len(pairs), "rate": median, "rate_min": min(rate), "rate_max": max(rate),
            "cpu": statistics.median(cpu_ratio), "gb_per_s": gb(own), "their_gb_per_s": gb(others),
            "cpu_s_per_gb": per_gb(own), "their_cpu_s_per_gb": per_gb(others), **more,
        }
        self.lines.append(line)
        span = f"{median:.2f} [{min(rate):.2f}, {max(rate):.2f}]"
        print(f"{name:<28} {against:<24} {span:>18} {line['cpu']:>9.2f} {line['gb_per_s']:>10.3f} {line['cpu_s_per_gb']:>9.3f} "
              f"{line['their_gb_per_s']:>7.3f} {line['their_cpu_s_per_gb']:>9.3f}", flush=True)

    def write(self) -> None:
        if self.options.json:
            with open(self.options.json, "a") as out:
                out.writelines(json.dumps(line) + "\n" for line in self.lines)
