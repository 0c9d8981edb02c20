#include "service/work_pool.h"

#include <pthread.h>

#include <utility>

namespace shardprep {

WorkPool::WorkPool(const std::string& name, int threads, int max_waiting)
    : max_waiting_(static_cast<size_t>(max_waiting)) {
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { Run(); });
    ::pthread_setname_np(threads_.back().native_handle(), name.c_str());
  }
}

bool WorkPool::Submit(std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  if (stopped_ || waiting_.size() >= max_waiting_) return false;
  waiting_.push_back(std::move(work));
  return true;
}

void WorkPool::Run() {
  while (true) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopped_ || !waiting_.empty();
      };
      mu_.Await(absl::Condition(&ready));
      if (waiting_.empty()) return;
      work = std::move(waiting_.front());
      waiting_.pop_front();
    }
    work();
  }
}

void WorkPool::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace shardprep
