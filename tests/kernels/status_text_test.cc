#include "kernels/status_text.h"

#include "gtest/gtest.h"

namespace shardprep {
namespace {

absl::Status Marked() {
  absl::Status status = absl::ResourceExhaustedError("full");
  status.SetPayload("a", absl::Cord("1"));
  status.SetPayload("b", absl::Cord("2"));
  return status;
}

void ExpectMarked(const absl::Status& status, absl::string_view message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), message);
  EXPECT_EQ(status.GetPayload("a"), absl::Cord("1"));
  EXPECT_EQ(status.GetPayload("b"), absl::Cord("2"));
}

TEST(StatusText, AStatusThatSaysMoreKeepsItsCodeAndPayloads) {
  ExpectMarked(WithMessage(Marked(), "quite full"), "quite full");
  ExpectMarked(Prefixed("disk", Marked()), "disk: full");
  EXPECT_EQ(Prefixed("disk", absl::OkStatus()), absl::OkStatus());
}

}  // namespace
}  // namespace shardprep
