"""The edits of `horovodrun`: command lines that today's MPI takes, hostfiles of every dialect, ssh.

Without an option `horovodrun` starts the ranks with mpirun wherever Horovod was built with MPI, and
its command line is that of Open MPI 4. They change Python files only.
"""

from __future__ import annotations

from hvdtrain.build_horovod.source import Edit

_MPI_RUN = "horovod/runner/mpi_run.py"
_HOSTS = "horovod/runner/common/util/hosts.py"
_REMOTE = "horovod/runner/util/remote.py"

_HELPERS = '''\
def _mpirun():
    """The mpirun of this Python installation, else the first one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpirun')
    return quote(beside) if os.access(beside, os.X_OK) else 'mpirun'


def _plm_option(env=None):
    """Option and beginning of the names of the parameters of Open MPI's ssh launcher."""
    output, _ = tiny_shell_exec.execute(f'{_mpirun()} --version', env) or ('', 1)
    major = re.search(r'(?:Open MPI|OpenRTE)\\)? v?(\\d+)', output)
    return '--prtemca plm_ssh' if major and int(major[1]) >= 5 else '--mca plm_rsh'


def mpi_available(env=None):'''

_UNKNOWN_KEYS = '''\
import subprocess

SSH_COMMAND_PREFIX = 'ssh -o PasswordAuthentication=no'


def _unknown_keys(host):
    """Accept a key that is not known where ssh would ask; a configuration that decides counts."""
    try:
        said = subprocess.run(['ssh', '-G', host], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ''
    asks = 'stricthostkeychecking ask' in said.splitlines()
    return ' -o StrictHostKeyChecking=accept-new' if asks else ''
'''

_READ_HOSTFILE = '''\
    slots = {}
    with open(filename, 'r') as f:
        for line in f:
            words = re.sub(r'\\s*=\\s*', '=', line.partition('#')[0]).split()
            if not words:
                continue
            name, _, count = words[0].partition(':')
            given = [word[len('slots='):] for word in words[1:] if word.startswith('slots=')]
            count = (given or [count or '1'])[0]
            if not count.isdecimal() or int(count) < 1:
                raise ValueError(f'{filename}: cannot read {line.strip()!r}. '
                                 'Expected HOST slots=N or HOST:N.')
            slots[name] = slots.get(name, 0) + int(count)
    if not slots:
        raise ValueError(f'{filename} names no host. Expected lines like: node1 slots=4')
    return ','.join(f'{name}:{count}' for name, count in slots.items())
'''

RUNNER_EDITS = (
    Edit(name="runner-modules", reason="what the functions of the next edit use",
         file=_MPI_RUN, pattern=r"^import os\n", replacement="import os\nimport re\n"),
    Edit(name="runner-functions", reason="used by the edits that follow",
         file=_MPI_RUN, pattern=r"^def mpi_available\(env=None\):", replacement=_HELPERS),
    Edit(name="runner-version", reason="the mpirun beside Python, wherever PATH leads",
         file=_MPI_RUN, pattern=r"'mpirun --version'", replacement="f'{_mpirun()} --version'"),
    Edit(name="runner-mpirun", reason="the same mpirun; a wheel's finds its files by its own path",
         file=_MPI_RUN, pattern=r"'mpirun \{basic_args\} '",
         replacement="_mpirun() + ' {basic_args} '"),
    Edit(name="runner-binding", reason="Open MPI 5 takes `-bind-to none` for the program `none`",
         file=_MPI_RUN,
         pattern=r"list\(_OMPI_FLAGS\), list\(_NO_BINDING_ARGS\)",
         replacement="list(_OMPI_FLAGS), ['--bind-to none', '--map-by slot']"),
    Edit(name="runner-ssh", reason="Open MPI 5 has renamed the parameters of its ssh launcher",
         file=_MPI_RUN, pattern=r"f'-mca plm_rsh_args ",
         replacement="f'{_plm_option(env)}_args "),
    Edit(name="runner-tree-spawn", reason="as runner-ssh", file=_MPI_RUN,
         pattern=r"'-mca plm_rsh_no_tree_spawn true'",
         replacement="f'{_plm_option(env)}_no_tree_spawn true'"),
    Edit(name="runner-num-concurrent", reason="as runner-ssh", file=_MPI_RUN,
         pattern=r"'-mca plm_rsh_num_concurrent \{\}'\.format\(len\(host_names\)\)",
         replacement="f'{_plm_option(env)}_num_concurrent {len(host_names)}'"),
    Edit(name="runner-unknown-keys",
         reason="it took any key of a host, also one that has changed, whatever ssh is told",
         file=_REMOTE, pattern=r"^SSH_COMMAND_PREFIX = .*\n", replacement=_UNKNOWN_KEYS),
    Edit(name="runner-ssh-command", reason="used where ssh's command line is made",
         file=_REMOTE, pattern=r"f'\{SSH_COMMAND_PREFIX\} \{host\} ",
         replacement="f'{SSH_COMMAND_PREFIX}{_unknown_keys(host)} {host} "),
    Edit(name="runner-hostfile",
         reason="comments, blank lines, `host`, `host:4` and `max_slots` were errors",
         file=_HOSTS, pattern=r"^    hosts = \[\]\n    with open\(filename, 'r'\) as f:\n"
                              r"(?:        .*\n)+    return ','\.join\(hosts\)\n",
         replacement=_READ_HOSTFILE),
)
