#include "negotiation/join.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace cc {
namespace {

template <class T>
T identity_of(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  switch (op) {
    case ReduceOp::min:
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
    case ReduceOp::max:
      return Limits::has_infinity ? static_cast<T>(-Limits::infinity()) : Limits::lowest();
    case ReduceOp::product:
      return T(1);
    case ReduceOp::sum:
    case ReduceOp::average:
      break;
  }
  return Limits::has_infinity ? static_cast<T>(-0.0) : T(0);  // -0.0 + x is x for every x, also for -0.0
}

// float16 and bfloat16 by their bits.
uint16_t half_identity_of(ReduceOp op, uint16_t infinity, uint16_t one) {
  constexpr uint16_t sign = 0x8000;
  if (op == ReduceOp::min) return infinity;
  if (op == ReduceOp::max) return static_cast<uint16_t>(infinity | sign);
  return op == ReduceOp::product ? one : sign;
}

template <class T>
void fill(std::vector<char>* bytes, T value) {
  for (size_t left = bytes->size() / sizeof(T); left-- > 0;) {
    std::memcpy(bytes->data() + left * sizeof(T), &value, sizeof(T));
  }
}

void fill_with_identity(std::vector<char>* bytes, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::u8:
      return fill(bytes, identity_of<uint8_t>(op));
    case DType::i8:
      return fill(bytes, identity_of<int8_t>(op));
    case DType::u16:
      return fill(bytes, identity_of<uint16_t>(op));
    case DType::i16:
      return fill(bytes, identity_of<int16_t>(op));
    case DType::u32:
      return fill(bytes, identity_of<uint32_t>(op));
    case DType::i32:
      return fill(bytes, identity_of<int32_t>(op));
    case DType::u64:
      return fill(bytes, identity_of<uint64_t>(op));
    case DType::i64:
      return fill(bytes, identity_of<int64_t>(op));
    case DType::f16:
      return fill(bytes, half_identity_of(op, 0x7C00, 0x3C00));
    case DType::bf16:
      return fill(bytes, half_identity_of(op, 0x7F80, 0x3F80));
    case DType::f32:
      return fill(bytes, identity_of<float>(op));
    case DType::f64:
      return fill(bytes, identity_of<double>(op));
    case DType::boolean:
      return fill(bytes, static_cast<uint8_t>(op == ReduceOp::min || op == ReduceOp::product));
    case DType::count:
      return;
  }
}

}  // namespace

int JoinedRanks::update(const std::vector<const Header*>& headers) {
  int active = 0;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const bool joined = headers[rank]->kind == Kind::join;
    if (joined && !joined_[rank]) last_ = static_cast<int>(rank);
    joined_[rank] = joined;
    active += joined ? 0 : 1;
  }
  return active;
}

int JoinedRanks::take_last() {
  std::fill(joined_.begin(), joined_.end(), false);
  return last_;
}

bool scales_before_transfer(const Header& header, bool some_joined, uint64_t inline_bytes) {
  if (!is_reduction(header.kind) || header.prescale == 1.0 || !some_joined) return false;
  if (header.reduce == ReduceOp::sum || header.reduce == ReduceOp::average) return false;  // zeros stay zeros
  // Of small tensors only those of the others are summed; the external transport of GPUs applies the factor where the
  // input is.
  return header.bytes() > inline_bytes && header.device != Device::gpu_memory;
}

Header without_factors(const Header& header) {
  Header plain = header;
  if (is_half(header.dtype)) plain.dtype = DType::f32;
  if (header.reduce == ReduceOp::average) plain.reduce = ReduceOp::sum;
  plain.prescale = plain.postscale = 1.0;
  return plain;
}

NeutralOperation::NeutralOperation(const Header& wanted, int size) {
  Header& header = operation.header;
  header = wanted;
  header.inline_bytes = 0;
  if (header.kind == Kind::allgather || header.kind == Kind::alltoall) {
    header.count = 0;
    header.dims[0] = 0;
    operation.splits.assign(static_cast<size_t>(size), 0);
  }
  if (header.device == Device::gpu_memory) return;  // its external transport has no other memory for it
  input_.resize(header.bytes());
  if (is_reduction(header.kind)) {
    fill_with_identity(&input_, header.dtype, header.reduce);
    output_.resize(header.bytes());
  }
  operation.input = input_.data();
  operation.output = is_reduction(header.kind) ? output_.data() : input_.data();
}

}  // namespace cc
