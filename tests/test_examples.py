"""The example scripts, as a newcomer runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from llama import Llama
from llama import cli as terminal

ROOT = Path(__file__).parent.parent
RULER = "\n==================================\n"


ONE_THREAD = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(
    *command: str, stdin: str | None = None, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository's root on one thread."""
    return subprocess.run(
        [sys.executable, *command],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **ONE_THREAD, **env},
        timeout=120,
        check=False,
    )


def started(
    *command: str, stdout: IO[bytes] | int = subprocess.PIPE, **env: str
) -> subprocess.Popen[bytes]:
    """As `run`, in bytes and not waited for."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, **env},
    )


def test_the_text_example_prints_each_prompt_and_its_continuation(llama: Llama) -> None:
    from example_text_completion import STORY_PROMPTS

    done = run("example_text_completion.py", "--temperature", "0", "--max_gen_len", "10")
    assert done.returncode == 0, done.stderr
    loaded, _, rest = done.stdout.partition("\n")
    assert loaded.startswith("Loaded in ")
    answers = llama.text_completion(STORY_PROMPTS, temperature=0, max_gen_len=10)
    pairs = zip(STORY_PROMPTS, answers, strict=True)
    assert rest == "".join(f"{p}\n> {a['generation']}\n{RULER}\n" for p, a in pairs)


def test_a_chat_over_a_pipe_answers_each_line_and_ends_with_the_input() -> None:
    lines = "Tell me a story about a cat.\n\n/nonsense\n/system Be kind.\nHello!\n/reset\nHello!\n"
    done = run(
        "example_chat_completion.py",
        *("--interactive", "--temperature", "0", "--max_gen_len", "40"),
        stdin=lines,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("/reset begins anew, /system") == 2  # at the start, and for /nonsense
    assert done.stdout.count("Once upon a time, there was a little girl") == 1
    assert done.stdout.count("cut short") == 1
    assert done.stdout.count("Hello! Do you want to hear a story?") == 2
    quit_at_once = run("example_chat_completion.py", "--interactive", stdin="/quit\nHello!\n")
    assert quit_at_once.returncode == 0
    assert "story" not in quit_at_once.stdout


def test_a_chat_that_does_not_fit_says_so_and_goes_on() -> None:
    done = run(
        "example_chat_completion.py",
        *("--interactive", "--temperature", "0", "--max_seq_len", "40"),
        stdin="Hello! " * 40 + "\nHello!\n",
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"dialog 0 has \d+ tokens, and max_seq_len is 40", done.stdout)
    assert "/reset begins anew." in done.stdout
    assert "Hello! Do you want" in done.stdout


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_curly_quotes_get_a_substitute_under_a_terminal_that_lacks_them(encoding: str) -> None:
    code = (
        "import sys, example_text_completion as e, llama.cli as t\n"
        "e.STORY_PROMPTS = ['\\u201cHi\\u201d \\u4f60']\n"
        "sys.argv = ['example', '--max_gen_len', '3']\n"
        "t.run(e.main)"
    )
    done = run("-c", code, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "Hi" in done.stdout
    assert "=====" in done.stdout


def test_an_example_whose_reader_has_gone_ends_in_silence() -> None:
    process = started("example_text_completion.py", "--max_gen_len", "3")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is full")
@pytest.mark.parametrize(
    "command", [["-m", "llama", "memory", "llama-2-7b"], ["example_text_completion.py"]]
)
def test_output_to_a_full_disk_is_one_message(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = started(*command, stdout=full)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.fullmatch(rb"error: the output cannot be written: No space left.*\n", stderr)


@pytest.mark.skipif(sys.platform == "win32", reason="a console's Ctrl-C is no signal there")
def test_ctrl_c_ends_an_example_in_silence() -> None:
    process = started("example_text_completion.py", "--max_batch_size", "1", PYTHONUNBUFFERED="1")
    assert process.stdout.readline().startswith(b"Loaded")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")


def test_input_that_is_no_text_gets_a_substitute() -> None:
    code = (
        "import sys, example_chat_completion as e, llama.cli as t\n"
        "sys.argv = ['example', '--interactive', '--temperature', '0', '--max_gen_len', '3']\n"
        "t.run(e.main)"
    )
    process = started("-c", code)
    stdout, stderr = process.communicate(b"caf\xe9\n", timeout=120)
    assert process.returncode == 0, stderr
    assert b"half of a character" not in stdout


def test_an_example_runs_where_the_output_is_no_terminal_at_all() -> None:
    code = (
        "import io, contextlib, example_text_completion as e\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    e.main(max_gen_len=3)\n"
        "assert '> ' in out.getvalue()"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_command_runs_without_any_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program without a console does on Windows, and one whose streams a shell has closed."""
    called = []

    def command(x: int) -> None:
        print("nowhere", x)
        with pytest.raises(EOFError):
            input("> ")
        called.append(x)

    for arguments in (["go", "--x", "5"], []):  # without any, the help is shown
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        for name in ("stdin", "stdout", "stderr"):
            monkeypatch.setattr(sys, name, None)
        terminal.run({"go": command})
        for name in ("stdin", "stdout", "stderr"):
            getattr(sys, name).close()
    assert called == [5]


def test_an_unknown_option_is_refused_before_the_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After minutes of loading and writing, it would be late to hear of it."""

    def command(x: int = 1) -> None:
        raise AssertionError(f"called with {x}")

    for commands, words, unknown in (
        (command, ["--wrong", "5"], "--wrong"),
        ({"go": command}, ["go", "1", "more"], "more"),
    ):
        monkeypatch.setattr(sys, "argv", ["command", *words])
        with pytest.raises(SystemExit) as refused:
            terminal.run(commands)
        assert refused.value.code == 2
        assert f"Could not consume arg: {unknown}" in capsys.readouterr().err


def test_a_command_pasted_as_one_line_is_told_of_its_backslash() -> None:
    """`... example_text_completion.py \\ --ckpt_dir DIR` on one line."""
    done = run("example_text_completion.py", " --ckpt_dir", "llama-2-7b/")
    assert done.returncode != 0
    assert "backslash" in done.stderr.splitlines()[-1]
