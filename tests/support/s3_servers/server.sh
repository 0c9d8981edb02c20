# shellcheck shell=bash
# server.sh: what the scripts of this directory share; sourced, not run.
#
# The sourcing script sets `server_name`, says by `need` which programs it runs, and defines
# `launch DIR`, which starts its daemons by `daemon DIR NAME COMMAND...`, waits until they answer,
# and sets `endpoint`. Then it calls `main "$@"`:
#
#   start DIR       starts a server that keeps everything in DIR, which must be absent or empty, and
#                   prints its environment as NAME=VALUE lines
#   stop DIR        ends the server of DIR, at once: its data is not worth an orderly end
#   run COMMAND...  starts a server in a temporary directory, runs the command with that
#                   environment, and removes both; ends with the command's status. Both go when
#                   this script ends, however it does.
#
# The environment: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and
#   SHARDPREP_TEST_S3_SERVER      rgw or swift
#   SHARDPREP_TEST_S3_ENDPOINT    as AWS_ENDPOINT_URL
#   SHARDPREP_TEST_S3_BUCKET      an empty bucket
#   SHARDPREP_TEST_S3_ACCESS_LOG  the server's log of requests, where it writes one
# and, where the server has TLS (else empty):
#   SHARDPREP_TEST_S3_TLS_ENDPOINT  the same over TLS, by a name that may have a bucket before it
#   SHARDPREP_TEST_S3_CA_BUNDLE     the authority of its certificate, made for this server
#
# Everything listens on 127.0.0.1, on ports that were free at the start.

readonly region=us-east-1
readonly bucket=shardprep-test
readonly wait_s=120
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
server_name=
access_key=
secret_key=
endpoint=
access_log=
tls_endpoint=
ca_bundle=
# Open as long as this script lives; in `run`, the end of the pipe that its cleaner reads.
exec {alive}>/dev/null

die() {
  echo "${0##*/}: $1" >&2
  exit 1
}

# free_ports N: ports on which nothing listens. Somebody else may take one before it is used, which
# is why a start is tried again.
free_ports() {
  python3 - "$1" <<'PYTHON'
import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in held:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))
PYTHON
}

# daemon DIR NAME COMMAND...: starts a command in the background as a process group of its own, its
# output in DIR/log/NAME.out and its process id in DIR/pids/NAME.
daemon() {
  local dir=$1 name=$2
  shift 2
  setsid "$@" >"$dir/log/$name.out" 2>&1 </dev/null {alive}>&- &
  echo $! >"$dir/pids/$name"
}

# wait_for DIR WHAT COMMAND...: until the command succeeds. Fails when a daemon has ended.
wait_for() {
  local dir=$1 what=$2 end=$((SECONDS + wait_s)) pid_file
  shift 2
  until "$@" >/dev/null 2>&1; do
    for pid_file in "$dir"/pids/*; do
      if [ -e "$pid_file" ] && ! kill -0 "$(cat "$pid_file")" 2>/dev/null; then
        echo "${0##*/}: ${pid_file##*/} ended while waiting for $what:" >&2
        tail -n 20 "$dir/log/${pid_file##*/}.out" >&2
        return 1
      fi
    done
    if [ $SECONDS -ge $end ]; then
      echo "${0##*/}: waited $wait_s s in vain: $what" >&2
      return 1
    fi
    sleep 0.05
  done
}

# need COMMAND...: ends with a message when a program is not installed.
need() {
  local program
  for program in "$@"; do
    command -v "$program" >/dev/null ||
      die "$program is not installed: deploy/install_packages.sh s3test"
  done
}

answers() {
  curl -s -o /dev/null --max-time 5 "$1"
}

# make_bucket DIR: by a signed request, which also proves that the credentials work.
make_bucket() {
  local names
  mapfile -t names <"$1/environment"
  env "${names[@]}" python3 -B "$here/s3_client.py" create-bucket
}

# end_daemons DIR: ends every daemon of DIR that still runs, with its children, and waits until they
# are gone. A process that does not name DIR has come to the process id by chance and is left alone.
end_daemons() {
  local dir=$1 pid_file pid
  for pid_file in "$dir"/pids/*; do
    [ -e "$pid_file" ] || continue
    pid=$(cat "$pid_file")
    if [ -r "/proc/$pid/cmdline" ] && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF "$dir"; then
      kill -KILL -- "-$pid" 2>/dev/null || true
      while grep -qs '^State:\s*[^ZX]' "/proc/$pid/status"; do sleep 0.02; done
    fi
    rm -f "$pid_file"
  done
}

# start_server DIR: the daemons, the credentials and the bucket. Tried again with other ports.
start_server() {
  local dir=$1 attempt
  if [ -e "$dir" ] && [ -n "$(ls -A "$dir")" ]; then die "$dir is not empty"; fi
  access_key=$(head -c 10 /dev/urandom | od -An -tx1 | tr -d ' \n')
  secret_key=$(head -c 20 /dev/urandom | od -An -tx1 | tr -d ' \n')
  for attempt in 1 2 3; do
    mkdir -p "$dir/log" "$dir/pids"
    # `if` would switch off errexit inside: a subshell of its own keeps it.
    set +e
    (
      set -e
      launch "$dir"
      describe >"$dir/environment"
      make_bucket "$dir" >"$dir/log/bucket" 2>&1
    )
    local status=$?
    set -e
    [ $status -ne 0 ] || return 0
    echo "${0##*/}: attempt $attempt failed with $status" >&2
    if [ -e "$dir/log/bucket" ]; then tail -n 1 "$dir/log/bucket" >&2; fi
    end_daemons "$dir"
    rm -rf "${dir:?}"/*
  done
  die "no server came up in $dir"
}

describe() {
  cat <<ENVIRONMENT
AWS_ENDPOINT_URL=$endpoint
AWS_REGION=$region
AWS_ACCESS_KEY_ID=$access_key
AWS_SECRET_ACCESS_KEY=$secret_key
SHARDPREP_TEST_S3_SERVER=$server_name
SHARDPREP_TEST_S3_ENDPOINT=$endpoint
SHARDPREP_TEST_S3_BUCKET=$bucket
SHARDPREP_TEST_S3_ACCESS_LOG=$access_log
SHARDPREP_TEST_S3_TLS_ENDPOINT=$tls_endpoint
SHARDPREP_TEST_S3_CA_BUNDLE=$ca_bundle
ENVIRONMENT
}

# clean_up_after DIR: waits for the end of its input, then ends the daemons and removes DIR.
clean_up_after() {
  trap '' INT TERM HUP
  exec {alive}>&-
  cat >/dev/null
  end_daemons "$1"
  rm -rf "$1"
}

run_with_server() {
  local dir status=0 names
  dir=$(mktemp -d "${TMPDIR:-/tmp}/shardprep-s3.XXXXXX")
  mkfifo "$dir.alive"
  # A process of its own outside this script's process tree, so that it outlives whatever ends us.
  (clean_up_after "$dir" <"$dir.alive" >/dev/null &)
  exec {alive}>"$dir.alive"
  rm "$dir.alive"
  start_server "$dir"
  mapfile -t names <"$dir/environment"
  env "${names[@]}" "$@" {alive}>&- || status=$?
  exec {alive}>&-
  while [ -e "$dir" ]; do sleep 0.02; done
  exit $status
}

main() {
  case ${1-} in
    start)
      [ $# -eq 2 ] || die "usage: ${0##*/} start DIR"
      mkdir -p "$2"
      start_server "$(realpath "$2")"
      cat "$2/environment" ;;
    stop)
      [ $# -eq 2 ] || die "usage: ${0##*/} stop DIR"
      end_daemons "$(realpath "$2")" ;;
    run)
      [ $# -ge 2 ] || die "usage: ${0##*/} run COMMAND..."
      shift
      run_with_server "$@" ;;
    *)
      die "usage: ${0##*/} start DIR | stop DIR | run COMMAND..." ;;
  esac
}
