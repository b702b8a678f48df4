#!/bin/sh
# Prints the path of nvcc, or of the compiler library.
#   find_nvcc.sh any VENV VERSION      $NVCC, one on the PATH or of an installed toolkit of CUDA 12.8 or later, else as below
#   find_nvcc.sh wheels VENV VERSION   the one of this version, fetched as Python wheels into a virtual environment
#   find_nvcc.sh nvrtc VENV VERSION    libnvrtc of this version, fetched in the same way with its dependencies
set -eu
how=$1 venv=$2 version=$3
fetch() { # PACKAGE...
    mkdir -p "$(dirname "$venv")"
    # A concurrent call (make -j) waits for it.
    (
        flock 9
        [ ! -e "$venv/cuda-$version" ] || exit 0
        "${PYTHON:-python3}" -m venv "$venv" >&2
        "$venv/bin/pip" install -q --disable-pip-version-check $(printf "%s==$version.* " "$@") >&2
        touch "$venv/cuda-$version"
    ) 9>"$venv.lock"
}
recent() {
    [ -x "$(command -v "$1")" ] || return 1
    release=$("$1" --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
    [ -n "$release" ] && [ "${release% *}" -gt 12 ] || { [ "${release% *}" = 12 ] && [ "${release#* }" -ge 8 ]; }
}
if [ "$how" = any ]; then
    [ -z "${NVCC:-}" ] || { echo "$NVCC"; exit; }
    for nvcc in nvcc /usr/local/cuda/bin/nvcc; do
        if recent "$nvcc"; then command -v "$nvcc"; exit; fi
    done
fi
if [ "$how" = nvrtc ]; then
    fetch nvidia-cuda-nvrtc nvidia-cuda-cccl nvidia-nvfatbin
    echo "$venv"/lib/python3*/site-packages/nvidia/cu"${version%%.*}"/lib/libnvrtc.so."${version%%.*}"
    exit
fi
fetch nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl
echo "$venv"/lib/python3*/site-packages/nvidia/cu"${version%%.*}"/bin/nvcc
