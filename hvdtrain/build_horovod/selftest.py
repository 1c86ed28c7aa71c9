"""Two ranks in the target environment, through Gloo and through MPI, with checked values."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.build_horovod.probe import Target
from hvdtrain.build_horovod.process import Finished, clean_environment, run
from hvdtrain.build_horovod.toolchain import Mpi
from hvdtrain.errors import EXIT_TIME_OVER, BuildError
from hvdtrain.hosts import Host, assign_ranks, rank_variables
from hvdtrain.log import get_logger
from hvdtrain.world.rendezvous import gloo_variables, listen_on_all, serve
from hvdtrain.world.secret import JobKey, new_secret

RANK_PROGRAM = Path(__file__).with_name("selftest_rank.py")
TIMEOUT_S = 300.0


def self_test(target: Target, *, mpi: Mpi | None, gloo: bool,
              environ: Mapping[str, str]) -> tuple[str, ...]:
    """Run the self-test over each collective that was built; returns their names.

    Raises:
        BuildError: A rank fails, or computes a wrong value.
    """
    env = clean_environment(environ)
    env["TF_CPP_MIN_LOG_LEVEL"] = "3"
    env["OMP_NUM_THREADS"] = "1"
    passed = []
    if gloo:
        _judge("gloo", run_gloo_ranks([str(target.python), "-P", str(RANK_PROGRAM)], env=env))
        passed.append("gloo")
    if mpi:
        _judge("mpi", _run_mpirun(target, mpi, env))
        passed.append("mpi")
    return tuple(passed)


def _judge(name: str, ranks: list[Finished]) -> None:
    if any(rank.code for rank in ranks) or not any("SELF-TEST OK" in rank.out for rank in ranks):
        said = "\n".join(f"  rank {index}: exit code {rank.code}: {_last_lines(rank)}"
                         for index, rank in enumerate(ranks))
        raise BuildError(
            f"Horovod was built and installed, but its self-test over {name} failed:\n{said}\n"
            "Build it anew with: hvdtrain build-horovod --force --install")
    line = next(text for rank in ranks for text in rank.out.splitlines() if "SELF-TEST OK" in text)
    get_logger().info("self-test over %s: 2 ranks, values as expected (%s)", name,
                      line.removeprefix("SELF-TEST OK "))


def _last_lines(rank: Finished) -> str:
    return " | ".join(rank.text.strip().splitlines()[-4:])


def run_gloo_ranks(command: list[str], *, env: Mapping[str, str],
                   timeout_s: float = TIMEOUT_S, size: int = 2) -> list[Finished]:
    """Start `size` ranks of a command on this host over Gloo and wait for all of them.

    A rank that is not done after `timeout_s` is killed and gets code 124.
    """
    key = JobKey(new_secret())
    server = serve(listen_on_all(["127.0.0.1"]), hosts=["localhost"], slots=[size], key=key)
    shared = {**env, **gloo_variables(address="127.0.0.1", port=server.port, interface="lo",
                                      key=key)}
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _run_ranks(command, shared, Path(folder), timeout_s, size)
    finally:
        server.close()


def _run_ranks(command: list[str], env: Mapping[str, str], folder: Path, timeout_s: float,
               size: int) -> list[Finished]:
    outs = [folder / f"rank{rank}" for rank in range(size)]
    ranks = []
    for slot, out in zip(assign_ranks((Host("localhost", size),), size), outs, strict=True):
        with out.with_suffix(".out").open("w") as to, out.with_suffix(".err").open("w") as err:
            ranks.append(subprocess.Popen(
                command, env={**env, **rank_variables(slot, size)}, stdout=to, stderr=err,
                stdin=subprocess.DEVNULL))
    codes = _wait_all(ranks, timeout_s)
    return [Finished(code=code, out=out.with_suffix(".out").read_text(errors="replace"),
                     err=out.with_suffix(".err").read_text(errors="replace"))
            for code, out in zip(codes, outs, strict=True)]


def _wait_all(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Exit codes of all ranks; none is left running, whatever happens."""
    codes = []
    try:
        for rank in ranks:
            try:
                codes.append(rank.wait(timeout=timeout_s))
            except subprocess.TimeoutExpired:
                codes.append(EXIT_TIME_OVER)
                timeout_s = 0.1
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return codes


def _run_mpirun(target: Target, mpi: Mpi, env: Mapping[str, str]) -> list[Finished]:
    options = ["-np", "2"]
    if mpi.kind == "openmpi":
        options += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
    env = {"HOME": tempfile.gettempdir(), **env, "HOROVOD_CONTROLLER": "mpi",
           "HOROVOD_CPU_OPERATIONS": "mpi", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return [run([mpi.mpirun, *options, target.python, "-P", RANK_PROGRAM], env=env,
                timeout_s=TIMEOUT_S)]
