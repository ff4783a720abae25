#!/bin/sh
# Cross-compiles the torch-free tests for AArch64 and runs NEON's, with threads, under an emulator: NEON is only claimed because this passes.
# Needs aarch64-linux-gnu-g++ and qemu-aarch64-static.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$root/build/aarch64
cmake -S "$root" -B "$build" -DATTNWORKS_PYTHON=OFF -DATTNWORKS_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
cmake --build "$build" --parallel
for test in test_forward test_decode test_backward test_modifiers; do
  OMP_WAIT_POLICY=passive qemu-aarch64-static -L /usr/aarch64-linux-gnu "$build/native/tests/$test" neon
done
