"""What is shown of the ranks' output, and what is kept."""

import io
import os
import signal
import subprocess
import time
from pathlib import Path

from hvdtrain.launch.by_starter import runs_below
from hvdtrain.launch.output import RankOutput, WaitingNotice


def console(np: int = 2, **options: object) -> tuple[RankOutput, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return RankOutput(np, out=out, err=err, **options), out, err  # type: ignore[arg-type]


def test_shows_the_chiefs_output_and_every_ranks_errors() -> None:
    shown, out, err = console()
    shown.feed(0, "stdout", b"loss 1\nlo")
    shown.feed(1, "stdout", b"loss 2\n")
    shown.feed(1, "stderr", b"careful\n")
    shown.feed(0, "stdout", b"ss 3\n")
    assert (out.getvalue(), err.getvalue()) == ("[0] loss 1\n[0] loss 3\n", "[1] careful\n")


def test_verbose_shows_everything() -> None:
    shown, out, _ = console(verbose=True)
    shown.feed(1, "stdout", b"loss 2\n")
    assert out.getvalue() == "[1] loss 2\n"


def test_prefixes_line_up_and_are_not_doubled() -> None:
    shown, _, err = console(np=12)
    shown.feed(3, "stderr", b"x\n[rank 3/12 hosta] y\n")
    assert err.getvalue() == "[ 3] x\n[rank 3/12 hosta] y\n"


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    shown, out, _ = console()
    shown.feed(0, "stdout", b"1/3\r2/3\r3/3\nnext\r\n")
    assert out.getvalue() == "[0] 3/3\n[0] next\n"


def test_a_last_line_without_end_is_shown_when_the_rank_ends() -> None:
    shown, out, _ = console()
    shown.feed(0, "stdout", b"done")
    shown.finish(0)
    assert (out.getvalue(), shown.tail(0)) == ("[0] done\n", ("done",))


def test_live_output_comes_at_once_and_as_it_is() -> None:
    shown, out, err = console(live=True)
    shown.feed(0, "stdout", b"1/3\r2/3")
    assert out.getvalue() == "1/3\r2/3"
    shown.feed(0, "stdout", b"\r3/3 \xe2\x94")
    shown.feed(0, "stdout", b"\x81\n(Pdb) ")
    shown.feed(1, "stdout", b"other\n")
    shown.feed(1, "stderr", b"other\n")
    assert (out.getvalue(), err.getvalue()) == ("1/3\r2/3\r3/3 \u2501\n(Pdb) ", "")
    shown.finish(0)
    assert out.getvalue().endswith("(Pdb) \n")
    assert (shown.tail(0), shown.tail(1)) == ((), ("other", "other"))


def test_live_errors_come_by_lines_without_reports_and_noise() -> None:
    shown, _, err = console(live=True)
    shown.feed(0, "stderr", b"careful\nHVD-FAI")
    shown.feed(0, "stderr", b'LED {"rank": 0, "host": "h", "time_s": 2.0, "error": "E", '
               b'"message": "m", "primary": true}\noneDNN custom operations are on\n')
    shown.feed(0, "stderr", b"HVD-DONE\nbar 1")
    assert err.getvalue() == "careful\n"
    shown.feed(0, "stderr", b"\rbar 2")
    assert err.getvalue() == "careful\nbar 1\rbar 2"
    shown.feed(0, "stderr", b"\nend")
    shown.finish(0)
    assert err.getvalue() == "careful\nbar 1\rbar 2\nend\n"
    assert shown.record(0) is not None
    assert shown.done == {0}


def test_a_live_progress_bar_may_be_long() -> None:
    shown, out, _ = console(live=True)
    for _ in range(3000):
        shown.feed(0, "stdout", b"\r" + b"=" * 50)
    shown.feed(0, "stdout", b"\n")
    assert out.getvalue() == ("\r" + "=" * 50) * 3000 + "\n"


def test_live_and_verbose_shows_the_others_with_their_rank() -> None:
    shown, out, _ = console(live=True, verbose=True)
    shown.feed(0, "stdout", b"one\n")
    shown.feed(1, "stdout", b"two\n")
    assert out.getvalue() == "one\n[1] two\n"


def test_reports_and_noise_are_kept_from_screen_and_tail() -> None:
    shown, _, err = console()
    shown.feed(1, "stderr", b'HVD-FAILED {"rank": 1, "host": "h", "time_s": 2.0, "error": "E", '
               b'"message": "m", "primary": true}\noneDNN custom operations are on\nreal\n')
    assert (err.getvalue(), shown.tail(1)) == ("[1] real\n", ("real",))
    record = shown.record(1)
    assert record is not None
    assert record.message == "m"


def test_log_files_hold_all_lines_of_each_rank(tmp_path: Path) -> None:
    shown, _, _ = console(np=11, directory=tmp_path / "logs")
    shown.feed(1, "stdout", b"loss 2\n")
    shown.feed(1, "stderr", b"oneDNN custom operations are on\n")
    shown.close()
    lines = (tmp_path / "logs" / "rank.01.log").read_text(encoding="utf-8").splitlines()
    assert [line[9:] for line in lines] == [
        "stdout loss 2", "stderr oneDNN custom operations are on"]
    assert len(list((tmp_path / "logs").iterdir())) == 11


def test_bytes_that_are_no_text_do_not_end_the_job() -> None:
    shown, out, _ = console()
    shown.feed(0, "stdout", b"\xff\xfe\n")
    assert out.getvalue() == "[0] \ufffd\ufffd\n"


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    shown, out, _ = console()
    shown.feed(0, "stdout", b"x" * 70000)
    assert len(out.getvalue()) == 70005


def test_words_come_after_a_while_and_ever_more_seldom() -> None:
    said: list[str] = []
    waiting = WaitingNotice(said.append, first_s=0.1)
    waiting.tick(lambda: "too early")
    began = time.monotonic()
    while time.monotonic() - began < 0.6:
        waiting.tick(lambda: "hostb")
        time.sleep(0.01)
    assert said == ["waiting for hostb: 0 s so far"] * 3  # after 0.1, 0.2 and 0.4 s


def test_no_words_are_no_line() -> None:
    said: list[str] = []
    WaitingNotice(said.append, first_s=0.0).tick(lambda: "")
    assert said == []


def test_a_program_is_seen_below_the_processes_between() -> None:
    command = ["/bin/sleep", "54.321"]
    with subprocess.Popen(["/bin/sh", "-c", f"{' '.join(command)}; true"]) as shell:
        deadline = time.monotonic() + 5.0
        while not runs_below(os.getpid(), command) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert runs_below(os.getpid(), command)
        assert runs_below(shell.pid, command)
        assert not runs_below(os.getpid(), ["/bin/sleep", "54"])
        child, = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
    assert not runs_below(os.getpid(), command)
