"""The manifest in a host's prefix: what the last complete run has installed there, for its users and for the next survey."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer

from provision.plan.model import COMPONENTS, HostPlan

UNREADABLE = "its manifest was written by another version or is damaged"


def digest_of(members: Mapping[str, Any] | str) -> str:
    """As hostside/survey has it; a digest as it is."""
    return members if isinstance(members, str) else hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()


class Manifest(BaseModel):
    """What a host holds.

    Attributes:
        cluster: the id of the cluster, see `install.ssh_mesh.cluster_id`.
        host: the host's plan, without reasons, and without what is not in the prefix: a driver, and what was removed.
        members: the cluster's hosts by name; unchecked: `install.ssh_mesh` validates those that it uses. From a survey, `digest_of` them,
            unless the run leaves out hosts.
        build: exact pins of what builds the engine, and of pip for packages that users add.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_number: Literal[2] = Field(2, alias="schema")
    cluster: str
    host: HostPlan
    members: Mapping[str, Any] | str = {}
    build: list[str] = []

    @classmethod
    def of(cls, host: HostPlan, cluster: str, members: Mapping[str, Mapping[str, object]] | str, build: list[str]) -> Manifest:
        """The manifest of a host once its plan is installed."""
        bare: dict[str, Any] = {"driver": None, "hwloc": None}
        for name in COMPONENTS:  # the wording of reasons may change; they are in the run's plan
            if name not in bare and (part := getattr(host, name)) is not None:
                bare[name] = replace(part, why=(), rejected=(), **({"builders": ()} if hasattr(part, "builders") else {}))
        return cls.model_construct(cluster=cluster, host=replace(host, **bare), members=members, build=build)

    @model_serializer
    def as_dict(self) -> Mapping[str, object]:
        """Plain data for JSON, as the file has it."""
        host = {name: value for name, value in self.host.as_dict().items() if name != "driver"}
        return {"schema": self.schema_number, "cluster": self.cluster, "host": host, "members": self.members, "build": self.build}
