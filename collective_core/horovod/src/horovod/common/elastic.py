"""States of an elastic job."""

from collective_core.common.elastic import ObjectState as ObjectState
from collective_core.common.elastic import State as State
