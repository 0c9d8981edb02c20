// HTTP over libcurl, used as a pipe: everything S3 is above it.
//
// HTTP/1.1 with connections that are kept and used again, TLS 1.2 at least with verification that
// cannot be switched off. Nothing is read from the environment: a proxy is used when the options
// say so. Never sends a request a second time: where libcurl would, after a kept connection turned
// out to be closed, the exchange ends as UNAVAILABLE, because a PUT or POST may have been carried
// out.
#pragma once

#include <memory>
#include <string>

#include "workers/s3/http_transport.h"
#include "workers/s3/s3_options.h"

namespace shardprep {

struct CurlTransportOptions {
  // PEM file of the only authorities to trust; empty: the system's. An unreadable file is
  // FAILED_PRECONDITION from every exchange over TLS.
  std::string ca_bundle;
  // Exchanges at a time, and connections kept, at most (> 0); a Send() over the bound waits. Each
  // costs up to 256 KiB of buffers.
  int max_connections = 32;
  // [scheme://][user:password@]host[:port]; empty: none. The hosts of `no_proxy` (comma-separated
  // names that stand for their subdomains as well, addresses, networks, or "*") go without it.
  std::string proxy;
  std::string no_proxy;
};

// Connections are closed with it; it must outlive its calls.
std::unique_ptr<HttpTransport> MakeCurlTransport(const CurlTransportOptions& options);

// With what `options` says about connections.
std::unique_ptr<HttpTransport> MakeCurlTransport(const S3Options& options);

}  // namespace shardprep
