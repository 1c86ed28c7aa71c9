"""How start, meeting, watchdog, end of an epoch and end of a job grow with ranks and hosts.

    python benchmarks/growth.py job --ranks 2 4 8 16 32 64      # on one host
    python benchmarks/growth.py job --hosts 2 4 8 16 32 64      # one rank on each; root only
    python benchmarks/growth.py job --hosts 16 --own-cores      # each has its own slow core
    python benchmarks/growth.py logins --hosts 8 16 32 --own-cores      # a star, and trees
    python benchmarks/growth.py watchdog --ranks 2 4 8 16 32 64

The ranks (`growth_rank.py`) talk and train nothing. All of them share this machine, whose time for
n interpreters and n logins grows with n whatever hvdtrain does. So the table also has that time
alone (`bare`: n interpreters that load the same library), and the CPU time of those processes of
which a job has one: the driver, its ssh clients, the rendezvous. With `--own-cores` no host may use
more than its equal part of this machine, as if each had one slow core, and times are given in
seconds of a whole core. `--against FOLDER` runs another checkout in turn. Every line is the median
of `--rounds`, with the range.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANK = [sys.executable, str(ROOT / "benchmarks" / "growth_rank.py")]
DRIVE = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), "drive"]
WATCHED = [sys.executable, str(ROOT / "benchmarks" / "growth_watched.py")]
CGROUPS = Path("/sys/fs/cgroup/cpu")  # of version 1
PERIOD_US = 50_000
LIMIT_S = 140.0
MARK = "GROWTH "


def cpu_of(pid):
    """CPU seconds of a process, with its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def drive(words):
    """In the process of the launcher: run it, then print what it and its children have used."""
    from hvdtrain.cli.main import main
    from hvdtrain.rendezvous.serve import RendezvousServer
    close, server = RendezvousServer.close, [0.0]

    def closing(self):
        server[0] = cpu_of(self.process.pid)
        close(self)

    RendezvousServer.close = closing
    sys.argv = ["hvdtrain", *words]
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
    own, children = (sum(resource.getrusage(who)[:2]) for who in (
        resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    sys.stdout.write(MARK + json.dumps({
        "driver": own, "server": server[0], "ssh": children - server[0], "over": time.time()})
        + "\n")
    sys.stdout.flush()
    os._exit(code or 0)


@contextlib.contextmanager
def hosts_for(count, own_cores):
    """A function that runs a command on the first of `count` + 1 virtual hosts; the other names."""
    sys.path.insert(0, str(ROOT))
    from tests.cluster.hosts import VirtualHosts
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(VirtualHosts(count + 1))
        if own_cores:
            stack.enter_context(parts_of_machine(hosts))

        def run(command, env):
            return hosts.run(hosts.names[0], command, cwd=ROOT, env=env, timeout=LIMIT_S).stdout
        yield run, hosts.names[1:]


@contextlib.contextmanager
def parts_of_machine(hosts):
    """Give each host, and with the first one this process, an equal part of the processors."""
    top = CGROUPS / f"hvdtrain-growth-{os.getpid()}"
    try:
        for number, name in enumerate(hosts.names):
            group = top / name
            group.mkdir(parents=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(
                PERIOD_US * os.cpu_count() / len(hosts.names))))
            for pid in (*hosts.processes(name), *[os.getpid()] * (number == 0)):
                (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (CGROUPS / "cgroup.procs").write_text(str(os.getpid()))
        hosts.down()
        deadline = time.monotonic() + 5.0
        for group in (*(top / name for name in hosts.names), top):
            while group.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # what was killed is still there for a moment
                    group.rmdir()
                time.sleep(0.01)


def run_here(command, env):
    """Run a command on this host; its output."""
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=LIMIT_S).stdout


def job(run, places, count, folder):
    """One job of a checkout: the seconds of its phases, and CPU seconds."""
    begun = time.time()
    said = run([*DRIVE, "launch", "-v", *places, "--timeout", str(int(LIMIT_S) - 10), "--", *RANK],
               {"PYTHONPATH": str(folder)})
    ranks = [json.loads(text) for text in re.findall(r"\{\"rank\".*\}", said)]
    told = re.search(rf"{MARK}(.*)", said)
    if len(ranks) != count or told is None:
        raise SystemExit(f"{len(ranks)} of {count} ranks have told their times:\n{said}")
    used = json.loads(told[1])
    last = {name: max(rank[name] for rank in ranks)
            for name in ("begun", "loaded", "met", "ready", "done", "shut")}
    return {"start": last["begun"] - begun, "load": last["loaded"] - last["begun"],
            "meeting": last["met"] - last["loaded"], "hvd.init": last["ready"] - last["met"],
            "epoch: numbers, ms": statistics.median(r["epoch"]["numbers"] for r in ranks),
            "epoch: object, ms": statistics.median(r["epoch"]["object"] for r in ranks),
            "end": used["over"] - last["shut"], "whole": used["over"] - begun,
            "CPU: driver": used["driver"], "CPU: ssh": used["ssh"],
            "CPU: rendezvous": used["server"],
            "CPU: a rank": statistics.median(r["cpu"] for r in ranks),
            "open files of a rank": statistics.median(r["files"] for r in ranks)}


def bare(count):
    """Seconds until n interpreters that load the library have ended."""
    began = time.time()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([*RANK, "--load"], cwd=ROOT, env=env) for _ in range(count)]
    for process in started:
        process.wait()
    return time.time() - began


def show(title, rows):
    """The medians with ranges of what the rounds have measured."""
    print(title)
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(f"  {name:<20} {statistics.median(values):9.3f}   ({min(values):.3f} to "
              f"{max(values):.3f})", flush=True)


@contextlib.contextmanager
def places_for(asked, count):
    """What runs a command, and the options that place `count` ranks."""
    if not asked.hosts:
        yield run_here, ["-H", f"localhost:{count}"]
        return
    with (hosts_for(count, asked.own_cores) as (run, names),
          tempfile.NamedTemporaryFile("w") as file):
        file.write("".join(f"{name} slots=1\n" for name in names))
        file.flush()
        yield run, ["--hostfile", file.name]


def measure_jobs(asked):
    sides = {"": ROOT, **({"against: ": asked.against} if asked.against else {})}
    what = "hosts, one rank on each" if asked.hosts else "ranks on one host"
    for count in asked.hosts or asked.ranks:
        rows, alone = {side: [] for side in sides}, []
        scale = os.cpu_count() / (count + 1) if asked.own_cores else 1.0
        with places_for(asked, count) as (run, places):
            for _ in range(asked.rounds):
                for side, folder in sides.items():
                    found = job(run, places, count, folder)
                    rows[side].append({
                        name: value * (1.0 if name.startswith(("CPU", "open")) else scale)
                        for name, value in found.items()})
                if not asked.own_cores:
                    alone.append({"bare": bare(count)})
        for side in sides:
            show(f"{side}{count} {what}; {asked.rounds} rounds; seconds", rows[side])
        if alone:
            show(f"{count} interpreters", alone)


def measure_logins(asked):
    """Launches of `true`, by a star and by trees."""
    for count in asked.hosts:
        rows = {fanout: [] for fanout in (0, 4, 8) if fanout < count}
        scale = os.cpu_count() / (count + 1) if asked.own_cores else 1.0
        with places_for(asked, count) as (run, places):
            for _ in range(asked.rounds):
                for fanout, row in rows.items():
                    tree = ["--ssh-fanout", str(fanout)] if fanout else []
                    began = time.time()
                    said = run([*DRIVE, "launch", *places, *tree, "--", "true"],
                               {"PYTHONPATH": str(ROOT)})
                    told = re.search(rf"{MARK}(.*)", said)
                    if told is None or "not reached" in said or "failed" in said:
                        raise SystemExit(said)
                    used = json.loads(told[1])
                    row.append({"seconds": (used["over"] - began) * scale,
                                "CPU: driver": used["driver"], "CPU: its ssh": used["ssh"]})
        for fanout, row in rows.items():
            show(f"{count} hosts, {f'a tree by {fanout}' if fanout else 'a star'}", row)


def watch(count, folder, fault):
    """Start watched ranks without a launcher; rank 0's CPU, and seconds to the end of all."""
    sys.path.insert(0, str(ROOT))
    from hvdtrain.hosts import Host, assign_ranks, rank_variables
    from hvdtrain.rendezvous.secret import SECRET_VARIABLE, JobKey, new_secret
    from hvdtrain.rendezvous.serve import gloo_variables, listen_on_all, serve
    from hvdtrain.world.detect import HOSTS_VARIABLE
    key = JobKey(new_secret())
    server = serve(listen_on_all(["127.0.0.1"]), hosts=["localhost"], slots=[count], key=key)
    shared = {**os.environ, "PYTHONPATH": str(folder), SECRET_VARIABLE: key.secret,
              HOSTS_VARIABLE: f"localhost:{count}",
              **gloo_variables(address="127.0.0.1", port=server.port, interface="lo", key=key)}
    ranks = [subprocess.Popen(WATCHED, env=shared | rank_variables(slot, count), cwd=ROOT,
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
             for slot in assign_ranks([Host("localhost", count)], count)]
    used = float(re.search(r"USED (.*)", ranks[0].stdout.readline())[1])
    for rank in ranks:  # all stand still from here on
        while rank.stdout.readline() != "STILL\n":
            pass
    began = time.time()
    if fault == "death":
        ranks[-1].kill()
    codes = [rank.wait() for rank in ranks]
    server.close()
    return {"rank 0, ms of CPU per s": 1000 * used, f"seconds to the end after {fault}":
            time.time() - began, "codes": float(len(set(codes)))}


def measure_watchdogs(asked):
    sides = {"": ROOT, **({"against: ": asked.against} if asked.against else {})}
    for count in asked.ranks:
        rows = {(side, fault): [] for side in sides for fault in ("death", "stall")}
        for _ in range(asked.rounds):
            for side, fault in rows:
                rows[side, fault].append(watch(count, sides[side], fault))
        for (side, fault), row in rows.items():
            show(f"{side}{count} ranks, {fault}", row)


def main():
    if sys.argv[1:2] == ["drive"]:
        drive(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["job", "logins", "watchdog"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--hosts", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--own-cores", action="store_true")
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    measures = {"job": measure_jobs, "logins": measure_logins, "watchdog": measure_watchdogs}
    measures[asked.what](asked)


if __name__ == "__main__":
    main()
