"""Which address is advertised: decided from invented interfaces, no network needed."""

from __future__ import annotations

import pytest
from collective_core.runtime import config, network
from collective_core.runtime.network import Interface

from collective_core import CollectiveError, _native

LO = Interface("lo", "127.0.0.1", 8)
DOCKER = Interface("docker0", "172.17.0.1", 16)


def choose(own, *others, **wishes):
    return network.choose_address(own, list(others), **wishes)


def test_the_network_that_all_hosts_share():
    own = [LO, DOCKER, Interface("eth0", "10.0.0.5", 24), Interface("eth1", "192.168.7.5", 24)]
    other = [LO, DOCKER, Interface("ens3", "192.168.7.9", 24), Interface("ens4", "10.9.0.9", 24)]
    assert choose(own, other) == "192.168.7.5"


def test_a_bridge_that_every_host_has_leads_nowhere():
    own = [LO, Interface("bridge7", "172.30.0.1", 16), Interface("eth0", "10.0.0.5", 24)]
    other = [LO, Interface("bridge7", "172.30.0.1", 16), Interface("eth0", "10.0.0.6", 24)]
    assert choose(own, other) == "10.0.0.5"


def test_a_wish_for_a_network_or_an_address_wins():
    own = [LO, Interface("eth0", "10.0.0.5", 24), Interface("ib0", "172.18.3.4", 16), Interface("eth6", "fd00::5", 64)]
    other = [LO, Interface("eth0", "10.0.0.6", 24), Interface("ib0", "172.18.3.5", 16)]
    assert choose(own, other, networks=["172.18.0.0/16"]) == "172.18.3.4"
    assert choose(own, other, networks=["192.168.0.0/16", "fd00::/8"]) == "fd00::5"
    assert choose(own, other, networks=["eth1", "ib0", "eth0"]) == "172.18.3.4", "the first that is there, by its name"
    assert choose(own, other, address="10.0.0.5") == "10.0.0.5"


def test_errors_list_what_there_is():
    own = [LO, DOCKER]
    with pytest.raises(CollectiveError, match=r"docker0 172\.17\.0\.1/16"):
        choose(own, [LO, Interface("eth0", "203.0.113.6", 24)])
    with pytest.raises(CollectiveError, match="COLLECTIVE_NETWORK=10"):
        choose(own, [LO], networks=["10.0.0.0/8"])
    for wrong in ("10.0.0.0/99", "eth9", "10.0.0"):
        with pytest.raises(CollectiveError, match="COLLECTIVE_NETWORK"):
            choose(own, [LO], networks=[wrong])


def test_rails_are_further_addresses_in_their_order():
    own = [LO, Interface("eth0", "10.1.0.5", 16), Interface("eth1", "10.2.0.5", 16), Interface("eth2", "10.2.0.6", 16)]
    assert network.choose_rails(own, "10.1.0.5", ["eth2", "10.2.0.0/16"]) == ["10.2.0.6", "10.2.0.5"]
    assert network.choose_rails(own, "10.1.0.5", []) == []
    own += [Interface("eth0", "fd00::5", 64), Interface("eth1", "fd01::5", 64)]
    assert network.choose_rails(own, "fd00:0::5", ["eth1"]) == ["fd01::5"]
    for same in ("10.1.0.0/16", "eth0"):
        with pytest.raises(CollectiveError, match=r"on another card than 10\.1\.0\.5; its interfaces: .*eth1 10\.2\.0\.5/16"):
            network.choose_rails(own, "10.1.0.5", [same])


def test_a_rail_that_cannot_be_bound_ends_the_start():
    with pytest.raises(CollectiveError):
        _native.open_listeners("127.0.0.1", ",198.51.100.7,198.51.100.8")


def test_rails_that_are_no_addresses_are_named():
    own = [LO, Interface("eth0", "10.1.0.5", 16)]
    with pytest.raises(CollectiveError, match="COLLECTIVE_RAILS: "):
        network.choose_rails(own, "10.1.0.5", ["10.1.0"])


@pytest.mark.parametrize("text", ["soon", "-3", "nan", "1e12"])
def test_a_timeout_that_cannot_be_read_is_named(monkeypatch, text):
    monkeypatch.setenv("COLLECTIVE_TIMEOUT", text)
    with pytest.raises(CollectiveError, match="COLLECTIVE_TIMEOUT"):
        config.from_environment()


def test_a_timeout_of_zero_never_comes(monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0")
    assert config.from_environment().timeout == config.NEVER
    monkeypatch.setenv("COLLECTIVE_TIMEOUT", "7")
    assert config.from_environment().timeout == 7
