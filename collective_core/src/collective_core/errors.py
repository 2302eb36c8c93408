"""The exception that every failure of the engine becomes. Must not import anything heavy: everyone imports it."""

from __future__ import annotations

from typing import Sequence

#: Kinds of failure by the numbers of csrc/base/errors.h.
KINDS = {1: "mismatch", 2: "timeout", 3: "peer_lost", 4: "invalid", 5: "internal", 6: "closed"}


class CollectiveError(RuntimeError):
    """A collective or the start of the engine failed.

    ``kind`` is one of the values of :data:`KINDS`; after ``mismatch`` and ``invalid`` the engine is usable as before, after
    the others only ``shutdown()`` remains. ``ranks`` are the ranks to blame, as far as they are known.
    """

    #: Whether the ranks disagree on an operation that they call by one name.
    has_one_name = False

    def __new__(cls, message: str = "", kind: str = "internal", *_: object, **__: object) -> CollectiveError:  # noqa: ARG004
        """One of the kind ``peer_lost`` is a :class:`PeerLostError`."""
        return super().__new__(PeerLostError if cls is CollectiveError and kind == "peer_lost" else cls)

    def __init__(self, message: str = "", kind: str = "internal", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.ranks: tuple[int, ...] = tuple(ranks)


class PeerLostError(CollectiveError):
    """A consequence of another rank's end: that rank's error is the one to read."""


def is_fatal(error: CollectiveError) -> bool:
    """Whether the failure ended the engine: then only ``shutdown()`` remains, and other ranks may be gone."""
    return error.kind in ("timeout", "peer_lost", "internal")


class InvalidUseError(CollectiveError, ValueError):
    """A collective was asked for that this rank cannot run. Scripts written for Horovod expect a ValueError."""


class NotInitialisedError(CollectiveError, ValueError):
    """``init`` was not called. Scripts written for Horovod expect a ValueError."""


#: The name under which scripts written for Horovod catch a CollectiveError.
HorovodInternalError = CollectiveError
