#!/bin/bash
# install_packages.sh [--list] GROUP...
#
# Installs those Debian 12 packages of the groups that are not installed yet; does nothing, and
# needs no rights, when all are there. Groups:
#   build   compiler, libraries and what the tests link
#   hip     what compiles the GPU kernels; optional, without it the CPU shuffles
#   check   sanitizers, clang-format, clang-tidy and the Python gRPC client of the tests
#   deploy-check  promtool and a Prometheus, and the types that Kubernetes manifests are held against.
#           Rendering them also wants a kubectl of version 1.21 or later: that of Debian 12 is older
#   run     libraries that the binaries are linked with, and the authorities that sign servers
#   run-hip the same for binaries with GPU kernels
#   consumers  torch and pyflakes, for the tests of deploy/consumers
#   s3test  S3 servers for the tests: a Ceph object gateway and OpenStack Swift
# --list prints the packages of the groups, one a line, and installs nothing.
#
# Ends with 0 when every package is installed, with 1 and a message when one is not and cannot be.
set -euo pipefail

packages_of() {
  case $1 in
    build)
      echo g++ cmake ninja-build ccache python3 \
        libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev \
        golang-github-gogo-googleapis-dev prometheus-cpp-dev nlohmann-json3-dev libssl-dev \
        libisal-dev libsqlite3-dev libpugixml-dev libcurl4-openssl-dev libgtest-dev \
        libgmock-dev libbenchmark-dev ;;
    hip)
      # clang-offload-bundler is in clang-tools-19, llvm-objcopy in llvm-19.
      echo libamdhip64-dev rocm-device-libs clang-19 clang-tools-19 llvm-19 lld-19 ;;
    check)
      echo clang-19 libclang-rt-19-dev clang-format-19 clang-tidy-19 openssl python3-grpcio \
        python3-protobuf ;;
    consumers)
      echo python3-torch pyflakes3 ;;
    s3test)
      echo ceph-mon ceph-osd ceph-common radosgw curl \
        swift-proxy swift-account swift-container swift-object memcached ;;
    deploy-check)
      echo prometheus python3-kubernetes python3-yaml ;;
    run)
      echo ca-certificates libstdc++6 libgrpc++1.51 libgrpc29 libprotobuf32 libabsl20220623 \
        libprometheus-cpp-core1.0 libcivetweb1 libssl3 libisal2 libcurl4 libpugixml1v5 \
        libsqlite3-0 ;;
    run-hip)
      echo libamdhip64-5 ;;
    *)
      echo "install_packages.sh: no group '$1'; the groups are listed at the top of the script" >&2
      return 1 ;;
  esac
}

is_installed() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Prints why packages cannot be installed, and what the reader can do about it.
refuse() {
  echo "install_packages.sh: $1" >&2
  echo "These Debian 12 packages are missing: ${missing[*]}" >&2
  echo "Ask an administrator to run: apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
}

apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -q "$@"
}

list_only=no
if [ "${1-}" = --list ]; then
  list_only=yes
  shift
fi
if [ $# -eq 0 ]; then
  echo "usage: install_packages.sh [--list] GROUP..." >&2
  exit 2
fi
wanted=()
for group in "$@"; do
  names=$(packages_of "$group")
  # shellcheck disable=SC2206  # names are separated by spaces
  wanted+=($names)
done
if [ "$list_only" = yes ]; then
  printf '%s\n' "${wanted[@]}" | sort -u
  exit 0
fi

missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${wanted[@]}"; do
    is_installed "$package" || missing+=("$package")
  done
else
  missing=("${wanted[@]}")
fi
if [ ${#missing[@]} -eq 0 ]; then
  echo "packages ($*): all ${#wanted[@]} installed"
  exit 0
fi

command -v apt-get >/dev/null || refuse "this is not a Debian system"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || refuse "not root, and sudo is not installed"
  as_root=(sudo)
fi
echo "packages ($*): installing ${missing[*]}"
# Package lists that are absent or out of date are the usual reason for a first failure.
if ! apt install --no-install-recommends -y "${missing[@]}"; then
  apt update || refuse "apt-get update failed"
  apt install --no-install-recommends -y "${missing[@]}" || refuse "apt-get install failed"
fi
