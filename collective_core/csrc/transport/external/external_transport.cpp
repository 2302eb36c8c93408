#include "transport/external/external_transport.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>

namespace cc {
namespace {

// MPI counts in 32 bits, and whoever waits for one piece hears of a death within it.
constexpr uint64_t piece_bytes = uint64_t(64) << 20;
constexpr int64_t most_rows = std::numeric_limits<int32_t>::max();
// Questions whether a transfer is done, each of which also moves it on, between looks at the other ranks.
constexpr int polls_between_checks = 64;
constexpr size_t error_text = 1024;

// What the library is asked to do for a type that may not be one of its own. Sums of 8 and 16 bits go as 32: Open MPI
// 4.1 adds them with instructions that saturate where the processor has AVX, and without them they wrap.
struct Plain {
  DType dtype;
  ReduceOp reduce;
};
Plain plain(const Reduction& reduction) {
  const ReduceOp op = reduction.op == ReduceOp::average ? ReduceOp::sum : reduction.op;
  switch (reduction.dtype) {
    case DType::f16:
    case DType::bf16:
      return {DType::f32, op};
    case DType::u8:
    case DType::i8:
    case DType::u16:
    case DType::i16:
      if (op == ReduceOp::min || op == ReduceOp::max) return {reduction.dtype, op};
      return {DType::u32, op};
    case DType::boolean:
      return {DType::u8, op == ReduceOp::min || op == ReduceOp::product ? ReduceOp::min : ReduceOp::max};
    default:
      return {reduction.dtype, op};
  }
}

// Memory for a transfer. Where an exception ends the transfer, MPI may go on using it: then it is never given back.
class LentBuffer {
 public:
  explicit LentBuffer(uint64_t bytes) : memory_(bytes ? memory_for(bytes) : nullptr) {}
  LentBuffer(const LentBuffer&) = delete;
  LentBuffer& operator=(const LentBuffer&) = delete;
  ~LentBuffer() {
    if (std::uncaught_exceptions() > exceptions_) static_cast<void>(memory_.release());
  }
  char* data() { return memory_.get(); }

 private:
  std::unique_ptr<char[]> memory_;
  const int exceptions_ = std::uncaught_exceptions();
};

// n integers of another width: the low bits, which are all that a sum or a product keeps.
template <class From, class To>
void convert(void* out, const void* in, size_t n) {
  for (size_t i = 0; i < n; ++i) static_cast<To*>(out)[i] = static_cast<To>(static_cast<const From*>(in)[i]);
}

void refuse_too_many(int64_t rows) {
  if (rows <= most_rows) return;
  throw Failure(Fault::invalid, "MPI counts rows in 32 bits, and a rank would have " + std::to_string(rows) +
                                    ": reshape the tensor to fewer, longer rows");
}

}  // namespace

void ExternalTransports::use(Device device, cc_start start, cc_test test) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (start) known_[device] = {start, test};
  if (!start) known_.erase(device);
  uint32_t devices = 0;
  for (const auto& entry : known_) devices |= 1U << static_cast<unsigned>(entry.first);
  devices_ = devices;
}

std::unique_ptr<ExternalTransport> ExternalTransports::of(Device device, int process_set) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(registered_as(device));
  if (found == known_.end()) return nullptr;
  return std::make_unique<ExternalTransport>(process_set, found->second.first, found->second.second);
}

void ExternalTransport::run_into(Operation& operation, Group& group, const cc_transfer& transfer,
                                 Deadline& deadline) const {
  try {
    run(group, transfer, deadline);
  } catch (...) {
    static_cast<void>(operation.gathered.release());  // as of LentBuffer
    throw;
  }
}

void ExternalTransport::run(Group& group, const cc_transfer& transfer, Deadline& deadline) const {
  char error[error_text] = "";
  const auto fail = [&] {
    throw Failure(Fault::internal, group.topology().describe(group.topology().rank) + ": " + error,
                  {group.topology().rank});
  };
  if (start_(&transfer, error, sizeof error) != 0) fail();
  for (int polls = 1;; ++polls) {
    const int32_t state = test_(transfer.process_set, error, sizeof error);
    if (state < 0) fail();
    if (state > 0) break;
    if (polls % polls_between_checks == 0) {
      group.failure_detector().check();
      // Whom it waits for, the library does not say.
      if (group.topology().is_leader() && group.is_warning_due(deadline)) group.warn(" for its data to move", deadline);
      if (deadline.passed())
        throw Failure(Fault::timeout, "the data has not moved within the time that COLLECTIVE_TIMEOUT sets");
    }
    sched_yield();
  }
  deadline.extend();
}

void ExternalTransport::allreduce(Group& group, const Operation& operation, Deadline& deadline) const {
  const Header& header = operation.header;
  const Reduction reduction = reduction_of(header, operation.contributors);
  const Plain carried = plain(reduction);
  const size_t element = size_of(header.dtype), accumulator = accumulator_size_of(header.dtype);
  const bool as_it_is = carried.dtype == header.dtype && header.prescale == 1.0;
  const bool finished = as_it_is && reduction.op != ReduceOp::average && header.postscale == 1.0;
  const bool widened = size_of(carried.dtype) > accumulator;
  const uint64_t most = piece_bytes / size_of(carried.dtype);
  const uint64_t longest = std::min(most, header.count);
  LentBuffer staging(as_it_is ? 0 : longest * accumulator);
  LentBuffer wide(widened ? longest * size_of(carried.dtype) : 0);

  for (uint64_t begin = 0; begin < header.count; begin += most) {
    const uint64_t length = std::min(most, header.count - begin);
    const void* input = static_cast<const char*>(operation.input) + begin * element;
    void* output = static_cast<char*>(operation.output) + begin * element;
    void* sum = as_it_is ? output : staging.data();
    if (!as_it_is) kernels().accumulate(reduction, sum, true, &input, 1, length);
    cc_transfer transfer{};
    transfer.process_set = process_set_;
    transfer.kind = static_cast<int32_t>(Kind::allreduce);
    transfer.dtype = static_cast<int32_t>(carried.dtype);
    transfer.reduce = static_cast<int32_t>(carried.reduce);
    transfer.input = widened ? wide.data() : as_it_is ? input : sum;
    transfer.output = widened ? wide.data() : sum;
    transfer.count = length;
    if (widened)
      (accumulator == 1 ? convert<uint8_t, uint32_t> : convert<uint16_t, uint32_t>)(wide.data(), sum, length);
    run(group, transfer, deadline);
    if (widened)
      (accumulator == 1 ? convert<uint32_t, uint8_t> : convert<uint32_t, uint16_t>)(sum, wide.data(), length);
    if (!finished) kernels().finish(reduction, output, sum, length);
  }
}

void ExternalTransport::reducescatter(Group& group, const Operation& operation, Deadline& deadline) const {
  LentBuffer sum(operation.header.bytes());
  reduce_whole(group, operation, sum.data(), [&](const Operation& whole) { allreduce(group, whole, deadline); });
}

void ExternalTransport::broadcast(Group& group, const Operation& operation, Deadline& deadline) const {
  const Header& header = operation.header;
  const bool is_root = header.root == group.topology().rank;
  for (uint64_t begin = 0; begin < header.bytes(); begin += piece_bytes) {
    cc_transfer transfer{};
    transfer.process_set = process_set_;
    transfer.kind = static_cast<int32_t>(Kind::broadcast);
    transfer.root = header.root;
    transfer.input = is_root ? static_cast<const char*>(operation.input) + begin : nullptr;
    transfer.output = is_root ? nullptr : static_cast<char*>(operation.output) + begin;
    transfer.count = std::min(piece_bytes, header.bytes() - begin);
    run(group, transfer, deadline);
  }
}

void ExternalTransport::allgather(Group& group, Operation& operation, Deadline& deadline) const {
  refuse_too_many(std::accumulate(operation.received.begin(), operation.received.end(), int64_t(0)));
  if (operation.gathered_bytes == 0) return;
  cc_transfer transfer{};
  transfer.process_set = process_set_;
  transfer.kind = static_cast<int32_t>(Kind::allgather);
  transfer.input = operation.input;
  transfer.output = operation.gathered.get();
  transfer.received = operation.received.data();
  transfer.row_bytes = operation.header.row_bytes();
  run_into(operation, group, transfer, deadline);
}

void ExternalTransport::alltoall(Group& group, Operation& operation, const Splits& splits, Deadline& deadline) const {
  const size_t rank = static_cast<size_t>(group.topology().rank);
  bool nothing = true;
  for (size_t r = 0; r < splits.size(); ++r) {  // the same verdict on every rank
    int64_t sent = 0, received = 0;
    for (size_t other = 0; other < splits.size(); ++other) {
      sent += splits[r][other];
      received += splits[other][r];
    }
    refuse_too_many(std::max(sent, received));
    nothing = nothing && sent == 0;
  }
  if (nothing || operation.header.row_bytes() == 0) return;
  cc_transfer transfer{};
  transfer.process_set = process_set_;
  transfer.kind = static_cast<int32_t>(Kind::alltoall);
  transfer.input = operation.input;
  transfer.output = operation.gathered.get();
  transfer.sent = splits[rank].data();
  transfer.received = operation.received.data();
  transfer.row_bytes = operation.header.row_bytes();
  run_into(operation, group, transfer, deadline);
}

void ExternalTransport::on_gpu(Group& group, Operation& operation, const std::vector<const Header*>& headers,
                               Deadline& deadline) const {
  const Header& header = operation.header;
  const Topology& topology = group.topology();
  std::vector<int64_t> sent;
  if (header.kind == Kind::alltoall) {
    const Splits splits = splits_of_all(topology, headers);
    sent = splits[static_cast<size_t>(topology.rank)];
    for (const auto& theirs : splits) operation.received.push_back(theirs[static_cast<size_t>(topology.rank)]);
  } else if (header.kind == Kind::allgather) {
    for (const Header* theirs : headers) operation.received.push_back(theirs->dims[0]);  // 0 of one that has joined
  } else if (header.kind == Kind::reducescatter) {
    for (int rank = 0; rank < topology.size; ++rank)
      sent.push_back(static_cast<int64_t>(rows_of(static_cast<uint64_t>(header.dims[0]), rank, topology.size).length));
  }
  // The same verdict on every rank.
  if (std::all_of(headers.begin(), headers.end(), [](const Header* theirs) { return theirs->bytes() == 0; })) return;

  cc_transfer transfer{};
  transfer.process_set = process_set_;
  transfer.kind = static_cast<int32_t>(header.kind);
  transfer.dtype = static_cast<int32_t>(header.dtype);
  transfer.reduce = static_cast<int32_t>(header.reduce);
  transfer.root = header.root;
  transfer.contributors = operation.contributors;
  transfer.tag = operation.tag;
  transfer.input = operation.input;
  transfer.output = operation.output;
  transfer.count = is_reduction(header.kind) ? header.count : header.bytes();
  transfer.row_bytes = header.row_bytes();
  transfer.sent = sent.empty() ? nullptr : sent.data();
  transfer.received = operation.received.empty() ? nullptr : operation.received.data();
  run(group, transfer, deadline);
}

}  // namespace cc
