#!/usr/bin/env bash
# The CPU kernels under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer: odd sizes, several
# callers at once, one thread against several. Needs g++; a few minutes.
#
#     native/sanitize.sh [rounds]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT
flags=(-std=c++17 -O1 -g -ffp-contract=fast -fno-math-errno -Wno-psabi -pthread -march=x86-64-v3)
for kind in address,undefined thread; do
    g++ "${flags[@]}" -fsanitize="$kind" -fno-sanitize-recover=undefined stress.cpp csrc/*.cpp -o "$build/stress"
    echo "$kind:"
    ASAN_OPTIONS=detect_leaks=1 "$build/stress" "${1:-40}"
done
