"""Whole states and objects."""

from collective_core.torch.functions import allgather_object as allgather_object
from collective_core.torch.functions import broadcast_object as broadcast_object
from collective_core.torch.functions import broadcast_object_fn as broadcast_object_fn
from collective_core.torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from collective_core.torch.functions import broadcast_parameters as broadcast_parameters
