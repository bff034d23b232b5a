"""The example scripts, as a newcomer runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from spawn import torchrun

from llama import Llama

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


def started(*command: str, **env: str) -> subprocess.Popen[bytes]:
    """As `run`, in bytes and not waited for."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
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


def test_the_chat_example_prints_each_dialog_and_its_answer(llama: Llama) -> None:
    from example_chat_completion import STORY_DIALOGS

    done = run("example_chat_completion.py", "--temperature", "0", "--max_gen_len", "10")
    assert done.returncode == 0, done.stderr
    for result in llama.chat_completion(STORY_DIALOGS, temperature=0, max_gen_len=10):
        assert f"> Assistant: {result['generation']['content']}\n{RULER}" in done.stdout


@pytest.mark.parametrize("example", ["text", "chat"])
def test_a_wrong_path_ends_an_example_in_one_line_and_status_1(example: str) -> None:
    done = run(f"example_{example}_completion.py", "1e3")
    assert done.returncode == 1
    assert re.fullmatch(r"error: '1e3' .*\n", done.stderr)


def test_on_two_ranks_a_wrong_path_is_said_once() -> None:
    done = torchrun(2, "example_text_completion.py", "--ckpt_dir", "None")
    assert done.returncode == 1
    assert len(re.findall(r"^error: 'None' ", done.stderr, re.MULTILINE)) == 1


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


@pytest.mark.skipif(sys.platform == "win32", reason="a console's Ctrl-C is no signal there")
def test_ctrl_c_ends_an_example_in_silence() -> None:
    process = started("example_text_completion.py", "--max_batch_size", "1", PYTHONUNBUFFERED="1")
    assert process.stdout.readline().startswith(b"Loaded")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")


def test_an_example_runs_where_the_output_is_no_terminal_at_all() -> None:
    code = (
        "import io, contextlib, example_text_completion as e\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    e.main(max_gen_len=3)\n"
        "assert '> ' in out.getvalue()"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_command_pasted_as_one_line_is_told_of_its_backslash() -> None:
    """`... example_text_completion.py \\ --ckpt_dir DIR` on one line."""
    done = run("example_text_completion.py", " --ckpt_dir", "llama-2-7b/")
    assert done.returncode != 0
    assert "backslash" in done.stderr.splitlines()[-1]
