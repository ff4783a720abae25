#!/bin/sh
# Cross-compiles NEON's kernels and the torch-free tests for AArch64 and runs them, with threads, under an emulator: NEON is only claimed
# because this passes. Needs aarch64-linux-gnu-g++ and qemu-aarch64-static.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$root/build/aarch64
jobs=$(nproc 2>/dev/null || echo 2)
cmake -S "$root" -B "$build" -DATTNWORKS_PYTHON=OFF -DATTNWORKS_TESTS=ON -DATTNWORKS_ONLY=neon -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CROSSCOMPILING_EMULATOR='qemu-aarch64-static;-L;/usr/aarch64-linux-gnu'
cmake --build "$build" --parallel "$jobs"
OMP_WAIT_POLICY=passive ctest --test-dir "$build" --output-on-failure --parallel "$jobs"
