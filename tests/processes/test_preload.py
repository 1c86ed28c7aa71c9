"""A preloaded process: what is forked from it is as a new process, and harms it in no way.

Most of its processes import numpy alone, which is quick.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from hvdtrain.launch.execute import launch
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan
from hvdtrain.preload import client
from hvdtrain.preload.client import (
    SOCKET_VARIABLE,
    ForkedProgram,
    Preloader,
    RefusedError,
    start_program,
)
from hvdtrain.preload.server import server_command
from tests.launch_facts import facts
from tests.preload import STAND_IN
from tests.shared_files import shared_files

ROOT = Path(__file__).resolve().parents[2]
COUNTING = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
ENV = os.environ | COUNTING
LOOK = """
import json, os, random, signal, sys, __main__
import numpy
json.dump({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path[:2], "cwd": os.getcwd(),
    "main": [__name__, __main__.__dict__ is globals(), __package__, __doc__,
             globals().get("__file__"), __spec__ and __spec__.name],
    "environ": dict(os.environ), "umask": os.umask(0), "affinity": sorted(os.sched_getaffinity(0)),
    "handlers": {n.name: str(signal.getsignal(n)) for n in signal.valid_signals()
                 if isinstance(n, signal.Signals)},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "input": sys.stdin.read(),
    "leads": [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)],
    "buffered": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering],
    "encoding": [sys.stdout.encoding, sys.stderr.errors], "flags": str(sys.flags),
    "files": sorted(f for f in map(int, os.listdir("/proc/self/fd")) if f < 200),
    "threads": len(os.listdir("/proc/self/task")),
    "shown": [open("/proc/self/cmdline").read().split("\\0")[1:],
              sorted(open("/proc/self/environ").read().split("\\0"))],
    "random": [random.random(), float(numpy.random.random())],
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def preloader():
    with closing(Preloader(server_command(["json", "numpy"]), ENV)) as made:
        yield made


def fork(preloader, *words, env=ENV, text="", **options):
    """Run Python with these words to its end: exit code, standard output and error."""
    program = ForkedProgram(preloader.path, [sys.executable, *words], env=env, stdin=-1,
                            stdout=-1, stderr=-1, **options)
    program.begin()
    program.stdin.write(text.encode())
    program.stdin.close()
    out, err = program.stdout.read().decode(), program.stderr.read().decode()
    program.stdout.close()
    program.stderr.close()
    return program.wait(10.0), out, err


def new(*words, env=ENV, text="", cwd=None):
    done = subprocess.run([sys.executable, *words], env=env, input=text, capture_output=True,
                          text=True, check=False, start_new_session=True, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/__main__.py").write_text(LOOK)
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable}\n{LOOK}")
    script.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("words", [
    ("look.py", "a b", "-x"), ("-u", "look.py"), ("-P", "look.py"), ("-m", "look", "1"),
    ("-m", "pack"), ("-c", LOOK, "", "ü"), ("./look.py",)],
    ids=lambda words: " ".join(words)[:12])
def test_a_program_finds_itself_as_in_a_process_of_its_own(preloader, folder, words):
    env = ENV | {"ONE": "1", "PYTHONUNBUFFERED": "1" if "-m" in words else ""}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    cores = os.sched_getaffinity(0)
    mask = os.umask(0o027)
    os.sched_setaffinity(0, {min(cores)})
    try:
        forked = fork(preloader, *words, env=env, text="typed", cwd=str(folder))
        ordinary = new(*words, env=env, text="typed", cwd=folder)
    finally:
        signal.signal(signal.SIGHUP, before)
        os.sched_setaffinity(0, cores)
        os.umask(mask)
    assert (forked[0], forked[2]) == (ordinary[0], ordinary[2]) == (0, "")
    found, expected = json.loads(forked[1]), json.loads(ordinary[1])
    if words[0] in ("-u", "-P"):  # what a fork cannot show
        expected["orig_argv"].remove(words[0])
        expected["shown"][0].remove(words[0])
        expected.pop("flags"), found.pop("flags")
    if words[0] == "-P":
        assert found.pop("path")[0] == expected.pop("path")[0]
    assert found.pop("random") != expected.pop("random")
    assert found == expected


def test_a_script_with_a_first_line_is_run_by_its_path(preloader, folder):
    program = ForkedProgram(preloader.path, [str(folder / "script"), "one"], env=ENV, stdin=-3,
                            stdout=-1)
    program.begin()
    found = json.loads(program.stdout.read())
    program.stdout.close()
    assert program.wait() == 0
    assert found["argv"] == [str(folder / "script"), "one"]
    assert found["path"][0] == str(folder)


def test_forks_have_other_random_numbers(preloader):
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    drawn = [fork(preloader, "-c", code)[1].split() for _ in range(3)]
    assert len({number for pair in drawn for number in pair}) == 6


@pytest.mark.parametrize(("code", "ends"), [
    ("pass", 0), ("import sys; sys.exit(3)", 3), ("import sys; sys.exit('why')", 1),
    ("1 / 0", 1), ("import os; os._exit(200)", 200), ("import os; os.kill(os.getpid(), 9)", -9),
    ("import os; os.abort()", -6), ("import ctypes; ctypes.string_at(0)", -11),
    ("import os; os.kill(os.getpid(), 15)", -15), ("raise KeyboardInterrupt", -2),
    ("import atexit, os; atexit.register(os._exit, 9)", 9),
    ("import threading, time, os; threading.Thread(target=lambda: (time.sleep(0.1), os._exit(5)))"
     ".start()", 5),
    ("import sys; sys.stdout.write('x' * 100000)", 0)])
def test_a_fork_ends_with_the_code_of_a_new_process(preloader, code, ends):
    forked, ordinary = fork(preloader, "-c", code), new("-c", code)
    assert (forked[0], forked[1]) == (ordinary[0], ordinary[1])
    assert forked[0] == ends
    assert forked[2].splitlines()[-1:] == ordinary[2].splitlines()[-1:]
    assert fork(preloader, "-c", "print('well')")[1] == "well\n"


def test_a_module_that_is_not_there_ends_as_python_ends(preloader):
    assert fork(preloader, "-m", "no_such") == new("-m", "no_such")


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_until(what, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert what()


def test_what_a_client_leaves_is_killed_with_its_group(preloader, tmp_path):
    code = (f"import os, time; os.fork(); open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); "
            "time.sleep(600)")
    program = ForkedProgram(preloader.path, [sys.executable, "-c", code], env=ENV)
    program.begin()
    wait_until(lambda: len(os.listdir(tmp_path)) == 2)
    assert children(preloader.pid) == [str(program.pid)]
    program.abandon()
    wait_until(lambda: not any(Path("/proc", pid).exists() for pid in os.listdir(tmp_path)))
    assert children(preloader.pid) == []


def test_the_number_of_a_fork_is_its_own_until_its_end_is_told(preloader):
    program = ForkedProgram(preloader.path, [sys.executable, "-c", "pass"], env=ENV)
    program.begin()
    state = Path(f"/proc/{program.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
    other = _started(preloader, "import time; time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.05)
    other.abandon()
    assert program.wait() == 0
    wait_until(lambda: not state.exists())


def _started(preloader, code):
    program = ForkedProgram(preloader.path, [sys.executable, "-c", code], env=ENV)
    program.begin()
    return program


def test_signals_reach_a_fork_and_its_end_is_awaited(preloader):
    code = ("import signal, sys, time; "
            "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); print('up', flush=True); "
            "time.sleep(600)")
    program = ForkedProgram(preloader.path, [sys.executable, "-c", code], env=ENV, stdout=-1)
    program.begin()
    assert program.stdout.readline() == b"up\n"
    program.stdout.close()
    assert program.poll() is None
    program.send_signal(signal.SIGUSR1)
    assert program.wait(5.0) == program.poll() == 7
    program.kill()  # nothing is left to kill


@pytest.mark.parametrize(("change", "why"), [
    ({"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS counts when modules are imported, and it is '7' "
     "here but was '1'"),
    ({"TF_ENABLE_ONEDNN_OPTS": "0"}, "TF_ENABLE_ONEDNN_OPTS counts"),
    ({"KERAS_BACKEND": "jax"}, "KERAS_BACKEND counts"), ({"XLA_FLAGS": "x"}, "XLA_FLAGS counts"),
    ({"LD_LIBRARY_PATH": "/x"}, "LD_LIBRARY_PATH counts"), ({"HOME": "/x"}, "HOME counts"),
    ({"PYTHONHASHSEED": "1"}, "PYTHONHASHSEED counts"),
    ({"LC_ALL": "de_DE"}, "LC_ALL counts"), ({"TF_CONFIG": "{}", "HOROVOD_RANK": "1"}, None)])
def test_an_environment_that_differs_at_import_is_refused(preloader, change, why):
    if why is None:
        assert fork(preloader, "-c", "pass", env=ENV | change)[0] == 0
        return
    with pytest.raises(RefusedError, match=why):
        fork(preloader, "-c", "pass", env=ENV | change)


@pytest.mark.parametrize(("command", "why"), [
    (["/bin/sh", "-c", "true"], "/bin/sh is not .*python"),
    (["no-such-program"], "no-such-program is not"),
    (["/usr/bin/env", "python"], "/usr/bin/env is not"),
    ([sys.executable], "knows no option to be interactive"),
    ([sys.executable, "-O", "x.py"], "knows no option -O"),
    ([sys.executable, "no-such.py"], "no-such.py is not a file")])
def test_what_this_python_does_not_run_is_refused(preloader, command, why):
    program = ForkedProgram(preloader.path, command, env=ENV)
    with pytest.raises(RefusedError, match=why):
        program.begin()


def test_a_folder_that_is_not_there_is_refused(preloader, tmp_path):
    with pytest.raises(RefusedError, match="gone is not a folder"):
        fork(preloader, "-c", "pass", cwd=str(tmp_path / "gone"))


MODULES = {
    "a thread later": ("import threading, time\nthreading.Timer(0.5, lambda: threading.Thread("
                       "target=time.sleep, args=[60], daemon=True).start()).start()\n",
                       "has started threads since it imported"),
    "tensorflow": ("import tensorflow as tf\ntf.constant(1) + 1\n", "TensorFlow has run something"),
    "mpi": ("from mpi4py import MPI\n", "MPI is initialized"),
    "gpu": ("import os\nfile = os.open('/dev/nvidia-hvdtrain-test', os.O_RDONLY)\n",
            "a GPU is in use"),
}


@pytest.mark.parametrize("case", MODULES)
def test_a_process_that_has_done_more_than_import_does_not_fork(case, tmp_path):
    text, why = MODULES[case]
    (tmp_path / "does_more.py").write_text(text)
    device = Path("/dev/nvidia-hvdtrain-test")
    if case == "gpu":
        if not os.access("/dev", os.W_OK):
            pytest.skip("no file can be made in /dev")
        device.touch()
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ENV.get('PYTHONPATH', '')}",
                 "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        with closing(Preloader(server_command(["does_more"]), env)) as preloader:
            if case == "a thread later":
                fork(preloader, "-c", "pass", env=env)
                time.sleep(0.6)
            with pytest.raises(RefusedError, match=why):
                fork(preloader, "-c", "pass", env=env)
    finally:
        device.unlink(missing_ok=True)


def test_variables_that_the_imports_set_themselves_are_no_difference(tmp_path):
    (tmp_path / "sets.py").write_text("import os\nos.environ['TF_OWN'] = '1'\n")
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ENV.get('PYTHONPATH', '')}"}
    with closing(Preloader(server_command(["sets"]), env)) as preloader:
        for value in ({}, {"TF_OWN": "1"}):
            assert fork(preloader, "-c", "pass", env=env | value)[0] == 0
        code = "import os; print('TF_OWN' in os.environ)"
        assert fork(preloader, "-c", code, env=env)[1] == "False\n"
        with pytest.raises(RefusedError, match="TF_OWN counts"):
            fork(preloader, "-c", "pass", env=env | {"TF_OWN": "2"})


def test_modules_that_are_not_installed_are_left_out_and_broken_ones_are_told(tmp_path, capfd):
    with closing(Preloader(server_command(["no_such_module", "no.such"]), ENV)) as preloader:
        assert fork(preloader, "-c", "print(1)")[1] == "1\n"
    (tmp_path / "broken.py").write_text("print('on the way')\nimport no_such_module\n")
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ENV.get('PYTHONPATH', '')}"}
    with closing(Preloader(server_command(["broken"]), env)) as preloader, \
            pytest.raises(RefusedError, match="the preloaded process ended"):
        fork(preloader, "-c", "pass", env=env)
    assert "No module named 'no_such_module'" in capfd.readouterr().err
    with pytest.raises(RefusedError, match="no preloaded process listens at"):
        fork(preloader, "-c", "pass", env=env)


def test_a_program_runs_as_a_new_process_where_it_is_refused(preloader, capfd):
    for env, shown in ((ENV, 1), (ENV | {SOCKET_VARIABLE: preloader.path}, 3),
                       (ENV | {SOCKET_VARIABLE: preloader.path, "OMP_NUM_THREADS": "3"}, 1),
                       (ENV | {SOCKET_VARIABLE: "/no/such"}, 1)):
        code = "import os, sys; sys.exit(3 if os.getppid() == int(os.environ['SERVER']) else 1)"
        process = start_program([sys.executable, "-c", code],
                                env=env | {"SERVER": str(preloader.pid)}, stdin=-3)
        assert process.wait(10.0) == shown


def test_a_process_stands_for_a_fork(preloader):
    env = ENV | {SOCKET_VARIABLE: preloader.path}
    code = ("import os, signal, sys, time; sys.stdout.write(sys.stdin.readline()); "
            "print(os.getppid(), flush=True); signal.signal(15, lambda *_: sys.exit(5)); "
            "print('up', flush=True); time.sleep(600)")
    for number, ends in ((signal.SIGTERM, 5), (signal.SIGUSR1, -signal.SIGUSR1)):
        process = subprocess.Popen([*STAND_IN, sys.executable, "-c", code], env=env, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdin.write("line\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(3)] == [
            "line\n", f"{preloader.pid}\n", "up\n"]
        process.send_signal(number)
        process.communicate(timeout=5.0)
        assert process.returncode == ends
    refused = subprocess.run([*STAND_IN, "sh", "-c", "exit 4"], env=env, capture_output=True,
                             text=True, check=False)
    assert (refused.returncode, "runs as a new process: sh is not" in refused.stderr) == (4, True)


OWNER = """
import sys, time
from hvdtrain.preload.client import ForkedProgram, Preloader
from hvdtrain.preload.server import server_command
import os
made = Preloader(server_command(["json"]), os.environ)
program = ForkedProgram(made.path, [sys.executable, "-c", "import time; time.sleep(600)"],
                        env=os.environ)
program.begin()
print(made.pid, program.pid, made.path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["owner", "preloaded process"])
def test_nothing_outlives_an_owner_or_a_preloaded_process_that_is_killed(victim):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=ENV, text=True, cwd=ROOT,
                             stdout=subprocess.PIPE)
    server, child, path = owner.stdout.readline().split()
    os.kill(owner.pid if victim == "owner" else int(server), signal.SIGKILL)
    try:
        wait_until(lambda: not Path(f"/proc/{child}").exists())
        # Of the owner the server is a zombie until the owner ends.
        wait_until(lambda: not Path(f"/proc/{server}/exe").exists())
        if victim == "owner":
            assert not Path(path).parent.exists()
    finally:
        owner.kill()
        owner.communicate()
        Path(path).unlink(missing_ok=True)
        if Path(path).parent.exists():
            Path(path).parent.rmdir()


def as_nobody(path):
    """What another user hears who asks there."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            ForkedProgram(path, [sys.executable, "-c", "pass"], env={}, cwd="/").begin()
        except RefusedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as said:
        return said.read()


def test_others_may_not_start_programs(preloader):
    """Neither users who cannot reach the socket, nor those who can, nor other namespaces."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import client\n"
            "try: client.ForkedProgram(sys.argv[2], [sys.executable, '-c', 'pass'], env={}).begin()"
            "\nexcept client.RefusedError as error: print(error)")
    words = [sys.executable, "-c", code, str(Path(client.__file__).parent), preloader.path]
    folder = Path(preloader.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    if os.geteuid():
        pytest.skip("only root can be another user")
    assert "Permission denied" in as_nobody(preloader.path)
    folder.chmod(0o755)
    os.chmod(preloader.path, 0o777)
    try:
        assert "belongs to user 0, this one to 65534" in as_nobody(preloader.path)
    finally:
        folder.chmod(0o700)
    elsewhere = subprocess.run(["unshare", "-n", *words], capture_output=True, text=True,
                               check=False, env=ENV)
    assert "is in another net namespace" in elsewhere.stdout
    assert fork(preloader, "-c", "print(1)")[1] == "1\n"


def test_a_client_that_sends_nonsense_or_nothing_does_no_harm(preloader):
    import socket
    talks = []
    for data in (b"", b"{", b"x" * 70000):
        talk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        talk.connect(preloader.path)
        talk.sendall(data)
        talks.append(talk)
    assert fork(preloader, "-c", "print(1)")[1] == "1\n"
    for talk in talks:
        talk.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talk:
        talk.connect(preloader.path)
        talk.sendall(b"nonsense\n")
        assert b"not a request" in talk.recv(1000)
    assert fork(preloader, "-c", "print(1)")[1] == "1\n"


def measures(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
    return resident, len(os.listdir(f"/proc/{pid}/fd")), len(children(pid))


def test_many_forks_leave_nothing_behind(preloader):
    """`benchmarks/preload.py` forks 500 times from a process with TensorFlow."""
    ways = ("pass", "import os; os._exit(1)", "import os; os.kill(os.getpid(), 9)")
    for _ in range(6):
        fork(preloader, "-c", "pass")
    wait_until(lambda: not children(preloader.pid))
    before, files = measures(preloader.pid), shared_files()
    for number in range(60):
        if number % 10 == 9:
            _started(preloader, "import time; time.sleep(600)").abandon()
        else:
            fork(preloader, "-c", ways[number % 3])
    wait_until(lambda: not children(preloader.pid))
    after = measures(preloader.pid)
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 512  # KB
    assert shared_files() <= files


def start_ranks(monkeypatch, preloader, code, **options):
    """Launch two ranks that are taken from a preloaded process; returns the exit code."""
    environ = COUNTING | {SOCKET_VARIABLE: preloader.path}
    for name in {*os.environ} - {*ENV}:  # what TensorFlow set in this process
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    asked = {"command": (sys.executable, "-c", code), "np": 2, "starter": "native"} | options
    return launch(make_plan(LaunchOptions(**asked), environ, facts(cores=2)))


def test_ranks_of_a_launch_are_forks(preloader, monkeypatch, capfd):
    code = ("import os, sys; print(os.getppid(), os.environ['HOROVOD_RANK'], file=sys.stderr); "
            "print('chief only')")
    assert start_ranks(monkeypatch, preloader, code) == 0
    out, err = capfd.readouterr()
    assert out == "[0] chief only\n"
    assert sorted(err.splitlines()) == [f"[{rank}] {preloader.pid} {rank}" for rank in range(2)]


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("raise ValueError('bad')", 1, "ValueError: bad"), ("os.kill(os.getpid(), 11)", 139, "SIGSEGV"),
    ("sys.exit(7)", 7, "exit code 7")])
def test_a_forked_rank_that_breaks_is_named_and_ends_the_others(preloader, monkeypatch, capfd,
                                                                fault, code, words):
    text = (f"import os, sys, time\nif os.environ['HOROVOD_RANK'] == '1':\n    {fault}\n"
            "time.sleep(60)")
    began = time.monotonic()
    assert start_ranks(monkeypatch, preloader, text) == code
    assert time.monotonic() - began < 5.0
    err = capfd.readouterr().err
    assert "hvdtrain launch: rank 1 on localhost failed" in err
    assert words in err
    assert not children(preloader.pid)


def test_ranks_that_cannot_be_forked_are_new_processes_and_the_reason_is_told_once(
        preloader, monkeypatch, capfd):
    assert start_ranks(monkeypatch, preloader, "", command=("/bin/sh", "-c", "exit 0")) == 0
    assert capfd.readouterr().err.splitlines() == [
        "hvdtrain launch: localhost: ranks are started as new processes: /bin/sh is not "
        f"{sys.executable}, nor a script of it"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launch_that_is_ended_while_its_host_imports_leaves_nothing(number, tmp_path):
    """The preloaded process is one of the launch's own, with TensorFlow."""
    (tmp_path / "rank.py").write_text("")
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "--preload", "--", sys.executable,
         "rank.py"], env=ENV, cwd=tmp_path, text=True, stderr=subprocess.PIPE)

    def servers():
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes()
                if b"hvdtrain.preload.server" in words and entry.name.isdigit():
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    found.append((entry.name, stat[1]))
            except OSError:
                continue
        return {pid for pid, parent in found if is_below(parent, process.pid)}

    wait_until(servers)
    mine = servers()
    process.send_signal(number)
    _, err = process.communicate(timeout=30.0)
    assert process.returncode == (143 if number == signal.SIGTERM else -9), err
    wait_until(lambda: not any(Path("/proc", pid, "exe").exists() for pid in mine), 20.0)


def is_below(pid, ancestor):
    """Whether a process was started by another, or by one of that."""
    while pid not in ("0", "1", str(ancestor)):
        try:
            pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return False
    return pid == str(ancestor)
