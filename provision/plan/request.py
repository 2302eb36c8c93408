"""The request of a command that plans: the hosts, the options, and provision.lock, which is read once, at the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

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
        return cls(inventory, options, lock, previous, invalid, engine_of(options.wheels))


def engine_of(folder: Path | None) -> EngineSource:
    """The engine with the wheels of its sources in the user's folder. Raises UsageError where the folder has those of others alone."""
    engine = engine_source.pack()
    made = engine.with_wheels(folder)
    if folder and made == engine and (others := sorted(folder.glob(f"{engine.package}-*.whl"))):
        expected = f"expected {engine.package}-{engine.version}-{engine.build}-py3-none-manylinux….whl, of the same sources as this toolkit"
        raise UsageError(f"invalid wheel of the engine: {others[0].name} ({expected})", where=str(folder), hint="take another, or none")
    return made
