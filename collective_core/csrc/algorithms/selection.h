// Which algorithm runs, by kind, size and place of the tensors. Decided from what all ranks know, so all decide alike.
#pragma once

#include "algorithms/data_phase.h"

namespace cc {

// Null where no data moves.
Algorithm select_algorithm(const DataPhase& phase);

}  // namespace cc
