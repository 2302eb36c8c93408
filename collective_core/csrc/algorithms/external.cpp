// The data phases over an external transport (external_transport.h).
//
// The negotiation stays ours, and with it errors, order, joined ranks, deadlines and the recorder; so do small tensors,
// which have travelled by the time that all agree. Sums are the library's: its order, its bits. Types that it does not
// know are ours: half types go as float32, booleans as 0 and 1 under minimum and maximum; factors and the division of
// an average are applied here, by the same kernels as elsewhere.
#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "algorithms/collectives.h"
#include "base/memory.h"
#include "transport/external/external_transport.h"

namespace cc {
namespace {

// MPI counts in 32 bits, and whoever waits for one piece hears of a death within it.
constexpr uint64_t piece_bytes = uint64_t(64) << 20;
constexpr int64_t max_rows = std::numeric_limits<int32_t>::max();

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
  if (rows <= max_rows) return;
  throw Failure(Fault::invalid, "MPI counts rows in 32 bits, and a rank would have " + std::to_string(rows) +
                                    ": reshape the tensor to fewer, longer rows");
}

void run(const DataPhase& phase, const cc_transfer& transfer) {
  phase.external->run(phase.topology(), transfer, phase.deadline, [&phase] {
    phase.group.failure_detector().check();
    // Whom it waits for, the library does not say.
    if (phase.topology().is_leader() && phase.group.is_warning_due(phase.deadline))
      phase.group.warn(" for its data to move", phase.deadline);
  });
}

// The number of an ordered transfer. A second exchange, of which no rank waits for another's program: what a rank
// proposes in it is settled soon.
uint64_t agree_on_order(const DataPhase& phase, uint64_t proposed) {
  Header proposal{};
  proposal.kind = Kind::barrier;
  proposal.name_hash = proposed;
  phase.deadline.extend();  // all ranks have come
  phase.exchange.run_again(&proposal, phase.deadline);
  uint64_t order = 0;
  for (int rank = 0; rank < phase.topology().size; ++rank)
    order = std::max(order, phase.group.memory().header_of(proposal.sequence, rank)->name_hash);
  return order;
}

void run_in_order(const DataPhase& phase, cc_transfer transfer) {
  const uint64_t proposed = phase.external->propose(phase.topology());
  try {
    transfer.order = agree_on_order(phase, proposed);
    run(phase, transfer);
  } catch (...) {
    phase.external->withdraw(proposed);
    throw;
  }
}

void run_into_gathered(const DataPhase& phase, const cc_transfer& transfer) {
  try {
    run(phase, transfer);
  } catch (...) {
    static_cast<void>(phase.operation.gathered.release());  // as of LentBuffer
    throw;
  }
}

}  // namespace

void external_allreduce(const DataPhase& phase) {
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  const Reduction reduction = reduction_of(operation);
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
    transfer.kind = static_cast<int32_t>(Kind::allreduce);
    transfer.dtype = static_cast<int32_t>(carried.dtype);
    transfer.reduce = static_cast<int32_t>(carried.reduce);
    transfer.input = widened ? wide.data() : as_it_is ? input : sum;
    transfer.output = widened ? wide.data() : sum;
    transfer.count = length;
    if (widened)
      (accumulator == 1 ? convert<uint8_t, uint32_t> : convert<uint16_t, uint32_t>)(wide.data(), sum, length);
    run(phase, transfer);
    if (widened)
      (accumulator == 1 ? convert<uint32_t, uint8_t> : convert<uint32_t, uint16_t>)(sum, wide.data(), length);
    if (!finished) kernels().finish(reduction, output, sum, length);
  }
}

void external_reducescatter(const DataPhase& phase) {
  LentBuffer sum(sum_bytes_of(phase.header()));
  reduce_by_allreduce(phase, sum.data(), external_allreduce);
}

void external_broadcast(const DataPhase& phase) {
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  const bool is_root = header.root == phase.topology().rank;
  for (uint64_t begin = 0; begin < header.bytes(); begin += piece_bytes) {
    cc_transfer transfer{};
    transfer.kind = static_cast<int32_t>(Kind::broadcast);
    transfer.root = header.root;
    transfer.input = is_root ? static_cast<const char*>(operation.input) + begin : nullptr;
    transfer.output = is_root ? nullptr : static_cast<char*>(operation.output) + begin;
    transfer.count = std::min(piece_bytes, header.bytes() - begin);
    run(phase, transfer);
  }
}

void external_allgather(const DataPhase& phase) {
  Operation& operation = phase.operation;
  begin_allgather(phase);
  refuse_too_many(std::accumulate(operation.received.begin(), operation.received.end(), int64_t(0)));
  if (operation.gathered_bytes == 0) return;
  cc_transfer transfer{};
  transfer.kind = static_cast<int32_t>(Kind::allgather);
  transfer.input = operation.input;
  transfer.output = operation.received_bytes();
  transfer.received = operation.received.data();
  transfer.row_bytes = operation.header.row_bytes();
  run_into_gathered(phase, transfer);
}

void external_alltoall(const DataPhase& phase) {
  Operation& operation = phase.operation;
  const size_t rank = static_cast<size_t>(phase.topology().rank);
  const Splits splits = splits_of_all(phase.topology(), phase.headers);
  begin_alltoall(phase, splits);
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
  transfer.kind = static_cast<int32_t>(Kind::alltoall);
  transfer.input = operation.input;
  transfer.output = operation.received_bytes();
  transfer.sent = splits[rank].data();
  transfer.received = operation.received.data();
  transfer.row_bytes = operation.header.row_bytes();
  run_into_gathered(phase, transfer);
}

void external_on_gpu(const DataPhase& phase) {
  Operation& operation = phase.operation;
  const std::vector<const Header*>& headers = phase.headers;
  const Header& header = operation.header;
  const Topology& topology = phase.topology();
  if (!phase.external)
    throw Failure(Fault::internal, "this rank has no external transport for the memory of GPUs", {topology.rank});
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
  const bool ordered =
      std::any_of(headers.begin(), headers.end(), [](const Header* theirs) { return theirs->ordered; });
  if (ordered)
    run_in_order(phase, transfer);  // the headers are not read any more
  else
    run(phase, transfer);
}

}  // namespace cc
