"""Pages of HTML from templates: the one place that decides how text from outside is escaped."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from provision import __version__
from provision.base.errors import ProvisionError, UsageError
from provision.base.terminal import neutral


@cache
def template(package: str) -> jinja2.Template:
    """The template ``page.html.j2`` of a package, which escapes all that it is given, and fails where it is given too little.

    It may import ``charts.html.j2``, which draws a `provision.bench.charts.Chart`.
    """
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(each, ".") for each in (package, "provision.bench")])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_shown
    )
    return environment.get_template("page.html.j2", globals={"version": __version__})


def check_folder(path: Path | None, option: str) -> None:
    """Raise UsageError where the file of this option could not be written, before hosts have worked for it."""
    if path is not None and not os.access(path.absolute().parent, os.W_OK):
        raise UsageError("no file can be written there", where=str(path.absolute().parent), hint=f"name another place: {option} FILE")


def write(path: Path, page: str) -> None:
    """Raises ProvisionError where the page cannot be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ProvisionError(f"the page cannot be written: {error.strerror}", where=str(path), hint="name another: -o FILE") from error


def _shown(value: Any) -> Any:
    """Text without characters that reorder a page; what a macro has drawn is HTML."""
    return neutral(value) if type(value) is str else value
