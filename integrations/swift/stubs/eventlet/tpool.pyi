from collections.abc import Callable
from typing import Any

def execute(function: Callable[..., Any], *arguments: Any) -> Any: ...
