from collections.abc import Callable
from typing import Any

from . import corolocal as corolocal, hubs as hubs, tpool as tpool, wsgi as wsgi

class GreenThread:
    dead: bool

def spawn(function: Callable[..., object], *arguments: Any) -> GreenThread: ...
