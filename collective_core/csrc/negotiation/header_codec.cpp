#include "negotiation/header_codec.h"

#include <cstring>

#include "base/validation.h"

namespace cc {
namespace {

Header as_it_travels(const Header& header) {
  Header travelling = header;
  travelling.input_location = header.input_location ? 1 : 0;
  travelling.output_location = header.output_location ? 1 : 0;
  return travelling;
}

// Bit by bit: a NaN as a factor equals itself, and a zero's sign counts.
bool same_bytes(const void* a, const void* b, size_t n) {
  return std::memcmp(a, b, n) == 0;
}

bool same(const Header& a, const Header* slot_of_a, const Header& b, const Header* slot_of_b) {
  return same_bytes(&a, &b, sizeof a) && same_bytes(slot_of_a + 1, slot_of_b + 1, a.inline_bytes);
}

void append(std::vector<char>* encoded, const void* bytes, size_t n) {
  const char* begin = static_cast<const char*>(bytes);
  encoded->insert(encoded->end(), begin, begin + n);
}

}  // namespace

void encode_headers(const std::vector<const Header*>& slots, std::vector<char>* encoded) {
  for (size_t first = 0; first < slots.size();) {
    const Header header = as_it_travels(*slots[first]);
    size_t end = first + 1;
    const auto goes_on = [&](const Header* next) {
      return next == slots[end - 1] || same(header, slots[first], as_it_travels(*next), next);
    };
    while (end < slots.size() && goes_on(slots[end])) ++end;
    const HeaderRun run{static_cast<uint32_t>(end - first)};
    append(encoded, &run, sizeof run);
    append(encoded, &header, sizeof header);
    append(encoded, slots[first] + 1, header.inline_bytes);
    first = end;
  }
}

bool decode_headers(const std::vector<char>& encoded, uint32_t sequence, int size, size_t max_payload,
                    const std::vector<Header*>& slots, std::vector<size_t>* leads) {
  size_t at = 0;
  leads->clear();
  while (at < encoded.size()) {
    HeaderRun run{};
    Header header{};
    if (encoded.size() - at < sizeof run + sizeof header) return false;
    std::memcpy(&run, encoded.data() + at, sizeof run);
    std::memcpy(&header, encoded.data() + at + sizeof run, sizeof header);
    const char* said = encoded.data() + at + sizeof run;
    const size_t length = sizeof header + header.inline_bytes;
    at += sizeof run;
    if (run.ranks == 0 || run.ranks > slots.size() - leads->size() || header.inline_bytes > max_payload) return false;
    if (encoded.size() - at < length || header.sequence != sequence || !is_valid_header(header, size)) return false;
    std::memcpy(slots[leads->size()], said, length);
    leads->insert(leads->end(), run.ranks, leads->size());
    at += length;
  }
  return leads->size() == slots.size();
}

size_t max_encoded_bytes(size_t ranks, size_t max_payload) {
  return ranks * (sizeof(HeaderRun) + sizeof(Header) + max_payload);
}

}  // namespace cc
