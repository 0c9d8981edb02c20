#!/bin/bash
# run.sh: builds everything and runs every check, as continuous integration does.
#
# Steps, cheapest first where they do not depend on each other: packages, format, release build, all
# tests (those against S3 servers start their own), a benchmark smoke run, sanitizer build and tests
# under it, clang-tidy. The first step that fails ends the run and is named last. Writes below build/
# only; what tests put elsewhere goes to a temporary directory that is removed, and a test that
# leaves something there, or a process behind, is an error.
#
# JOBS=N limits the processes at a time (default: one per processor).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly jobs=${JOBS:-$(nproc)}
readonly binaries=(shardprep shardprep-controller shardprep-worker make-checkpoint)
readonly summary_width=28
export CCACHE_DIR=$PWD/build/ccache
export PYTHONDONTWRITEBYTECODE=1
# Tests that need torch fail without it instead of being left out.
export SHARDPREP_REQUIRE_TORCH=1
current_step=
summary=()
test_tmp=

# --- steps ----------------------------------------------------------------------------------------

install_packages() {
  deploy/install_packages.sh build check consumers s3test deploy-check
  deploy/install_packages.sh hip || echo "Going on without the HIP packages."
}

our_sources() {
  find kernels workers service tests \( -name '*.h' -o -name '*.cc' \) | sort
}

check_format() {
  our_sources | xargs clang-format-19 --dry-run --Werror
}

check_python() {
  find deploy tests -name '*.py' | sort | xargs pyflakes3
}

build_release() {
  cmake --preset release
  cmake --build --preset release -j "$jobs"
}

test_release() {
  ctest --preset release -j "$jobs"
}

smoke_benchmark() {
  tests/bench/targets.py --bin build/release/bin --quick
  tests/support/s3_servers/rgw.sh run tests/bench/s3_bench.py --bin build/release/bin --smoke
}

# Names of the unit tests, which are those of their targets: all tests without a label.
unit_tests_of() {
  ctest --test-dir "$1" --show-only=json-v1 | python3 -c '
import json, sys
for test in json.load(sys.stdin)["tests"]:
    if not any(entry["name"] == "LABELS" for entry in test.get("properties", [])):
        print(test["name"])
'
}

build_sanitized() {
  cmake --preset asan
  local targets
  mapfile -t targets < <(unit_tests_of build/asan)
  [ ${#targets[@]} -gt 0 ]
  cmake --build --preset asan -j "$jobs" --target "${targets[@]}" "${binaries[@]}"
}

test_sanitized() {
  local pattern
  pattern=$(unit_tests_of build/asan | paste -sd '|')
  [ -n "$pattern" ]
  ctest --preset asan -j "$jobs" -R "^($pattern)\$"
}

# The real processes under the sanitizers, gRPC and all.
test_sanitized_binaries() {
  SHARDPREP_BIN=build/asan/bin /usr/bin/python3 tests/e2e/prepare_test.py
  SHARDPREP_BIN=build/asan/bin /usr/bin/python3 tests/e2e/refusal_test.py
}

# By the release build's compile commands: every generated header is there, and the device's host
# code is compiled. That build's compiler knows warnings that clang does not.
check_tidy() {
  python3 -c '
import json, os
here = os.getcwd() + "/"
for entry in json.load(open("build/release/compile_commands.json")):
    name = os.path.relpath(entry["file"], here)
    if name.split("/")[0] in ("kernels", "workers", "service", "tests"):
        print(name)
' | sort -u | xargs -P "$jobs" -n 4 \
    clang-tidy-19 -p build/release --quiet --extra-arg=-Wno-unknown-warning-option
}

# --- running them ---------------------------------------------------------------------------------

# step NAME COMMAND...: a failure inside ends the script, and the exit trap names the step.
step() {
  current_step=$1
  shift
  printf '\n=== %s\n' "$current_step"
  local start=$SECONDS
  "$@"
  summary+=("$(printf "%-${summary_width}s %5d s" "$current_step" $((SECONDS - start)))")
  current_step=
}

# Names processes that run a binary of this checkout. They are not ended: whoever started them may
# have done so on purpose.
processes_left() {
  local process binary
  for process in /proc/[0-9]*; do
    binary=$(readlink "$process/exe" 2>/dev/null) || continue
    case $binary in
      "$PWD"/build/*) echo "${process#/proc/} $binary" ;;
    esac
  done | sort
}

check_nothing_left() {
  local left
  left=$(find "$test_tmp" -mindepth 1 -maxdepth 1)
  if [ -n "$left" ]; then
    printf 'left behind by tests:\n%s\n' "$left" >&2
    return 1
  fi
  left=$(comm -13 <(echo "$processes_before") <(processes_left))
  if [ -n "$left" ]; then
    printf 'processes left behind by tests:\n%s\n' "$left" >&2
    return 1
  fi
}

finish() {
  local status=$?
  [ -z "$test_tmp" ] || rm -rf "$test_tmp"
  printf '\n'
  [ ${#summary[@]} -eq 0 ] || printf '%s\n' "${summary[@]}"
  if [ $status -ne 0 ]; then
    printf 'FAILED: %s\n' "${current_step:-before the first step}"
  else
    printf 'all passed in %d s\n' "$SECONDS"
  fi
  exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

test_tmp=$(mktemp -d "${TMPDIR:-/tmp}/shardprep-tests.XXXXXX")
export TMPDIR=$test_tmp TEST_TMPDIR=$test_tmp
processes_before=$(processes_left)

step "packages" install_packages
step "format" check_format
step "python lint" check_python
step "release build" build_release
step "all tests" test_release
step "benchmark smoke run" smoke_benchmark
step "sanitizer build" build_sanitized
step "unit tests, sanitized" test_sanitized
step "end to end, sanitized" test_sanitized_binaries
step "fuzzing" tests/fuzz/run.sh 20
step "clang-tidy" check_tidy
step "nothing left behind" check_nothing_left
