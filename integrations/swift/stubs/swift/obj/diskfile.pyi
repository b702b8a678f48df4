from collections.abc import Iterable, Mapping
from io import BufferedReader
from logging import Logger

class BaseDiskFileWriter:
    _fd: int
    _size: int
    _upload_size: int
    _last_sync: int
    _bytes_per_sync: int
    manager: DiskFileManager
    def open(self) -> BaseDiskFileWriter: ...
    def write(self, chunk: bytes) -> None: ...
    def chunks_finished(self) -> tuple[int, str]: ...

class BaseDiskFileReader:
    _fp: BufferedReader
    _obj_size: int
    _bytes_read: int
    _etag_validate_frac: float
    _md5_of_sent_bytes: str | None
    _read_to_eof: bool
    _started_at_0: bool
    _suppress_file_closing: bool
    manager: DiskFileManager
    def can_zero_copy_send(self) -> bool: ...
    def zero_copy_send(self, wsockfd: int) -> None: ...
    def app_iter_range(self, start: int | None, stop: int | None) -> Iterable[bytes]: ...
    def close(self) -> None: ...
    def _drop_cache(self, fd: int, offset: int, length: int) -> None: ...
    def _quarantine(self, msg: str) -> None: ...

class DiskFileWriter(BaseDiskFileWriter): ...
class DiskFileReader(BaseDiskFileReader): ...

class DiskFile:
    reader_cls: type[DiskFileReader]
    writer_cls: type[DiskFileWriter]

class DiskFileManager:
    diskfile_cls: type[DiskFile]
    logger: Logger
    def __init__(self, conf: Mapping[str, str], logger: Logger) -> None: ...
