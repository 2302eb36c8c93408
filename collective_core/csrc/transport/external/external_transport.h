// The data phases over an external transport, a library behind the two functions of cc_use_carrier (c_api.h): MPI for
// tensors in host memory, NCCL for those of GPUs.
//
// The negotiation stays ours, and with it errors, order, joined ranks, deadlines and the recorder; so do small tensors,
// which have travelled by the time that all agree. Sums are the library's: its order, its bits. Types that it does not
// know are ours: half types go as float32, booleans as 0 and 1 under minimum and maximum; factors and the division of
// an average are applied here, by the same kernels as elsewhere.
//
// A transfer is started and then asked for until it is done, with a look at the other ranks in between: a rank that
// dies is named here as elsewhere. The library may then still hold the buffers, so it must not be called again, and
// they are never given back.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "algorithms/collectives.h"
#include "api/c_api.h"

namespace cc {

class ExternalTransport {
 public:
  ExternalTransport(int process_set, cc_start start, cc_test test)
      : process_set_(process_set), start_(start), test_(test) {}

  void allreduce(Group& group, const Operation& operation, Deadline& deadline) const;
  void reducescatter(Group& group, const Operation& operation, Deadline& deadline) const;
  void broadcast(Group& group, const Operation& operation, Deadline& deadline) const;
  // Into operation.gathered, which is there; `rows` of each rank.
  void allgather(Group& group, Operation& operation, Deadline& deadline) const;
  void alltoall(Group& group, Operation& operation, const Splits& splits, Deadline& deadline) const;
  // Any of these in the memory of a GPU: the library does all of it, and has the memory for what is received.
  // headers: of all ranks.
  void on_gpu(Group& group, Operation& operation, const std::vector<const Header*>& headers, Deadline& deadline) const;

 private:
  void run(Group& group, const cc_transfer& transfer, Deadline& deadline) const;
  void run_into(Operation& operation, Group& group, const cc_transfer& transfer, Deadline& deadline) const;

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
