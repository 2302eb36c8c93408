"""What programs catch."""

from collective_core.errors import HorovodInternalError as HorovodInternalError
from collective_core.torch.elastic.state import HostsUpdatedInterrupt as HostsUpdatedInterrupt


class HorovodVersionMismatchError(ImportError):
    """Never raised: the engine is built for no version of a framework."""
