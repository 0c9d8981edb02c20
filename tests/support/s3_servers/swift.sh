#!/bin/bash
# swift.sh start DIR | stop DIR | run COMMAND...
#
# OpenStack Swift behind its S3 interface on 127.0.0.1; usage in server.sh. A second implementation
# beside rgw.sh, and one without conditional PUT. Data lies on disk, in a file system that must have
# extended attributes. Needs the packages of group s3test.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=server.sh
. "$(dirname "${BASH_SOURCE[0]}")/server.sh"
readonly server_name=swift
need swift-proxy-server swift-account-server swift-container-server swift-object-server \
  swift-ring-builder memcached curl python3

write_config() {
  local dir=$1 proxy_port=$2 cache_port=$3
  cat >"$dir/etc/swift.conf" <<CONF
[swift-hash]
swift_hash_path_suffix = suffix
swift_hash_path_prefix = prefix
[storage-policy:0]
name = only
default = yes
CONF
  cat >"$dir/etc/proxy-server.conf" <<CONF
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $proxy_port
workers = 0
user = $(id -un)
swift_dir = $dir/etc
log_level = WARNING
[pipeline:main]
pipeline = catch_errors cache listing_formats s3api tempauth copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
allow_account_management = true
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:$cache_port
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = $region
[filter:tempauth]
use = egg:swift#tempauth
user_test_$access_key = $secret_key .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
CONF
}

# write_ring DIR KIND PORT: one device that holds everything, and its server's configuration.
write_ring() {
  local dir=$1 kind=$2 port=$3
  (
    cd "$dir/etc"
    swift-ring-builder "$kind.builder" create 4 1 1
    swift-ring-builder "$kind.builder" add "r1z1-127.0.0.1:$port/disk" 1
    swift-ring-builder "$kind.builder" rebalance
  ) >"$dir/log/ring-$kind.out" 2>&1
  cat >"$dir/etc/$kind-server.conf" <<CONF
[DEFAULT]
devices = $dir/node
mount_check = false
bind_ip = 127.0.0.1
bind_port = $port
workers = 0
user = $(id -un)
swift_dir = $dir/etc
log_level = WARNING
disable_fallocate = true
recon_cache_path = $dir/cache
[pipeline:main]
pipeline = $kind-server
[app:$kind-server]
use = egg:swift#$kind
CONF
}

launch() {
  local dir=$1 proxy_port cache_port account_port container_port object_port kind
  local -A ports
  read -r proxy_port cache_port account_port container_port object_port < <(free_ports 5)
  ports=([account]=$account_port [container]=$container_port [object]=$object_port)
  # The S3 access key of Swift's built-in accounts is ACCOUNT:USER.
  endpoint=http://127.0.0.1:$proxy_port
  mkdir -p "$dir"/{etc,node/disk,cache}
  write_config "$dir" "$proxy_port" "$cache_port"
  for kind in account container object; do
    write_ring "$dir" "$kind" "${ports[$kind]}"
    daemon "$dir" "$kind" swift-$kind-server "$dir/etc/$kind-server.conf"
  done
  daemon "$dir" cache memcached -u "$(id -un)" -l 127.0.0.1 -p "$cache_port" -P "$dir/cache.pid"
  daemon "$dir" proxy swift-proxy-server "$dir/etc/proxy-server.conf"
  access_key=test:$access_key
  wait_for "$dir" "the proxy" answers "$endpoint"
}

main "$@"
