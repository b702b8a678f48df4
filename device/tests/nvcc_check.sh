#!/bin/sh
# Compiles every kernel for CUDA, without a GPU, and checks that each kernel has its entry and moves 16-byte granules in one access.
# Usage: nvcc_check.sh VENV OUT "ARCH ..." CUDA_VERSION KERNEL.cpp ...
set -eu
cd "$(dirname "$0")/.."
venv=$1 out=$2 arches=$3 version=$4
shift 4
[ $# -gt 0 ] || { echo "no kernel given" >&2; exit 1; }

nvcc=$(./find_nvcc.sh wheels "$venv" "$version")
cuda=${nvcc%/bin/nvcc}
"$nvcc" --version | tail -2

mkdir -p "$out"
for source in "$@"; do
    name=$(basename "$source" .cpp)
    for arch in $arches; do
        "$nvcc" -x cu -std=c++17 -arch="$arch" -Iinclude -Werror all-warnings -ptx -o "$out/$name.$arch.ptx" "$source"
        "$cuda/bin/ptxas" -arch="$arch" -o "$out/$name.$arch.cubin" "$out/$name.$arch.ptx"
        for what in ".entry serval_kernel_$name(" ld.relaxed.sys.global.b128 st.relaxed.sys.global.b128; do
            grep -qF "$what" "$out/$name.$arch.ptx" || { echo "$source: no '$what' for $arch" >&2; exit 1; }
        done
        echo "$name $arch: $(wc -c <"$out/$name.$arch.cubin") bytes"
    done
done
