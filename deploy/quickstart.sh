#!/bin/bash
# quickstart.sh [--work-dir DIR]
#
# From a fresh checkout to a verified artefact: installs missing packages, builds, writes a small
# checkpoint with the extents of real DeepSeek-V4-Pro experts, prepares it for eight ranks, and
# verifies the result against the checkpoint. Can be run again at any time: it clears its work
# directory (default: build/quickstart) and starts over. Needs 1.5 GB of disk beside the build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The work directory carries this mark, so that nothing else is ever cleared.
readonly mark=.shardprep-quickstart
readonly bin=build/release/bin
readonly ranks=8
readonly free_needed_mib=1500
step_count=0

usage() {
  echo "usage: deploy/quickstart.sh [--work-dir DIR]"
}

step() {
  step_count=$((step_count + 1))
  printf '\n== %d. %s\n' "$step_count" "$1"
}

# Prints a command as a reader would type it, then runs it.
show() {
  printf '$'
  printf ' %s' "$@"
  printf '\n'
  "$@"
}

clear_work_dir() {
  if [ -e "$work_dir" ] && [ ! -e "$work_dir/$mark" ] && [ -n "$(ls -A "$work_dir")" ]; then
    echo "quickstart.sh: $work_dir exists and was not made by this script; not touching it" >&2
    exit 1
  fi
  rm -rf "$work_dir"
  mkdir -p "$work_dir"
  touch "$work_dir/$mark"
  local free_mib
  free_mib=$(df --output=avail -B1M "$work_dir" | tail -n 1)
  if [ "$free_mib" -lt "$free_needed_mib" ]; then
    echo "quickstart.sh: $work_dir has $free_mib MiB free, want $free_needed_mib MiB" >&2
    exit 1
  fi
}

print_manifest() {
  python3 - "$1" <<'PYTHON'
import json, sys

m = json.load(open(sys.argv[1] + "/manifest.json"))
target, extents = m["kernel_target"], m["extents"]
rows = [
    ("family", m["family"]),
    ("kernel", f'{target["backend"]} {target["activation"]} on {target["architecture"]}'),
    ("profile", f'{target["profile"]}, gate mode {m["gate_mode"]}'),
    ("alignment rule", m["alignment"]["rule_id"]),
    ("intermediate", f'{extents["intermediate"]} native, {extents["padded_intermediate"]} padded'),
    ("hidden", f'{extents["hidden"]} native, {extents["padded_hidden"]} padded'),
    ("ranks, files", f'{m["rank_count"]}, {m["file_count"]}'),
    ("bytes", f'{int(m["total_bytes"]):,}'),
    ("not carried", f'{len(m["not_carried"])} tensors'),
    ("minimum AITER", m["minimum_aiter_version"] or "any"),
    ("fingerprint", m["layout_fingerprint"]),
    ("content id", m["content_id"]),
]
for name, value in rows:
    print(f"  {name:<15} {value}")
PYTHON
}

work_dir=build/quickstart
while [ $# -gt 0 ]; do
  case $1 in
    --work-dir)
      [ $# -ge 2 ] || { usage >&2; exit 2; }
      work_dir=$2
      shift 2 ;;
    -h | --help)
      usage
      exit 0 ;;
    *)
      usage >&2
      exit 2 ;;
  esac
done
readonly source_dir=$work_dir/checkpoint
readonly prepared_dir=$work_dir/prepared

clear_work_dir

step "Packages"
deploy/install_packages.sh build
if ! deploy/install_packages.sh hip; then
  echo "Going on without the HIP packages: the CPU will shuffle."
fi

step "Build"
show cmake --preset release
show cmake --build --preset release \
  --target shardprep shardprep-controller shardprep-worker make-checkpoint

step "A checkpoint with the extents of DeepSeek-V4-Pro experts"
show "$bin/make-checkpoint" --preset quickstart --out "$source_dir"

step "What the job would do"
readonly job=(--source "$source_dir" --destination "$prepared_dir" --tensor-parallel-size "$ranks"
  --include-mtp)
show "$bin/shardprep" plan "${job[@]}"

step "Prepare for $ranks ranks"
show "$bin/shardprep" prepare "${job[@]}"

step "Verify every byte against the checkpoint"
show "$bin/shardprep" verify "$prepared_dir" --source "$source_dir"

step "The same job again has nothing to do"
show "$bin/shardprep" prepare "${job[@]}"

step "The manifest of $prepared_dir"
print_manifest "$prepared_dir"
printf '\nDone. The artefact lies in %s; rank 3 of it is fetched by:\n' "$prepared_dir"
printf '  %s/shardprep fetch %s --rank 3 --into DIR --expect profile=aiter-separated,width=384\n' \
  "$bin" "$prepared_dir"
