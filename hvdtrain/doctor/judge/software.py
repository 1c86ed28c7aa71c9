"""Python, TensorFlow, Keras, Horovod, MPI of one host."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hvdtrain.doctor.facts import PythonFacts
from hvdtrain.doctor.finding import Finding, failed, not_applicable, ok, warning
from hvdtrain.doctor.judge.view import HostView
from hvdtrain.horovod_check import FIX, HorovodCheck

#: As in pyproject.toml; a test compares them.
OLDEST_PYTHON = (3, 11)
SUPPORTED = {"tensorflow": ">=2.16,<2.22", "keras": ">=3.5,<3.16"}
GET_TENSORFLOW = "pip install 'hvdtrain[cpu]'   (with GPUs: 'hvdtrain[gpu]')"


def judge_python(host: HostView) -> list[Finding]:
    """The interpreter."""
    python = host.facts.python
    if python is None:
        return []
    found = f"{python.version}, {python.executable}"
    if tuple(int(part) for part in python.version.split(".")[:2]) < OLDEST_PYTHON:
        return [too_old_python(host.name, python.version)]
    return [ok("python", host.name, found)]


def too_old_python(host: str, version: str) -> Finding:
    """The finding for a Python that cannot even run the probe."""
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return failed("python", host, version, expected=f"{wanted} or newer",
                  fix=f"python{wanted} -m venv .venv && .venv/bin/pip install hvdtrain")


def judge_hvdtrain(host: HostView) -> list[Finding]:
    """Whether a rank can import hvdtrain."""
    python = host.facts.python
    if python is None:
        return []
    if python.hvdtrain_at is None:
        return [failed("hvdtrain", host.name, f"{python.executable} cannot import it",
                       expected="installed for the Python of the ranks",
                       fix=f"{python.executable} -m pip install hvdtrain")]
    version = python.packages.get("hvdtrain", "without metadata")
    return [ok("hvdtrain", host.name, f"{version}, {python.hvdtrain_at}, source "
                                      f"{python.hvdtrain_hash}")]


def judge_versions(host: HostView) -> list[Finding]:
    """TensorFlow and Keras against the supported ranges."""
    python = host.facts.python
    if python is None:
        return []
    return [_judge_version(host.name, python, name) for name in SUPPORTED]


def _judge_version(host: str, python: PythonFacts, name: str) -> Finding:
    found, wanted = python.packages.get(name), SUPPORTED[name]
    if found is None:
        return failed(name, host, "not installed", expected=wanted, fix=GET_TENSORFLOW)
    try:
        fits = SpecifierSet(wanted, prereleases=True).contains(Version(found))
    except InvalidVersion:
        fits = False
    if fits:
        return ok(name, host, found)
    fix = f"pip install '{name}{wanted}'"
    if name == "tensorflow":
        fix = f"{GET_TENSORFLOW}, then: hvdtrain build-horovod --install"
    return failed(name, host, found, expected=wanted, fix=fix)


def judge_keras_backend(host: HostView) -> list[Finding]:
    """Keras must compute with TensorFlow."""
    python = host.facts.python
    if python is None:
        return []
    backend, source = python.keras_backend, python.keras_backend_from
    if backend is None:
        return [ok("keras-backend", host.name, "tensorflow, its default")]
    if backend == "tensorflow":
        return [ok("keras-backend", host.name, f"tensorflow, by {source}")]
    fix = ("export KERAS_BACKEND=tensorflow" if source == "KERAS_BACKEND" else
           f"sed -i 's/\"backend\": *\"{backend}\"/\"backend\": \"tensorflow\"/' {source}")
    return [failed("keras-backend", host.name, f"{backend}, by {source}", expected="tensorflow",
                   fix=fix)]


def judge_tensorflow_loads(host: HostView) -> list[Finding]:
    """Whether TensorFlow's library can be loaded by this processor and system."""
    loaded = host.facts.tensorflow_load
    if loaded is None:
        return []
    if loaded.loads:
        return [ok("tensorflow-loads", host.name, "its library loads")]
    return [failed("tensorflow-loads", host.name, loaded.detail, expected="its library loads",
                   fix="pip install --force-reinstall --no-deps tensorflow-cpu   (SIGILL: this "
                       "processor lacks AVX, and needs a TensorFlow built for it)")]


def judge_horovod(host: HostView) -> list[Finding]:
    """Whether Horovod's build fits what is installed, and whether its library loads."""
    check = host.facts.horovod
    if check is None:
        return []
    findings = [_split_fix(host, problem, serious=not _can_do_without(host))
                for problem in check.problems]
    findings += [_split_fix(host, text, serious=False) for text in check.warnings]
    if not findings:
        findings = [ok("horovod", host.name, _describe(check))]
    loaded = host.facts.horovod_load
    if loaded is None:
        return findings
    if loaded.loads:
        return [*findings, ok("horovod-loads", host.name, "its library loads")]
    return [*findings, failed("horovod-loads", host.name, loaded.detail,
                              expected="its library loads beside TensorFlow",
                              fix=FIX.removeprefix("run: ") + " --force")]


def _describe(check: HorovodCheck) -> str:
    parts = [part for part, there in (("Gloo", check.gloo), (check.mpi_kind, check.mpi_kind),
                                      ("NCCL", check.nccl)) if there]
    return (f"{(check.version or '').partition('+')[0]} for TensorFlow "
            f"{check.tensorflow_built_for}, with {', '.join(map(str, parts))}")


def _can_do_without(host: HostView) -> bool:
    """mpi4py reduces as well, where there is an mpirun."""
    mpi = host.facts.mpi
    return mpi is not None and mpi.path is not None and mpi.mpi4py is not None and mpi.mpi4py.loads


def _split_fix(host: HostView, text: str, *, serious: bool) -> Finding:
    """A finding from a text of `check_horovod`, which ends with `run: COMMAND`."""
    found, _, fix = text.rpartition("run: ")
    found = (found or text).rstrip().removesuffix("then").rstrip().rstrip(";,")
    if not serious and _can_do_without(host) and host.facts.horovod is not None \
            and not host.facts.horovod.ok:
        found += " (mpi4py would be used)"
    make = failed if serious else warning
    return make("horovod", host.name, found, expected="Horovod built for what is installed",
                fix=fix if found != text else FIX.removeprefix("run: "))


def judge_mpi(host: HostView) -> list[Finding]:
    """The mpirun against the MPI of Horovod, and mpi4py."""
    mpi, check = host.facts.mpi, host.facts.horovod
    if mpi is None:
        return []
    kind = check.mpi_kind if check is not None and check.ok else None
    if mpi.path is None:
        findings = [not_applicable("mpi", host.name, "no mpirun; Gloo needs none")]
    elif kind is not None and kind != mpi.flavour:
        findings = [warning(
            "mpi", host.name, f"mpirun is {mpi.flavour} {mpi.version} ({mpi.path}), but Horovod "
            f"was built with {kind}: under it each rank would train alone",
            expected=f"the mpirun of {kind}, or Gloo (hvdtrain launch takes it by itself)",
            fix=f"pip install {kind}   (or: hvdtrain build-horovod --mpi auto --install --force)")]
    else:
        findings = [ok("mpi", host.name, f"{mpi.flavour} {mpi.version}, {mpi.path}")]
    if mpi.mpi4py is None:
        return [*findings, not_applicable("mpi4py", host.name, "not installed; Horovod needs none")]
    if mpi.mpi4py.loads:
        return [*findings, ok("mpi4py", host.name, f"with {mpi.mpi4py.detail}")]
    return [*findings, warning("mpi4py", host.name, mpi.mpi4py.detail,
                               expected="`from mpi4py import MPI` works",
                               fix="pip install --force-reinstall 'hvdtrain[mpi]'")]


def judge_problems(host: HostView) -> list[Finding]:
    """What the probe could not look at."""
    return [warning("probe", host.name, f"{part} could not be looked at: {problem}",
                    expected="an answer", fix="hvdtrain doctor --json   (if it stays so, it is a "
                                              "bug of the doctor; report it with this output)")
            for part, problem in host.facts.problems.items()]


SOFTWARE = (judge_python, judge_hvdtrain, judge_versions, judge_tensorflow_loads,
            judge_keras_backend, judge_horovod, judge_mpi, judge_problems)
