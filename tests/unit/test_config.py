import dataclasses
import re
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvdtrain.bench.options import CompareOptions
from hvdtrain.cli.words import words_of
from hvdtrain.config import (
    COLLECTIVE_VARIABLE,
    GROUPS,
    SETTINGS_VARIABLE,
    TrainConfig,
    config_from_json,
    config_to_json,
)
from hvdtrain.engine_config import PsConfig, TfConfig
from hvdtrain.errors import ConfigError
from hvdtrain.job import CompileConfig, Job, with_default_output
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.settings import from_mapping, from_text, refuse_differences, replace, settings_in


def test_unknown_keys_are_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"unknown key 'bach_size'. Valid keys: "
                       "approximation_rank, batch, batch_global"):
        from_mapping(TrainConfig, {"bach_size": 1}, where="job.toml, [train]")


@pytest.mark.parametrize(("values", "message"), [
    ({"epochs": "3"}, "epochs must be a whole number. Received: epochs='3' of type str"),
    ({"epochs": True}, "epochs must be a whole number"),
    ({"epochs": 0}, "epochs must be at least 1. Received: epochs=0"),
    ({"batch_per_rank": 2.5}, "batch_per_rank must be a whole number"),
    ({"lr_scaling": "cubic"}, "lr_scaling must be one of 'linear', 'sqrt', 'none', or 'module"),
    ({"engine": "tf", "remainder": "join"}, "remainder='join' belongs to engine 'allreduce'"),
    ({"engine": "ps", "compression": "fp16"}, "compression='fp16' belongs .* --ps-wire-dtype"),
    ({"engine": "tf", "xla": True}, "xla=True belongs .* Received: engine='tf'"),
    ({"engine": "ps", "collective": "mpi4py"}, "collective='mpi4py' belongs .* TensorFlow itself"),
    ({"engine": "ps", "checkpoint_every_steps": 5}, "at the ends of epochs only"),
    ({"checkpoint_every_s": -1.0}, "checkpoint_every_s"),
    ({"output": 3}, "output must be a path or None"),
    ({"warmup_epochs": -1}, "warmup_epochs must be at least 0"),
    ({"bucket_mb": 0}, "bucket_mb must be above 0. Received: bucket_mb=0"),
    ({"hang_timeout_s": 0.5}, "hang_timeout_s must be 0, or at least 1 and at most 1,000,000. Rec"),
    ({"hang_timeout_s": 1e7}, "hang_timeout_s must be 0, or"),
    ({"engine": "tf", "bucket_mb": 2}, "bucket_mb=2 belongs to engine 'allreduce'. .* Leave it"),
    ({"batch_per_rank": 4, "batch_global": 8}, "batch_per_rank and batch_global exclude each ot"),
    ({"compression": "zip"},
     "compression must be one of .none., .fp16., .bf16., .lowrank."),
    ({"approximation_rank": 0}, "approximation_rank must be at least 1"),
    ({"predivide": "2"}, "predivide must be a number. Received: predivide='2' of type str"),
    ({"predivide": True}, "predivide must be a number"),
    ({"predivide": 0}, "predivide must be above 0 and at most 1"),
    ({"compression": "topk"}, "compression=.topk. was removed. Use compression=.lowrank."),
    ({"predivide": 0}, "predivide must be above 0"),
    ({"predivide": 4, "compression": "lowrank"}, "predivide=4 has no meaning"),
    ({"resume": True, "output": "a", "overwrite": True}, "exclude each other"),
    ({"ps": {"start_timeout_s": 5}}, "ps must be PsConfig"),
])
def test_values_that_do_not_fit_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(TrainConfig, values, where="job.toml, [train]")


def float_settings():
    """Every setting that is a number with a fraction, whatever its dataclass."""
    for cls, needed in ((TrainConfig, {}), (PsConfig, {}), (TfConfig, {}), (CompileConfig, {}),
                        (LaunchOptions, {"command": ("true",)}), (CompareOptions, {"job": "j"})):
        hints = typing.get_type_hints(cls)
        yield from (pytest.param(cls, needed, field.name, id=f"{cls.__name__}.{field.name}")
                    for field in dataclasses.fields(cls)
                    if hints[field.name] is float or float in typing.get_args(hints[field.name]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("cls", "needed", "name"), list(float_settings()))
def test_what_is_no_finite_number_is_refused(cls, needed, name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be a finite number. Received: {name}="):
        cls(**needed, **{name: value})


def test_a_job_file_may_resume_since_fit_gives_it_an_output_folder():
    config = from_mapping(TrainConfig, {"resume": True}, where="job.toml, [train]")
    job = Job(name="digits", model=dict, data=dict, config=config)
    assert with_default_output(job, {}).output == Path("runs/digits")


def test_strings_become_paths_and_whole_numbers_pass_as_numbers():
    config = from_mapping(TrainConfig, {"output": "runs/a", "warmup_epochs": 1}, where="x")
    assert config.output == Path("runs/a")
    assert config.warmup_epochs == 1


def test_a_path_may_be_given_as_a_string():
    assert TrainConfig(output="runs/a").output == Path("runs/a")


def test_the_help_of_fit_shows_each_setting_in_its_group():
    from hvdtrain.cli.main import app
    text = CliRunner().invoke(app, ["fit", "--help"], env={"COLUMNS": "100"}).stdout
    parts = re.split(r"^(\w[\w ]*):$", text, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(shown) == ["Arguments", "Options", *GROUPS]
    for one in settings_in(TrainConfig).values():
        if not one.script_only:
            assert one.help.split()[-1] in " ".join(shown[one.group].split())
            assert re.search(rf"{words_of(one)[0].partition('/')[0]}\b", shown[one.group])
    assert "--batch " not in text


def test_a_change_takes_back_what_it_excludes_and_keeps_the_rest():
    config = TrainConfig(epochs=3, batch_per_rank=4, overwrite=True)
    assert replace(config, seed=5) == TrainConfig(epochs=3, batch_per_rank=4, overwrite=True,
                                                  seed=5)
    assert replace(config, batch_global=9, resume=True) == TrainConfig(
        epochs=3, batch_global=9, resume=True)
    with pytest.raises(ConfigError, match="resume and overwrite exclude each other; give one"):
        replace(TrainConfig(), resume=True, overwrite=True)


def test_settings_of_an_engine_are_changed_within():
    config = replace(TrainConfig(ps=PsConfig(servers=2)), **{"ps.mode": "sync", "engine": "ps"})
    assert config == TrainConfig(ps=PsConfig(servers=2, mode="sync"), engine="ps")


def test_an_option_of_an_engine_that_does_not_train_is_refused():
    with pytest.raises(ConfigError, match=r"ps\.mode='sync' belongs to engine 'ps'. Received: engin"
                       "e='tf'. Use engine 'ps', or leave it out."):
        TrainConfig(engine="tf").with_options({"ps.mode": "sync"})
    job = TrainConfig(ps=PsConfig(mode="sync"))  # of a job file: another engine may be compared
    assert job.with_options({"epochs": 2}).ps.mode == "sync"


@pytest.mark.parametrize(("config", "environ", "result"), [
    ({}, {}, {}),
    ({"epochs": 2}, {COLLECTIVE_VARIABLE: "auto"}, {"epochs": 2}),
    ({"epochs": 2}, {SETTINGS_VARIABLE: '{"output": "a"}', COLLECTIVE_VARIABLE: "mpi4py"},
     {"epochs": 2, "output": Path("a"), "collective": "mpi4py"}),
    ({"epochs": 2, "output": "a"}, {SETTINGS_VARIABLE: '{"output": "a", "epochs": 2}'},
     {"epochs": 2, "output": "a"}),
])
def test_a_script_gets_what_the_launcher_gives_it(config, environ, result):
    assert TrainConfig(**config).as_launched(environ) == TrainConfig(**result)


@pytest.mark.parametrize(("config", "environ", "message"), [
    ({"epochs": 2}, {SETTINGS_VARIABLE: '{"epochs": 3}'},
     "The options of the launcher say epochs=3, and the script epochs=2. Leave one of the two"),
    ({"epochs": 2}, {SETTINGS_VARIABLE: '{"epochs": 1}'}, "the launcher say epochs=1, and"),
    ({"collective": "single"}, {COLLECTIVE_VARIABLE: "mpi4py"},
     "the launcher say collective='mpi4py', and the script collective='single'"),
    ({}, {SETTINGS_VARIABLE: '{"epoch": 1}'}, f"{SETTINGS_VARIABLE}: unknown key 'epoch'. Valid"),
    ({}, {SETTINGS_VARIABLE: '{"epochs": "1"}'}, "epochs must be a whole number"),
    ({}, {SETTINGS_VARIABLE: "epochs=1"}, "HVDTRAIN_SETTINGS holds no settings in JSON. Received"),
    ({}, {SETTINGS_VARIABLE: "3"}, "holds no settings in JSON. Received: '3'"),
])
def test_what_a_launcher_and_a_script_say_otherwise_is_refused(config, environ, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**config).as_launched(environ)


@pytest.mark.parametrize(("items", "result"), [
    (["epochs=3", "zero=true", "compression=bf16"],
     {"epochs": 3, "zero": True, "compression": "bf16"}),
    (["output=3", "lr_scaling=a:b", "warmup_epochs=1"],
     {"output": "3", "lr_scaling": "a:b", "warmup_epochs": 1}),
    (["ps.mode=sync", "seed=null"], {"ps.mode": "sync", "seed": None}),
])
def test_settings_are_read_as_they_are_typed(items, result):
    assert from_text(TrainConfig, items, where="--set") == result


@pytest.mark.parametrize(("item", "message"), [
    ("epochs", "--set is 'epochs'. Expected NAME=VALUE, e.g. epochs=3"),
    ("epoch=3", "--set: unknown key 'epoch'. Valid keys: .*epochs"),
    ("epochs=three", "epochs must be a whole number. Received: epochs='three'"),
    ("epochs=0", "epochs must be at least 1"), ("zero=yes", "zero must be true or false"),
    ("warmup_epochs=NaN", "warmup_epochs must be a finite number"),
    ("compression=zip", "compression must be one of 'none'"),
])
def test_a_mistake_in_what_is_typed_is_told(item, message):
    with pytest.raises(ConfigError, match=message):
        from_text(TrainConfig, [item], where="--set")


def test_settings_survive_the_way_to_another_process():
    config = TrainConfig(output=Path("a b"), engine="ps", epochs=3,
                         ps=PsConfig(mode="sync", backup_workers=2), tf=TfConfig(devices=2))
    assert config_from_json(config_to_json(config)) == config
    assert config_from_json(config_to_json(TrainConfig())) == TrainConfig()


def test_settings_that_are_the_same_on_all_ranks_pass():
    refuse_differences([{"epochs": "3", "seed": "1"}, {"seed": "1", "epochs": "3"}], ["a", "b"])


def test_the_first_rank_and_setting_that_differ_are_named():
    everyone = [{"epochs": "3", "seed": seed} for seed in ("1", "1", "2", "5")]
    with pytest.raises(ConfigError, match="seed is 1 on rank 0 and 2 on rank 2. Give every rank"):
        refuse_differences(everyone, [f"rank {rank}" for rank in range(4)])
