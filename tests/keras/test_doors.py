"""Every setting, from every door: it arrives in the configuration that trains, or is refused."""

import contextlib
import io
import json
import shlex
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import typer.main
import yaml

import hvdtrain
from hvdtrain.cli.main import app
from hvdtrain.collective_names import COLLECTIVE_VARIABLE
from hvdtrain.config import TrainConfig
from hvdtrain.entry import load_job
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.job import with_default_output
from hvdtrain.optim.distributed import state_of
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.runtime.guard import Guard
from hvdtrain.session import session_for
from hvdtrain.settings import replace, settings_in, value_of
from hvdtrain.train.fit import run_job
from tests.launch_facts import facts

DATA = (np.zeros((8, 2), "f4"), np.zeros((8, 1), "f4"))
COMMAND = typer.main.get_command(app)
JOB = """
import keras
import numpy as np
import hvdtrain
from hvdtrain.settings import replace


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    made.compile(hvdtrain.DistributedOptimizer(optimizer) if OWN else optimizer, "mse")
    models.append(made)
    return made


models = []


def job():
    return hvdtrain.Job(name="doors", model=model,
                        data=lambda: (np.zeros((8, 2), "f4"), np.zeros((8, 1), "f4")),
                        config=replace(hvdtrain.TrainConfig(), **GIVEN))
"""
#: Another value than the default of each setting, and how it is typed after `hvdtrain fit`.
SETTINGS = {
    "epochs": (7, "--epochs 7"),
    "engine": ("tf", "--engine tf"),
    "collective": ("single", "--collective single"),
    "seed": (3, "--seed 3"),
    "xla": (True, "--xla"),
    "batch_per_rank": (5, "--batch-per-rank 5"),
    "batch_global": (9, "--batch-global 9"),
    "batch": ("per_rank", "--batch per_rank"),
    "shuffle": (False, "--no-shuffle"),
    "remainder": ("drop", "--remainder drop"),
    "divide": ("batches", "--divide batches"),
    "lr_scaling": ("a:b", "--lr-scaling a:b"),
    "warmup_epochs": (2.5, "--warmup-epochs 2.5"),
    "sparse": ("dense", "--sparse dense"),
    "merge": ("none", "--merge none"),
    "compression": ("bf16", "--compression bf16"),
    "approximation_rank": (3, "--approximation-rank 3"),
    "predivide": (4.0, "--predivide 4"),
    "bucket_mb": (2.0, "--bucket-mb 2"),
    "zero": (True, "--zero"),
    "sync_batch_norm": (True, "--sync-batch-norm"),
    "output": ("an/other", "-o an/other"),
    "checkpoint_every_epochs": (2, "--checkpoint-every-epochs 2"),
    "checkpoint_every_steps": (11, "--checkpoint-every-steps 11"),
    "checkpoint_every_s": (1.5, "--checkpoint-every-seconds 1.5"),
    "checkpoint_background": (False, "--no-checkpoint-background"),
    "keep_checkpoints": (8, "--keep-checkpoints 8"),
    "resume": (True, "--resume"),
    "overwrite": (True, "--overwrite"),
    "tensorboard": (False, "--no-tensorboard"),
    "timeline": ("lines.json", "--timeline lines.json"),
    "keep": ("batch_per_rank", "--keep batch_per_rank"),
    "commit_every_steps": (100, "--commit-every-steps 100"),
    "commit_every_s": (9.0, "--commit-every-seconds 9"),
    "check_weights": (False, "--no-check-weights"),
    "stop_on_nan": (False, "--no-stop-on-nan"),
    "hang_timeout_s": (0.0, "--hang-timeout 0"),
    "ps.servers": (2, "--ps 2"),
    "ps.mode": ("sync", "--ps-mode sync"),
    "ps.replicas_to_aggregate": (2, "--ps-replicas 2"),
    "ps.backup_workers": (1, "--ps-backup-workers 1"),
    "ps.staleness": (0, "--ps-staleness 0"),
    "ps.steps_per_closure": (1, "--ps-steps-per-closure 1"),
    "ps.placement": ("round_robin", "--ps-placement round_robin"),
    "ps.partitioner": ("fixed:2", "--ps-partitioner fixed:2"),
    "ps.fused": (False, "--no-ps-fused"),
    "ps.sparse_embeddings": (False, "--no-ps-sparse"),
    "ps.wire_dtype": ("bfloat16", "--ps-wire-dtype bfloat16"),
    "ps.evaluation": ("direct", "--ps-evaluation direct"),
    "ps.evaluator": (True, "--evaluator"),
    "ps.max_restarts": (0, "--max-restarts 0"),
    "ps.start_timeout_s": (9.0, "--ps-start-timeout 9"),
    "tf.strategy": ("mirrored", "--strategy mirrored"),
    "tf.devices": (2, "--devices 2"),
    "tf.device": ("CPU:0", "--device CPU:0"),
    "tf.cross_device": ("ring", "--cross-device ring"),
    "tf.tpu": ("name", "--tpu name"),
}
SYNC = {"ps.replicas_to_aggregate", "ps.backup_workers"}
BY_COMPARE = {"output", "checkpoint_every_epochs", "tensorboard", "engine", "collective",
              "ps.servers", "ps.mode", "tf.strategy"}
"""Settings that a comparison makes itself."""


def given_with(name):
    """The setting, and what it needs to mean something."""
    engine = name.partition(".")[0]
    given = {name: SETTINGS[name][0]}
    if engine in ("ps", "tf"):
        given["engine"] = engine
    if name in SYNC:
        given["ps.mode"] = "sync"
    return given


def words_for(given):
    options = {"engine": f"--engine {given.get('engine')}", "ps.mode": "--ps-mode sync"}
    return [word for name in given for word in options.get(name, SETTINGS[name][1]).split()]


def typed(*words):
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        COMMAND.main([str(word) for word in words], standalone_mode=False)
    return printed.getvalue()


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The configurations that reached the training of an engine; nothing is trained."""
    from hvdtrain.engines import tf_distribute
    from hvdtrain.engines.parameter_server import supervisor
    from hvdtrain.train.run import Run, RunResult
    nothing = RunResult(history={}, first_epoch=0, model_path=None)
    seen = []
    monkeypatch.setattr("hvdtrain.train.fit.run_job",
                        lambda job, config, *_, **__: seen.append(config))
    monkeypatch.setattr(tf_distribute, "fit_with_strategy",
                        lambda _, config, *__, **___: seen.append(config))
    monkeypatch.setattr(supervisor, "supervise", lambda config, *_, **__: seen.append(config))
    monkeypatch.setattr(Run, "fit", lambda run, *_, **__: seen.append(run.config) or nothing)
    monkeypatch.setattr(supervisor, "is_forked", lambda: True)  # else the process begins anew
    monkeypatch.setattr(Guard, "fail", lambda guard, error: None)  # else it ends
    monkeypatch.setattr("hvdtrain.cli.launch.gather_facts", lambda *_: facts())
    monkeypatch.chdir(tmp_path)
    return seen


def job_file(given=()):
    tables = {"model": {"name": "digits_mlp"}, "data": {"name": "digits"},
              "compile": {"loss": "mse"}, "train": {}, "ps": {}, "tf": {}}
    for name, value in dict(given).items():
        table, _, key = name.rpartition(".")
        tables[table or "train"][key] = value
    Path("doors.toml").write_text("".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in values.items())
        for table, values in tables.items()))
    return "doors.toml"


def python_job(given=()):
    Path("doors.py").write_text(JOB.replace("GIVEN", repr(dict(given))).replace("OWN", "False"))
    return "doors.py"


def fit_words(words):
    """What follows `fit` in a command line."""
    return words[words.index("fit") + 1:]


def launched(*words):
    return shlex.split(typed("launch", "-np", 4, "--starter", "native", "--dry-run",
                             *words).splitlines()[-1])


def in_a_script(environ, trained):
    """The settings of a script that says nothing."""
    config = TrainConfig().as_launched(environ)
    session_for(config)
    trained.append(config)


def from_a_job_file(given, trained):
    typed("fit", job_file(given))


def from_a_python_job(given, trained):
    typed("fit", python_job(given))


def from_the_command_line(given, trained):
    typed("fit", job_file(), *words_for(given))


def from_launch(given, trained):
    typed("fit", *fit_words(launched("fit", job_file(), *words_for(given))))


def from_slurm(given, trained):
    script = typed("slurm", "-n", 4, "--no-requeue", "fit", job_file(), *words_for(given))
    [rank] = [line for line in script.splitlines() if line.startswith("rank=(")]
    typed("fit", *fit_words(shlex.split(rank[len("rank=("):-1])))


def from_kubernetes(given, trained, kind="mpijob", role="Launcher"):
    text = typed("k8s", kind, "--name", "doors", "--image", "image", "--backoff-limit", 0, "--",
                 "fit", "doors.toml", *words_for(given))
    job_file()
    typed("fit", *fit_words(container(text, kind, role)["args"]))


def from_a_tfjob(given, trained):
    from_kubernetes(given, trained, "tfjob", "Chief")


def from_compare(given, trained):
    engine = {"ps": "ps-sync" if "ps.mode" in given else "ps-async",
              "tf": "multi-worker-mirrored"}.get(given.get("engine"), "allreduce-gloo")
    line = typed("compare", job_file(given), "--engines", engine, "--rounds", 1,
                 "--dry-run").splitlines()[-1]
    typed("fit", *fit_words(shlex.split(line)))


def from_a_script(given, trained):
    hvdtrain.fit(model_of_a_script(), *DATA, config=replace(TrainConfig(), **given))


def from_a_distributed_model(given, trained):
    config = replace(TrainConfig(), **given)
    hvdtrain.distribute(model_of_a_script(), config=config).fit(*DATA)


def model_of_a_script():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def set_words(given):
    return [word for name, value in given.items() for word in (
        "--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}")]


def from_launch_to_a_script(given, trained):
    words = launched(*set_words(given), "--", "python", "train.py")
    in_a_script(dict(word.split("=", 1) for word in words if "=" in word), trained)


def from_slurm_to_a_script(given, trained):
    script = typed("slurm", "-n", 4, *set_words(given), "--", "python", "train.py")
    exports = [shlex.split(line)[1] for line in script.splitlines()
               if line.startswith("export HVDTRAIN_S") and "=" in line
               or line.startswith(f"export {COLLECTIVE_VARIABLE}=")]
    in_a_script(dict(item.split("=", 1) for item in exports), trained)


def from_kubernetes_to_a_script(given, trained, kind="mpijob", role="Launcher"):
    text = typed("k8s", kind, "--name", "doors", "--image", "image", *set_words(given), "--",
                 "python", "train.py")
    env = {one["name"]: one["value"] for one in container(text, kind, role)["env"]}
    in_a_script(env, trained)


def from_a_tfjob_to_a_script(given, trained):
    from_kubernetes_to_a_script(given, trained, "tfjob", "Chief")


def container(text, kind, role):
    spec = yaml.safe_load(text)["spec"]
    replicas = spec["mpiReplicaSpecs" if kind == "mpijob" else "tfReplicaSpecs"][role]
    return replicas["template"]["spec"]["containers"][0]


JOBS = [from_a_job_file, from_a_python_job, from_the_command_line, from_launch, from_slurm,
        from_kubernetes, from_a_tfjob, from_compare]
SCRIPTS = [from_a_script, from_a_distributed_model, from_launch_to_a_script,
           from_slurm_to_a_script, from_kubernetes_to_a_script, from_a_tfjob_to_a_script]


def refusal(name, door):
    """What is said where a setting cannot act from a door; None where it acts."""
    if door in JOBS:
        return "batch has no meaning in a job: it says what" if name == "batch" else None
    if name == "engine" or "." in name:
        return "cannot be used by hvdtrain.fit in a script"
    if name == "timeline":  # of a session that was begun without it
        return r"timeline='lines.json', but .* hvdtrain.init\(timeline="
    if name == "collective" and door is from_launch_to_a_script:
        return "--set collective is for scripts; there is an option for it: --collective"
    return None


def test_each_setting_is_told_of_here():
    assert set(SETTINGS) == set(settings_in(TrainConfig))
    for name, one in settings_in(TrainConfig).items():
        assert one.default != SETTINGS[name][0]
    options = {opt for one in COMMAND.commands["fit"].params
               if one.param_type_name == "option" for opt in one.opts}
    told = {words.split()[0].replace("--no-", "--") for _, words in SETTINGS.values()}
    assert told == options - {"--dry-run", "--help", "-h", "--output"}


@pytest.mark.parametrize("door", [*JOBS, *SCRIPTS], ids=lambda door: door.__name__)
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_arrives_from_each_door_or_is_refused(name, door, trained):
    given = given_with(name)
    message = refusal(name, door)
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            door(given, trained)
        return
    door(given, trained)
    expected = replace(TrainConfig(), **given)
    if door in JOBS and expected.output is None:
        expected = replace(expected, output="runs/doors")
    [config] = trained
    if door is from_compare:
        assert config.output.name == "train"
        expected = replace(expected, **{one: value_of(config, one) for one in BY_COMPARE})
    assert config == expected


REDUCTIONS = [{"compression": "bf16"}, {"sparse": "dense"}, {"bucket_mb": 2.0}, {"predivide": 4.0},
            {"compression": "lowrank", "approximation_rank": 2},
            {"compression": "lowrank", "approximation_rank": 3}]


@pytest.mark.parametrize("own", [False, True], ids=["plain", "distributed in the job"])
@pytest.mark.parametrize("given", REDUCTIONS, ids=lambda given: "-".join(given))
def test_the_command_line_reaches_the_reduction_of_a_python_job(given, own, tmp_path, one_rank):
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("OWN", repr(own)).replace("GIVEN", "{}"))
    job = load_job(str(path))
    config = with_default_output(job, {**given, "output": tmp_path / "out"})
    run_job(job, config, one_rank, dry_run=True)
    model = job.model.__globals__["models"][0]
    assert state_of(model.optimizer).options == ReducerOptions.of(TrainConfig(**given))



def test_options_that_contradict_the_settings_are_refused_and_others_are_joined():
    given = ReducerOptions(compression="fp16", local_variables=("expert",))
    assert given.changed_by(ReducerOptions()) == given
    joined = given.changed_by(ReducerOptions(bucket_bytes=1 << 20))
    assert (joined.compression, joined.bucket_bytes, joined.local_variables) == (
        "fp16", 1 << 20, ("expert",))
    with pytest.raises(ConfigError, match=r"compression='bf16', and the options given to"):
        given.changed_by(ReducerOptions(compression="bf16"))


def test_counting_a_stream_says_so(monkeypatch, caplog):
    from hvdtrain.data import stream
    monkeypatch.setattr(stream, "_SAY_EVERY_S", 0.0)
    source = hvdtrain.StreamSource(lambda rank, size: iter(np.zeros((200, 2), "f4")))
    assert source.count(0, 1) == 200
    assert "counting its samples, 64 so far. A stream that never ends" in caplog.text
    with pytest.raises(DataError, match="never ends"):
        hvdtrain.StreamSource(tf.data.Dataset.range(3).repeat()).count(0, 1)


def test_everything_is_taken_away_after_a_run_and_after_an_error(one_rank):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse")
    data = (np.ones((8, 2), "f4"), np.ones((8, 1), "f4"))
    hvdtrain.fit(model, *data)
    before = set(vars(model)), set(vars(optimizer)), set(vars(model._compile_loss))

    class Odd(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            hvdtrain.fit(model, *data, callbacks=[Odd()])
        assert (set(vars(model)), set(vars(optimizer)), set(vars(model._compile_loss))) == before
    assert not {"train_step", "evaluate", "_get_metrics_result_or_logs"} & before[0]
    assert state_of(optimizer).learning_rate_multiplier is None
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.set_weights(model.get_weights())
    for each in (plain, model):
        each.fit(*data, batch_size=8, verbose=0)
    np.testing.assert_array_equal(plain.get_weights()[0], model.get_weights()[0])
