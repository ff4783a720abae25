#!/bin/sh
# Builds the extension in place (src/attnworks/_native*.so) for development. Usage: native/build.sh [python] [cmake options]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
[ $# -gt 0 ] && shift
cmake -S "$root" -B "$root/build/inplace" -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$root/src/attnworks" "$@"
cmake --build "$root/build/inplace" --parallel
