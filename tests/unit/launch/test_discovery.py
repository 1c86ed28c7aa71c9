"""Where the hosts of an elastic job come from, and what is told when that fails."""

import select

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.hosts import Host
from hvdtrain.launch.discovery import Discovery, hosts_of_program


def program(folder, text):
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("text", "expected"), [
    ("echo a:2; echo b", [Host("a", 2), Host("b", 1)]),
    ("echo; echo ' a:2 '", [Host("a", 2)]),
    (":", []),
])
def test_the_hosts_that_a_program_prints(tmp_path, text, expected):
    assert hosts_of_program(program(tmp_path, text)) == tuple(expected)


@pytest.mark.parametrize(("text", "told"), [
    ("echo no hosts today >&2; exit 3", r"failed \(code 3\): no hosts today"),
    ("sleep 60", r"hosts.sh failed .*0.3 s"),
    ("echo a:1; echo a:2", "names a twice"),
    ("echo a:many", "hosts.sh: .*a:many"),
    ("echo a b c", "hosts.sh: "),
])
def test_what_is_wrong_with_a_program_is_told_in_one_line(tmp_path, text, told):
    with pytest.raises(LaunchError, match=told) as raised:
        hosts_of_program(program(tmp_path, text), limit_s=0.3)
    assert "\n" not in str(raised.value)


def test_hosts_stay_while_looking_fails(monkeypatch):
    monkeypatch.setattr("hvdtrain.launch.discovery._EVERY_S", 0.01)
    answers = [[Host("a", 1)]]

    def look():
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    def changed():
        assert select.select([discovery], [], [], 10.0)[0]
        discovery.take()
        return discovery.hosts, discovery.problem
    discovery = Discovery(look, again=True)
    try:
        discovery.start()
        answers.append(LaunchError("it hangs"))
        assert changed() == ((Host("a", 1),), "it hangs")
        answers.append([Host("a", 1), Host("b", 2)])
        assert changed() == ((Host("a", 1), Host("b", 2)), "")
    finally:
        discovery.close()
