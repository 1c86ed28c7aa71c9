"""The launcher pod of a Kubernetes MPIJob, as the operator prepares it, on virtual hosts."""

import re
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import VirtualHosts

ROOT = Path(__file__).resolve().parents[2]
# The operator's names; in the first lines /etc becomes the pod's own.
PREPARE = """set -e
mount -t tmpfs tmpfs /mnt
cp -a /etc/. /mnt/
mount --bind /mnt /etc
mkdir -p /etc/mpi
printf 'job-worker-0.job-worker.ns.svc slots=2\\njob-worker-1.job-worker.ns.svc slots=1\\n' \
> /etc/mpi/hostfile
"""


@pytest.mark.parametrize("starter", ["native", "mpirun"])
def test_ranks_go_to_the_workers_whose_names_come_late(fragile_hosts: VirtualHosts, starter: str
                                                       ) -> None:
    prepared = fragile_hosts.run("hosta", ["bash", "-c", PREPARE])
    assert prepared.returncode == 0, prepared.stdout
    process = fragile_hosts.start("hosta", [
        sys.executable, "-m", "hvdtrain", "launch", "-v", "--starter", starter, "--", "bash", "-c",
        "echo $(hostname) $HOROVOD_RANK$OMPI_COMM_WORLD_RANK"], cwd=ROOT,
        env={"K_MPI_JOB_ROLE": "launcher"})
    time.sleep(2.0)
    names = "".join(f"{fragile_hosts.address(host)} job-worker-{i}.job-worker.ns.svc\\n"
                    for i, host in enumerate(("hostb", "hostc")))
    fragile_hosts.run("hosta", ["bash", "-c", f"printf '{names}' >> /etc/hosts"])
    out, _ = process.communicate(timeout=40)
    assert process.returncode == 0, out
    assert sorted(re.findall(r"^\[\d\] (host\w \d)$", out, flags=re.MULTILINE)) == [
        "hostb 0", "hostb 1", "hostc 2"]


@pytest.mark.parametrize(("starter", "words"), [
    ("native", r"2 of the hosts cannot be used after 2 s(.|\n)*job-worker-1\.job-worker\.ns\.svc: "
               r"exit code 255, ssh: Could not resolve"),
    ("mpirun", r"After 2 s these hosts are not known here: job-worker-0\.job-worker\.ns\.svc, "
               r"job-worker-1\.job-worker\.ns\.svc\.")])
def test_workers_that_never_come_are_named(fragile_hosts: VirtualHosts, starter: str, words: str
                                           ) -> None:
    fragile_hosts.run("hosta", ["bash", "-c", PREPARE])
    done = fragile_hosts.run("hosta", [
        sys.executable, "-m", "hvdtrain", "launch", "--starter", starter, "--start-timeout", "2",
        "--", "true"], cwd=ROOT, env={"K_MPI_JOB_ROLE": "launcher"})
    assert done.returncode == 3
    assert re.search(words, done.stdout), done.stdout
