#include "base/validation.h"

#include <algorithm>
#include <cstring>

namespace cc {
namespace {

constexpr uint64_t max_elements = uint64_t(1) << 48;  // sums of bytes over all ranks stay below 2^64

// The product of the dimensions; more than any tensor has if it cannot be one.
uint64_t elements_of(const Header& header) {
  const int64_t* const end = header.dims + std::min<int>(header.ndim, max_dims);
  if (std::any_of(header.dims, end, [](int64_t length) { return length < 0; })) return max_elements + 1;
  if (std::find(header.dims, end, 0) != end) return 0;
  uint64_t elements = 1;
  for (const int64_t* length = header.dims; length != end; ++length) {
    if (static_cast<uint64_t>(*length) > max_elements / elements) return max_elements + 1;
    elements *= static_cast<uint64_t>(*length);
  }
  return elements;
}

}  // namespace

bool is_valid_header(const Header& header, int size) {
  if (header.kind >= Kind::count || header.dtype >= DType::count || header.reduce > ReduceOp::product) return false;
  if (header.device >= Device::count) return false;
  if (!std::memchr(header.name, '\0', sizeof header.name)) return false;
  if (header.unsupported) return true;  // nothing but its sentence is used
  if (header.kind == Kind::broadcast && (header.root < 0 || header.root >= size)) return false;
  if (!has_tensor(header.kind)) return header.count == 0;
  return header.count <= max_elements && elements_of(header) == header.count;
}

bool are_valid_splits(const std::vector<int64_t>& splits, const Header& header, uint64_t row_bytes) {
  uint64_t rows = 0;
  for (const int64_t part : splits) {
    if (part < 0 || static_cast<uint64_t>(part) > max_elements) return false;
    rows += static_cast<uint64_t>(part);
  }
  return row_bytes == 0 || (header.bytes() % row_bytes == 0 && rows == header.bytes() / row_bytes);
}

Fault fault_of(int number) {
  const bool known = number > static_cast<int>(Fault::none) && number <= static_cast<int>(Fault::closed);
  return known && is_fatal(static_cast<Fault>(number)) ? static_cast<Fault>(number) : Fault::internal;
}

}  // namespace cc
