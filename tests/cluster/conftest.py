"""The cluster as fixtures. Where it may not be had, tests skip with the reason, or fail in CI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import VirtualHosts
from tests.cluster.packages import NotPermittedError, is_required
from tests.cluster.slurm import PrivateSlurm


def _refuse(error: NotPermittedError) -> None:
    if is_required():
        pytest.fail(f"the cluster tests must run here, but: {error}")
    pytest.skip(str(error))


def _up(made: VirtualHosts | PrivateSlurm) -> None:
    try:
        made.up()
    except NotPermittedError as error:
        _refuse(error)


@pytest.fixture(scope="session")
def hosts() -> Iterator[VirtualHosts]:
    """Three hosts: hosta, hostb, hostc. For tests that leave them as they were."""
    made = VirtualHosts(3)
    _up(made)
    yield made
    made.down()


@pytest.fixture
def fragile_hosts() -> Iterator[VirtualHosts]:
    """Three hosts of the test's own, to cut, crash and slow down."""
    made = VirtualHosts(3)
    _up(made)
    yield made
    made.down()


@pytest.fixture(scope="session")
def slurm(hosts: VirtualHosts) -> Iterator[PrivateSlurm]:
    """Slurm on hosta and hostb."""
    made = PrivateSlurm(hosts)
    _up(made)
    yield made
    made.down()
