"""The command lines of a comparison: whole texts, from options alone."""

import os
from pathlib import Path

import pytest

from hvdtrain.bench.options import CompareOptions
from hvdtrain.bench.plan import make_plan
from hvdtrain.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden" / "bench"
CASES = {
    "all_engines": {"workers": 3, "servers": 2, "rounds": 1, "epochs": 5, "batch_per_rank": 64},
    "rounds_interleave": {"engines": ("allreduce-gloo", "ps-async"), "rounds": 2,
                          "output": Path("my results")},
    "network_servers_on_workers": {"network": ("100mbit",), "hosts": (2, 3), "servers": 2,
                                   "rounds": 1},
    "network_servers_apart": {"network": ("100mbit", "1gbit"), "servers": 2, "rounds": 1,
                              "servers_on": "apart", "engines": ("single", "ps-sync")},
    "sweep_roles": {"sweep": "roles", "servers": 3, "engines": ("ps-async",), "rounds": 1},
}


def plan(environ=None, **options):
    return make_plan(CompareOptions(**{"job": "job.toml"} | options), cores=8,
                     program=("hvdtrain",), environ=environ or {})


@pytest.mark.parametrize("name", CASES)
def test_command_lines(name):
    path = GOLDEN / f"{name}.txt"
    text = plan(**CASES[name]).render()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "accept it with UPDATE_GOLDEN=1"


def test_every_golden_text_is_tested():
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def test_threads_are_those_of_a_worker_for_every_engine():
    assert plan(workers=2).threads == 4
    assert plan(workers=16).threads == 1
    assert plan(network=("1gbit",), hosts=(2, 4)).threads == 2  # the hosts share the cores
    assert plan({"OMP_NUM_THREADS": "3"}).threads == 3
    assert plan({"OMP_NUM_THREADS": "3"}, threads=5).threads == 5


def test_virtual_hosts_are_counted_with_those_of_the_servers():
    assert plan().hosts == 0
    assert plan(network=("1gbit",), hosts=(2, 3), servers=2).hosts == 3
    assert plan(network=("1gbit",), hosts=(2, 3), servers=2, servers_on="apart").hosts == 5


def test_more_hosts_than_there_are_names_are_refused():
    with pytest.raises(ConfigError, match=r"17 virtual hosts are asked for.*at most 16"):
        plan(network=("1gbit",), hosts=(17,))


def test_roles_are_swept_only_with_servers():
    with pytest.raises(ConfigError, match="Add ps-async or ps-sync"):
        plan(sweep="roles", engines=("single",))


def test_one_process_runs_once_for_points_that_do_not_reach_it():
    engines = [run.engine for run in plan(network=("1mbit", "1gbit"), hosts=(2, 3), rounds=2,
                                          engines=("single", "allreduce-gloo")).runs]
    assert (engines.count("single"), engines.count("allreduce-gloo")) == (2, 8)
