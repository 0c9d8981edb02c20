// A job as people read it. Pure.
#pragma once

#include <string>
#include <vector>

#include "service/progress_line.h"
#include "shardprep/v1/prep.pb.h"

namespace shardprep {

// "PENDING", "RUNNING", ...; "CANCELLING" for a job that waits for its last lease to be closed.
std::string JobStateText(const v1::PrepJob& job);

// For the progress line: bytes written, and rank tasks in the note.
ProgressState JobProgress(const v1::PrepJob& job);

// What a job that was created is about to do: a line; of several targets one more for each.
std::vector<std::string> JobAnnouncement(const v1::PrepJob& job);

// Everything that matters of one job, in lines. Ends with a line feed.
std::string JobReport(const v1::PrepJob& job);

// One line for each job, below a head line; "no jobs" when there are none.
std::string JobTable(const std::vector<v1::PrepJob>& jobs);

// What the committed manifests of a job say in short, in lines; of several, each below its target.
std::string ManifestReport(const v1::PrepJob& job);

}  // namespace shardprep
