"""MPIJob and TFJob: options, manifests checked with the schemas of Kubernetes and the operators."""

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

import hvdtrain
from hvdtrain.cli.main import app
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.launch.options import RankCommand
from hvdtrain.submit.kubernetes import Claim, KubernetesOptions, escape, make_manifest, to_yaml

TESTS = Path(__file__).parents[2]
GOLDEN = TESTS / "golden" / "submit"
SCHEMAS = {"MPIJob": json.loads((TESTS / "data/kubeflow/mpijob_v2beta1.json").read_text()),
           "TFJob": json.loads((TESTS / "data/kubeflow/tfjob_v1.json").read_text())}
# The oldest and the newest that are at hand.
KUBERNETES = ("1.25", "1.37")
FIT = RankCommand(words=("fit", "/data/job.toml", "--epochs", "3"), is_program=False)
PROGRAM = RankCommand(words=("python", "/app/it's.py", "--", "$(HOME)"), is_program=True)
ODD = ("1e3", "0o14", "0x1F", "1_000", "yes", "No", "on", "y", "null", "~", "", " ", "1:30",
       "2001-01-01", "- a", "a: b", "#", "it's", 'say "so"', "a\nb", "tab\t", "ünï \U0001f600",
       "!!int 3", "&a", "*a", "{a}", "[a]", "|", ">", "%", "@", "`", "\\", "\x7f", ".5", ".inf",
       "=", "<<", "$(HOME)", "$$", "x" * 300, "two  blanks", "trailing ")

CASES: dict[str, tuple[RankCommand, dict[str, Any]]] = {
    "mpijob_least": (FIT, {"kind": "mpijob"}),
    "mpijob_gpu": (FIT, {
        "kind": "mpijob", "namespace": "team", "workers": 2, "gpus_per_worker": 4, "cpu": "32",
        "memory": "128Gi", "env": ("NCCL_DEBUG=INFO", "NOTE=it's $(HOME)"),
        "pvc": ("data:/data", "runs:/work dir"), "shm": "16Gi", "service_account": "trainer",
        "restart_policy": "OnFailure", "backoff_limit": 5, "ttl_s": 3600,
        "clean_pod_policy": "All", "grace_s": 120, "implementation": "mpich"}),
    "mpijob_program": (PROGRAM, {"kind": "mpijob", "slots_per_worker": 2, "shm": "0"}),
    "tfjob_one": (FIT, {"kind": "tfjob", "program": "/opt/venv/bin/hvdtrain"}),
    "tfjob_gpu": (FIT, {
        "kind": "tfjob", "workers": 4, "gpus_per_worker": 1, "cpu": "7500m", "memory": "32Gi",
        "env": ("OMP_NUM_THREADS=3",), "pvc": ("data:/data",), "restart_policy": "OnFailure",
        "backoff_limit": 3, "ttl_s": 0, "clean_pod_policy": "None"}),
    "tfjob_servers": (FIT, {"kind": "tfjob", "workers": 4, "servers": 2, "gpus_per_worker": 1,
                            "cpu": "8", "backoff_limit": 1, "restart_policy": "OnFailure"}),
    "tfjob_program": (PROGRAM, {"kind": "tfjob", "workers": 2}),
    "mpijob_odd": (RankCommand(words=("program", *ODD), is_program=True), {
        "kind": "mpijob", "env": tuple(f"ODD_{n}={word}" for n, word in enumerate(ODD))}),
}


def manifest(name: str) -> dict[str, Any]:
    command, changes = CASES[name]
    return make_manifest(KubernetesOptions(**({"name": "digits", "image": "a/b:1"} | changes)),
                         command)


def replicas(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["spec"][{"MPIJob": "mpiReplicaSpecs",
                                          "TFJob": "tfReplicaSpecs"}[made["kind"]]]
    return found


def check(made: dict[str, Any], kubernetes: str = KUBERNETES[0]) -> None:
    """As the API server would: the fields of the operator, then those of each pod."""
    jsonschema.validate(made, SCHEMAS[made["kind"]])
    for replica in replicas(made).values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": replica["template"]}
        kubernetes_validate.validate(pod, kubernetes, strict=True)


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("name", CASES)
def test_the_cluster_takes_the_manifest(name: str, kubernetes: str) -> None:
    check(manifest(name), kubernetes)


#: Maps whose keys are free: names of resources.
FREE = {"limits", "requests"}


def mappings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all mappings in a manifest whose fields are fixed."""
    if isinstance(value, dict):
        if not path or path[-1] not in FREE:
            yield path
        for key, inner in value.items():
            yield from mappings(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from mappings(inner, (*path, index))


@pytest.mark.parametrize(("name", "path"), [
    (name, path) for name in ("mpijob_gpu", "tfjob_gpu") for path in mappings(manifest(name))],
    ids=lambda part: "/".join(map(str, part)) if isinstance(part, tuple) else part)
def test_the_check_refuses_an_unknown_field_anywhere(name: str, path: tuple[Any, ...]) -> None:
    made = copy.deepcopy(manifest(name))
    place = made
    for step in path:
        place = place[step]
    place["thereIsNoSuchField"] = "1"
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError),
                       match="thereIsNoSuchField"):
        check(made)


@pytest.mark.parametrize(("path", "value"), [
    (("spec", "slotsPerWorker"), "4"), (("spec", "mpiImplementation"), "openmpi"),
    (("spec", "runPolicy", "cleanPodPolicy"), "Never"),
    (("spec", "runPolicy", "backoffLimit"), -1),
    (("spec", "mpiReplicaSpecs", "Launcher", "replicas"), 2),
    (("spec", "mpiReplicaSpecs", "Worker", "replicas"), 0),
    (("spec", "mpiReplicaSpecs", "Worker", "restartPolicy"), "ExitCode"),
    (("spec", "mpiReplicaSpecs", "Worker", "template", "spec", "containers"), None),
    (("spec", "mpiReplicaSpecs", "Worker", "template", "spec", "containers", 0, "args"), "a b"),
    (("spec", "mpiReplicaSpecs", "Worker", "template", "spec", "containers", 0, "env", 0,
      "value"), 1),
])
def test_the_check_refuses_a_wrong_value(path: tuple[Any, ...], value: Any) -> None:
    made = copy.deepcopy(manifest("mpijob_gpu"))
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(made)


@pytest.mark.parametrize("name", [name for name in CASES if name != "mpijob_odd"])
def test_the_manifest_is_the_golden_one(name: str) -> None:
    text = to_yaml(manifest(name)).replace(f"hvdtrain {hvdtrain.__version__}", "hvdtrain X", 1)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "accept it with UPDATE_GOLDEN=1"


def test_every_golden_manifest_is_tested() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES) - {"mpijob_odd"}


@pytest.mark.parametrize("name", CASES)
def test_pyyaml_reads_what_was_written(name: str) -> None:
    assert yaml.safe_load(to_yaml(manifest(name), ("k8s", "a\nb"))) == manifest(name)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("name", CASES)
def test_kubernetes_reads_what_was_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text(to_yaml(manifest(name), ("k8s", "a\nb")), encoding="utf-8")
    shown = subprocess.run(
        ["kubectl", "annotate", "--local", "-f", path, "a=b", "-o", "json"], text=True,
        capture_output=True, check=True, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    read = json.loads(shown.stdout)
    del read["metadata"]["annotations"]
    assert read == manifest(name)


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a word: $(VAR) is replaced where VAR is set, $$ is one $."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else variables.get(
        found[1], found[0]), text)


@pytest.mark.parametrize("word", [*ODD, "$", "$$(HOME)", "$$$", "$(", "a$(HOME)$b", "$(NO)"])
def test_kubernetes_leaves_a_word_as_it_is(word: str) -> None:
    assert expanded(escape(word), {"HOME": "/root"}) == word


def args(made: dict[str, Any], role: str) -> list[str]:
    container = replicas(made)[role]["template"]["spec"]["containers"][0]
    return [expanded(word, {}) for word in (*container["command"], *container.get("args", ()))]


@pytest.mark.parametrize(("name", "ranks"), [
    ("mpijob_gpu", "fit /data/job.toml --epochs 3 --resume"),
    ("mpijob_program", """python '/app/it'"'"'s.py' -- '$(HOME)'""")])
def test_hvdtrain_launch_takes_what_the_launcher_is_given(
        name: str, ranks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = manifest(name)
    program, launch, *words = args(made, "Launcher")
    container = replicas(made)["Launcher"]["template"]["spec"]["containers"][0]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], expanded(variable["value"], {}))
    job = tmp_path / "job.toml"
    shutil.copy(TESTS.parent / "examples" / "digits_mlp.toml", job)
    words = [word.replace("/data/job.toml", str(job)) for word in words]
    result = CliRunner().invoke(app, [launch, "-np", "2", "--dry-run", *words])
    assert result.exit_code == 0, result.exception
    assert program == "hvdtrain"
    assert result.stdout.rstrip().endswith(ranks.replace("/data/job.toml", str(job)))
    for variable in container["env"]:
        assert f" {variable['name']}=" in result.stdout


def test_a_tfjob_has_one_chief_among_its_workers() -> None:
    found = replicas(manifest("tfjob_gpu"))
    assert {role: found[role]["replicas"] for role in found} == {"Chief": 1, "Worker": 3}
    assert args(manifest("tfjob_one"), "Chief") == ["/opt/venv/bin/hvdtrain", *FIT.words]
    assert "Worker" not in replicas(manifest("tfjob_one"))


def test_a_tfjob_with_servers_has_a_chief_of_its_own() -> None:
    found = replicas(manifest("tfjob_servers"))
    assert {role: found[role]["replicas"] for role in found} == {"Chief": 1, "Worker": 4, "PS": 2}
    for role in found:
        assert args(manifest("tfjob_servers"), role)[-2:] == ["--engine", "ps"]
    gpus = {role: found[role]["template"]["spec"]["containers"][0]["resources"]["limits"].get(
        "nvidia.com/gpu") for role in found}
    assert gpus == {"Chief": None, "Worker": "1", "PS": None}


def test_what_is_started_again_goes_on() -> None:
    assert args(manifest("tfjob_gpu"), "Worker")[-1] == "--resume"
    assert "--resume" not in args(manifest("mpijob_least"), "Launcher")
    again = KubernetesOptions(kind="mpijob", name="a", image="b", backoff_limit=1)
    overwriting = RankCommand(words=("fit", "j", "--overwrite"), is_program=False)
    with pytest.raises(ConfigError, match="would delete the job's own checkpoints"):
        make_manifest(again, overwriting)
    resuming = RankCommand(words=("fit", "j", "--resume"), is_program=False)
    assert args(make_manifest(again, resuming), "Launcher").count("--resume") == 1


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["k8s", *words])


@pytest.mark.parametrize("kind", ["mpijob", "tfjob"])
def test_every_option_reaches_the_manifest(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    more = ("--slots-per-worker", "1", "--implementation", "intel") if kind == "mpijob" else ()
    words = [kind, "--name", "n", "--image", "i", "--namespace", "s", "--workers", "3",
             "--gpus-per-worker", "1", "--cpu", "2", "--memory", "3Gi", "--env", "A=1", "-x", "B=2",
             "--pvc", "c:/c", "--shm", "4Gi", "--service-account", "a", "--restart-policy",
             "OnFailure", "--backoff-limit", "5", "--ttl", "6", "--clean-pod-policy", "All",
             "--grace", "70", "--program", "/p", *more, "--file", str(path), "--", "fit", "/j"]
    result = invoke(*words)
    assert result.exit_code == 0, result.exception
    text = path.read_text()
    expected = make_manifest(KubernetesOptions(
        kind=kind, name="n", image="i", namespace="s", workers=3, gpus_per_worker=1, cpu="2",  # type: ignore[arg-type]
        memory="3Gi", env=("A=1", "B=2"), pvc=("c:/c",), shm="4Gi", service_account="a",
        restart_policy="OnFailure", backoff_limit=5, ttl_s=6, clean_pod_policy="All", grace_s=70,
        program="/p", implementation="intel"),
        RankCommand(words=("fit", "/j"), is_program=False))
    assert yaml.safe_load(text) == expected
    assert text.splitlines()[0].endswith(" ".join(["by: hvdtrain k8s", *words]))
    check(expected)


def test_a_program_needs_dashes() -> None:
    result = invoke("tfjob", "--name", "n", "--image", "i", "python", "a.py")
    assert isinstance(result.exception, LaunchError)
    assert "hvdtrain k8s tfjob [options] -- python a.py" in str(result.exception)


@pytest.mark.parametrize("kind", ["mpijob", "tfjob"])
@pytest.mark.parametrize(("words", "message"), [
    (("fit", "/j.toml", "--epochs", "0"), "epochs must be at least 1"),
    (("fit", "/j.toml", "--batch", "global"), "batch has no meaning in a job"),
    (("--set", "epochs=3", "fit", "/j"), "there is an option for it: --epochs of hvdtrain fit"),
    (("--set", "zero=yes", "--", "program"), "zero must be true or false"),
])
def test_a_wrong_setting_is_told_when_the_manifest_is_written(
        kind: str, words: tuple[str, ...], message: str) -> None:
    result = invoke(kind, "--name", "n", "--image", "i", *words)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_an_unknown_option_of_fit_is_told_when_the_manifest_is_written() -> None:
    result = invoke("mpijob", "--name", "n", "--image", "i", "fit", "/j.toml", "--epoch", "3")
    assert result.exit_code == 2
    assert "No such option: --epoch" in result.output
    assert "hvdtrain fit" in result.output


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine: 1\n")
    result = invoke("tfjob", "--name", "n", "--image", "i", "--file", str(path), "fit", "/j")
    assert isinstance(result.exception, LaunchError)
    assert path.read_text() == "mine: 1\n"


def options(**changes: Any) -> KubernetesOptions:
    return KubernetesOptions(**({"kind": "mpijob", "name": "digits", "image": "a/b:1"} | changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"name": "Digits"}, "--name is 'Digits'"), ({"name": ""}, "--name"),
    ({"name": "1a"}, "begin with a letter"), ({"name": "a_b"}, "--name"),
    ({"name": "a-"}, "--name"), ({"name": "a.b"}, "--name"), ({"name": "a\n"}, "--name"),
    ({"name": "a" * 55}, "at most 54 lower-case"),
    ({"name": "a" * 54, "workers": 11}, "at most 53 lower-case"),
    ({"namespace": "A"}, "--namespace"), ({"service_account": "a/b"}, "--service-account"),
    ({"image": ""}, "--image"), ({"image": "a b"}, "--image"), ({"image": "-x"}, "--image"),
    ({"program": ""}, "--program"), ({"program": "-x"}, "--program"),
    ({"workers": 0}, "workers must be at least 1"),
    ({"slots_per_worker": 0}, "slots_per_worker must be at least 1"),
    ({"gpus_per_worker": -1}, "gpus_per_worker must be at least 0"),
    ({"ttl_s": -1}, "ttl_s must be at least 0"), ({"backoff_limit": -1}, "backoff_limit must be"),
    ({"grace_s": 0}, "grace_s must be at least 1"),
    ({"gpus_per_worker": 2, "slots_per_worker": 4}, "4 ranks in each pod have 2 GPUs"),
    ({"kind": "tfjob", "slots_per_worker": 2}, "one rank in each pod"),
    ({"kind": "tfjob", "gpus_per_worker": 2}, "one rank in each pod, which uses one GPU"),
    ({"restart_policy": "ExitCode"}, "Expected one of: Never, OnFailure"),
    ({"kind": "tfjob", "restart_policy": "x"}, "Never, OnFailure, Always, ExitCode"),
    ({"clean_pod_policy": "running"}, "one of 'Running', 'All', 'None'"),
    ({"implementation": "OpenMPI"}, "one of 'openmpi', 'intel', 'mpich'"),
    ({"cpu": "1.5.0"}, "--cpu"), ({"cpu": "4 "}, "--cpu"), ({"memory": "16GB"}, "--memory"),
    ({"shm": "lots"}, "--shm"), ({"memory": "-1Gi"}, "--memory"),
    ({"env": ("A",)}, "Expected VAR=VALUE"), ({"env": ("A b=1",)}, "--env"),
    ({"pvc": ("data",)}, "Expected NAME:MOUNT"), ({"pvc": ("data:data",)}, "begins with /"),
    ({"pvc": ("data:/",)}, "--pvc"), ({"pvc": ("Data:/d",)}, "--pvc"),
    ({"pvc": ("a:/d:ro",)}, "holds no colon"),
    ({"pvc": ("a:/d", "b:/d/")}, "Two volumes are mounted at /d"),
    ({"pvc": ("a:/dev/shm",)}, "Two volumes are mounted at /dev/shm"),
])
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


@pytest.mark.parametrize(("changes", "slots"), [
    ({}, 1), ({"slots_per_worker": 3}, 3), ({"gpus_per_worker": 4}, 4),
    ({"gpus_per_worker": 4, "slots_per_worker": 2}, 2), ({"kind": "tfjob"}, 1)])
def test_a_rank_for_each_gpu(changes: dict[str, Any], slots: int) -> None:
    assert options(**changes).slots == slots


@pytest.mark.parametrize(("cpu", "slots", "threads"), [
    (None, 1, None), ("8", 1, 8), ("8", 3, 2), ("500m", 1, 1), ("7500m", 2, 3), ("2.5", 1, 2)])
def test_ranks_share_the_processors_of_their_pod(cpu: str | None, slots: int,
                                                 threads: int | None) -> None:
    assert options(cpu=cpu, slots_per_worker=slots).threads == threads


def test_the_longest_names_and_claims() -> None:
    assert options(name="a" * 54).name == "a" * 54  # with -worker-0 63 characters
    assert options(pvc=("a.b:/x/y/",)).claims == (Claim(name="a.b", mount="/x/y"),)
