// Which algorithm runs, by kind, size and place of the tensors. Decided from what all ranks know, so all decide alike.
#pragma once

#include "algorithms/data_phase.h"

namespace cc {

// Null where no data moves.
Algorithm select_algorithm(const DataPhase& phase);
// For a large tensor, when there are several hosts.
Algorithm allreduce_between_hosts(const Topology& topology);

}  // namespace cc
