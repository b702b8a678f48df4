"""Writes the wheel: Python files, binaries, and the metadata of `pyproject.toml` (https://packaging.python.org/specifications, binary distribution
format). Equal inputs give equal bytes."""

import base64
import hashlib
import platform
import re
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The oldest Python: that of the crate's feature `abi3-py311`.
_PYTHON = "cp311-abi3"
#: Libraries that every Linux distribution of PEP 600 has.
_COMMON = re.compile(r"ld-linux[-\w]*\.so\.\d|lib(c|dl|m|pthread|rt|util)\.so\.\d|libgcc_s\.so\.1|libstdc\+\+\.so\.6")
#: Dates of files in the archive: the first that the format can express.
_DATE = (1980, 1, 1, 0, 0, 0)


def write(folder: Path, project: Mapping[str, Any], package: Path, binaries: Mapping[str, Path]) -> str:
    """Writes the wheel into ``folder``: ``package/serval/*.py`` and so on, and ``binaries`` by their path in it. Returns its name."""
    tag = f"{_PYTHON}-{_platform(binaries.values())}"
    name = f"{_distribution(project)}-{tag}.whl"
    files = {
        f"serval/{file.name}": file.read_bytes()
        for file in sorted((package / "serval").iterdir())
        if file.suffix in (".py", ".pyi") or file.name == "py.typed"
    }
    files |= {path: file.read_bytes() for path, file in sorted(binaries.items())}
    info = f"{_distribution(project)}.dist-info"
    files |= {f"{info}/{file}": text.encode() for file, text in _metadata(project, package).items()}
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: serval_build\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if path in binaries else 0o100644) << 16
            archive.writestr(entry, content)
    return name


def write_metadata(folder: Path, project: Mapping[str, Any], package: Path) -> str:
    """Writes the metadata alone; returns the name of its folder."""
    info = f"{_distribution(project)}.dist-info"
    for name, text in _metadata(project, package).items():
        file = folder / info / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return info


def _distribution(project: Mapping[str, Any]) -> str:
    return f"{project['name'].replace('-', '_')}-{project['version']}"


def _metadata(project: Mapping[str, Any], package: Path) -> dict[str, str]:
    """The files of `*.dist-info` that depend on the project alone."""
    head = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
    ]
    for extra, needed in project["optional-dependencies"].items():
        head.append(f"Provides-Extra: {extra}")
        head += [f'Requires-Dist: {requirement}; extra == "{extra}"' for requirement in needed]
    head.append("Description-Content-Type: text/markdown")
    readme = (package / project["readme"]).read_text(encoding="utf-8")
    groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    points = [f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items()) for group, entries in groups.items()]
    return {
        "METADATA": "\n".join(head) + "\n\n" + readme,
        "entry_points.txt": "\n".join(points),
        "licenses/LICENSE": (package.parent / "LICENSE").read_text(encoding="utf-8"),
    }


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _platform(binaries: Any) -> str:
    """`manylinux_2_N_ARCH` (PEP 600), where 2.N is the newest version of glibc whose symbols the binaries use; `linux_ARCH` if they need
    a library that not every distribution has, or if that cannot be found out."""
    machine = platform.machine()
    newest = (2, 17)
    for binary in binaries:
        found = _needs(binary)
        if found is None:
            return f"linux_{machine}"
        newest = max(newest, found)
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"


def _needs(binary: Path) -> tuple[int, int] | None:
    """The newest version of glibc of which a binary needs symbols; ``None``: it needs other libraries, or `readelf` does not say."""
    try:
        command = ["readelf", "--wide", "--dynamic", "--version-info", str(binary)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    if not all(_COMMON.fullmatch(library) for library in re.findall(r"\(NEEDED\)[^\[]*\[(.+?)\]", text)):
        return None
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text)]
    return max(versions, default=None)
