"""What an elastic job carries, and how programs add to it."""

from collective_core.torch.elastic.handlers import ModelStateHandler as ModelStateHandler
from collective_core.torch.elastic.handlers import OptimizerStateHandler as OptimizerStateHandler
from collective_core.torch.elastic.handlers import SamplerStateHandler as SamplerStateHandler
from collective_core.torch.elastic.handlers import StateHandler as StateHandler
from collective_core.torch.elastic.handlers import get_handler_registry as get_handler_registry
from collective_core.torch.elastic.handlers import set_handler_registry as set_handler_registry
from collective_core.torch.elastic.state import TorchState as TorchState
