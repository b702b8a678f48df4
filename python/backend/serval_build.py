"""The build backend of the package (PEP 517). cargo builds the native module and the programs that the package carries, in the target folder of
the checkout and as `make build` does, so that it compiles only what is not built yet. `wheel_file` writes the wheel.
SERVAL_BUILD_PROFILE names the cargo profile (default: release)."""

import json
import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

import wheel_file

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOT = _PACKAGE.parent
_CARGO = os.environ.get("CARGO", "cargo")
#: What the package carries.
PROGRAMS = ("serval", "serval-compile")
_MODULE = "_native"
#: What cargo builds in one call. It chooses the features of shared crates by what is built together: the module alone would need some of them with other
#: features, that is, a second time.
TOGETHER = ("--package", "serval-cli", "--package", "serval-python")
#: The same for profile `dev`, with the crates of the test programs of `cargo xtask ci tests`: one of them makes cargo choose the features of tests.
TOGETHER_WITH_TESTS = ("--workspace", "--exclude", "serval-compile", "--bin", "serval", "--lib", "--test", "rings")
#: The compiler of WebAssembly modules is the same for every profile, and built alone: the command would get its features.
COMPILER = ("--package", "serval-compile")


def _source_tree() -> str:
    """The sources, as the root's Makefile names them in what it builds: another text would compile crates again."""
    named = subprocess.run([_ROOT / "tools" / "source-tree"], cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    return named.stdout.strip()


def _lacking() -> str | None:
    """What the build needs of the distribution and is not there: libzstd, which it compiles itself for other processors."""
    if platform.machine() != "x86_64":
        return None
    if shutil.which("pkg-config") is None:
        return "serval-engine needs pkg-config to build: apt-get install pkgconf libzstd-dev"
    if subprocess.run(["pkg-config", "--exists", "libzstd"]).returncode != 0:
        return "serval-engine needs libzstd with its headers to build: apt-get install libzstd-dev"
    return None


def _build(profile: str) -> dict[str, Path]:
    """Builds the programs and the module; returns their files by name."""
    if not (_ROOT / "crates" / "cli").is_dir():
        raise SystemExit("serval-engine is built in a checkout of Serval: run `pip install ./python` there")
    if shutil.which(_CARGO) is None:
        raise SystemExit("serval-engine needs Rust 1.95 or later to build: install it from https://rustup.rs")
    if lacking := _lacking():
        raise SystemExit(lacking)
    if profile == "dev":
        together = _cargo(profile, TOGETHER_WITH_TESTS, {})
    else:
        together = _cargo(profile, TOGETHER, {"SERVAL_BUILT_FROM": _source_tree()})
    return together | _cargo("release", COMPILER, {})


def _cargo(profile: str, what: Iterable[str], environment: dict[str, str]) -> dict[str, Path]:
    command = [_CARGO, "build", "--locked", "--profile", profile, "--message-format=json-render-diagnostics", *what]
    # The module needs no interpreter, and that of this process may be another one than the last time.
    environment = {**os.environ, "PYO3_NO_PYTHON": "1", **environment}
    built = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        raise SystemExit(f"`{' '.join(command)}` failed")
    files = {}
    for message in map(json.loads, built.stdout.splitlines()):
        name = message.get("target", {}).get("name")
        if message.get("executable") and name in PROGRAMS:
            files[name] = Path(message["executable"])
        elif name == _MODULE and message.get("reason") == "compiler-artifact":
            files[name] = next(Path(file) for file in message["filenames"] if file.endswith(".so"))
    return files


def _stripped(file: Path, folder: Path) -> Path:
    """A copy without line tables, if `strip` is installed."""
    copy = folder / file.name
    shutil.copy(file, copy)
    strip = shutil.which("strip")
    if strip:
        subprocess.run([strip, "--strip-debug", copy], check=True)
    return copy


def project() -> dict:
    """The `project` table, with the version of the workspace."""
    project = tomllib.loads((_PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cargo = tomllib.loads((_ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    return {**project, "version": cargo["workspace"]["package"]["version"]}


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return wheel_file.write_metadata(Path(metadata_directory), project(), _PACKAGE)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    import tempfile

    built = _build(os.environ.get("SERVAL_BUILD_PROFILE", "release"))
    with tempfile.TemporaryDirectory() as folder:
        binaries = {f"serval/_bin/{name}": _stripped(built[name], Path(folder)) for name in PROGRAMS}
        binaries["serval/_native.abi3.so"] = _stripped(built[_MODULE], Path(folder))
        return wheel_file.write(Path(wheel_directory), project(), _PACKAGE, binaries)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    raise SystemExit("serval-engine cannot be installed with `pip install -e`: run `pip install ./python` after each change")


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("serval-engine has no source distribution: run `pip install ./python` in a checkout of Serval")


if __name__ == "__main__":
    # Without pip: serval_build.py FOLDER
    import sys

    os.makedirs(sys.argv[1], exist_ok=True)
    print(os.path.join(sys.argv[1], build_wheel(sys.argv[1])))
