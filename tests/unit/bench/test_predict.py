"""Predicted steps that can be worked out by hand, and what `hvdtrain plan` takes and shows."""

import dataclasses
import json
import sys

import pytest
from typer.testing import CliRunner

from hvdtrain.bench import predict
from hvdtrain.bench.forecast import line_through, profile_from, profile_of, step_s
from hvdtrain.bench.options import PlanOptions
from hvdtrain.bench.predict import UNEVEN, simulate, throughput
from hvdtrain.bench.profile import (
    PAYLOAD,
    Cluster,
    ExchangeCost,
    Profile,
    ServerCost,
    Transfer,
)
from hvdtrain.errors import ConfigError

M = 1e6
#: 8 Mbit/s of payload: a megabyte takes a second.
SLOW = 8e6 / PAYLOAD
FREE = {"horovod-gloo": ExchangeCost(fixed_s=0.0, byte_s=0.0),
        "shared-memory": ExchangeCost(fixed_s=0.0, byte_s=0.0)}


def profile(**changes):
    """1 s of forward and backward with 10 samples, 0.1 s of update, one bucket of a megabyte."""
    return Profile(**{
        "samples": 400, "batch": 10, "fixed_s": 0.2, "sample_s": 0.08, "update_s": 0.1,
        "loop_s": 0.0, "cores": 8, "parameter_bytes": M, "exchange": FREE,
        "transfers": (Transfer(ready_s=1.0, size=M),), **changes})


def on(hosts, ranks=1, **changes):
    return Cluster(hosts=hosts, ranks_per_host=ranks, **{
        "bits_per_s": SLOW, "latency_s": 0.0, **changes})


@pytest.mark.parametrize(("text", "hosts", "ranks", "bits", "latency"), [
    ("8x4@100gbit,20us", 8, 4, 1e11, 20e-6), ("1x8", 1, 8, None, None),
    ("2x1@2.5Gbit", 2, 1, 2.5e9, None), (" 64x8@400gbit, 1.5ms", 64, 8, 4e11, 1.5e-3)])
def test_clusters_are_read(text, hosts, ranks, bits, latency):
    found = Cluster.parse(text)
    assert (found.hosts, found.ranks_per_host, found.size) == (hosts, ranks, hosts * ranks)
    assert (found.bits_per_s, found.latency_s) == (
        bits, None if latency is None else pytest.approx(latency))


@pytest.mark.parametrize(("text", "message"), [
    ("8", "Expected HOSTSxRANKS@RATE"), ("8x4", "has 8 hosts and no network"),
    ("0x4@1gbit", "Expected HOSTSxRANKS"), ("8x4@100", "Expected HOSTSxRANKS"),
    ("8x4@0gbit", "Expected HOSTSxRANKS"), ("8x4@1gbit,20", "with the time of a small message")])
def test_mistakes_in_clusters_are_told(text, message):
    with pytest.raises(ConfigError, match=message):
        PlanOptions(job="job.toml", on=(text,))


@pytest.mark.parametrize(("kind", "ranks", "link_bytes", "messages"), [
    ("reduce", 2, 100, 2), ("reduce", 4, 150, 6), ("divide", 4, 75, 3), ("gather", 4, 300, 3)])
def test_bytes_and_messages_of_a_ring(kind, ranks, link_bytes, messages):
    transfer = Transfer(ready_s=0.0, size=100, kind=kind)
    assert transfer.link_bytes(ranks) == pytest.approx(link_bytes)
    assert transfer.messages(ranks) == messages


def test_one_bucket_travels_after_the_backward_pass():
    found = predict.allreduce(profile(), on(4))
    assert found.step_s == pytest.approx(1.0 + 1.5 + 0.1)
    assert found.bound == "network"
    assert found.bound_s == pytest.approx(1.5)
    assert found.efficiency == pytest.approx(1.1 / 2.6)
    assert found.epoch_s == pytest.approx(10 * 2.6)


def test_early_buckets_travel_beside_the_backward_pass():
    buckets = (Transfer(ready_s=0.4, size=M / 2), Transfer(ready_s=1.0, size=M / 2))
    # On two ranks half a second each: the first from 0.4 to 0.9, the last from 1.0 to 1.5.
    found = predict.allreduce(profile(transfers=buckets), on(2))
    assert found.step_s == pytest.approx(1.5 + 0.05)
    assert found.bound == "compute"
    # On four ranks 0.75 s: the first is on its way until 1.15, and the last must wait for it.
    assert predict.allreduce(profile(transfers=buckets), on(4)).step_s == pytest.approx(1.9 + 0.05)


@pytest.mark.parametrize(("ready", "sizes", "update", "end"), [
    ([], [], 0.5, 2.5), ([2.0], [1.0], 0.5, 4.0), ([0.5, 2.0], [1.0, 1.0], 1.0, 4.0),
    ([0.5, 1.0], [3.0, 3.0], 1.0, 8.0), ([1.0, 0.5], [1.0, 2.0], 0.0, 4.5)])
def test_updates_begin_when_their_bucket_is_there(ready, sizes, update, end):
    """A collective takes half a second, and a second for each byte."""
    transfers = [Transfer(ready_s=at, size=size) for at, size in zip(ready, sizes, strict=True)]
    found, _ = simulate(transfers, each_for_itself, compute_s=2.0, update_s=update)
    assert found == pytest.approx(end)


def each_for_itself(taken):
    return {"latency": 0.5, "network": sum(one.size for one in taken)}


@pytest.mark.parametrize(("most_bytes", "end", "collectives"), [
    (0, 5.0, 4), (100, 4.0, 2), (1.5, 4.5, 3)])
def test_what_waits_travels_together(most_bytes, end, collectives):
    transfers = [Transfer(ready_s=at, size=size) for at, size in (
        (0.0, 1.0), (0.5, 0.5), (1.0, 0.5), (1.2, 1.0))]
    found, parts_s = simulate(transfers, each_for_itself, compute_s=1.2, update_s=0.0,
                              most_bytes=most_bytes)
    assert found == pytest.approx(end)
    assert parts_s == pytest.approx({"latency": 0.5 * collectives, "network": 3.0})


def test_ranks_of_one_host_share_its_link_and_count_in_the_ring():
    alone, four = (predict.allreduce(profile(), on(2, ranks)) for ranks in (1, 4))
    assert alone.parts_s["network"] == pytest.approx(1.0)
    assert four.parts_s["network"] == pytest.approx(2 * 7 / 8)


def test_latency_decides_for_small_gradients_on_many_ranks():
    small = profile(transfers=(Transfer(ready_s=1.0, size=1e3),))
    found = predict.allreduce(small, on(512, bits_per_s=1e11, latency_s=1e-3))
    assert found.bound == "latency"
    assert found.parts_s["latency"] == pytest.approx(4 * 511 * 1e-3)  # agreeing, and the ring


def test_what_the_collective_does_beside_the_network():
    cost = ExchangeCost(fixed_s=0.25, byte_s=0.5e-6, copy_s=0.1e-6)
    slow, fast = (predict.exchange_parts([Transfer(ready_s=1.0, size=M)], profile(
        exchange={"horovod-gloo": cost}), on(2, bits_per_s=bits)) for bits in (SLOW, 1e12))
    assert slow["collective"] == pytest.approx(0.25 + 0.1)  # the ring's work is hidden
    assert fast["network"] + fast["collective"] == pytest.approx(0.25 + 0.1 + 0.4)


def test_one_host_has_no_network():
    shared = profile(exchange={"shared-memory": ExchangeCost(fixed_s=0.01, byte_s=1e-7)})
    found = predict.allreduce(shared, Cluster(hosts=1, ranks_per_host=4))
    assert found.parts_s["network"] == 0.0
    assert found.parts_s["collective"] == pytest.approx(2 * 0.01 + 1.5 * M * 1e-7)


def test_too_few_cores_stretch_what_is_computed():
    used = profile(cores=2, cores_used=1.0)
    assert predict.allreduce(used, on(2, 2)).parts_s["compute"] == pytest.approx(1.0)
    assert predict.allreduce(used, on(2, 4)).parts_s["compute"] == pytest.approx(2.0)
    virtual = predict.allreduce(used, on(3, one_machine=True))
    assert virtual.parts_s["compute"] == pytest.approx(1.5)
    assert virtual.parts_s["update"] == pytest.approx(0.15)


def test_ranks_that_share_cores_send_nothing_before_the_backward_pass_has_ended():
    early = profile(cores=1, cores_used=1.0, transfers=(Transfer(ready_s=0.0, size=M),))
    assert predict.allreduce(early, on(2)).step_s == pytest.approx(1.0 + 0.1)
    assert predict.allreduce(early, on(2, one_machine=True)).step_s == pytest.approx(
        2 * 1.0 + 1.0 + 2 * 0.1)


def test_reading_decides_where_it_takes_longer_than_all_else():
    found = predict.allreduce(profile(read_s=0.5), on(2))
    assert found.step_s == pytest.approx(5.0)
    assert found.bound == "input"
    assert found.efficiency == pytest.approx(1.0)


def test_one_rank_exchanges_nothing():
    found = predict.allreduce(profile(), Cluster(hosts=1, ranks_per_host=1))
    assert found.step_s == pytest.approx(1.1)
    assert found.efficiency == pytest.approx(1.0)


def test_a_global_batch_is_divided():
    divided = profile(batch_global=40, batch=40, fixed_s=0.2, sample_s=0.08,
                      transfers=(Transfer(ready_s=3.4, size=M),))
    found = predict.allreduce(divided, on(4))
    assert found.batch == 10
    assert found.step_s == pytest.approx(1.0 + 1.5 + 0.1)
    assert found.epoch_s == pytest.approx(10 * 2.6)
    assert found.efficiency == pytest.approx((10 / 2.6) / (40 / 3.5))


SERVER = ServerCost(step_s=1.2, worker_cpu_s=1.0, server_cpu_s=0.05, chief_cpu_s=0.01)


def test_workers_pull_and_push_over_the_link_of_a_server():
    found = predict.ps_sync(profile(servers=SERVER), on(4))
    assert found.bound == "server's link"
    assert found.step_s == pytest.approx(1.2 + 3 * 0.05 + (1 + UNEVEN) * 4.0)
    four = predict.ps_sync(profile(servers=SERVER), on(4), 4)
    assert four.bound == "worker's link"
    assert four.step_s == pytest.approx(1.2 + 2 * 1.0)


def test_asynchronous_workers_without_a_processor_take_n_plus_1_transfers():
    free = ServerCost(step_s=0.0, worker_cpu_s=0.0, server_cpu_s=0.0, chief_cpu_s=0.0)
    for workers in (2, 3, 8):
        found = predict.ps_async(profile(servers=free, fixed_s=0.0, sample_s=0.0), on(workers))
        assert found.step_s == pytest.approx(workers + 1)


@pytest.mark.parametrize(("customers", "think", "demands", "rate"), [
    (1, 1.0, [1.0], 1 / 2), (2, 0.0, [1.0], 1.0), (2, 1.0, [1.0], 2 / 2.5)])
def test_mean_value_analysis(customers, think, demands, rate):
    assert throughput(customers, think, demands) == pytest.approx(rate)


def test_servers_that_were_not_measured_are_told():
    with pytest.raises(ConfigError, match="has no step with parameter servers"):
        predict.ps_sync(profile(), on(2))


@pytest.mark.parametrize(("cluster", "message"), [
    (Cluster(hosts=1, ranks_per_host=2), "no cost of shared-memory. Measure anew, with an --on of "
     "one host"), (on(2), "no cost of horovod-gloo.*several hosts")])
def test_a_collective_that_was_not_measured_is_told(cluster, message):
    with pytest.raises(ConfigError, match=message):
        predict.allreduce(profile(exchange={}), cluster)


@pytest.mark.parametrize(("points", "line"), [
    ({1: 3.0, 2: 5.0, 4: 9.0}, (1.0, 2.0)), ({4: 2.0}, (2.0, 0.0)),
    ({1: 3.0, 2: 2.0}, (2.5, 0.0)),  # noise: more samples do not take less time
    ({1: 1.0, 2: 4.0}, (0.0, 5 / 3))])  # nor no samples less than none
def test_the_line_through_measured_batches(points, line):
    assert line_through(points) == pytest.approx(line)


def test_steps_are_timed_within_epochs_and_after_the_first_ones():
    assert step_s([[0.0, 9.0, 10.0, 11.0, 12.0], [50.0, 52.0]]) == pytest.approx(4 / 3)


def measured_run(compute_s, **changes):
    return {"compute_s": compute_s, "update_s": 0.1, "stall_s": 0.02, "gap_s": 0.01,
            "read_s": 0.001, "cores_used": 1.5, "parameter_bytes": M, "samples": 100,
            "transfers": [{"kind": "reduce", "size": M, "ready_s": compute_s}], **changes}


def made_of(**changes):
    told = {"batch": 4, "batch_global": None, "runs": {
        "2": measured_run(0.5), "4": measured_run(0.8, **changes), "8": measured_run(1.1)}}
    return profile_of(told, rank_cores=1, cores=2, latency_s=1e-5, exchange=FREE, servers=None)


def test_a_profile_is_made_of_what_was_measured():
    found = made_of()
    assert found.compute_s(8) - found.compute_s(4) == pytest.approx(4 * found.sample_s)
    assert found.transfers[0].ready_s == pytest.approx(found.compute_s(4))
    assert found.loop_s == pytest.approx(0.03)
    assert (found.cores, found.cores_used) == (2, 1)
    slow = made_of(read_s=2.0)  # then the step waits for the data
    assert (slow.loop_s, slow.read_s) == (pytest.approx(0.01), pytest.approx(0.5))


def test_a_profile_survives_its_file():
    found = dataclasses.replace(made_of(), servers=SERVER)
    assert profile_from(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def plan(monkeypatch, *words):
    from hvdtrain.cli.main import app
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "plan", *words])
    return CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)


@pytest.fixture
def profile_file(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"job": "job.toml", **dataclasses.asdict(
        profile(servers=SERVER, latency_s=1e-5))}))
    return str(path)


def test_the_table_has_each_engine_on_each_cluster(monkeypatch, profile_file):
    done = plan(monkeypatch, "job.toml", "--profile", profile_file, "--on", "2x1@8mbit",
                "--on", "4x2@100gbit,20us")
    assert done.exit_code == 0
    rows = [line.split()[:3] for line in done.output.splitlines() if "x" in line.split(" ")[1:2][
        0:1] or line.strip().startswith(("2x1", "4x2"))]
    assert [row for row in rows if row[0][0] in "24"] == [
        ["2x1@8mbit", "2", "allreduce"], ["2x1@8mbit", "2", "ps-sync"],
        ["2x1@8mbit", "2", "ps-async"], ["4x2@100gbit,20us", "8", "allreduce"],
        ["4x2@100gbit,20us", "8", "ps-sync"], ["4x2@100gbit,20us", "8", "ps-async"]]


def test_json_has_the_measured_figures_and_the_parts_of_a_step(monkeypatch, profile_file):
    told = json.loads(plan(monkeypatch, "job.toml", "--profile", profile_file, "--json",
                           "--on", "4x1@8mbit,0us", "--engines", "allreduce").stdout)
    found, = told["predictions"]
    assert (found["ranks"], found["bound"]) == (4, "network")
    assert found["parts_s"]["network"] == pytest.approx(1.5 / PAYLOAD)
    assert told["profile"]["batch"] == 10


@pytest.mark.parametrize(("options", "message"), [
    ({"engines": ("ring",)}, "unknown 'ring'. Expected some of: allreduce, ps-sync, ps-async"),
    ({"servers": 0}, "servers must be at least 1"),
    ({"seconds": 0.0}, "seconds must be above 0"),
    ({"cores": 0}, "cores must be at least 1")])
def test_mistakes_in_options_are_told(options, message):
    with pytest.raises(ConfigError, match=message):
        PlanOptions(job="job.toml", **options)


@pytest.mark.parametrize(("job", "content", "message"), [
    ("other.toml", None, "is of job.toml with 10 samples per rank"),
    ("job.toml", "{}", "Expected a file that hvdtrain plan has written")])
def test_a_file_that_does_not_fit_is_told(profile_file, job, content, message):
    from hvdtrain.bench.forecast import forecast
    if content is not None:
        with open(profile_file, "w") as stream:
            stream.write(content)
    with pytest.raises(ConfigError, match=message):
        forecast(PlanOptions(job=job, profile=profile_file), {}, print)
