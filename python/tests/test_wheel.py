"""The wheel that is installed here, and that its build compiles nothing a second time."""

import base64
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python" / "backend"))
import serval_build  # noqa: E402
import wheel_file  # noqa: E402

#: Crates of the module that the command does not have.
OWN = ("pyo3", "serval-python", "target-lexicon")


def features(*packages):
    """Every crate that these packages are built from, with the features that it then has."""
    command = ["cargo", "tree", "--locked", "--offline", "--edges", "normal,build", "--prefix", "none", "--format", "{p} {f}", *packages]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.removesuffix(" (*)") for line in lines if line}


def test_the_module_uses_the_crates_of_the_command():
    command, together = features("--package", "serval-cli"), features(*serval_build.TOGETHER)
    assert command <= together, f"other features than by `make build`: {command - together}"
    more = {line for line in together - command if not line.startswith(OWN)}
    assert not more, f"`pip install ./python` compiles these besides: {more}"


def test_files_and_metadata_are_installed():
    installed = importlib.metadata.distribution("serval-engine")
    for file in installed.files:
        if file.hash is not None:
            digest = hashlib.sha256(file.read_binary()).digest()
            assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file
    for program in serval_build.PROGRAMS:
        assert os.access(installed.locate_file(f"serval/_bin/{program}"), os.X_OK)
    points = {(point.group, point.name) for point in installed.entry_points}
    assert points == {("console_scripts", "serval")}
    assert installed.metadata["Requires-Python"] == ">=3.11" and installed.version == serval_build.project()["version"]
    assert installed.requires == ['numpy>=1.24; extra == "arrays"']
    tag = installed.read_text("WHEEL").partition("Tag: ")[2].strip()
    assert tag.startswith("cp311-abi3-") and "linux" in tag


@pytest.mark.skipif(platform.machine() != "x86_64", reason="libzstd is compiled with the rest")
@pytest.mark.parametrize(("pkg_config", "missing"), [(None, "pkgconf libzstd-dev"), ("exit 1", "install libzstd-dev"), ('[ "$*" = "--exists libzstd" ]', None)])
def test_what_the_build_lacks_of_the_distribution_is_named(tmp_path, monkeypatch, pkg_config, missing):
    if pkg_config is not None:
        (tmp_path / "pkg-config").write_text(f"#!/bin/sh\n{pkg_config}\n")
        (tmp_path / "pkg-config").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    lacking = serval_build._lacking()
    assert lacking is None if missing is None else missing in lacking


def test_equal_files_give_an_equal_wheel(tmp_path):
    binary = Path(sys.executable).resolve()
    contents = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        name = wheel_file.write(folder, serval_build.project(), ROOT / "python", {"serval/_bin/serval": binary})
        contents.append((folder / name).read_bytes())
    assert contents[0] == contents[1]
