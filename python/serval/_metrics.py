"""Reads the counters of a running engine through its control socket."""

from __future__ import annotations

import json
import os
import re
import socket

from ._errors import EngineError

_ANSWER_BYTES_MAX = 1 << 20
_PAGE_BYTES_MAX = 64 << 20
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics(dict[str, float]):
    """Every sample of a page of metrics, by its name with its labels: ``'serval_replies_total{service="echo"}'``."""

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name whose labels include these."""
        return sum(
            value
            for sample, value in self.items()
            if sample.partition("{")[0] == name and labels.items() <= dict(_LABEL.findall(sample)).items()
        )


def parse(page: str) -> Metrics:
    """Reads a page in the OpenMetrics format."""
    metrics = Metrics()
    for line in page.splitlines():
        if line and not line.startswith("#"):
            # Labels may contain spaces; an exemplar follows the value after a space.
            end = line.rfind("}", 0, len(line.partition(" # ")[0])) + 1
            sample, _, rest = (line[:end], "", line[end:]) if end else line.partition(" ")
            metrics[sample] = float(rest.split()[0])
    return metrics


def fetch(path: str, timeout: float = 5.0) -> Metrics:
    """Asks the engine whose control socket is at ``path``."""
    descriptors: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
            control.settimeout(timeout)
            control.connect(path)
            control.send(b'{"command": "metrics"}\n')
            answer, descriptors, _, _ = socket.recv_fds(control, _ANSWER_BYTES_MAX, 4)
        size = json.loads(answer).get("metrics")
        if not isinstance(size, int) or not 0 <= size <= _PAGE_BYTES_MAX or len(descriptors) != 1:
            raise EngineError(f"the engine at {path} gave no page of metrics")
        return parse(os.pread(descriptors[0], size, 0).decode())
    except (OSError, ValueError) as error:
        raise EngineError(f"the engine at {path} gave no metrics: {error}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
