"""Variables and objects."""

from collective_core.tensorflow.functions import allgather_object as allgather_object
from collective_core.tensorflow.functions import broadcast_object as broadcast_object
from collective_core.tensorflow.functions import broadcast_object_fn as broadcast_object_fn
from collective_core.tensorflow.functions import broadcast_variables as broadcast_variables
