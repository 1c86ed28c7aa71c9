"""What the probe makes of files and of what programs print."""

import json
from dataclasses import asdict, replace

import pytest
from doctor_hosts import CUDA, FACTS, H100, SLURM

from hvdtrain.doctor import look
from hvdtrain.doctor.facts import Gpu, GpuFacts, facts_from_json
from hvdtrain.doctor.probe import look_at_directory, sees

GPU_BUILD = """build_info = collections.OrderedDict([('cpu_compiler', '/usr/lib/llvm-18/bin/clang'),
('cuda_compute_capabilities', ['sm_60', 'compute_90']), ('cuda_version', '12.5.1'),
('cudnn_version', '9'), ('is_cuda_build', True), ('is_rocm_build', False)])"""


def test_facts_travel_as_json():
    full = replace(FACTS, cuda=CUDA, slurm=SLURM, gpu=GpuFacts(gpus=(H100,)))
    assert facts_from_json(json.loads(json.dumps(asdict(full)))) == full


def test_gpus_of_nvidia_smi():
    text = "NVIDIA H100 80GB HBM3, 81559, 550.54.15\nNVIDIA GB10, [N/A], 580.95.05\n"
    assert look.from_smi(text) == (
        H100, Gpu(name="NVIDIA GB10", memory_mib=None, driver="580.95.05"))
    assert look.from_smi("") == ()


def test_gpus_of_the_driver(tmp_path):
    for number in (0, 1):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t Tesla T4\nIRQ:   \t\t 10\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
                                      "570.86.15  Release Build\n")
    assert look.from_proc(tmp_path) == (Gpu(name="Tesla T4", driver="570.86.15"),) * 2
    assert look.from_proc(tmp_path / "nothing") == ()


@pytest.mark.parametrize(("visible", "count"), [
    (None, 2), ("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("1,-1,0", 1), ("GPU-8a,GPU-9b,x", 2)])
def test_visible_gpus(visible, count):
    assert GpuFacts(gpus=(H100, H100), visible=visible).count_visible() == count


@pytest.mark.parametrize(("cgroup", "files", "cores"), [
    ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2.5),
    ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
    ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
    ("4:cpu,cpuacct:/x\n0::/\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000",
                                  "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}, 3.0),
    ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
    ("4:memory:/x\n", {}, None),
])
def test_the_quota_of_the_control_group(tmp_path, cgroup, files, cores):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert look.quota_cores(tmp_path) == cores


def test_no_control_group(tmp_path):
    assert look.quota_cores(tmp_path) is None


def test_the_backend_of_keras(tmp_path):
    environ = {"HOME": str(tmp_path)}
    assert look.keras_backend(environ) == (None, "")
    file = tmp_path / ".keras" / "keras.json"
    file.parent.mkdir()
    file.write_text('{"backend": "jax"}')
    assert look.keras_backend(environ) == ("jax", str(file))
    environ["KERAS_BACKEND"] = "torch"
    assert look.keras_backend(environ) == ("torch", "KERAS_BACKEND")
    del environ["KERAS_BACKEND"]
    file.write_text("[broken")
    assert look.keras_backend(environ) == (None, "")


def test_versions_are_read_from_metadata(tmp_path):
    for name, version in (("tensorflow_cpu", "2.21.0"), ("Keras", "3.15.1"), ("other", "1")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert look.versions([str(tmp_path)]) == {"tensorflow": "2.21.0", "keras": "3.15.1"}


def test_a_hash_tells_names_and_contents_apart(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("x")
    two.write_text("y")
    first = look.hash_of([one, two], tmp_path)
    assert first == look.hash_of([one, two], tmp_path)
    assert first != look.hash_of([two, one], tmp_path)
    two.write_text("z")
    assert first != look.hash_of([one, two], tmp_path)
    one.write_text("xz")
    two.write_text("")
    assert first != look.hash_of([one, two], tmp_path)


def test_a_cuda_build_and_its_libraries(tmp_path):
    info = tmp_path / "tensorflow/python/platform/build_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(GPU_BUILD)
    (tmp_path / "tensorflow/__init__.py").touch()
    for wheel, name in (("cublas", "libcublas.so.12"), ("cu13", "libnccl.so.2")):
        (tmp_path / "nvidia" / wheel / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / wheel / "lib" / name).touch()
    found = look.look_at_cuda([str(tmp_path)])
    assert (found.version, found.cudnn) == ("12.5.1", "9")
    assert found.libraries["libcublas.so.12"] == str(tmp_path / "nvidia/cublas/lib/libcublas.so.12")
    assert found.libraries["libnccl.so.2"].endswith("cu13/lib/libnccl.so.2")
    assert found.libraries["libcudnn.so.9"] == ""


def test_a_cpu_build_has_no_cuda(tmp_path):
    info = tmp_path / "tensorflow/python/platform/build_info.py"
    info.parent.mkdir(parents=True)
    (tmp_path / "tensorflow/__init__.py").touch()
    info.write_text(GPU_BUILD.replace("'is_cuda_build', True", "'is_cuda_build', False"))
    assert look.look_at_cuda([str(tmp_path)]) is None


def test_libraries_of_cuda_13(tmp_path):
    info = tmp_path / "tensorflow/python/platform/build_info.py"
    info.parent.mkdir(parents=True)
    (tmp_path / "tensorflow/__init__.py").touch()
    info.write_text(GPU_BUILD.replace("12.5.1", "13.0.1"))
    names = look.look_at_cuda([str(tmp_path)]).libraries
    assert {"libcudart.so.13", "libcufft.so.12", "libcudnn.so.9", "libnccl.so.2"} <= set(names)


@pytest.mark.parametrize("text", [
    "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions "
    "available: pmix_v4\n",  # 22.05.8
    "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix\nsrun: pmix_v4\n"
    "srun: cray_shasta\n",  # before
])
def test_what_srun_has_for_mpi(text):
    assert set(look.mpi_types(text)) == {"cray_shasta", "none", "pmi2", "pmix", "pmix_v4"}


def test_where_the_plugin_wants_its_library():
    debian = b"x\0/usr/lib/x86_64-linux-gnu/pmix2/lib\0/pmix:\0libpmix.so\0"
    assert look.pmix_library(debian) == "/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so"
    assert look.pmix_library(b"\0/opt/pmix/lib64\0libpmix.so.2\0") == \
        "/opt/pmix/lib64/libpmix.so.2"
    assert look.pmix_library(b"\0libpmix.so\0") == "libpmix.so"


def test_the_directory(tmp_path):
    assert not look_at_directory(tmp_path / "gone").exists
    assert look_at_directory(tmp_path).code_hash == ""
    (tmp_path / "job.toml").write_text("x")
    (tmp_path / "data.bin").write_text("y")
    found = look_at_directory(tmp_path)
    assert (found.code_files, bool(found.code_hash)) == (1, True)
    (tmp_path / "data.bin").write_text("z")
    assert look_at_directory(tmp_path) == found


def test_a_file_of_another_run_is_not_taken_for_ours(tmp_path):
    file = tmp_path / "f"
    assert not sees(file, "token")
    file.write_text("other")
    assert not sees(file, "token")
    file.write_text("token")
    assert sees(file, "token")


def test_facts_of_another_version_are_read_as_far_as_they_are_known():
    told = json.loads(json.dumps(asdict(FACTS)))
    told["python"]["colour"] = told["weather"] = "unknown here"
    assert facts_from_json(told) == FACTS
    del told["python"]["version"]
    with pytest.raises(TypeError, match="version"):
        facts_from_json(told)
