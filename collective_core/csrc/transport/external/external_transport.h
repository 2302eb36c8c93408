// A library that moves whole tensors in place of the engine, behind the two functions of transfer.h: MPI for tensors in
// host memory, NCCL for those of GPUs. What it is asked to do is in algorithms/external.cpp.
//
// A transfer is started and then polled until it is done, with a look at the other ranks in between: a rank that dies
// is named here as elsewhere. The library may then still hold the buffers, so it must not be called again, and they are
// never given back.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/deadline.h"
#include "base/topology.h"
#include "base/types.h"
#include "transport/external/transfer.h"

namespace cc {

class ExternalTransport {
 public:
  ExternalTransport(int process_set, cc_start start, cc_test test)
      : process_set_(process_set), start_(start), test_(test) {}

  // Of an ordered transfer, before it is run: this rank's wish for its number.
  uint64_t propose(const Topology& topology) const;
  // After that, when it fails before its end: others, behind it, wait for it no more.
  void withdraw(uint64_t order) const;
  // From its start to its end. The process set is filled in here. `check` is called now and then, and throws when
  // another rank has failed.
  void run(const Topology& topology, cc_transfer transfer, Deadline& deadline,
           const std::function<void()>& check) const;

 private:
  [[noreturn]] static void fail(const Topology& topology, const char* error);

  int process_set_;
  cc_start start_;
  cc_test test_;
};

// Which of them moves what, for all process sets.
class ExternalTransports {
 public:
  void use(Device device, cc_start start, cc_test test);
  std::unique_ptr<ExternalTransport> of(Device device, int process_set) const;  // null: the engine itself
  // Asked before every operation: without the mutex.
  bool exist_for(Device device) const { return (devices_ >> static_cast<int>(registered_as(device)) & 1U) != 0; }

 private:
  static Device registered_as(Device device) { return device == Device::gpu ? Device::host : device; }

  mutable std::mutex mutex_;
  std::atomic<uint32_t> devices_{0};  // that are in known_, as bits
  std::map<Device, std::pair<cc_start, cc_test>> known_;
};

}  // namespace cc
