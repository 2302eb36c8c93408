"""States of an elastic job."""

from collective_core.torch.elastic import ObjectState as ObjectState
from collective_core.torch.elastic import State as State
