#include "workers/s3/credentials.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Text(const AwsCredentials& credentials) {
  return absl::StrCat(credentials.access_key_id, "|", credentials.secret_access_key, "|",
                      credentials.session_token);
}

std::string Section(const std::string& profile, const std::string& suffix) {
  return absl::StrCat("[", profile, "]\naws_access_key_id = id", suffix,
                      "\naws_secret_access_key = secret", suffix, "\n");
}

// As editors and `aws configure` do it: the file keeps its inode.
void WriteInPlace(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

TEST(CredentialsFile, SectionsKeysAndCommentsInAllTheirSpellings) {
  const struct {
    std::string name;
    std::string text;
    std::string profile;
    std::string want;
  } kCases[] = {
      {"plain", "[default]\naws_access_key_id=id\naws_secret_access_key=se/cr+et=\n", "default",
       "id|se/cr+et=|"},
      {"token", "[p]\naws_access_key_id=id\naws_secret_access_key=s\naws_session_token=to==\n", "p",
       "id|s|to=="},
      {"no last line break", "[p]\naws_access_key_id=id\naws_secret_access_key=s", "p", "id|s|"},
      {"spaces", "[ p ]\n aws_access_key_id\t=  id  \n aws_secret_access_key = s\t\n", "p",
       "id|s|"},
      {"CRLF", "[p]\r\naws_access_key_id = id\r\n\r\naws_secret_access_key = s\r\n", "p", "id|s|"},
      {"byte order mark", "\xEF\xBB\xBF[p]\naws_access_key_id=id\naws_secret_access_key=s\n", "p",
       "id|s|"},
      {"comments",
       "# [p]\n; aws_access_key_id = no\n[p] # here\n  # indented\naws_access_key_id = id # mine\n"
       "aws_secret_access_key = a#b;c ; yours\n",
       "p", "id|a#b;c|"},
      {"keys in any case", "[p]\nAWS_ACCESS_KEY_ID = Id\nAws_Secret_Access_Key = S\n", "p",
       "Id|S|"},
      {"another section", Section("a", "A") + Section("b", "B") + Section("c", "C"), "b",
       "idB|secretB|"},
      {"section in two pieces",
       "[p]\naws_access_key_id = old\naws_secret_access_key = s\n" + Section("q", "Q") +
           "[p]\naws_access_key_id = new\n",
       "p", "new|s|"},
      {"settings of other programs",
       "[p]\nregion = r\ns3 =\n  max_concurrent_requests = 10\n  aws_access_key_id = no\n"
       "aws_access_key_id = id\naws_secret_access_key = s\n",
       "p", "id|s|"},
      {"case of profiles counts", Section("P", "1") + Section("p", "2"), "p", "id2|secret2|"},
  };
  for (const auto& c : kCases) {
    const auto credentials = ParseCredentialsFile(c.text, c.profile);
    ASSERT_TRUE(credentials.ok()) << c.name << ": " << credentials.status();
    EXPECT_EQ(Text(*credentials), c.want) << c.name;
  }
}

TEST(CredentialsFile, FaultsNameLineOrKeyAndNoSecret) {
  const struct {
    std::string text;
    absl::StatusCode code;
    std::string message;
  } kCases[] = {
      {"", absl::StatusCode::kNotFound, "no section [p]"},
      {"[q]\naws_access_key_id=id\naws_secret_access_key=SECRET\n", absl::StatusCode::kNotFound,
       "no section [p]"},
      {"[p]\naws_access_key_id = SECRET\n", absl::StatusCode::kNotFound,
       "no aws_secret_access_key in section [p]"},
      {"[p]\naws_secret_access_key = SECRET\n", absl::StatusCode::kNotFound,
       "no aws_access_key_id in section [p]"},
      {"[p]\naws_access_key_id =\naws_secret_access_key = SECRET\n", absl::StatusCode::kNotFound,
       "no aws_access_key_id in section [p]"},
      {"aws_access_key_id = SECRET\n[p]\n", absl::StatusCode::kInvalidArgument, "line 1: "},
      {"[p]\nSECRET\n", absl::StatusCode::kInvalidArgument, "line 2: "},
      {"[p]\n= SECRET\n", absl::StatusCode::kInvalidArgument, "line 2: "},
      {"[p\naws_access_key_id = SECRET\n", absl::StatusCode::kInvalidArgument, "line 1: "},
      {"[p] SECRET\n", absl::StatusCode::kInvalidArgument, "line 1: "},
      {"[p]\naws_access_key_id = id\naws_secret_access_key = SEC\n  RET\n",
       absl::StatusCode::kInvalidArgument, "line 4: indented below aws_secret_access_key"},
      {"[p]\naws_access_key_id = id\naws_secret_access_key = SEC RET\n",
       absl::StatusCode::kInvalidArgument, "line 3: aws_secret_access_key holds a space"},
      {"[p]\naws_access_key_id = id\naws_session_token = SEC\x01RET\n",
       absl::StatusCode::kInvalidArgument, "line 3: aws_session_token holds a space"},
      {std::string("{\0\"SECRET\"}", 11), absl::StatusCode::kInvalidArgument, "line 1: "},
  };
  for (const auto& c : kCases) {
    const absl::Status status = ParseCredentialsFile(c.text, "p").status();
    EXPECT_EQ(status.code(), c.code) << c.text << status;
    EXPECT_THAT(status.message(), HasSubstr(c.message)) << c.text;
    EXPECT_THAT(status.message(), Not(HasSubstr("SEC"))) << c.text;
    EXPECT_THAT(status.message(), Not(HasSubstr("RET"))) << c.text;
  }
}

TEST(Credentials, EnvironmentComesBeforeTheFile) {
  const TempDir dir;
  WriteInPlace(dir / "credentials", Section("default", "File"));
  const auto provider = MakeCredentialsProvider(
      {.environment = {"idEnv", "secretEnv", "token"}, .file = dir / "credentials"});
  ASSERT_TRUE(provider->Get().ok());
  EXPECT_EQ(Text(*provider->Get()), "idEnv|secretEnv|token");
  EXPECT_FALSE(provider->Refresh({"idEnv", "secretEnv", "token"}));
  EXPECT_TRUE(provider->Refresh({"idOld", "secretEnv", "token"}));
}

TEST(Credentials, HalfOfTheEnvironmentsPairIsRefused) {
  const TempDir dir;
  WriteInPlace(dir / "credentials", Section("default", "File"));
  const struct {
    AwsCredentials environment;
    std::string message;
  } kCases[] = {
      {{"hunter2", "", ""}, "AWS_SECRET_ACCESS_KEY is not set"},
      {{"", "hunter2", ""}, "AWS_ACCESS_KEY_ID is not set"},
      {{"id", "hunter2\n", ""}, "AWS_SECRET_ACCESS_KEY holds a space, line break"},
      {{"id", "hunter2", "hunter2 \r"}, "AWS_SESSION_TOKEN holds a space, line break"},
  };
  for (const auto& c : kCases) {
    const absl::Status status =
        MakeCredentialsProvider({.environment = c.environment, .file = dir / "credentials"})
            ->Get()
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(), HasSubstr(c.message));
    EXPECT_THAT(status.message(), Not(HasSubstr("hunter2")));
  }
}

TEST(Credentials, RewrittenFileIsReadAgain) {
  const TempDir dir;
  const std::string path = dir / "credentials";
  WriteInPlace(path, Section("default", "1"));
  const auto provider = MakeCredentialsProvider({.file = path});
  ASSERT_TRUE(provider->Get().ok());
  EXPECT_EQ(Text(*provider->Get()), "id1|secret1|");
  // Same size, and as close in time as can be.
  for (const char* suffix : {"2", "3", "4", "5"}) {
    WriteInPlace(path, Section("default", suffix));
    EXPECT_EQ(Text(*provider->Get()), absl::StrCat("id", suffix, "|secret", suffix, "|"));
  }
  // As a rotation does that keeps size and modification time.
  const auto modified = std::filesystem::last_write_time(path);
  WriteInPlace(path + ".new", Section("default", "6"));
  std::filesystem::last_write_time(path + ".new", modified);
  std::filesystem::rename(path + ".new", path);
  EXPECT_EQ(Text(*provider->Get()), "id6|secret6|");
}

TEST(Credentials, SwappedLinkOfAMountedSecretIsNoticed) {
  const TempDir dir;
  for (const char* version : {"1", "2"}) {
    std::filesystem::create_directory(dir / absl::StrCat("..v", version));
    WriteInPlace(dir / absl::StrCat("..v", version, "/credentials"), Section("p", version));
  }
  std::filesystem::create_symlink("..v1", dir / "..data");
  std::filesystem::create_symlink("..data/credentials", dir / "credentials");
  const auto provider = MakeCredentialsProvider({.file = dir / "credentials", .profile = "p"});
  ASSERT_TRUE(provider->Get().ok());
  EXPECT_EQ(Text(*provider->Get()), "id1|secret1|");
  std::filesystem::create_symlink("..v2", dir / "..data_tmp");
  std::filesystem::rename(dir / "..data_tmp", dir / "..data");
  std::filesystem::remove_all(dir / "..v1");
  EXPECT_EQ(Text(*provider->Get()), "id2|secret2|");
}

TEST(Credentials, UnusableFileLeavesTheLastGoodOnes) {
  const TempDir dir;
  const std::string path = dir / "credentials";
  WriteInPlace(path, Section("default", "1"));
  const auto provider = MakeCredentialsProvider({.file = path});
  const auto first = provider->Get();
  ASSERT_TRUE(first.ok()) << first.status();

  for (const std::string& text :
       {std::string(), std::string("[default]\naws_access_key_id = id2\n"),
        std::string("[default]\naws_access_key_id = id2\naws_sec"), Section("other", "2")}) {
    WriteInPlace(path, text);
    ASSERT_TRUE(provider->Get().ok()) << text;
    EXPECT_EQ(Text(*provider->Get()), "id1|secret1|") << text;
    EXPECT_FALSE(provider->Refresh(*first)) << text;
  }
  std::filesystem::remove(path);
  EXPECT_EQ(Text(*provider->Get()), "id1|secret1|");
  EXPECT_FALSE(provider->Refresh(*first));

  WriteInPlace(path, Section("default", "2"));
  EXPECT_TRUE(provider->Refresh(*first));
  EXPECT_EQ(Text(*provider->Get()), "id2|secret2|");
  EXPECT_FALSE(provider->Refresh(*provider->Get()));
}

TEST(Credentials, NoneFoundSaysWhereItLooked) {
  const TempDir dir;
  WriteInPlace(dir / "other", Section("other", "X"));
  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  WriteInPlace(dir / "large", std::string((1 << 20) + 1, '#'));
  const struct {
    std::string file;
    std::string message;
  } kCases[] = {
      {dir / "missing", "missing: No such file"},
      {dir.path(), "is no regular file"},
      {dir / "fifo", "is no regular file"},
      {dir / "large", "more than 1048576 bytes"},
      {dir / "other", "other: no section [default]"},
      {"", "neither AWS_SHARED_CREDENTIALS_FILE nor HOME"},
  };
  for (const auto& c : kCases) {
    const auto provider = MakeCredentialsProvider({.file = c.file});
    EXPECT_FALSE(provider->Refresh({}));
    const absl::Status status = provider->Get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(), HasSubstr("AWS_ACCESS_KEY_ID"));
    EXPECT_THAT(status.message(), HasSubstr(c.message));
    EXPECT_THAT(status.message(), Not(HasSubstr("secretX")));
  }
}

}  // namespace
}  // namespace shardprep
