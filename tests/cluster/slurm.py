"""A private, throw-away Slurm whose nodes are virtual hosts. Root only.

It has its own munge key and socket, settings, state and spool; nothing of a system's Slurm is
read or written. Partition `main` can be preempted (with 10 s of grace) by `high`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.hosts import VirtualHosts, hear_interrupts
from tests.cluster.packages import SLURM, SLURM_EXTRAS, NotPermittedError, ensure, program

_WAIT_S = 30.0
_END_S = 2.0
_SETTLE_S = 1.0
_CONF = """ClusterName=hvdtrain
SlurmctldHost={controller}
SlurmUser=root
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait={kill_wait_s}
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1,sched_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes={names} Default=YES State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes={names} State=UP PriorityTier=10
"""


class PrivateSlurm:
    """Slurm over the first `count` of some virtual hosts. A context manager."""

    def __init__(self, hosts: VirtualHosts, *, count: int = 2, cpus: int = 4,
                 kill_wait_s: int = 20, grace_s: int = 20) -> None:
        self.hosts = hosts
        self.nodes = hosts.names[:count]
        self._cpus = cpus
        self._times = {"kill_wait_s": kill_wait_s, "grace_s": grace_s}
        self._folder = Path()
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> PrivateSlurm:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Start it; returns when every node is idle.

        Raises:
            NotPermittedError: This machine does not allow it.
        """
        ensure(SLURM, SLURM_EXTRAS)
        self._folder = Path(tempfile.mkdtemp(prefix="hvdtrain-slurm-"))
        self._folder.chmod(0o755)
        try:
            self._write_settings()
            self._start_munge()
            self._start(self.nodes[0], "slurmctld", "-D")
            for node in self.nodes:
                (self._folder / f"spool.{node}").mkdir()
                self._start(node, "slurmd", "-D", "-N", node)
            self._await_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(AssertionError, OSError):
            self.run(["scancel", "--state=RUNNING", "--signal=KILL", "--full", "-u", "root"],
                     timeout=10)
        # A failed PMIx step can leave a slurmd that ignores SIGTERM. Those of the steps
        # (slurmstepd) carry no name of ours, but live in the hosts.
        for node in self.nodes:
            for mark in ("slurmctld", "slurmd", "slurmstepd"):
                self.hosts.signal(node, mark, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        pid_file = self._folder / "munge" / "pid"
        if pid_file.exists():
            munged = int(pid_file.read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(munged, signal.SIGTERM)
            deadline = time.monotonic() + _END_S
            while Path(f"/proc/{munged}").exists() and time.monotonic() < deadline:
                time.sleep(0.02)  # at its end it writes its seed
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def conf(self) -> str:
        """The value of SLURM_CONF."""
        return str(self._folder / "slurm.conf")

    def run(self, argv: Sequence[str], *, timeout: float = 60.0, cwd: Path | str | None = None,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node, where sbatch, srun and squeue work."""
        environ = {**(env or {}), "SLURM_CONF": self.conf}
        return self.hosts.run(self.nodes[0], argv, timeout=timeout, cwd=cwd, env=environ)

    def submit(self, script: Path, *options: str, cwd: Path | str | None = None) -> int:
        """Submit a batch script; returns the job's number."""
        done = self.run(["sbatch", "--parsable", *options, str(script)], cwd=cwd)
        assert done.returncode == 0, done.stdout
        return int(done.stdout.split()[-1].partition(";")[0])

    def state(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says, e.g. JobState, Restarts, ExitCode."""
        text = self.run(["scontrol", "--oneliner", "show", "job", str(job)]).stdout
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait(self, job: int, *states: str, timeout: float = 60.0) -> dict[str, str]:
        """Wait until the job is in one of `states`; default: until it has ended."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL",
                            "PREEMPTED", "OUT_OF_MEMORY")
        deadline = time.monotonic() + timeout
        while True:
            found = self.state(job)
            if found.get("JobState") in wanted:
                return found
            assert time.monotonic() < deadline, f"job {job} is not {wanted}: {found}"
            time.sleep(0.3)

    def start_now(self, job: int) -> None:
        """Start a requeued job at once; Slurm lets it wait two minutes otherwise."""
        deadline = time.monotonic() + _WAIT_S
        while self.state(job).get("JobState") != "PENDING":
            assert time.monotonic() < deadline, f"job {job} was not requeued: {self.state(job)}"
            time.sleep(0.3)
        # The end of the former batch script would be taken for that of the new one.
        while any(self.hosts.processes(node, f"[{job}.") for node in self.nodes):
            assert time.monotonic() < deadline, f"the former run of job {job} does not end"
            time.sleep(0.1)
        time.sleep(_SETTLE_S)
        self.run(["scontrol", "update", f"job={job}", "starttime=now"])

    def _write_settings(self) -> None:
        nodes = "\n".join(f"NodeName={node} CPUs={self._cpus} State=UNKNOWN Port=26818"
                          for node in self.nodes)
        (self._folder / "slurm.conf").write_text(_CONF.format(
            controller=self.nodes[0], folder=self._folder, nodes=nodes,
            names=",".join(self.nodes), **self._times))
        # Nodes share /tmp here and must not share PMIx's files; /dev/shm is private to each.
        (self._folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
        # The hosts see no cgroup file system, where slurmd's own search for one fails.
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self._folder / "state").mkdir()

    def _start_munge(self) -> None:
        munge = self._folder / "munge"
        munge.mkdir()
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge")
        munge.chmod(0o755)
        done = subprocess.run(
            ["runuser", "-u", "munge", "--", program("munged") or "munged",
             f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
             f"--log-file={munge}/log", f"--seed-file={munge}/seed"],
            capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotPermittedError(f"munged did not start: {done.stderr}")

    def _start(self, node: str, daemon: str, *options: str) -> None:
        environ = {**os.environ, "SLURM_CONF": self.conf}
        self._daemons.append(subprocess.Popen(
            self.hosts.enter(node, [program(daemon) or daemon, *options]), env=environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=hear_interrupts))

    def _await_idle(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            shown = self.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]).stdout.split()
            if set(self.nodes) <= set(shown):
                return
            time.sleep(0.1)
        logs = "\n".join(f"{path.name}: {path.read_text()[-500:]}"
                         for path in self._folder.glob("*.log"))
        raise NotPermittedError(f"the nodes of Slurm are not idle after {_WAIT_S:g} s:\n{logs}")
