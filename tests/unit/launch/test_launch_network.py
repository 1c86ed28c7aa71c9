"""Which interface of a host carries the ranks' traffic, and where the launcher is found."""

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.link import HostFacts, choose_interface, rendezvous_address


def host(**changes: object) -> HostFacts:
    values: dict[str, object] = {
        "clock_offset_s": 0.0, "own_address": "10.0.0.2", "ssh_client": "10.9.0.1",
        "ssh_server": "10.9.0.2",
        "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.2", "mgmt": "10.9.0.2"}}
    return HostFacts(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "expected"), [
    ((), "eth0"), (("mgmt",), "mgmt"), (("ib0", "mgmt"), "mgmt"), (("10.9.0.0/16",), "mgmt"),
    (("192.168.0.0/16", "10.0.0.0/24"), "eth0")])
def test_the_first_that_is_wanted_and_there(wanted: tuple[str, ...], expected: str) -> None:
    assert choose_interface("h", host(), wanted) == expected


def test_without_a_route_by_name_that_of_ssh_is_taken() -> None:
    assert choose_interface("h", host(own_address=None), ()) == "mgmt"
    assert choose_interface("h", host(own_address="127.0.0.1"), ()) == "mgmt"


def test_what_is_missing_is_told_with_what_is_there() -> None:
    with pytest.raises(LaunchError, match=r"h has no network interface ib0. It has: lo .*eth0"):
        choose_interface("h", host(), ("ib0",))
    with pytest.raises(LaunchError, match="No network interface of h leads to the other hosts"):
        choose_interface("h", host(own_address=None, ssh_server=None), ())


def test_the_launcher_is_where_ssh_came_from() -> None:
    assert rendezvous_address("h", host()) == "10.9.0.1"
    assert rendezvous_address("localhost", host(ssh_client=None)) == "127.0.0.1"
    assert rendezvous_address("localhost", host(ssh_client="fe80::1")) == "127.0.0.1"
    with pytest.raises(LaunchError, match="is not known here"):
        rendezvous_address("no-such-host.invalid", host(ssh_client=None))
