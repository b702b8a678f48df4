#!/bin/sh
# Compiles a kernel for CUDA, without a GPU, and checks that it has its entry point and accesses 16-byte granules atomically. If a
# check fails, the output is removed.
# Usage: nvcc_check.sh VENV CUDA_VERSION ARCH KERNEL.cpp OUT.cubin
set -eu
cd "$(dirname "$0")/.."
venv=$1 version=$2 arch=$3 source=$4 out=$5
name=$(basename "$source" .cpp) ptx=${out%.cubin}.ptx

nvcc=$(./find_nvcc.sh wheels "$venv" "$version")
mkdir -p "$(dirname "$out")"
rm -f "$out"
"$nvcc" -x cu -std=c++17 -arch="$arch" -Iinclude -Werror all-warnings -ptx -o "$ptx" "$source"
for what in ".entry serval_kernel_$name(" ld.relaxed.sys.global.b128 st.relaxed.sys.global.b128; do
    grep -qF "$what" "$ptx" || { echo "$source: no '$what' for $arch" >&2; exit 1; }
done
"${nvcc%nvcc}ptxas" -arch="$arch" -o "$out.part" "$ptx"
mv "$out.part" "$out"
echo "$name $arch: $(wc -c <"$out") bytes"
