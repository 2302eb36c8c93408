// What moves the data of an operation: an algorithm, with all that it works with. It runs after an exchange in which
// all ranks agreed, on all ranks, in the same order.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/operation.h"
#include "group/group.h"
#include "negotiation/exchange.h"

namespace cc {

class ExternalTransport;

struct DataPhase {
  Group& group;
  Operation& operation;
  const std::vector<const Header*>& headers;  // of all ranks, by rank
  Deadline& deadline;
  const ExternalTransport* external;  // that moves tensors of this device, or null: the engine itself
  Exchange& exchange;                 // for what is to be agreed on in between

  const Topology& topology() const { return group.topology(); }
  const Header& header() const { return operation.header; }
  // The same for another operation, a step on the way.
  DataPhase with(Operation& other) const { return {group, other, headers, deadline, external, exchange}; }
};

using Algorithm = void (*)(const DataPhase&);

}  // namespace cc
