"""The interface of gloo's host groups, where a program has used NCCL alone so far."""

import os
import socket

import pytest
import torch.distributed as dist
from dmuon._setup import interface
from dmuon._setup.interface import VARIABLE, interface_of, interface_towards, reachable_interface


@pytest.fixture
def nccl_world(monkeypatch):
    """The default process group has backends for GPUs alone, and nobody has chosen an interface."""
    monkeypatch.setattr(interface, "backends", lambda: {"cuda": "nccl"})
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_loopback_address_is_that_of_lo():
    assert interface_of("127.0.0.1") == interface_towards("127.0.0.1") == "lo"
    assert interface_of("::ffff:127.0.0.1") == "lo"


def test_an_address_that_no_interface_has_is_of_none():
    assert interface_of("192.0.2.1") is None  # for documentation alone, RFC 5737
    assert interface_of("2001:db8::1") is None


@pytest.mark.parametrize("host", ["", "no.such.host.invalid"])
def test_nobody_knows_the_way_to_a_host_without_a_name(host):
    assert interface_towards(host) is None


def test_a_name_with_a_loopback_address_and_another_means_the_other(monkeypatch):
    addresses = {"127.0.1.1": "lo", "10.1.2.3": "eth7"}
    found = [(socket.AF_INET, None, None, None, ("127.0.0.1", port)) for port, _ in enumerate(addresses, 9)]
    answers = iter(addresses.values())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(interface, "interface_of", lambda _: next(answers))
    assert interface_towards("head") == "eth7"


def test_gloo_gets_it_only_inside(nccl_world, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with reachable_interface() as chosen:
        assert chosen == os.environ[VARIABLE] == "lo"
    assert VARIABLE not in os.environ


def test_the_users_choice_stays(nccl_world, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(VARIABLE, "ib0")
    with reachable_interface() as chosen:
        assert chosen == os.environ[VARIABLE] == "ib0"
    assert os.environ[VARIABLE] == "ib0"


def test_gloo_chooses_itself_where_it_has_connected_before(nccl_world, monkeypatch):
    monkeypatch.setattr(interface, "backends", lambda: {"cpu": "gloo", "cuda": "nccl"})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with reachable_interface() as chosen:
        assert chosen is None
        assert VARIABLE not in os.environ


def test_backends_are_those_of_the_default_group(monkeypatch):
    from dmuon._setup.ranks import backends

    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert backends() == {"cpu": "gloo", "cuda": "nccl"}
