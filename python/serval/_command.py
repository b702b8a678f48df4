"""The console command ``serval``: runs the command that the package carries."""

from __future__ import annotations

import os
import sys

from ._engine import binary
from ._errors import EngineError


def main() -> None:
    """Replaces this process by the command."""
    try:
        path = binary()
    except EngineError as error:
        sys.exit(f"serval: {error}")
    os.execv(path, ["serval", *sys.argv[1:]])
