#include "service/doctor.h"

#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/device_choice.h"
#include "kernels/profile.h"
#include "kernels/status_macros.h"
#include "workers/byte_size.h"
#include "workers/object_names.h"
#include "workers/resources.h"

namespace shardprep {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
constexpr int64_t kLittleSpace = int64_t{10} << 30;
// Below it a job of hundreds of GiB takes hours.
constexpr double kSlowBytesPerSecond = 50.0 * (1 << 20);
constexpr absl::Duration kSkewThatWarns = absl::Minutes(1);
constexpr absl::Duration kSkewThatFails = absl::Minutes(5);
constexpr absl::Duration kExpiresSoon = absl::Hours(14 * 24);

Finding Ok(const std::string& subject, const std::string& what) {
  return {.verdict = Verdict::kOk, .subject = subject, .what = what, .advice = ""};
}

Finding Warn(const std::string& subject, const std::string& what, const std::string& advice) {
  return {.verdict = Verdict::kWarn, .subject = subject, .what = what, .advice = advice};
}

Finding Bad(const std::string& subject, const std::string& what, const std::string& advice) {
  return {.verdict = Verdict::kFail, .subject = subject, .what = what, .advice = advice};
}

Finding Bad(const std::string& subject, const absl::Status& status, const std::string& advice) {
  return Bad(
      subject,
      absl::StrCat(absl::StatusCodeToString(status.code()), ": ", std::string(status.message())),
      advice);
}

// Byte i of the large object: neither constant nor periodic in a chunk, so that a range from
// elsewhere, or a part in the place of another, is seen.
uint8_t PatternAt(int64_t i) {
  const auto word = static_cast<uint64_t>(i / 8) * 0x9e3779b97f4a7c15U;
  return static_cast<uint8_t>(word >> (8 * (i % 8)));
}

// -- Stores --

// One run over a store. Steps record what they find and leave no object behind.
class StoreRun {
 public:
  StoreRun(ObjectStore& store, const StoreProbe& probe)
      : store_(store),
        size_bytes_(probe.size_bytes),
        small_(ObjectKey(Probe{probe.id})),
        large_(ObjectKey(Probe{absl::StrCat(probe.id, "-large")})) {}

  std::vector<Finding> Run() {
    if (TryPut()) {
      TryConditionalPut();
      TryOverwrite();
      TryList();
      if (TryStream()) TryRanges();
      TryDelete();
      LookAtSpace();
    } else {
      Add(Warn("other operations", "not tried, since nothing can be written", "put that right"));
    }
    CleanUp();
    return findings_;
  }

 private:
  static constexpr char kFirst[] = "probe, version 1";
  static constexpr char kSecond[] = "probe, version 2, longer";

  void Add(Finding finding) { findings_.push_back(std::move(finding)); }

  bool TryPut() {
    const auto put = store_.Put(small_, kFirst, CommitGate());
    if (!put.ok()) {
      Add(Bad("put", put.status(),
              absl::StrCat("give this process the right to write below ", store_.uri())));
      return false;
    }
    const auto found = store_.Get(small_, 1024);
    if (!found.ok() || *found != kFirst) {
      Add(Bad("put", found.ok() ? "another object came back" : found.status().ToString(),
              "this store does not keep what it takes: use another"));
      return false;
    }
    Add(Ok("put", "an object was written and read back"));
    return true;
  }

  void TryConditionalPut() {
    constexpr char kSubject[] = "conditional put";
    const absl::Status second = store_.PutIfAbsent(small_, kSecond, CommitGate()).status();
    const auto found = store_.Get(small_, 1024);
    if (absl::IsAlreadyExists(second) && found.ok() && *found == kFirst) {
      Add(Ok(kSubject, "an object that is there is not replaced"));
      return;
    }
    Add(Bad(kSubject,
            second.ok() ? "an object that was there was replaced"
                        : absl::StrCat("the second write was answered ", second.ToString()),
            "two jobs could both publish a manifest: never run two at one destination here"));
  }

  void TryOverwrite() {
    constexpr char kSubject[] = "read after write";
    const auto put = store_.Put(small_, kSecond, CommitGate());
    const auto found = put.ok() ? store_.Get(small_, 1024) : put.status();
    const auto info = store_.Head(small_);
    const bool fresh = found.ok() && *found == kSecond && info.ok() &&
                       info->size_bytes == static_cast<int64_t>(sizeof(kSecond)) - 1 &&
                       info->etag == put->etag;
    if (fresh) {
      Add(Ok(kSubject, "the newest version is read at once"));
      return;
    }
    Add(Bad(kSubject,
            !found.ok()        ? found.status().ToString()
            : *found == kFirst ? "an older version came back"
                               : "size or version are not those that were written",
            "resuming relies on it: use a store or mount that is consistent (no attribute cache)"));
  }

  void TryList() {
    constexpr char kSubject[] = "list after write";
    const auto info = store_.Head(small_);
    const auto entries = store_.List(kWorkPrefix);
    if (!entries.ok()) {
      Add(Bad(kSubject, entries.status(), "give this process the right to list the destination"));
      return;
    }
    for (const ObjectEntry& entry : *entries) {
      if (entry.key != small_) continue;
      if (info.ok() && entry.info.size_bytes == info->size_bytes && entry.info.etag == info->etag) {
        Add(Ok(kSubject, "a new object is listed at once, in its version"));
        return;
      }
      Add(Bad(kSubject, "the listing shows another version than the object has",
              "resuming relies on it: use a store that lists consistently"));
      return;
    }
    Add(Bad(kSubject, "an object that was written is not listed",
            "resuming relies on it: use a store that lists consistently"));
  }

  absl::Status Stream() {
    std::vector<uint8_t> buffer(
        static_cast<size_t>(store_.WriteBufferBytes(size_bytes_, kPieceBytes)));
    WriteOptions options;
    options.size_bytes = size_bytes_;
    options.buffer = absl::MakeSpan(buffer);
    SP_ASSIGN_OR_RETURN(const auto writer, store_.Create(large_, options));
    for (int64_t at = 0; at < size_bytes_;) {
      const int64_t size = std::min(kPieceBytes, size_bytes_ - at);
      SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, writer->Reserve(size));
      for (int64_t i = 0; i < size; ++i) out[static_cast<size_t>(i)] = PatternAt(at + i);
      SP_RETURN_IF_ERROR(writer->Advance(size));
      at += size;
    }
    return writer->Commit(CommitGate()).status();
  }

  bool TryStream() {
    const absl::Time begin = absl::Now();
    const absl::Status status = Stream();
    if (!status.ok()) {
      Add(Bad("large object", status,
              "allow multipart uploads, or make room: parts are written this way"));
      return false;
    }
    AddSpeed("large object", "written", absl::Now() - begin);
    return true;
  }

  void AddSpeed(const std::string& subject, const std::string& verb, absl::Duration time) {
    const double seconds = std::max(absl::ToDoubleSeconds(time), 1e-6);
    const double rate = static_cast<double>(size_bytes_) / seconds;
    const std::string what =
        absl::StrFormat("%s %s in %.2f s, %s/s", FormatByteSize(size_bytes_), verb, seconds,
                        FormatByteSize(static_cast<int64_t>(rate)));
    if (rate >= kSlowBytesPerSecond) {
      Add(Ok(subject, what));
    } else {
      Add(Warn(subject, what, "that is slow for hundreds of GiB: look at disk, mount or network"));
    }
  }

  // Every byte, in pieces from the end to the beginning, so that each is a range of its own.
  absl::Status ReadBack() {
    SP_ASSIGN_OR_RETURN(const auto reader, store_.Open(large_));
    if (reader->info().size_bytes != size_bytes_) {
      return absl::DataLossError(
          absl::StrCat(reader->info().size_bytes, " bytes are there, written were ", size_bytes_));
    }
    const int64_t piece = std::max(kPieceBytes, store_.PreferredReadBytes());
    std::vector<uint8_t> bytes(static_cast<size_t>(std::min(piece, size_bytes_)));
    for (int64_t end = size_bytes_; end > 0;) {
      const int64_t begin = std::max<int64_t>(0, end - piece);
      SP_RETURN_IF_ERROR(
          reader->ReadAt(begin, absl::MakeSpan(bytes.data(), static_cast<size_t>(end - begin))));
      for (int64_t i = begin; i < end; ++i) {
        const uint8_t found = bytes[static_cast<size_t>(i - begin)];
        if (found == PatternAt(i)) continue;
        return absl::DataLossError(
            absl::StrCat("byte ", i, " is ", found, ", written was ", PatternAt(i)));
      }
      end = begin;
    }
    return absl::OkStatus();
  }

  void TryRanges() {
    const absl::Time begin = absl::Now();
    const absl::Status status = ReadBack();
    if (status.ok()) {
      AddSpeed("ranged reads", "read back, every byte right", absl::Now() - begin);
    } else {
      Add(Bad("ranged reads", status,
              "this store does not give back what was written: use another"));
    }
  }

  void TryDelete() {
    constexpr char kSubject[] = "delete";
    const absl::Status status = store_.Delete(small_);
    const absl::Status gone = store_.Head(small_).status();
    if (status.ok() && absl::IsNotFound(gone)) {
      Add(Ok(kSubject, "a deleted object is gone at once"));
    } else {
      Add(Bad(kSubject, status.ok() ? "a deleted object is still there" : status.ToString(),
              "journals are deleted at the end of a job: give this process that right"));
    }
  }

  void LookAtSpace() {
    constexpr char kSubject[] = "free space";
    const auto free = store_.FreeBytes();
    if (!free.ok()) {
      Add(Bad(kSubject, free.status(), "jobs look at it before they write"));
    } else if (*free == kUnlimitedBytes) {
      Add(Ok(kSubject, "the store states no limit"));
    } else if (*free < kLittleSpace) {
      Add(Warn(kSubject, FormatByteSize(*free), "compare with what `shardprep plan` needs"));
    } else {
      Add(Ok(kSubject, FormatByteSize(*free)));
    }
  }

  void CleanUp() {
    for (const std::string& key : {small_, large_}) {
      const absl::Status status = store_.Delete(key);
      if (status.ok()) continue;
      // After a put that was refused there is nothing to remove.
      if (absl::IsNotFound(store_.Head(key).status())) continue;
      Add(Warn("clean-up", absl::StrCat(key, " could not be removed: ", status.ToString()),
               "delete it; the next job there does so too"));
    }
  }

  ObjectStore& store_;
  const int64_t size_bytes_;
  const std::string small_;
  const std::string large_;
  std::vector<Finding> findings_;
};

// -- Certificates --

using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

std::vector<Certificate> ReadCertificates(const std::string& path) {
  std::vector<Certificate> certificates;
  const std::unique_ptr<std::FILE, decltype(&std::fclose)> file(std::fopen(path.c_str(), "r"),
                                                                &std::fclose);
  while (file != nullptr) {
    Certificate certificate(PEM_read_X509(file.get(), nullptr, nullptr, nullptr), &X509_free);
    if (certificate == nullptr) break;
    certificates.push_back(std::move(certificate));
  }
  return certificates;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm fields = {};
  if (ASN1_TIME_to_tm(time, &fields) != 1) return absl::InfinitePast();
  return absl::FromTM(fields, absl::UTCTimeZone());
}

std::string SubjectOf(X509* certificate) {
  char text[256] = "";
  X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, text, sizeof(text));
  return text;
}

std::string Day(absl::Time time) { return absl::FormatTime("%Y-%m-%d", time, absl::UTCTimeZone()); }

Finding CheckValidity(X509* certificate, const std::string& path, absl::Time now) {
  const absl::Time begin = TimeOf(X509_get0_notBefore(certificate));
  const absl::Time end = TimeOf(X509_get0_notAfter(certificate));
  const std::string subject = absl::StrCat("certificate ", SubjectOf(certificate));
  if (now < begin) {
    return Bad(subject, absl::StrCat(path, ": valid from ", Day(begin)),
               "look at the clock of this machine and of the one that signed");
  }
  if (now >= end) {
    return Bad(subject, absl::StrCat(path, ": expired on ", Day(end)), "renew it");
  }
  const std::string what = absl::StrCat(path, ": valid until ", Day(end));
  if (end - now < kExpiresSoon) return Warn(subject, what, "renew it; a running process reads it");
  return Ok(subject, what);
}

bool KeyFits(X509* certificate, const std::string& path) {
  const std::unique_ptr<std::FILE, decltype(&std::fclose)> file(std::fopen(path.c_str(), "r"),
                                                                &std::fclose);
  if (file == nullptr) return false;
  const auto no_passphrase = [](char*, int, int, void*) { return -1; };
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_PrivateKey(file.get(), nullptr, no_passphrase, nullptr), &EVP_PKEY_free);
  return key != nullptr && X509_check_private_key(certificate, key.get()) == 1;
}

// Why the first certificate is not signed by the authority; empty when it is. Its dates are looked
// at elsewhere.
std::string WhyUntrusted(const std::vector<Certificate>& own, const std::vector<Certificate>& ca) {
  const std::unique_ptr<X509_STORE, decltype(&X509_STORE_free)> store(X509_STORE_new(),
                                                                      &X509_STORE_free);
  const std::unique_ptr<X509_STORE_CTX, decltype(&X509_STORE_CTX_free)> context(
      X509_STORE_CTX_new(), &X509_STORE_CTX_free);
  const auto drop = [](STACK_OF(X509) * stack) { sk_X509_free(stack); };
  const std::unique_ptr<STACK_OF(X509), decltype(drop)> chain(sk_X509_new_null(), drop);
  SP_CHECK(store != nullptr && context != nullptr && chain != nullptr);
  for (const Certificate& certificate : ca) X509_STORE_add_cert(store.get(), certificate.get());
  for (size_t i = 1; i < own.size(); ++i) sk_X509_push(chain.get(), own[i].get());
  X509_STORE_set_flags(store.get(), X509_V_FLAG_NO_CHECK_TIME | X509_V_FLAG_PARTIAL_CHAIN);
  SP_CHECK(X509_STORE_CTX_init(context.get(), store.get(), own[0].get(), chain.get()) == 1);
  if (X509_verify_cert(context.get()) == 1) return "";
  return X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get()));
}

}  // namespace

std::string FindingLine(const Finding& finding) {
  static constexpr const char* kWords[] = {"ok", "warn", "fail"};
  return absl::StrFormat("%-4s  %-18s  %s%s%s", kWords[static_cast<int>(finding.verdict)],
                         finding.subject, finding.what,
                         finding.advice.empty() ? "" : "; to do: ", finding.advice);
}

std::vector<Finding> ProbeStore(ObjectStore& store, const StoreProbe& probe) {
  return StoreRun(store, probe).Run();
}

Finding CheckClock(absl::Time ours, absl::Time servers) {
  const absl::Duration ahead = ours - servers;
  const absl::Duration skew = absl::AbsDuration(ahead);
  const std::string what =
      skew < absl::Seconds(2)
          ? "agrees with the server's"
          : absl::StrCat(absl::FormatDuration(absl::Trunc(skew, absl::Seconds(1))),
                         ahead > absl::ZeroDuration() ? " ahead of" : " behind", " the server's");
  if (skew < kSkewThatWarns) return Ok("clock", what);
  const std::string advice =
      "set it by NTP: S3 refuses what is 15 minutes off, and certificates "
      "seem to be out of their time";
  return skew < kSkewThatFails ? Warn("clock", what, advice) : Bad("clock", what, advice);
}

std::vector<Finding> CheckCertificates(const TlsFiles& tls, absl::Time now) {
  std::vector<Finding> findings;
  const std::vector<Certificate> own = ReadCertificates(tls.certificate);
  const std::vector<Certificate> ca = ReadCertificates(tls.ca);
  for (const auto& [path, certificates] :
       {std::pair(&tls.certificate, &own), std::pair(&tls.ca, &ca)}) {
    if (certificates->empty()) {
      findings.push_back(Bad("certificates", absl::StrCat("no PEM certificate in ", *path),
                             "name a file that this user can read"));
    }
    for (const Certificate& certificate : *certificates) {
      findings.push_back(CheckValidity(certificate.get(), *path, now));
    }
  }
  if (own.empty() || ca.empty()) return findings;
  if (KeyFits(own[0].get(), tls.key)) {
    findings.push_back(Ok("private key", absl::StrCat("fits ", tls.certificate)));
  } else {
    findings.push_back(Bad("private key",
                           absl::StrCat(tls.key, " is not the key of ", tls.certificate),
                           "give the two files of one pair, the key without passphrase"));
  }
  const std::string why = WhyUntrusted(own, ca);
  findings.push_back(why.empty()
                         ? Ok("authority", absl::StrCat(tls.ca, " signed ", tls.certificate))
                         : Warn("authority",
                                absl::StrCat(tls.ca, " did not sign ", tls.certificate, ": ", why),
                                "right only where the two ends have different authorities"));
  return findings;
}

Finding CheckTarget(const AlignmentPolicy& policy, const std::string& backend,
                    const std::string& activation, const std::string& architecture,
                    const std::string& profile) {
  constexpr char kSubject[] = "target";
  const auto check = [&]() -> absl::StatusOr<std::string> {
    SP_ASSIGN_OR_RETURN(const BackendChoice choice, policy.ResolveBackend(backend, architecture));
    SP_ASSIGN_OR_RETURN(const AlignmentDecision rule,
                        policy.Decide(choice.backend, activation, architecture));
    SP_ASSIGN_OR_RETURN(const ProfileId id, ParseProfile(profile));
    SP_RETURN_IF_ERROR(policy.CheckProfile(choice.backend, activation, architecture, id));
    return absl::StrCat(choice.backend, "/", activation, " on ", architecture, " reads ", profile,
                        ", rule ", rule.rule_id, " aligns to ", rule.intermediate.elements());
  };
  const absl::StatusOr<std::string> what = check();
  if (what.ok()) return Ok(kSubject, *what);
  return Bad(kSubject, what.status(),
             "choose another backend, architecture or profile, or replace "
             "the policy");
}

Finding CheckDevice(const std::string& device) {
  constexpr char kSubject[] = "device";
  const auto chosen = OpenDevice(device, DefaultThreads());
  if (!chosen.ok()) {
    return Bad(kSubject, chosen.status(), "--device cpu gives the same bytes without a GPU");
  }
  return Ok(kSubject, absl::StrCat(chosen->shuffler->name(), ": ", chosen->reason));
}

}  // namespace shardprep
