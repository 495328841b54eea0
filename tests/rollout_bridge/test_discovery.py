"""Endpoints by list or by name."""

import pytest

from rollout_bridge.discovery import resolve


def test_a_list_stays_as_it_is():
    assert resolve(["b:2", "a:1", "[::1]:3"]) == ("b:2", "a:1", "[::1]:3")


def test_a_name_stands_for_each_of_its_addresses_once(monkeypatch):
    def addresses(name, port, type):
        assert (name, port) == ("fleet.example", 50051)
        return [(0, 0, 0, "", (host, port)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")]

    monkeypatch.setattr("rollout_bridge.discovery.socket.getaddrinfo", addresses)
    found = resolve(["a:1", "dns:fleet.example:50051"])
    assert found == ("a:1", "10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051")


def test_a_name_without_addresses_is_named(monkeypatch):
    def addresses(*_arguments, **_keywords):
        raise OSError("Name or service not known")

    monkeypatch.setattr("rollout_bridge.discovery.socket.getaddrinfo", addresses)
    with pytest.raises(ValueError, match="endpoint dns:fleet:1: expected a name with addresses"):
        resolve(["dns:fleet:1"])
