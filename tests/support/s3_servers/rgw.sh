#!/bin/bash
# rgw.sh start DIR | stop DIR | run COMMAND...
#
# A Ceph object gateway on 127.0.0.1 that keeps its data in memory; usage in server.sh. It checks
# signatures, ranges, If-None-Match and multipart uploads as strictly as servers do in production.
# Three daemons: a monitor, a storage daemon with the memory store, the gateway. Over TLS it has a
# name, so that a bucket may stand in the host's. Needs the packages of group s3test.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=server.sh
. "$(dirname "${BASH_SOURCE[0]}")/server.sh"
readonly server_name=rgw
# Names below localhost are loopback addresses to libcurl, whatever the resolver says.
readonly host_name=s3.localhost
need ceph ceph-mon ceph-osd ceph-authtool monmaptool radosgw radosgw-admin curl openssl python3

# Fast rounds of the monitor (a cluster of one needs no patience), no managers, one replica; deleted
# objects leave memory within seconds. Without cephx keys the gateway stalls for a minute; without
# tcp_nodelay every small answer waits 40 ms for the client's delayed acknowledgement.
write_config() {
  local dir=$1 mon_port=$2 mon_port_v1=$3 rgw_port=$4 tls_port=$5 fsid=$6
  local tls="ssl_endpoint=127.0.0.1:$tls_port ssl_certificate=$dir/tls/server.pem"
  tls+=" ssl_private_key=$dir/tls/server.key"
  cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$mon_port,v1:127.0.0.1:$mon_port_v1]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
keyring = $dir/keyring
run dir = $dir/run
admin socket = $dir/run/\$name.\$pid.asok
log file = $dir/log/\$name.log
mon cluster log file = $dir/log/cluster.log
mon data = $dir/mon
mon data avail crit = 1
mon data avail warn = 2
mon allow pool size one = true
mon max pg per osd = 10000
paxos propose interval = 0.02
paxos min wait = 0.01
osd data = $dir/osd
osd objectstore = memstore
osd max object name len = 256
osd max object namespace len = 64
osd crush chooseleaf type = 0
osd max pg per osd hard ratio = 100
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
memstore device bytes = 8G
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$rgw_port $tls tcp_nodelay=1
rgw dns name = $host_name
rgw data = $dir/rgw
rgw thread pool size = 64
rgw dynamic resharding = false
rgw override bucket index max shards = 1
rgw s3 auth use sts = false
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
debug rgw = 1
CONF
}

make_keys() {
  local keys=$1/keyring
  ceph-authtool --create-keyring "$keys" --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool "$keys" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *'
  ceph-authtool "$keys" --gen-key -n client.rgw --cap mon 'allow rwx' --cap osd 'allow rwx'
  ceph-authtool "$keys" --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
}

# An authority of its own, and the gateway's certificate.
make_certificate() {
  local dir=$1/tls
  mkdir -p "$dir"
  printf 'subjectAltName=DNS:%s,DNS:*.%s\n' "$host_name" "$host_name" >"$dir/names"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
    -subj /CN=test-authority -keyout "$dir/ca.key" -out "$dir/ca.pem"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$host_name" \
    -keyout "$dir/server.key" -out "$dir/server.csr"
  openssl x509 -req -in "$dir/server.csr" -CA "$dir/ca.pem" -CAkey "$dir/ca.key" -CAcreateserial \
    -days 2 -extfile "$dir/names" -out "$dir/server.pem"
}

admin() {
  timeout 30 ceph -c "$CEPH_CONF" --connect-timeout 3 "$@"
}

osd_is_up() {
  admin osd stat | grep -q ' 1 up'
}

launch() {
  local dir=$1 mon_port mon_port_v1 rgw_port tls_port fsid osd_id
  read -r mon_port mon_port_v1 rgw_port tls_port < <(free_ports 4)
  fsid=$(cat /proc/sys/kernel/random/uuid)
  osd_id=$(cat /proc/sys/kernel/random/uuid)
  endpoint=http://127.0.0.1:$rgw_port
  access_log=$dir/log/client.rgw.log
  tls_endpoint=https://$host_name:$tls_port
  ca_bundle=$dir/tls/ca.pem
  mkdir -p "$dir"/{mon,osd,rgw,run}
  write_config "$dir" "$mon_port" "$mon_port_v1" "$rgw_port" "$tls_port" "$fsid"
  export CEPH_CONF=$dir/ceph.conf
  {
    make_keys "$dir"
    make_certificate "$dir"
    monmaptool --create --fsid "$fsid" \
      --addv a "[v2:127.0.0.1:$mon_port,v1:127.0.0.1:$mon_port_v1]" "$dir/monmap"
    ceph-mon -c "$CEPH_CONF" --mkfs -i a --keyring "$dir/keyring" --monmap "$dir/monmap"
  } >"$dir/log/setup.out" 2>&1
  daemon "$dir" mon ceph-mon -c "$CEPH_CONF" -i a -f
  wait_for "$dir" "the monitor" admin mon stat
  {
    admin osd new "$osd_id" 0
    ceph-osd -c "$CEPH_CONF" -i 0 --mkfs --keyring "$dir/keyring" --osd-uuid "$osd_id"
    admin osd crush add osd.0 1.0 host=localhost root=default
  } >>"$dir/log/setup.out" 2>&1
  daemon "$dir" osd ceph-osd -c "$CEPH_CONF" -i 0 -f
  wait_for "$dir" "the storage daemon" osd_is_up
  daemon "$dir" rgw radosgw -c "$CEPH_CONF" -n client.rgw --no-mon-config -f
  wait_for "$dir" "the gateway" answers "$endpoint"
  radosgw-admin -c "$CEPH_CONF" -n client.rgw --no-mon-config user create --uid=tester \
    --display-name=tester --access-key="$access_key" --secret-key="$secret_key" \
    >>"$dir/log/setup.out" 2>&1
}

main "$@"
