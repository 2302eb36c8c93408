"""The data files: their form, and that of two entries for one line one supersedes the other."""

import json
import re
import runpy
import subprocess
from itertools import combinations
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from provision.base import validation
from provision.base.errors import UsageError
from provision.cli.main import app
from provision.diagnosis.logs.words import required_words
from provision.diagnosis.patterns import latin1
from provision.diagnosis.signatures import (
    FOLDER,
    LAYERS,
    Change,
    Signatures,
    Step,
    Symptom,
    all_signatures,
    error_shapes,
    harmless,
    known_error,
)

FILES = sorted((FOLDER / "signatures").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_of_signatures_keeps_to_the_printed_schema(file: Path) -> None:
    jsonschema.validate(
        yaml.safe_load(file.read_text(encoding="utf-8")), json.loads(CliRunner().invoke(app, ["schema", "signatures"]).output)
    )
    assert file.stem in LAYERS


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("  title: ", "  severity: bad\n  title: ", "`[0].severity` must be 'error', 'warning' or 'note', not 'bad'"),
        ("  probe:", "  prope:", "`[0].prope` is unknown; did you mean `probe`?"),
        ("'failed to extend", "# 'failed to extend", "`[0].patterns[0]` must be a pattern in quotes"),
        ("supersedes: [disk-full]", "fix: []", "`fix` occurs twice"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_line(right: str, wrong: str, said: str) -> None:
    text = (FOLDER / "signatures/nccl.yaml").read_text(encoding="utf-8")
    line = text[: text.index(right)].count("\n") + 1
    with pytest.raises(UsageError) as caught:
        validation.parse(Signatures, text.replace(right, wrong, 1), "nccl.yaml", "yaml")
    assert str(caught.value).startswith(f"nccl.yaml:{line}: {said}")


def test_ids_are_unique_and_what_entries_name_exists() -> None:
    ids = [entry["id"] for file in FILES for entry in yaml.safe_load(file.read_text(encoding="utf-8"))]
    assert len(ids) == len(set(ids)) >= 180
    for each in all_signatures().values():
        assert each.supersedes <= set(ids), each.id
        assert each.symptom_of <= {*ids, *LAYERS, "any"}, each.id


def test_every_pattern_has_required_words() -> None:
    patterns = [pattern for each in all_signatures().values() for pattern in each.patterns]
    patterns += [pattern for each in (*harmless(), *error_shapes()) for pattern in each.patterns]
    assert all(required_words(pattern) for pattern in patterns)


def test_of_two_entries_for_one_line_one_supersedes(load) -> None:
    texts = [text for logs in load("samples.yaml").values() for text in logs] + list(load("variants.yaml").values())
    lines = [line for text in texts for line in (*text.splitlines(), " ".join(text.split()))]
    known = [each for each in all_signatures().values() if not isinstance(each, Symptom)]
    quarrels = set()
    for line in lines:
        claims = [each for each in known if len(line) < 400 and any(pattern.first(latin1(line)) for pattern in each.patterns)]
        for one, other in combinations(claims, 2):
            related = {other.id, other.layer, "any"} & one.symptom_of or {one.id, one.layer, "any"} & other.symptom_of
            if not (related or one.id in other.supersedes or other.id in one.supersedes):
                quarrels.add((one.id, other.id, line))
    assert not quarrels


def test_an_unknown_id_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no known error") as caught:
        known_error("libopen-missing")
    assert "libopen-rte-missing" in str(caught.value)


LOOKS = r"(?:dmesg|journalctl|tail|smartctl|fuser|nvme|ras-mc-ctl|iptables -S|ufw status|-n true)\b"  # of what follows sudo
CHANGES = re.compile(
    rf"\bsudo (?!{LOOKS})|\b(?:apt-get|dnf|yum|zypper|conda) (?:-\S+ )*(?:install|remove|purge|update|upgrade)|\bapt-mark (?:un)?hold"
    r"|\bpip3? (?:un)?install (?!--dry-run)|\brm -|\bchmod |\bchown |\bsystemctl (?:start|stop|restart|reload|enable|disable)|\bmodprobe "
    r"|\bmount -o|\bumount |\btee |>> ?[/~]|\bsed -i|\bln -s|\bssh-copy-id|\bssh-keygen -R|\bp?kill |\bdocker system prune|^reboot\b"
)
SYSTEM_FILE = re.compile(r"\btee (?:-a )?/|>>? ?/etc|\bsed -i\S* .*/etc")
PLACEHOLDER = re.compile(r"(?<![$\w{])[A-Z][A-Z_]{3,}\b")
VERSION = re.compile(r"(?:gcc|g\+\+|cuda-[a-z]+|libnccl2|nvidia-[a-z]+)[-=]\d")


def steps() -> list[tuple[str, Step]]:
    return [(name, step) for name, error in all_signatures().items() for step in error.steps]


def test_a_step_that_changes_a_host_says_what_and_how_to_undo_it() -> None:
    looks = [(name, step) for name, step in steps() if isinstance(step, str) and not step[0].isupper()]
    assert not [each for each in looks if CHANGES.search(each[1].partition("   # ")[0])]
    changes = [step for _, step in steps() if isinstance(step, Change)]
    assert len(changes) > 100
    for step in changes:
        assert "   # " not in step.run
        assert ("root" in step.needs) == bool(re.search(r"\bsudo\b", step.run)), step.run
        assert len(step.changes) <= 160, step.changes
    script = "\n".join(step.run for step in changes)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""


def test_no_step_writes_a_placeholder_into_a_system_file_or_names_a_version() -> None:
    runs = [step.run if isinstance(step, Change) else step.partition("   # ")[0] for _, step in steps()]
    assert not [run for run in runs if SYSTEM_FILE.search(run) and PLACEHOLDER.search(run)]
    assert not [run for run in runs if VERSION.search(run)]
    assert not [run for run in runs if re.search(r"\b(?:purge|remove|hold) .*'(?:lib)?nvidia-\*'", run)]


def test_each_entry_says_how_to_confirm_it_and_names_its_sources_or_is_found_by_a_check() -> None:
    code = "".join(path.read_text(encoding="utf-8") for form in ("*.py", "*.j2") for path in FOLDER.parent.rglob(form))
    for error in all_signatures().values():
        if not isinstance(error, Symptom):
            assert bool(error.probe) == bool(error.sources) == bool(error.patterns), error.id
            assert error.patterns or error.id in code, error.id


def test_each_error_of_2026_and_later_has_samples_of_two_versions(load) -> None:
    """The older ones have one sample and a variant."""
    samples, variants = load("samples.yaml"), load("variants.yaml")
    known = [error.id for error in all_signatures().values() if error.patterns and not isinstance(error, Symptom)]
    assert not [name for name in known if len(samples.get(name, ())) + (name in variants) < 1]
    assert sum(len(samples.get(name, ())) >= 2 for name in known) >= 90


@pytest.mark.parametrize("name", ["fabric-manager-down", "xid-any", "gpu-persistence", "mpi-job-aborted"])
def test_explain_prints_all_of_an_entry(name: str) -> None:
    said = CliRunner().invoke(app, ["doctor", "explain", name]).output
    error = known_error(name)
    for step in error.steps:
        for line in (step,) if isinstance(step, str) else (step.run, f"changes: {step.changes}", f"undo: {step.undo}"):
            assert line in said
    for text in (error.cause, *error.sources):
        assert text in said
    assert ("109  " in said) == (name == "xid-any")


def test_the_pages_of_known_errors_show_texts_as_they_are_and_code_as_code(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path(__file__).parents[3] / "scripts"
    monkeypatch.syspath_prepend(str(scripts))  # as Python does for a script
    pages = runpy.run_path(str(scripts / "known_errors.py"))["pages"]()
    page = "\n".join(pages.values())
    assert all(
        f"[{name}](" in pages["known-errors.md"] and f"\n## {name}\n" in page
        for name, error in all_signatures().items()
        if not isinstance(error, Symptom)
    )
    assert r"named docker\*/br-\*/virbr\*/veth\*/tailscale\* while no btl\_tcp\_if\_\* is set" in page
    assert "at each `systemctl daemon-reload` (also" in page
    assert "Undo: take `cdi` out of" in page
    assert r"\`" not in page


def test_xids_without_an_entry_of_their_own_are_explained_by_the_catalogue(explain) -> None:
    lines = [
        "NVRM: Xid (PCI:0000:3b:00): 62, pid=1, name=python3, 2027(2d84)",
        "NVRM: Xid (PCI:0000:3b:00): 38, pid=1",
        "NVRM: Xid (PCI:0000:3b:00): 999, x",
    ]
    (found,) = explain("\n".join(lines))
    assert (found.id, found.severity) == ("xid-any", "error")
    assert found.fix[0] == "Xid 62: a micro-controller of the GPU halted: reset the GPU"
    assert found.fix[1].startswith("Xid 38: an error in the firmware")
    assert found.fix[2].startswith("Xid 999: not in the catalogue")
    (found,) = explain(lines[1])
    assert found.severity == "note"
