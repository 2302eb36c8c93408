"""The request of a command that plans: the hosts, the options, and provision.lock, which is read once, at the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date

from provision import catalog
from provision.base import engine_source
from provision.base.engine_source import EngineSource
from provision.base.errors import UsageError
from provision.inventory import Inventory
from provision.plan import lock_file
from provision.plan.lock import Lock
from provision.plan.options import Options


@dataclass(frozen=True)
class Request:
    """What to plan for which hosts.

    Attributes:
        lock: what the plan keeps to; None where there is none, or with ``--upgrade``.
        previous: the inventory's lock, also with ``--upgrade``; None where there is none, or an invalid one.
        invalid: why it is invalid, where ``--upgrade`` replaces it.
        today: by which the age of the catalogue counts; resolving knows no clock.
    """

    inventory: Inventory
    options: Options
    lock: Lock | None = None
    previous: Lock | None = None
    invalid: UsageError | None = None
    engine: EngineSource = field(default_factory=engine_source.pack)
    today: date = field(default_factory=lambda: catalog.now().date())

    @classmethod
    def of(cls, inventory: Inventory, options: Options) -> Request:
        """The request with the inventory's lock: with ``--limit`` without releases that the other hosts do not have.

        Raises UsageError for an invalid lock, unless ``--upgrade`` replaces it.
        """
        try:
            previous, invalid = lock_file.read(inventory), None
        except UsageError as error:
            if not options.upgrade:
                raise
            previous, invalid = None, error
        lock = previous.compatible_with(inventory.left_out) if previous and not options.upgrade else None
        return cls(inventory, options, lock, previous, invalid, engine_source.pack().with_wheels(options.wheels))
