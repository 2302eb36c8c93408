// What a collective is: its kind, its element type, and the header that every rank publishes before any data moves.
// The header is what the ranks compare (negotiation.cpp); its layout is the wire format, so all ranks run one engine
// version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"

namespace cc {

inline size_t size_of(DType dtype) {
  static const size_t sizes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1};
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(sizes) ? sizes[index]
                                  : 1;  // a header's type comes from another process; counts are divided by this
}
inline bool is_half(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16;
}
// Half types are summed in float32 and rounded once; every other type is its own accumulator.
inline size_t accumulator_size_of(DType dtype) {
  return is_half(dtype) ? sizeof(float) : size_of(dtype);
}
inline const char* name_of(DType dtype) {
  static const char* const names[] = {"uint8", "int8",    "uint16",   "int16",   "uint32",  "int32", "uint64",
                                      "int64", "float16", "bfloat16", "float32", "float64", "bool"};
  return names[static_cast<size_t>(dtype)];
}
inline const char* name_of(Kind kind) {
  static const char* const names[] = {"allreduce", "allgather",     "broadcast", "barrier",
                                      "alltoall",  "reducescatter", "join"};
  return names[static_cast<size_t>(kind)];
}
inline const char* name_of(ReduceOp op) {
  static const char* const names[] = {"Sum", "Average", "Min", "Max", "Product"};
  return names[static_cast<size_t>(op)];
}

inline bool has_tensor(Kind kind) {
  return kind != Kind::barrier && kind != Kind::join;
}
inline bool is_reduction(Kind kind) {
  return kind == Kind::allreduce || kind == Kind::reducescatter;
}

// Whether this rank may still submit what the others want.
enum class Blocked : uint8_t {
  no,
  waits,  // its caller waits for one of its operations, and submits nothing before that is done
  tried   // and the others have been asked in vain for each of them
};

constexpr int max_dims = 8;        // dimensions spelt out in error messages; PyTorch tensors rarely have more
constexpr size_t name_bytes = 72;  // of the tensor's name kept for messages; the whole name is in name_hash

struct Header {
  uint32_t sequence;      // of the exchange; both sides must agree on it
  uint32_t inline_bytes;  // of payload that follow the header in the slot
  Kind kind;
  DType dtype;
  ReduceOp reduce;
  uint8_t ndim;
  Blocked blocked;
  Device device;            // where the caller's tensor lies
  uint8_t unsupported;      // this rank cannot run it: the inline payload is a sentence that says why
  uint8_t timeline : 1;     // this rank records one, and will merge it with the others' if all ranks do
  uint8_t whole : 1;        // it is an error while a rank has joined
  uint8_t ordered : 1;      // its external transport needs a number that all ranks agree on
  uint8_t attachable : 1;   // others on its host can read and write the tensors where they lie (cross_memory.h)
  int32_t root;             // as a rank of the process set
  uint32_t shape_hash;      // of the dimensions from max_dims on, and of what the tensor is made of; or 0
  uint64_t count;           // elements on this rank
  uint64_t input_location;  // where input and output lie in this rank's part of the arena (arena.h), or 0
  uint64_t output_location;
  uint64_t name_hash;
  double prescale;
  double postscale;
  int64_t dims[max_dims];  // the last one times those that follow it
  char name[name_bytes];

  std::string shape_text() const {
    std::string text = "[";
    const int shown = ndim > max_dims ? max_dims - 1 : ndim;
    for (int i = 0; i < shown; ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
    return text + (ndim > max_dims ? ", ...]" : "]");
  }
  uint64_t bytes() const { return count * size_of(dtype); }
  uint64_t row_bytes() const {
    uint64_t row = size_of(dtype);
    for (int i = 1; i < ndim && i < max_dims; ++i) row *= static_cast<uint64_t>(dims[i]);
    return row;
  }
};
static_assert(sizeof(Header) == 208, "the header is a wire format");

// FNV-1a, 64 bits. `hash`: of what precedes the text.
inline uint64_t hash_of(const char* text, uint64_t hash = 1469598103934665603ULL) {
  for (; *text; ++text) hash = (hash ^ static_cast<unsigned char>(*text)) * 1099511628211ULL;
  return hash;
}

// One collective as this rank asked for it. The caller keeps input and output alive until it is done.
struct Operation {
  Header header{};
  const void* input = nullptr;
  void* output = nullptr;            // alltoall: null. allgather: null, or room for what all send if all send as much
  std::vector<int64_t> splits;       // alltoall: rows for each rank
  std::string unsupported_reason;    // why this rank cannot run it, or empty
  std::unique_ptr<char[]> gathered;  // allgather, alltoall: memory for the bytes received, unless `output` is
  uint64_t gathered_bytes = 0;
  std::vector<int64_t> received;  // allgather, alltoall: rows from each rank; join: the rank that joined last
  int32_t tag = 0;                // of the caller's own
  bool inner = false;             // an agreement of the caller's, no operation of the program's
  int contributors = 0;           // ranks that have not joined: by so many an average divides

  // Of an allgather or alltoall that has begun: the bytes received, in rank order.
  char* received_bytes() const { return gathered ? gathered.get() : static_cast<char*>(output); }
  std::string describe() const {
    std::string text = name_of(header.kind);
    if (header.name[0]) text += std::string(" '") + header.name + "'";
    if (has_tensor(header.kind) && !header.unsupported)
      text += std::string(" (") + name_of(header.dtype) + header.shape_text() + ")";
    return text;
  }
};

}  // namespace cc
