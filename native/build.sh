#!/bin/sh
# Builds the x86-64 levels into build/ (development only; the package builds through CMakeLists.txt).
cd "$(dirname "$0")" && mkdir -p build/obj
flags="-std=c++17 -O3 -ffp-contract=fast -fno-math-errno -fPIC -fvisibility=hidden -Wall -Wextra -Wno-psabi -pthread"
for level in ${1:-v4 v3 v2}; do
    objects=""
    for source in csrc/*.cpp; do
        object=build/obj/$(basename $source .cpp)_$level.o
        newest=$(ls -t $source csrc/*.h $object 2>/dev/null | head -1)
        [ "$newest" = "$object" ] || g++ $flags -march=x86-64-$level -c $source -o $object || exit 1
        objects="$objects $object"
    done
    g++ -shared -pthread $objects -o build/libtorchcaps_native_$level.so || exit 1
done
