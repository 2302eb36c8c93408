"""Random inventories: the hosts are those that Ansible has, and every duplicate address is found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provision.inventory import Host, InventoryError, load
from provision.inventory.checks import OWN_VARIABLES, unknown_variables
from provision.inventory.loading import parse_list

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}(-[a-z0-9]{1,4})?", fullmatch=True).filter(
    lambda name: name not in ("all", "ungrouped", "localhost")
)
SOME = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def inventory(text: str, name: str = "h.ini") -> Iterator[str]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path(name).write_text(text)
            yield name
        finally:
            os.chdir(before)


@SOME
@given(st.lists(NAMES, min_size=1, max_size=8, unique=True), st.integers(1, 64))
def test_each_line_is_a_host(names: list[str], slots: int) -> None:
    with inventory("".join(f"{name} slots={slots}\n" for name in names)) as file:
        found = load(file).hosts
    assert [(host.name, host.slots) for host in found] == [(name, slots) for name in names]


@SOME
@given(NAMES, st.integers(0, 120), st.integers(0, 30), st.sampled_from([1, 2, 3]))
def test_ranges_expand_as_in_ansible(prefix: str, first: int, more: int, width: int) -> None:
    start, end = str(first).zfill(width), str(first + more).zfill(width)
    if len(start) > 1 and start.startswith("0") and len(start) != len(end):
        return  # Ansible refuses such a range
    pattern = f"{prefix}x[{start}:{end}]"
    with inventory(f"{pattern}\n") as file:
        names = [host.name for host in load(file).hosts]
    assert len(names) == more + 1
    assert [host.name for host in parse_list(pattern)[0]] == names


@SOME
@given(st.lists(NAMES, min_size=2, max_size=6, unique=True), st.data())
def test_duplicate_addresses_are_found(names: list[str], data: st.DataObject) -> None:
    one, two = sorted(data.draw(st.permutations(range(len(names))))[:2])
    addresses = [f"10.0.0.{index}" for index in range(len(names))]
    addresses[two] = addresses[one]
    text = "".join(f"{name} ansible_host={address}\n" for name, address in zip(names, addresses, strict=True))
    with inventory(text) as file, pytest.raises(InventoryError) as caught:
        load(file)
    (finding,) = caught.value.problems
    assert finding.where == "h.ini"
    assert finding.what == f"hosts `{names[one]}` and `{names[two]}` are the same machine: address {addresses[one]}"


@SOME
@given(st.sampled_from(OWN_VARIABLES), st.data())
def test_transposed_letters_are_recognised(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(name) - 2).filter(lambda index: name[index] != name[index + 1]))
    wrong = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    (finding,) = unknown_variables([Host("a", "a", variables={wrong: 1})], "h.ini")
    assert (finding.what, finding.hint) == (f"unknown variable `{wrong}` (host `a`)", f"did you mean `{name}`?")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1=:[]{}\"'#; \n-,!&*%@`|>\t"), max_size=60), st.sampled_from(["h.ini", "h.yml", "h"]))
def test_any_text_is_an_inventory_or_an_error(text: str, name: str) -> None:
    with inventory(text, name) as file:
        try:
            hosts, said = load(file).hosts, ""
        except InventoryError as error:
            hosts, said = (), str(error)
    assert hosts or said


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1:[],@. -_!"), max_size=20))
def test_any_argument_is_a_list_or_an_error(argument: str) -> None:
    hosts, findings = parse_list(argument)
    assert hosts or findings
    assert all(host.name for host in hosts)
