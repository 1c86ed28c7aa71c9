"""`init`: detects the world, chooses the collective, pins devices and meets the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import log
from hvdtrain.collectives import Choice, choose, create, use
from hvdtrain.collectives.base import Collective
from hvdtrain.config import TrainConfig
from hvdtrain.errors import ConfigError, LeftEarlyError, WorldError
from hvdtrain.horovod_check import check_horovod
from hvdtrain.log import get_logger
from hvdtrain.optional import require
from hvdtrain.rendezvous.barrier import rendezvous_barrier
from hvdtrain.rendezvous.bootstrap import bootstrap
from hvdtrain.runtime.guard import ScriptGuard
from hvdtrain.runtime.progress import IDLE, Progress
from hvdtrain.runtime.watchdog import Watchdog, start_watchdog
from hvdtrain.world import World
from hvdtrain.world.detect import detect_world


@dataclass(frozen=True, kw_only=True)
class Session:
    """This process as a rank among others; `devices` is a `train.devices.DevicePlan`."""

    world: World
    collective: Collective
    choice: Choice
    devices: Any
    progress: Progress = field(default_factory=Progress)
    watchdog: Watchdog | None = None
    asked_collective: str = "auto"
    timeline: Path | None = None
    guard: ScriptGuard | None = None
    elastic: Any = None  # a `train.elastic.Elastic`, if the launcher asks for it
    shown: list[str] = field(default_factory=list)

    @contextmanager
    def watched(self, hang_timeout_s: float) -> Iterator[None]:
        """A training, with its own limit for the watchdog. All ranks."""
        if self.watchdog is not None:
            self.watchdog.settings.hang_timeout_s = hang_timeout_s
        try:
            yield
        except SystemExit as error:
            if error.code in (None, 0) and self.world.size > 1:
                raise LeftEarlyError from error
            raise
        finally:
            self.progress.enter(IDLE)


_current: list[Session] = []
_at_shutdown: list[Callable[[], None]] = []
_was_started: list[bool] = []
_seeded: list[Session] = []
"""The session whose ranks have agreed on seeds."""


def init(*, collective: str = "auto", hang_timeout_s: float = TrainConfig.hang_timeout_s,
         timeline: Path | None = None, horovod_way: bool = False,
         process_sets: Sequence[Sequence[int]] = (),
         environ: MutableMapping[str, str] | None = None) -> Session:
    """Find out which rank this process is, pin its devices and meet the others. All ranks.

    Call it before the first TensorFlow operation. A second call returns the same session. From then
    on an uncaught error ends this rank at once, and is reported to the launcher. Where the random
    generators of Python, NumPy and TensorFlow differ between the ranks, they are seeded alike: a
    shuffle without a seed gives one order. Keras' own `model.fit` is refused where each rank would
    train alone.

    Args:
        collective: String, `"auto"`, or a name of `config.COLLECTIVES` such as `"horovod-gloo"`.
        hang_timeout_s: Float, how long a rank may hang or be silent; `fit` sets that of its
            `TrainConfig`. 0: no watchdog. Defaults to 300.
        timeline: Path of a file in which Horovod writes on the chief when each collective began and
            ended, for `chrome://tracing` or Perfetto.
        horovod_way: Boolean, for scripts written for Horovod, as `hvdtrain.tensorflow.init` sets
            it: several ranks use Horovod, random generators stay as they are, so that each rank
            shuffles in another order, and `model.fit` with the same data on all ranks is a
            warning. A later call can still set it; it keeps collective and seeds.
        process_sets: Sequence of sequences of ranks, subsets that Horovod knows from the start.
        environ: Mapping; defaults to the process environment. `HOROVOD_*` variables are added to it
            where no starter prepared a rendezvous.

    Returns:
        The `Session`: world, collective and device plan.

    Raises:
        ConfigError: `hang_timeout_s` is out of range, or `timeline` needs Horovod.
        WorldError: The processes do not form the group that was promised.
        CollectiveError: No collective is usable.
        DeviceError: More ranks on this host than GPUs.
    """
    if _current:
        if horovod_way:
            _allow_horovod_way(_current[0])
        return _current[0]
    env = os.environ if environ is None else environ
    guard = ScriptGuard(env)
    guard.install()
    asked = TrainConfig(collective=collective, hang_timeout_s=hang_timeout_s,
                        timeline=timeline).as_launched(env)
    collective, hang_timeout_s, timeline = asked.collective, asked.hang_timeout_s, asked.timeline
    world = guard.world = detect_world(env)
    log.configure(log.rank_prefix(world.rank, world.size, world.host))
    choice = choose(collective, world, check_horovod(),
                    among="horovod" * ((horovod_way or timeline is not None) and world.size > 1))
    require("tensorflow", "training")
    require("keras", "training")
    from hvdtrain.train import devices, elastic
    plan = devices.pin(world, env, late=horovod_way)
    if choice.name == "horovod-gloo":
        env.update(bootstrap(world, env))
        # Gloo's own limit of 30 s also bounds how much later the slowest rank may start.
        rendezvous_barrier(world, env)
    if timeline is not None:
        _write_timeline(timeline, choice, env)
    if plan.crowded and world.starter == "openmpi":
        # Else ranks that wait take the cores from those that compute: 12 times slower.
        env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    made = create(choice, world, env, process_sets)
    compare_with_promise(world, made)
    made.one_host = world.local_size == world.size
    progress = Progress()
    session = Session(
        world=world, collective=made, choice=choice, devices=plan, progress=progress,
        guard=guard,
        watchdog=start_watchdog(world, progress, made.gather_objects,
                                hang_timeout_s=hang_timeout_s, environ=env),
        asked_collective=collective, timeline=timeline, elastic=elastic.Elastic.of(env, world))
    _remember(session)
    if world.size > 1:
        _prepare_keras(session, horovod_way=horovod_way)
    return session


def _remember(session: Session) -> None:
    _current.append(session)
    _was_started[:] = [True]
    use(session.collective)


def _prepare_keras(session: Session, *, horovod_way: bool) -> None:
    """Seed the ranks alike, and watch calls of Keras' own `fit` and `save_model`."""
    from hvdtrain.train.distribute import watch_keras
    if horovod_way:
        _allow_horovod_way(session)
    else:
        _agree_on_seeds(session)
    _at_shutdown.append(watch_keras(session.collective))


def _agree_on_seeds(session: Session) -> None:
    from hvdtrain.train.own_loop import agree_on_seeds
    agree_on_seeds(session.collective)
    _seeded.append(session)


def with_equal_seeds() -> Session:
    """The session, for what divides data that are the same on all ranks. All ranks."""
    session = init()
    if session.world.size > 1 and not _seeded:
        if session.world.is_chief:
            get_logger().warning(
                "hvd.init() left each rank its own random numbers: what was shuffled before this "
                "call has another order on each rank. Where hvdtrain divides the data, call "
                "hvdtrain.init() in place of hvd.init().")
        _agree_on_seeds(session)
    return session


def _allow_horovod_way(session: Session) -> None:
    from hvdtrain.train.distribute import allow_horovod_way
    if session.world.size > 1 and not session.choice.name.startswith("horovod"):
        raise ConfigError(
            f"Horovod's functions need Horovod, but hvdtrain.init() chose the collective "
            f"`{session.choice.name}` ({session.choice.reason}). Call hvd.init() first, or write "
            "hvdtrain.init(collective=\"horovod-gloo\").")
    _at_shutdown.append(allow_horovod_way())


def started() -> Session | None:
    """The session of this process, or None before `init` and after `shutdown`."""
    return _current[0] if _current else None


def was_started() -> bool:
    """Whether there is, or was, a session in this process."""
    return bool(_was_started)


def session_for(config: TrainConfig) -> Session:
    """The session of a script's training: that of `init`, or a new one. All ranks."""
    # ConfigError where a setting is for another engine, or `init` was called with another value.
    if config.engine != "allreduce":
        raise ConfigError(
            f"engine={config.engine!r} cannot be used by hvdtrain.fit in a script, which trains "
            "with engine 'allreduce'. Write a job (docs/jobs.md) and start it with "
            f"hvdtrain launch -np N fit JOB --engine {config.engine}.")
    if not _current:
        return init(collective=config.collective, timeline=config.timeline,
                    hang_timeout_s=config.hang_timeout_s)
    session = with_equal_seeds()
    for name, wanted, known in (
            ("collective", config.collective, {"auto", session.asked_collective,
                                               session.choice.name}),
            ("timeline", config.timeline, {None, session.timeline})):
        if wanted not in known:
            raise ConfigError(
                f"The settings say {name}={str(wanted)!r}, but hvdtrain.init() was called before "
                f"without it. Give it there: hvdtrain.init({name}={str(wanted)!r}).")
    return session


def _write_timeline(path: Path, choice: Choice, env: MutableMapping[str, str]) -> None:
    if not choice.name.startswith("horovod"):
        raise ConfigError(f"The timeline is Horovod's, but the collective is `{choice.name}` "
                          f"({choice.reason}). Leave --timeline out, or start several ranks with "
                          "--collective horovod-gloo.")
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    env["HOROVOD_TIMELINE"] = str(path.resolve())


def shutdown() -> None:
    """Close the collective. All ranks; for scripts and tests that continue afterwards."""
    if _current:
        session = _current.pop()
        _seeded.clear()
        while _at_shutdown:
            _at_shutdown.pop()()
        if session.watchdog is not None:
            session.watchdog.close()
        session.collective.close()
        if session.guard is not None:
            session.guard.uninstall()
        use(None)


def compare_with_promise(world: World, collective: Collective) -> None:
    """WorldError, with its cause, where a rank that was promised to be one of N is not."""
    if collective.size == world.size and collective.rank == world.rank:
        return
    if collective.size == 1 and world.size > 1:
        raise WorldError(
            f"This process was started by {world.starter} as rank {world.rank} of {world.size}, "
            f"but {collective.name} finds it alone: {world.size} independent trainings would "
            f"run. The {world.starter} launcher and the MPI library of {collective.name} do not "
            "belong together. Use the mpirun of that MPI (`hvdtrain launch --starter mpirun` "
            f"finds it), or no MPI at all: hvdtrain launch -np {world.size} fit ...")
    raise WorldError(
        f"{world.starter} started this process as rank {world.rank} of {world.size}, but "
        f"{collective.name} says rank {collective.rank} of {collective.size}. Variables of two "
        f"starters are mixed: {', '.join(f'{k}={v}' for k, v in world.evidence.items())}. "
        "Start the job from a fresh shell.")
