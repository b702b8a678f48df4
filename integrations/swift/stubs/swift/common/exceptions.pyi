from types import TracebackType
from typing import Literal

from eventlet.timeout import Timeout

class ChunkReadError(Exception): ...
class ChunkReadTimeout(Timeout):
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]: ...

class DiskFileNoSpace(Exception): ...
