"""What programs catch."""

from collective_core.common.elastic_states import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from collective_core.errors import HorovodInternalError as HorovodInternalError


class HorovodVersionMismatchError(ImportError):
    """Never raised: the engine is built for no version of a framework."""
