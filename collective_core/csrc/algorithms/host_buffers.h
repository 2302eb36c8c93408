// Where the tensors of a host's ranks lie while workers sum them with those of other hosts: what the ways between hosts
// share (allreduce_ring.cpp, mesh.cpp).
//
// Where the tensors of all ranks of every host can be reached, because the rank is alone on its host, because they
// lie in the arena or by cross-memory attach, worker k moves slice k of the whole tensor: from the inputs, into all
// outputs of its host. By attach it copies a segment of each other rank here before it adds it, and every result there.
// Otherwise the tensor is cut into chunks, and per chunk
//   1. every rank copies its chunk into its buffer in[c % 2]; barrier;
//   2. worker k moves slice k between hosts into out[c % 2]; barrier;
//   3. every rank copies out[c % 2] into its tensor. (The barrier of the next step 1 protects the buffers.)
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {

// A slice of the tensors of this host's ranks.
struct HostBuffers {
  uint64_t begin;                   // element of the tensor
  size_t length;                    // elements
  std::vector<const char*> inputs;  // of this host's ranks, in their order
  std::vector<char*> outputs;       // where the result goes: may be the inputs
  bool attaches = false;            // they are this rank's alone: those of the others take cross-memory attach

  HostBuffers part(const Slice& slice, size_t element) const;
  // Adds this host's ranks to `sum` as `reduction` says, `count` accumulators of the elements from `at`. `fresh`: there
  // is nothing in it. `block`: memory for as many elements, for attach.
  void add_to(char* sum, bool fresh, const Reduction& reduction, size_t at, size_t count, const DataPhase& phase,
              char* block) const;
  // Copies a result from the first output to the others.
  void spread(size_t at, size_t count, const DataPhase& phase) const;
};

// Whether all tensors can be accessed where they lie, on every host: decided from the headers, so every host decides
// alike.
bool all_accessible(const DataPhase& phase);
// Where they can: calls `move` on the workers, the first channels() ranks of every host, with the whole tensors, and
// then waits for the host's ranks.
void run_in_place(const DataPhase& phase, const std::function<void(const HostBuffers&)>& move);
// An allreduce of any tensors: calls `move` on the workers, with a slice.
void run_between_hosts(const DataPhase& phase, void (*move)(const DataPhase&, const HostBuffers&));

}  // namespace cc
