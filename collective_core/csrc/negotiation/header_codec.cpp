#include "negotiation/header_codec.h"

#include <cstring>

#include "negotiation/validation.h"

namespace cc {
namespace {

Header as_it_travels(const Header& header) {
  Header travelling = header;
  travelling.input_place = header.input_place ? 1 : 0;
  travelling.output_place = header.output_place ? 1 : 0;
  return travelling;
}

// Bit by bit: a NaN as a factor equals itself, and a zero's sign counts.
bool same_bytes(const void* a, const void* b, size_t n) {
  return std::memcmp(a, b, n) == 0;
}

bool same(const Header& a, const Header* slot_of_a, const Header& b, const Header* slot_of_b) {
  return same_bytes(&a, &b, sizeof a) && same_bytes(slot_of_a + 1, slot_of_b + 1, a.inline_bytes);
}

void append(std::vector<char>* block, const void* bytes, size_t n) {
  const char* begin = static_cast<const char*>(bytes);
  block->insert(block->end(), begin, begin + n);
}

}  // namespace

void write_block(const std::vector<const Header*>& slots, std::vector<char>* block) {
  for (size_t first = 0; first < slots.size();) {
    const Header header = as_it_travels(*slots[first]);
    size_t end = first + 1;
    while (end < slots.size() && same(header, slots[first], as_it_travels(*slots[end]), slots[end])) ++end;
    const Run run{static_cast<uint32_t>(end - first)};
    append(block, &run, sizeof run);
    append(block, &header, sizeof header);
    append(block, slots[first] + 1, header.inline_bytes);
    first = end;
  }
}

bool read_block(const std::vector<char>& block, uint32_t sequence, int size, size_t most_payload,
                const std::vector<Header*>& slots) {
  size_t at = 0, filled = 0;
  while (at < block.size()) {
    Run run{};
    Header header{};
    if (block.size() - at < sizeof run + sizeof header) return false;
    std::memcpy(&run, block.data() + at, sizeof run);
    std::memcpy(&header, block.data() + at + sizeof run, sizeof header);
    const char* said = block.data() + at + sizeof run;
    const size_t length = sizeof header + header.inline_bytes;
    at += sizeof run;
    if (run.ranks == 0 || run.ranks > slots.size() - filled || header.inline_bytes > most_payload) return false;
    if (block.size() - at < length || header.sequence != sequence || !is_credible(header, size)) return false;
    for (uint32_t i = 0; i < run.ranks; ++i) std::memcpy(slots[filled++], said, length);
    at += length;
  }
  return filled == slots.size();
}

size_t longest_block(size_t ranks, size_t most_payload) {
  return ranks * (sizeof(Run) + sizeof(Header) + most_payload);
}

}  // namespace cc
