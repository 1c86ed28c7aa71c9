import dataclasses
import typing
from pathlib import Path

import pytest

from hvdtrain.bench.options import CompareOptions
from hvdtrain.config import TrainConfig, config_from_json, config_to_json
from hvdtrain.engine_config import PsConfig, TfConfig
from hvdtrain.errors import ConfigError
from hvdtrain.job import CompileConfig, Job
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.run import with_default_output
from hvdtrain.settings import from_mapping, refuse_differences, replace


def test_unknown_keys_are_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"unknown key 'bach_size'. Valid keys: "
                       "approximation_rank, batch_per_rank"):
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
    ({"bucket_mb": 0}, "bucket_mb must be positive"),
    ({"compression": "zip"},
     "compression must be one of .none., .fp16., .bf16., .topk., .lowrank."),
    ({"approximation_rank": 0}, "approximation_rank must be at least 1"),
    ({"topk_ratio": "0.1"}, "topk_ratio must be a number. Received: topk_ratio='0.1' of type str"),
    ({"topk_ratio": True}, "topk_ratio must be a number"),
    ({"topk_ratio": 2}, "topk_ratio must be above 0 and at most 1"),
    ({"predivide": 0}, "predivide must be above 0"),
    ({"predivide": 4, "compression": "topk"}, "predivide=4 has no meaning"),
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


def test_replace_keeps_what_was_not_given():
    config = replace(TrainConfig(epochs=3), epochs=None, seed=5)
    assert (config.epochs, config.seed) == (3, 5)


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
