// What a benchmark of this machine found, as people and as programs read it. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "workers/roofline.h"

namespace shardprep {

// One job from start to end. Seconds are wall time, but for the stages.
struct BenchRun {
  double start_seconds = 0;  // until the controller takes jobs
  double job_seconds = 0;    // from creating the job to its end
  double copy_seconds = 0;   // of the durable copy of the source that was timed beside it
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  std::map<std::string, double> stage_seconds;  // over all threads, as in v1::Progress
};

struct BenchResult {
  std::string source;
  int64_t source_bytes = 0;
  int64_t needed_bytes = 0;  // of the source, by the plan
  int64_t ranks = 0;
  int threads = 0;
  std::string device;
  std::vector<Roofline> rooflines;  // all of kRooflineNames
  std::vector<BenchRun> runs;       // at least one, in the order they were made
};

// One stage of the median job.
struct StageFigure {
  std::string stage;   // read, shuffle, digest, write; wait for what is left of the job's time
  double seconds = 0;  // of the job's wall time: the threads' time over their number
  int64_t bytes = 0;
  std::string roofline;         // what bounds the stage, empty for wait
  double roofline_seconds = 0;  // that the stage would take at its roofline
};

// The run whose job time is the median.
const BenchRun& MedianRun(const BenchResult& result);

// Stages of the median run in the order of the data path, wait last. Their seconds add up to the
// job's.
std::vector<StageFigure> StageFigures(const BenchResult& result);

// Tables. Ends with a line feed.
std::string BenchText(const BenchResult& result);

// The same as one JSON object, indented, without a line feed at the end. README.md names the
// fields.
std::string BenchJson(const BenchResult& result);

}  // namespace shardprep
