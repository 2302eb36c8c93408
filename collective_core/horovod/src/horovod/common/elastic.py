"""States of an elastic job."""

from collective_core.common.elastic_states import ObjectState as ObjectState
from collective_core.common.elastic_states import State as State
