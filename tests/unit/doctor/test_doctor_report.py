"""Who connects to whom, the allreduce's finding, the table, the JSON, the page."""

import io
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from doctor_hosts import CUDA, H100, HOROVOD, host
from rich.console import Console

from hvdtrain.doctor.examine import launch_options, obstacle
from hvdtrain.doctor.facts import GpuFacts
from hvdtrain.doctor.findings import (
    DoctorReport,
    Finding,
    failed,
    grouped,
    not_applicable,
    ok,
    warning,
)
from hvdtrain.doctor.judge_together import (
    MOST_FOR_ALL_PAIRS,
    addresses_of,
    judge_allreduce,
    targets_of,
)
from hvdtrain.doctor.options import DoctorOptions
from hvdtrain.errors import ConfigError
from hvdtrain.launch.options import RemoteOptions
from hvdtrain.process import ANSWER_MARK

ROOT = Path(__file__).resolve().parents[3]
TOLD = {"collective": "horovod-gloo", "device": "CPU, 1 CPU thread", "bytes": 16 << 20,
        "seconds": 0.02, "rounds": 20, "size": 2}
LINE = f"[0] {ANSWER_MARK}{json.dumps(TOLD)}"
FINDINGS = (
    ok("python", "hosta", "3.12.4"), ok("keras", "hosta", "3.15.1"),
    ok("python", "hostb", "3.12.4"),
    failed("keras", "hostb", "2.15.0", expected=">=3.5", fix="pip install [keras]"),
    warning("clock", "hostb", "2 s", expected="1 s", fix="chronyc makestep"),
    not_applicable("slurm", "hosta", "no srun"))
REPORT = DoctorReport(hosts=("hosta", "hostb"), findings=FINDINGS, seconds=1.25)


def cluster(count, **changes):
    views = []
    for number in range(1, count + 1):
        address = f"10.0.0.{number}"
        views.append(host(f"host{number}", is_local=number == 1, network={
            "interfaces": {"lo": "127.0.0.1", "eth0": address}, "own_address": address,
            "port": 40000 + number, "ssh_client": None if number == 1 else "10.0.0.1"}, **changes))
    return views


def pairs(views, launcher=None):
    addresses = addresses_of(views, ())
    return {view.name: {target["host"] for target in targets_of(view, views, addresses, launcher)}
            for view in views}


def test_few_hosts_all_try_each_other():
    assert pairs(cluster(3)) == {"host1": {"host2", "host3"}, "host2": {"host1", "host3"},
                                 "host3": {"host1", "host2"}}
    assert pairs(cluster(1)) == {"host1": set()}
    target = targets_of(cluster(2)[0], cluster(2), addresses_of(cluster(2), ()), None)[0]
    assert target == {"host": "host2", "address": "10.0.0.2", "port": 40002}


def test_many_hosts_try_their_neighbors_in_a_ring():
    tried = pairs(cluster(MOST_FOR_ALL_PAIRS + 1))
    assert tried["host1"] == {"host9", "host2"}
    assert all(len(targets) == 2 for targets in tried.values())


def test_a_launcher_without_ranks_must_be_reached_but_reaches_nobody():
    assert pairs(cluster(3), launcher="host1") == {
        "host1": set(), "host2": {"host1", "host3"}, "host3": {"host1", "host2"}}


def test_a_host_without_a_usable_interface_is_left_out():
    views = [*cluster(2), host("bad", is_local=False, network={
        "interfaces": {"lo": "127.0.0.1"}, "own_address": None})]
    assert pairs(views)["host1"] == {"host2"}


def test_the_bandwidth_of_the_allreduce():
    request = launch_options([host()], DoctorOptions())
    finding = judge_allreduce("hosta", 0, LINE, request)
    assert finding.status == "ok"
    assert finding.found.startswith("839 MB/s bus bandwidth: 16 MiB float32 in 20.0 ms")


@pytest.mark.parametrize(("code", "printed"), [
    (3, f"{LINE}\na\nb\n\n[1] boom\n"), (0, "boom")])
def test_an_allreduce_that_fails_shows_its_last_lines(code, printed):
    options = DoctorOptions(hosts="a,b", remote=RemoteOptions(port=22), network_interface=("eth0",))
    request = launch_options([host("a"), host("b")], options)
    finding = judge_allreduce("a,b", code, printed, request)
    assert finding.status == "failed"
    assert "boom" in finding.found
    assert finding.fix.startswith("hvdtrain launch --network-interface eth0 --ssh-port 22 -np 2 "
                                  "-H a:1,b:1 ")


def test_where_the_two_ranks_run():
    options = DoctorOptions()
    assert launch_options([host()], options).hosts == "localhost:2"
    assert launch_options([host("b", is_local=False)], options).hosts == "b:2"
    assert launch_options([host(), host("b", is_local=False)], options).hosts == "hosta:1,b:1"


@pytest.mark.parametrize(("gpus", "env"), [
    (0, ()), (1, ("CUDA_VISIBLE_DEVICES=-1",)), (2, ())])
def test_two_ranks_do_not_share_a_gpu(gpus, env):
    view = host(cuda=CUDA, gpu=GpuFacts(gpus=(H100,) * gpus))
    assert launch_options([view], DoctorOptions()).env == env


def test_the_ranks_are_not_started_for_what_is_known_to_fail():
    views = [host(), host("b")]
    assert obstacle(views, FINDINGS) == ""
    bad = failed("keras", "b", "2", expected="3", fix="pip")
    assert obstacle(views, [bad]) == "keras failed on b"
    assert obstacle(views[:1], [bad]) == ""
    assert obstacle([], []) == "no host can be reached"
    without = host(horovod=replace(HOROVOD, gloo=False))
    assert "Horovod cannot be used with Gloo" in obstacle([without], [])


def test_json_has_the_keys_that_stay():
    told = json.loads(REPORT.as_json())
    assert set(told) == {"hvdtrain", "hosts", "seconds", "status", "checks"}
    assert (told["hosts"], told["status"]) == (["hosta", "hostb"], "failed")
    assert [set(check) for check in told["checks"]] == [
        {"check", "host", "status", "found", "expected", "fix"}] * len(FINDINGS)
    assert json.loads(replace(REPORT, findings=FINDINGS[:2]).as_json())["status"] == "ok"


def test_one_line_for_hosts_that_are_alike_in_the_order_of_the_checks():
    assert [(finding.check, finding.status, hosts) for finding, hosts in grouped(FINDINGS)] == [
        ("python", "ok", ["hosta", "hostb"]), ("keras", "ok", ["hosta"]),
        ("keras", "failed", ["hostb"]), ("clock", "warning", ["hostb"]),
        ("slurm", "not_applicable", ["hosta"])]


def test_the_table_shows_repairs_that_can_be_pasted():
    stream = io.StringIO()
    long = "pip install " + "x" * 300
    replace(REPORT, findings=(*FINDINGS, failed(
        "nccl", "hosta", "gone", expected="here", fix=long))).show(Console(file=stream))
    lines = stream.getvalue().splitlines()
    assert "    pip install [keras]" in lines
    assert f"    {long}" in lines
    assert any(re.match(r" ok +python +hosta, hostb +3\.12\.4", line) for line in lines)
    assert lines[-1] == "2 failed, 1 warning, 3 ok, 1 not applicable, in 1.2 s"


def test_options_are_checked():
    with pytest.raises(ConfigError, match="Both -H and --hostfile"):
        DoctorOptions(hosts="a", hostfile=Path("f"))
    with pytest.raises(ConfigError, match="--network-interface"):
        DoctorOptions(network_interface=("a b",))
    assert DoctorOptions().read_hosts() == ()
    assert [h.slots for h in DoctorOptions(hosts="a:2,b").read_hosts()] == [2, 1]


def checks_in_code():
    text = "".join(file.read_text() for file in (ROOT / "hvdtrain/doctor").rglob("*.py"))
    names = re.findall(r'\b(?:ok|failed|warning|not_applicable|make)\(\s*"([a-z-0-9]+)"', text)
    return set(names) | {"tensorflow", "keras", "directory", "output", "allreduce"}


def test_the_page_tells_of_each_check_option_and_key():
    import typer.main

    from hvdtrain.cli.main import app
    page = (ROOT / "docs/doctor.md").read_text()
    rows = set(re.findall(r"^\| `([a-z-0-9]+)` \|", page, flags=re.MULTILINE))
    assert checks_in_code() - rows == set()
    for parameter in typer.main.get_command(app).commands["doctor"].params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert name in page, f"docs/doctor.md does not tell of {name}"
    for field in fields(Finding):
        assert f"`{field.name}`" in page
