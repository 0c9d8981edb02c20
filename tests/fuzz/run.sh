#!/bin/bash
# run.sh [SECONDS] [TARGET...]: fuzzes every target, or those named, for SECONDS each (default 20).
#
# Builds the preset `fuzz` in build/fuzz and runs as many targets at a time as there are processors
# (JOBS=N: N). Starts from tests/fuzz/corpus/TARGET; what it finds besides grows in
# build/fuzz/corpus/TARGET and is kept between runs. Exits with 1 when an input violates a property,
# crashes, leaks, takes 10 s or 2 GiB; that input is build/fuzz/findings/TARGET-*, and
#
#   build/fuzz/fuzz/fuzz_TARGET build/fuzz/findings/TARGET-...      runs it again.
#
# A finding becomes a literal unit test, and its input, minimised with -minimize_crash=1, a file of
# the corpus. The long run, over night:    tests/fuzz/run.sh 14400
# What it found, boiled down, goes into the corpus (small files only) with
#
#   build/fuzz/fuzz/fuzz_TARGET -merge=1 tests/fuzz/corpus/TARGET build/fuzz/corpus/TARGET
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly seconds=${1:-20}
[ $# -eq 0 ] || shift
readonly jobs=${JOBS:-$(nproc)}
readonly build=build/fuzz
readonly max_input_bytes=8192
export CCACHE_DIR=${CCACHE_DIR:-$PWD/build/ccache}

targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  mapfile -t targets < <(find tests/fuzz/corpus -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort)
fi

fuzz() {
  local target=$1 found=$build/corpus/$1
  mkdir -p "$found"
  if "$build/fuzz/fuzz_$target" -max_total_time="$seconds" -max_len="$max_input_bytes" -timeout=10 \
    -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$build/findings/$target-" \
    "$found" "tests/fuzz/corpus/$target" >"$build/findings/$target.log" 2>&1; then
    printf '%-20s %s runs\n' "$target" \
      "$(awk '/number_of_executed_units/ {print $2}' "$build/findings/$target.log")"
  else
    printf '%-20s FAILED\n' "$target"
    tail -n 60 "$build/findings/$target.log"
    return 1
  fi
}
export -f fuzz
export seconds build max_input_bytes

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz -j "$jobs" --target "${targets[@]/#/fuzz_}"
mkdir -p "$build/findings"
printf '%s\n' "${targets[@]}" | xargs -P "$jobs" -I{} bash -c 'fuzz {}'
