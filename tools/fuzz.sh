#!/bin/bash
# libFuzzer targets of tests/fuzz, SECONDS each: fuzz.sh SECONDS
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-60}
command -v clang >/dev/null || { echo "fuzz: clang and libclang-rt-14-dev are needed: apt-get install -y clang libclang-rt-14-dev"; exit 1; }
mkdir -p build/fuzz
pkgs="libcjson libmicrohttpd libpcre2-8 libutf8proc libxxhash sqlite3 libcrypto"
make -s -j2 BUILD=build/fuzz CC=clang OPT="-O1 -g" SAN="-fsanitize=address,undefined,fuzzer-no-link" WARN= lib
for f in tests/fuzz/fuzz_*.c; do
    name=$(basename "$f" .c)
    # shellcheck disable=SC2046
    clang -std=c11 -D_GNU_SOURCE -Isrc -g -O1 -fsanitize=address,undefined,fuzzer $(pkg-config --cflags $pkgs) "$f" build/fuzz/libtare.a $(pkg-config --libs $pkgs) -lm -ldl -pthread -o "build/fuzz/$name"
    mkdir -p "build/fuzz/corpus-$name"
    dict=
    [ -f "tests/fuzz/$name.dict" ] && dict=-dict=tests/fuzz/$name.dict
    echo "== $name"
    "build/fuzz/$name" -max_total_time="$seconds" -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 $dict "build/fuzz/corpus-$name" $( [ -d "tests/fuzz/corpus/$name" ] && echo "tests/fuzz/corpus/$name") 2>&1 | tail -n 12
done
