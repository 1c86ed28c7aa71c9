"""Slurm as seen from one host."""

from __future__ import annotations

from hvdtrain.doctor.facts import SlurmFacts
from hvdtrain.doctor.finding import Finding, not_applicable, ok, warning
from hvdtrain.doctor.judge.view import HostView

_NOT_SET_UP = "configuration source"
"""Slurm's programs are installed, but this host belongs to no cluster."""


def judge_slurm(host: HostView) -> list[Finding]:
    """Whether Slurm answers, and whether this is a job of it."""
    slurm = host.facts.slurm
    if slurm is None and "slurm" in host.facts.problems:
        return []
    if slurm is None:
        return [not_applicable("slurm", host.name, "no srun on PATH"),
                not_applicable("pmix", host.name, "no srun on PATH")]
    if _NOT_SET_UP in slurm.problem and not slurm.job_id:
        why = "Slurm's programs are here, but no cluster is set up"
        return [not_applicable("slurm", host.name, why), not_applicable("pmix", host.name, why)]
    if slurm.problem:
        return [warning("slurm", host.name, slurm.problem, expected="Slurm answers",
                        fix="scontrol ping   (and see `systemctl status slurmctld` on its host)"),
                *_judge_pmix(host.name, slurm)]
    where = "not inside of a job"
    if slurm.job_id:
        where = f"inside of job {slurm.job_id}" + (", in a step" if slurm.in_step else "")
    return [ok("slurm", host.name, f"{slurm.version}, {where}; srun --mpi has "
                                   f"{', '.join(slurm.mpi_types) or 'nothing'}"),
            *_judge_pmix(host.name, slurm)]


def _judge_pmix(host: str, slurm: SlurmFacts) -> list[Finding]:
    """Ranks under `srun --mpi=pmix` need the plugin, and the plugin its library."""
    if not slurm.pmix_plugin:
        return [not_applicable("pmix", host, "Slurm has no PMIx plugin; `srun --mpi=none` with "
                                             "Gloo needs none")]
    if slurm.pmix_loads:
        return [ok("pmix", host, f"{slurm.pmix_plugin} finds {slurm.pmix_library}")]
    return [warning("pmix", host, f"{slurm.pmix_plugin} wants {slurm.pmix_library}, which does "
                    "not load: srun --mpi=pmix fails", expected="PMIx's library at that place",
                    fix="apt-get install libpmix2 libpmix-dev   (then restart slurmd; Gloo with "
                        "--mpi=none works without)")]


SLURM = (judge_slurm,)
