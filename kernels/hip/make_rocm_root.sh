#!/bin/sh
# make_rocm_root.sh COMPILER ROOT
#
# Builds a private ROCm root under ROOT from Debian's packages, so that a clang newer than Debian's
# device libraries finds headers and bitcode where it looks for them, and knows architectures that
# those libraries predate. An architecture needs one bitcode file of its own, holding its ISA
# version; the rest of the library is common to all.
set -eu
compiler=$1
root=$2

bitcode_dir=
for candidate in /usr/lib/*/amdgcn/bitcode /usr/lib/amdgcn/bitcode; do
  if [ -e "$candidate/ockl.bc" ]; then bitcode_dir=$candidate; fi
done
if [ -z "$bitcode_dir" ] || [ ! -e /usr/include/hip/hip_runtime.h ]; then
  echo "HIP headers or device libraries are not installed" >&2
  exit 1
fi

rm -rf "$root"
mkdir -p "$root/include" "$root/amdgcn/bitcode"
ln -s /usr/include/hip "$root/include/hip"
for file in "$bitcode_dir"/*.bc; do
  ln -s "$file" "$root/amdgcn/bitcode/"
done

# Name of the architecture and the number that the device library calls its ISA version. The module
# must not state a code object version, or it conflicts with the one of the kernels.
while read -r name version; do
  file=$root/amdgcn/bitcode/oclc_isa_version_$name.bc
  if [ -e "$file" ]; then continue; fi
  printf 'extern const __constant int __oclc_ISA_version;\nconst __constant int __oclc_ISA_version = %s;\n' \
    "$version" |
    "$compiler" -x cl -Xclang -finclude-default-header -target amdgcn-amd-amdhsa -nogpulib \
      -Xclang -mcode-object-version=none -c -emit-llvm -o "$file" -
done <<VERSIONS
90a 9010
942 9402
950 9500
1250 12500
VERSIONS
