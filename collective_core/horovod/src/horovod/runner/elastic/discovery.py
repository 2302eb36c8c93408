"""Which hosts an elastic job may use now."""

from __future__ import annotations

from collective_core.launch.hosts import lines_of, read


class HostDiscovery:
    """The interface. ``Runner(hosts=function, min_np=…)`` takes such a method, ``horovod.run`` a script."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots by host name."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """The hosts that a script prints, a line ``name`` or ``name:slots`` each; ``slots``: of those without a number."""

    def __init__(self, discovery_script: str, slots: int) -> None:
        self._discovery_script, self._default_slots = discovery_script, slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Raises :class:`CollectiveError` where the script fails, or prints what cannot be read."""
        lines = self._execute_discovery_script().split()
        return {host.name: host.slots if ":" in line else self._default_slots for line, host in zip(lines, read(lines))}

    def _execute_discovery_script(self) -> str:
        return "\n".join(lines_of(self._discovery_script))
