#include "workers/s3/s3_options.h"

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using Variables = std::map<std::string, std::string>;

ReadEnvironment Environment(const Variables& variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

TEST(S3Options, FlagsComeBeforeVariablesAndTheNarrowerVariableFirst) {
  const Variables all = {{"AWS_ENDPOINT_URL_S3", "http://s3var:1"},
                         {"AWS_ENDPOINT_URL", "http://var:2"},
                         {"AWS_REGION", "region-var"},
                         {"AWS_DEFAULT_REGION", "region-default"},
                         {"AWS_CA_BUNDLE", "/var.pem"}};
  Variables fewer = all;
  fewer["AWS_ENDPOINT_URL_S3"] = "";  // set to nothing is not set
  fewer.erase("AWS_REGION");
  const struct {
    S3Flags flags;
    Variables variables;
    std::string endpoint;
    std::string region;
    std::string ca_bundle;
  } kCases[] = {
      {{.endpoint = "http://flag:3", .region = "region-flag", .ca_bundle = "/flag.pem"},
       all,
       "http://flag:3",
       "region-flag",
       "/flag.pem"},
      {{}, all, "http://s3var:1", "region-var", "/var.pem"},
      {{}, fewer, "http://var:2", "region-default", "/var.pem"},
      {{}, {}, "", "us-east-1", ""},
  };
  for (const auto& c : kCases) {
    const auto options = MakeS3Options(c.flags, Environment(c.variables));
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->endpoint, c.endpoint);
    EXPECT_EQ(options->region, c.region);
    EXPECT_EQ(options->ca_bundle, c.ca_bundle);
  }
}

TEST(S3Options, EndpointsHaveOneSpelling) {
  const struct {
    std::string given;
    std::string want;
  } kCases[] = {
      {"http://127.0.0.1:9000", "http://127.0.0.1:9000"},
      {"http://127.0.0.1:9000/", "http://127.0.0.1:9000"},
      {"HTTPS://MinIO.Example.COM:443/", "https://minio.example.com"},
      {"http://minio:80", "http://minio"},
      {"http://minio:443", "http://minio:443"},
      {"https://minio:80", "https://minio:80"},
      {"http://rook_ceph.rgw:8080", "http://rook_ceph.rgw:8080"},
      {"http://[::1]:9000", "http://[::1]:9000"},
      {"https://[2001:DB8::1]", "https://[2001:db8::1]"},
  };
  for (const auto& c : kCases) {
    const auto options = MakeS3Options({.endpoint = c.given}, Environment({}));
    ASSERT_TRUE(options.ok()) << c.given << options.status();
    EXPECT_EQ(options->endpoint, c.want);
  }
}

TEST(S3Options, MalformedValuesAreRefusedByName) {
  const struct {
    S3Flags flags;
    Variables variables;
    std::string message;
  } kCases[] = {
      {{.endpoint = "minio:9000"}, {}, "flag s3_endpoint is \"minio:9000\""},
      {{}, {{"AWS_ENDPOINT_URL", "ftp://minio"}}, "AWS_ENDPOINT_URL is \"ftp://minio\""},
      {{}, {{"AWS_ENDPOINT_URL_S3", "http://"}}, "AWS_ENDPOINT_URL_S3 is"},
      {{.endpoint = "http://minio/s3"}, {}, "without a path"},
      {{.endpoint = "http://minio//"}, {}, "without a path"},
      {{.endpoint = "http://minio?x=1"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://minio#x"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://mi nio"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://minio\r\nx: y"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://minio:"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://:9000"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://minio:0"}, {}, "a port from 1 to 65535"},
      {{.endpoint = "http://minio:65536"}, {}, "a port from 1 to 65535"},
      {{.endpoint = "http://minio:+80"}, {}, "a port from 1 to 65535"},
      {{.endpoint = "http://minio:9000:1"}, {}, "a port from 1 to 65535"},
      {{.endpoint = "http://[::1"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://[minio]"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://::1"}, {}, "want http(s)://host[:port]"},
      {{.endpoint = "http://[::1]9000"}, {}, "want http(s)://host[:port]"},
      {{.region = "us east"}, {}, "flag s3_region is \"us east\""},
      {{}, {{"AWS_REGION", "us-east-1/x"}}, "AWS_REGION is \"us-east-1/x\""},
      {{.addressing = "dns"}, {}, "flag s3_addressing is \"dns\""},
      {{.payload = "none"}, {}, "flag s3_payload is \"none\""},
  };
  for (const auto& c : kCases) {
    const absl::Status status = MakeS3Options(c.flags, Environment(c.variables)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message << status;
    EXPECT_THAT(status.message(), HasSubstr(c.message));
  }
}

TEST(S3Options, PasswordInAnEndpointIsRefusedAndNotRepeated) {
  const absl::Status status =
      MakeS3Options({.endpoint = "http://user:SECRET@minio"}, Environment({})).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("flag s3_endpoint holds a user"));
  EXPECT_THAT(status.message(), Not(HasSubstr("SECRET")));
}

TEST(S3Options, RegionOfAnAmazonEndpointCountsWhenNoneIsStated) {
  const struct {
    std::string endpoint;
    std::string stated;
    std::string want;
  } kCases[] = {
      {"https://s3.eu-west-1.amazonaws.com", "", "eu-west-1"},
      {"https://s3.dualstack.eu-west-1.amazonaws.com", "", "eu-west-1"},
      {"https://s3-fips.us-gov-west-1.amazonaws.com", "", "us-gov-west-1"},
      {"https://s3.cn-north-1.amazonaws.com.cn", "", "cn-north-1"},
      {"https://bucket.vpce-1a2b-3c.s3.us-west-2.vpce.amazonaws.com", "", "us-west-2"},
      {"https://s3.eu-west-1.amazonaws.com", "us-west-2", "us-west-2"},
      {"https://s3.amazonaws.com", "", "us-east-1"},
      {"https://s3.eu-west-1.example.com", "", "us-east-1"},
      {"https://amazonaws.com", "", "us-east-1"},
  };
  for (const auto& c : kCases) {
    const auto options =
        MakeS3Options({.endpoint = c.endpoint, .region = c.stated}, Environment({}));
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->region, c.want) << c.endpoint;
  }
  EXPECT_EQ(DefaultS3Endpoint("eu-west-1"), "https://s3.eu-west-1.amazonaws.com");
  EXPECT_EQ(DefaultS3Endpoint("cn-north-1"), "https://s3.cn-north-1.amazonaws.com.cn");
}

TEST(S3Options, BucketStandsInThePathExceptAtAmazon) {
  using Addressing = S3Options::Addressing;
  const struct {
    std::string endpoint;
    std::string addressing;
    std::optional<Addressing> want;  // nothing: refused
  } kCases[] = {
      {"", "", Addressing::kVirtualHost},
      {"http://minio:9000", "", Addressing::kPath},
      {"", "path", Addressing::kPath},
      {"http://minio:9000", "virtual", Addressing::kVirtualHost},
      {"http://127.0.0.1:9000", "path", Addressing::kPath},
      {"http://127.0.0.1:9000", "virtual", std::nullopt},
      {"http://[::1]:9000", "virtual", std::nullopt},
  };
  for (const auto& c : kCases) {
    const auto options =
        MakeS3Options({.endpoint = c.endpoint, .addressing = c.addressing}, Environment({}));
    ASSERT_EQ(options.ok(), c.want.has_value()) << c.endpoint << options.status();
    if (c.want) {
      EXPECT_EQ(options->addressing, *c.want) << c.endpoint;
    } else {
      EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(options.status().message(), HasSubstr(c.endpoint));
    }
  }
}

TEST(S3Options, UnsignedPayloadWantsTls) {
  const struct {
    std::string endpoint;
    std::string payload;
    std::optional<bool> is_unsigned;  // nothing: refused
  } kCases[] = {
      {"http://minio", "", false},
      {"http://minio", "signed", false},
      {"https://minio", "unsigned", true},
      {"", "unsigned", true},
      {"http://minio", "unsigned", std::nullopt},
  };
  for (const auto& c : kCases) {
    const auto options =
        MakeS3Options({.endpoint = c.endpoint, .payload = c.payload}, Environment({}));
    ASSERT_EQ(options.ok(), c.is_unsigned.has_value()) << options.status();
    if (c.is_unsigned) {
      EXPECT_EQ(options->unsigned_payload, *c.is_unsigned);
    } else {
      EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
    }
  }
}

TEST(S3Options, CredentialsAreLookedForWhereAmazonsToolsLook) {
  const auto options = MakeS3Options({}, Environment({{"AWS_ACCESS_KEY_ID", "id"},
                                                      {"AWS_SECRET_ACCESS_KEY", "secret"},
                                                      {"AWS_SESSION_TOKEN", "token"},
                                                      {"AWS_PROFILE", "work"},
                                                      {"HOME", "/home/me"}}));
  ASSERT_TRUE(options.ok()) << options.status();
  const CredentialsSource& source = options->credentials;
  EXPECT_EQ(source.environment.access_key_id, "id");
  EXPECT_EQ(source.environment.secret_access_key, "secret");
  EXPECT_EQ(source.environment.session_token, "token");
  EXPECT_EQ(source.profile, "work");
  EXPECT_EQ(source.file, "/home/me/.aws/credentials");

  const struct {
    Variables variables;
    std::string file;
  } kCases[] = {
      {{}, ""},
      {{{"AWS_SHARED_CREDENTIALS_FILE", "/run/secrets/s3"}, {"HOME", "/home/me"}},
       "/run/secrets/s3"},
      {{{"AWS_SHARED_CREDENTIALS_FILE", "~/s3"}, {"HOME", "/home/me"}}, "/home/me/s3"},
  };
  for (const auto& c : kCases) {
    const auto others = MakeS3Options({}, Environment(c.variables));
    ASSERT_TRUE(others.ok()) << others.status();
    EXPECT_EQ(others->credentials.file, c.file);
    EXPECT_EQ(others->credentials.profile, "default");
  }
}

TEST(S3Options, ProxyIsTheOneOfTheEndpointsScheme) {
  const Variables all = {{"https_proxy", "http://tls-proxy:1"},
                         {"http_proxy", "http://plain-proxy:2"},
                         {"HTTP_PROXY", "http://sent-by-a-client:3"},
                         {"no_proxy", "internal,10.0.0.0/8"}};
  const struct {
    std::string endpoint;
    Variables variables;
    std::string proxy;
    std::string no_proxy;
  } kCases[] = {
      {"", all, "http://tls-proxy:1", "internal,10.0.0.0/8"},
      {"https://minio", all, "http://tls-proxy:1", "internal,10.0.0.0/8"},
      {"http://minio", all, "http://plain-proxy:2", "internal,10.0.0.0/8"},
      {"http://minio", {{"HTTP_PROXY", "http://p"}, {"NO_PROXY", "x"}}, "", "x"},
      {"", {{"HTTPS_PROXY", "http://p"}, {"NO_PROXY", "x"}}, "http://p", "x"},
      {"http://127.0.0.1:9000", all, "", ""},
      {"http://127.8.9.1:9000", all, "", ""},
      {"https://localhost:9000", all, "", ""},
      {"http://[::1]:9000", all, "", ""},
      {"http://127.example.com", all, "http://plain-proxy:2", "internal,10.0.0.0/8"},
  };
  for (const auto& c : kCases) {
    const auto options = MakeS3Options({.endpoint = c.endpoint}, Environment(c.variables));
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->proxy, c.proxy) << c.endpoint;
    EXPECT_EQ(options->no_proxy, c.no_proxy) << c.endpoint;
  }
}

}  // namespace
}  // namespace shardprep
