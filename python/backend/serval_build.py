"""The build backend of the package (PEP 517): maturin builds the native module; before that, cargo builds the `serval` command, which the
package carries. SERVAL_BUILD_PROFILE names the cargo profile of both (default: release)."""

import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import get_requires_for_build_wheel, prepare_metadata_for_build_wheel  # noqa: F401

_PACKAGE = Path(__file__).resolve().parent.parent
_CARRIED = _PACKAGE / "serval" / "_bin" / "serval"


def _build_command(profile: str) -> None:
    cargo = os.environ.get("CARGO", "cargo")
    root = _PACKAGE.parent
    if not (root / "crates" / "cli").is_dir():
        raise SystemExit("serval-engine is built in a checkout of Serval: run `pip install ./python` there")
    if shutil.which(cargo) is None:
        raise SystemExit("serval-engine needs Rust 1.88 or later to build: install it from https://rustup.rs")
    command = [cargo, "build", "--locked", "--profile", profile, "--package", "serval-cli", "--bin", "serval", "--message-format=json"]
    built = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    import json

    messages = [json.loads(line) for line in built.splitlines() if line.startswith("{")]
    binary = next(message["executable"] for message in reversed(messages) if message.get("executable"))
    _CARRIED.parent.mkdir(exist_ok=True)
    fresh = _CARRIED.with_suffix(".new")
    shutil.copy(binary, fresh)
    strip = shutil.which("strip")
    if strip:
        subprocess.run([strip, "--strip-debug", fresh], check=True)
    fresh.chmod(0o755)
    # By another name first: the old file may be running.
    fresh.replace(_CARRIED)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    profile = os.environ.get("SERVAL_BUILD_PROFILE", "release")
    _build_command(profile)
    settings = dict(config_settings or {})
    settings.setdefault("build-args", f"--locked --profile {profile}")
    return maturin.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    raise SystemExit("serval-engine cannot be installed with `pip install -e`: run `pip install ./python` after each change")


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("serval-engine has no source distribution: run `pip install ./python` in a checkout of Serval")
