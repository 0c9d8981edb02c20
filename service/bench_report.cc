#include "service/bench_report.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "service/plan_report.h"
#include "service/progress_line.h"
#include "workers/stage.h"

namespace shardprep {
namespace {

constexpr char kWait[] = "wait";

double RateOf(const BenchResult& result, const std::string& name) {
  for (const Roofline& roofline : result.rooflines) {
    if (roofline.name == name) return roofline.all_threads;
  }
  SP_CHECK(false);
  return 0;
}

double Share(double part, double whole) { return whole > 0 ? part / whole : 0; }

StageFigure FigureOf(const BenchResult& result, const BenchRun& run, Stage stage) {
  StageFigure figure;
  figure.stage = StageName(stage);
  const auto found = run.stage_seconds.find(figure.stage);
  if (found != run.stage_seconds.end()) figure.seconds = found->second / result.threads;
  const auto at = [&](int64_t bytes, const char* roofline) {
    return static_cast<double>(bytes) / RateOf(result, roofline);
  };
  switch (stage) {
    case Stage::kRead:
      figure.bytes = run.bytes_read;
      figure.roofline = "file_read";
      figure.roofline_seconds = at(run.bytes_read, "file_read");
      break;
    case Stage::kShuffle:
      figure.bytes = run.bytes_written;
      figure.roofline = "weight_shuffle";
      figure.roofline_seconds = at(run.bytes_written, "weight_shuffle");
      break;
    case Stage::kDigest:  // SHA-256 of what is written, CRC-32C of what is read
      figure.bytes = run.bytes_written;
      figure.roofline = "sha256+crc32c";
      figure.roofline_seconds = at(run.bytes_written, "sha256") + at(run.bytes_read, "crc32c");
      break;
    case Stage::kWrite:
      figure.bytes = run.bytes_written;
      figure.roofline = "file_write";
      figure.roofline_seconds = at(run.bytes_written, "file_write");
      break;
  }
  return figure;
}

const StageFigure& Longest(const std::vector<StageFigure>& stages) {
  return *std::max_element(
      stages.begin(), stages.end(),
      [](const StageFigure& a, const StageFigure& b) { return a.seconds < b.seconds; });
}

double RooflineSeconds(const std::vector<StageFigure>& stages) {
  return std::accumulate(
      stages.begin(), stages.end(), 0.0,
      [](double sum, const StageFigure& figure) { return sum + figure.roofline_seconds; });
}

// The median over the runs.
template <typename Value>
double MedianOf(const BenchResult& result, Value value) {
  std::vector<double> values;
  values.reserve(result.runs.size());
  for (const BenchRun& run : result.runs) values.push_back(value(run));
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double CopySeconds(const BenchResult& result) {
  return MedianOf(result, [](const BenchRun& run) { return run.copy_seconds; });
}

double WholeSeconds(const BenchResult& result) {
  return MedianOf(result, [](const BenchRun& run) { return run.start_seconds + run.job_seconds; });
}

std::string Rate(double bytes_per_second) {
  return absl::StrFormat("%.2f GB/s", bytes_per_second / 1e9);
}
std::string Seconds(double seconds) { return absl::StrFormat("%.3f s", seconds); }
std::string Percent(double share) { return absl::StrFormat("%.0f %%", 100 * share); }

std::string RooflineTable(const BenchResult& result) {
  std::vector<std::vector<std::string>> rows = {
      {"roofline", "one thread", absl::StrCat(result.threads, " threads")}};
  for (const Roofline& roofline : result.rooflines) {
    rows.push_back({roofline.name, Rate(roofline.one_thread), Rate(roofline.all_threads)});
  }
  return AlignedTable(rows, 1);
}

std::string StageTable(const std::vector<StageFigure>& stages) {
  std::vector<std::vector<std::string>> rows = {
      {"stage", "bound by", "time", "rate", "at roofline", "of roofline"}};
  for (const StageFigure& figure : stages) {
    if (figure.roofline.empty()) {
      rows.push_back({figure.stage, "", Seconds(figure.seconds), "", "", ""});
      continue;
    }
    rows.push_back({figure.stage, figure.roofline, Seconds(figure.seconds),
                    Rate(Share(static_cast<double>(figure.bytes), figure.seconds)),
                    Seconds(figure.roofline_seconds),
                    Percent(Share(figure.roofline_seconds, figure.seconds))});
  }
  return AlignedTable(rows, 2);
}

}  // namespace

const BenchRun& MedianRun(const BenchResult& result) {
  std::vector<const BenchRun*> runs;
  runs.reserve(result.runs.size());
  for (const BenchRun& run : result.runs) runs.push_back(&run);
  const auto middle = runs.begin() + static_cast<int64_t>(runs.size() / 2);
  std::nth_element(runs.begin(), middle, runs.end(), [](const BenchRun* a, const BenchRun* b) {
    return a->job_seconds < b->job_seconds;
  });
  return **middle;
}

std::vector<StageFigure> StageFigures(const BenchResult& result) {
  const BenchRun& run = MedianRun(result);
  std::vector<StageFigure> stages;
  double left = run.job_seconds;
  for (const Stage stage : kStages) {
    stages.push_back(FigureOf(result, run, stage));
    left -= stages.back().seconds;
  }
  stages.push_back({.stage = kWait, .seconds = left});
  return stages;
}

std::string BenchText(const BenchResult& result) {
  const BenchRun& run = MedianRun(result);
  const std::vector<StageFigure> stages = StageFigures(result);
  const double copy = CopySeconds(result);
  std::string text = absl::StrCat("rooflines, medians of all repetitions\n", RooflineTable(result));
  absl::StrAppend(
      &text, "job, median of ", result.runs.size(), "\n",
      AlignedRows(
          {{"source", absl::StrCat(result.source, ", ", ExactSize(result.source_bytes))},
           {"ranks", absl::StrCat(result.ranks)},
           {"device", result.device},
           {"read", absl::StrFormat("%s, %.3f of what is needed", ExactSize(run.bytes_read),
                                    Share(static_cast<double>(run.bytes_read),
                                          static_cast<double>(result.needed_bytes)))},
           {"written", ExactSize(run.bytes_written)},
           {"start", Seconds(run.start_seconds)},
           {"job", Seconds(run.job_seconds)},
           {"durable copy", Seconds(copy)},
           {"start and job / copy", absl::StrFormat("%.2f", Share(WholeSeconds(result), copy))}}),
      "stages of that job, its time shared out over them\n", StageTable(stages));
  absl::StrAppend(
      &text, absl::StrFormat("bound by %s; all stages at their rooflines would take %s, %s of the "
                             "job's time\n",
                             Longest(stages).stage, Seconds(RooflineSeconds(stages)),
                             Percent(Share(RooflineSeconds(stages), run.job_seconds))));
  return text;
}

std::string BenchJson(const BenchResult& result) {
  const BenchRun& run = MedianRun(result);
  const std::vector<StageFigure> figures = StageFigures(result);
  nlohmann::ordered_json rooflines;
  for (const Roofline& roofline : result.rooflines) {
    rooflines[roofline.name] = {{"one_thread_bytes_per_second", roofline.one_thread},
                                {"all_threads_bytes_per_second", roofline.all_threads}};
  }
  nlohmann::ordered_json stages;
  for (const StageFigure& figure : figures) {
    const auto bytes = static_cast<double>(figure.bytes);
    stages[figure.stage] = {{"seconds", figure.seconds},
                            {"bytes", figure.bytes},
                            {"bytes_per_second", Share(bytes, figure.seconds)},
                            {"roofline", figure.roofline},
                            {"roofline_seconds", figure.roofline_seconds},
                            {"of_roofline", Share(figure.roofline_seconds, figure.seconds)}};
  }
  nlohmann::ordered_json job_seconds = nlohmann::ordered_json::array();
  nlohmann::ordered_json copy_seconds = nlohmann::ordered_json::array();
  for (const BenchRun& each : result.runs) {
    job_seconds.push_back(each.job_seconds);
    copy_seconds.push_back(each.copy_seconds);
  }
  const nlohmann::ordered_json json = {
      {"source", result.source},
      {"source_bytes", result.source_bytes},
      {"needed_bytes", result.needed_bytes},
      {"ranks", result.ranks},
      {"threads", result.threads},
      {"device", result.device},
      {"rooflines", rooflines},
      {"job",
       {{"start_seconds", run.start_seconds},
        {"seconds", run.job_seconds},
        {"bytes_read", run.bytes_read},
        {"bytes_written", run.bytes_written},
        {"bound_by", Longest(figures).stage},
        {"roofline_seconds", RooflineSeconds(figures)},
        {"stages", stages}}},
      {"copy_seconds", CopySeconds(result)},
      {"job_per_copy", Share(WholeSeconds(result), CopySeconds(result))},
      {"all_job_seconds", job_seconds},
      {"all_copy_seconds", copy_seconds}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace shardprep
