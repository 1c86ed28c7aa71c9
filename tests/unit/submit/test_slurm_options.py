"""What `hvdtrain slurm` refuses, and what it makes of the rest."""

from typing import Any

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.submit.slurm_options import SlurmOptions, time_limit_s


def options(**changes: Any) -> SlurmOptions:
    return SlurmOptions(**({"ntasks_per_node": 2} | changes))


@pytest.mark.parametrize(("text", "seconds"), [
    ("90", 5400), ("90:30", 5430), ("1:30:15", 5415), ("2-1", 176400), ("2-1:30", 178200),
    ("2-1:30:15", 178215), ("0", 0)])
def test_the_six_forms_of_a_time_limit(text: str, seconds: int) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1d", "1.5", "1:2:3:4", "3-1:2:3:4", "-5", "2-", "1:", "1 0",
                                  "10\n", "1h"])
def test_no_other_time_limit(text: str) -> None:
    with pytest.raises(ConfigError, match="Expected one of Slurm's forms: MINUTES"):
        time_limit_s(text)


@pytest.mark.parametrize(("changes", "message"), [
    ({"nodes": 0}, "--nodes is 0. Expected 1 or more"),
    ({"ntasks": 0}, "--ntasks is 0"),
    ({"cpus_per_task": -1}, "--cpus-per-task is -1"),
    ({"gpus_per_node": 0}, "--gpus-per-node is 0"),
    ({"signal_before_s": -1}, "--signal-before is -1. Expected 0 or more"),
    ({"signal_before_s": 65536}, "at most 65535"),
    ({"max_requeues": -1}, "--max-requeues"), ({"wait_s": -1}, "--wait is -1"),
    ({"ntasks_per_node": None}, "number of ranks is not given"),
    ({"nodes": 4, "ntasks": 3}, "cannot use 4 nodes"),
    ({"nodes": 2, "ntasks": 5}, "have place for 4"),
    ({"gpus_per_node": 1}, "2 ranks on each node have 1 GPUs"),
    ({"mem": "1.5G"}, "takes no fractions"), ({"mem": "x"}, "--mem"), ({"mem": ""}, "--mem"),
    ({"time": "3"}, "nothing would be trained"), ({"time": "0:30"}, "nothing would be trained"),
    ({"partition": "a\n#SBATCH --uid=0"}, "without line breaks"),
    ({"job_name": ""}, "--job-name is ''"), ({"output": "a\tb"}, "--output"),
    ({"account": "--uid=0"}, "looks like another option"),
    ({"modules": ("-x",)}, "--module"), ({"modules": ("a\nb",)}, "--module"),
    ({"env": ("=1",)}, "--env"), ({"env": ("A B=1",)}, "--env"), ({"env": ("1A=1",)}, "--env"),
    ({"env": ("A;id=1",)}, "--env"), ({"env": ("A=\0",)}, "--env"), ({"env": ("",)}, "--env"),
    ({"extra": ("exclusive",)}, "begins with --"), ({"extra": ("--a\nid",)}, "begins with --"),
    ({"extra": ("--comment='a",)}, "No closing quotation"),
])
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_a_rank_for_each_gpu() -> None:
    assert SlurmOptions(gpus_per_node=4).ranks_per_node == 4
    assert SlurmOptions(gpus_per_node=4, ntasks_per_node=2).ranks_per_node == 2
    assert SlurmOptions(gpus_per_node=4, ntasks=3).ranks_per_node is None


@pytest.mark.parametrize("changes", [
    {"nodes": 2, "ntasks": 4},
    {"nodes": 2, "ntasks": 2, "ntasks_per_node": None},
    {"gpus_per_node": 2},
    {"signal_before_s": 0, "max_requeues": 0, "wait_s": 0},
    {"signal_before_s": 65535},
])
def test_the_last_value_that_is_not_refused(changes: dict[str, Any]) -> None:
    made = options(**changes)
    assert {name: getattr(made, name) for name in changes} == changes


def test_a_time_limit_that_leaves_time_to_train() -> None:
    assert options(time="4", signal_before_s=120).time == "4"
    assert options(time="1", signal_before_s=0).time == "1"
    assert options(time="0").time == "0"
