"""`provision schema`: the JSON Schema of each document that the toolkit reads or writes, for editors and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import typer
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from provision.base import terminal
from provision.base.errors import UsageError
from provision.base.validation import did_you_mean
from provision.bench.results import Measurements
from provision.diagnosis.signatures import Signatures
from provision.doctor.certify.model import Certificate
from provision.plan.lock_file import LockDocument
from provision.plan.model import PlanDocument
from provision.plan.requirements import Requirements
from provision.report.model import Report
from provision.report.status.model import Status
from provision.resolve.what_if import WhatIfDocument
from provision.survey.document import FactsFile

Mode = Literal["validation", "serialization"]  # of what is read, keys with a default may be missing; what we write has them all

# A document's name, as it is typed → its model. A new document is one line here.
DOCUMENTS: Mapping[str, tuple[type[object], Mode]] = {
    "bench": (Measurements, "serialization"),
    "certificate": (Certificate, "serialization"),
    "facts": (FactsFile, "validation"),
    "lock": (LockDocument, "validation"),
    "plan": (PlanDocument, "validation"),
    "report": (Report, "serialization"),
    "requirements": (Requirements, "validation"),
    "signatures": (Signatures, "validation"),
    "status": (Status, "serialization"),
    "what-if": (WhatIfDocument, "validation"),
}


class _Generator(GenerateJsonSchema):
    """Keys of another form than a mapping's are refused, as the models do; no titles that only repeat a name."""

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        found = super().dict_schema(schema)
        return {**found, "additionalProperties": False} if "patternProperties" in found else found

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002
        return False


def schema(
    name: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="The document, e.g. `report` or `catalogue nccl`; without it all are listed.")
    ] = None,
) -> None:
    """Print the JSON Schema of a document that provision reads or writes."""
    known, requested = documents(), " ".join(name or ())
    if not requested:
        for each in known:
            terminal.out().say(each)
    elif requested in known:
        model, mode = known[requested]
        terminal.print_json(
            {"$schema": GenerateJsonSchema.schema_dialect, **TypeAdapter(model).json_schema(schema_generator=_Generator, mode=mode)}
        )
    else:
        raise UsageError(f"no such document `{requested}`{did_you_mean(requested, known)}", hint="provision schema lists them")


def documents() -> dict[str, tuple[type[object], Mode]]:
    """All documents, by name, those of the catalogue among them."""
    from provision.catalog.models import FILES  # no other command needs them all

    files: dict[str, tuple[type[object], Mode]] = {f"catalogue {name}": (model, "validation") for name, model in FILES.items()}
    return {**DOCUMENTS, **files}
