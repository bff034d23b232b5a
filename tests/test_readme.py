"""README and docs, executed: their commands and their Python, and what they show of the output.

A block of `text` is the output of the block of `sh` or `python` before it. What a command
names and nobody has here is made small: CHECKPOINTS and STAND_INS say what stands for what. What
cannot be run at all is in NOT_RUN, with the reason; any other command is run.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from checkpoints import write_meta
from spawn import ROOT, TORCHRUN, run

from llama.checkpoints.convert import convert
from llama.generation import STORIES
from llama.memory import Plan, architecture
from llama.sizes import format_bytes

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOC_FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in DOC_FILES}
MARK = "<end of a block>"

PROGRAMS = {"torchrun": TORCHRUN, "python": [sys.executable]}
NOT_RUN = {
    "pip install -e .": "needs a network",
    "pip install -e '.[test]'": "needs a network",
    "pytest": "is what runs here",
    "torchrun --nnodes 2 --node_rank 0 --nproc_per_node 4 --master_addr 10.0.0.1 "
    "--master_port 29500 example_chat_completion.py --ckpt_dir llama-2-70b-chat/": (
        "needs two machines: test_two_hosts.py has them"
    ),
}
# What a command says -> what is run in its place.
STAND_INS = {
    "--nproc_per_node 8": "--nproc_per_node 2",
    "--nproc_per_node 4": "--nproc_per_node 2",
    "--device mps": "--device cpu",
}
# What an example gets besides, since random weights know no end of an answer.
SHORT = "--max_gen_len 4"
# The folders of real checkpoints -> how many files of which layout a tiny one of that name has.
CHECKPOINTS = {
    "llama-2-7b-chat": ("meta", 1),
    "llama-2-13b-chat": ("meta", 2),
    "llama-2-70b-chat": ("meta", 4),
    "Llama-2-7b-hf": ("hf", 1),
    "Llama-2-7b-chat-hf": ("hf", 2),
    "Llama-2-70b-chat-hf": ("hf", 3),
}


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    code: str
    shown: str | None  # of its output

    @property
    def commands(self) -> list[str]:
        """One for each, on one line."""
        lines = self.code.replace("\\\n", " ").splitlines()
        joined = [" ".join(line.split()) for line in lines if line and not line.startswith("#")]
        return [command for line in joined for command in line.split(" && ")]


def blocks() -> Iterator[Block]:
    for page, text in PAGES.items():
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for (language, code), (after, shown) in itertools.pairwise([*fences, ("", "")]):
            if language in ("sh", "python"):
                yield Block(page, language, code, shown if after == "text" else None)
            assert after != "text" or language in ("sh", "python"), (
                f"whose output is this?\n{shown}"
            )


SHELL = [block for block in blocks() if block.language == "sh"]
PYTHON = [block for block in blocks() if block.language == "python"]
COMMANDS = [command for block in SHELL for command in block.commands]


def stand_in(command: str) -> str:
    for said, done in STAND_INS.items():
        command = command.replace(said, done)
    is_random = any(f"--ckpt_dir {name}/" in command for name in CHECKPOINTS)
    return f"{command} {SHORT}" if is_random else command


def assert_shown(output: str, shown: str) -> None:
    """The README shows what comes out: up to `...`, and but for the seconds and line ends."""
    lines, wanted = (
        [re.sub(r"\d+\.\d\d seconds", "", line).rstrip() for line in text.splitlines()]
        for text in (output, shown)
    )
    if wanted[-1] == "...":
        lines, wanted = lines[: len(wanted) - 1], wanted[:-1]
    assert lines == wanted


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the repository's, with all checkpoints of which the README speaks."""
    folder = tmp_path_factory.mktemp("readme")
    for path in [*ROOT.glob("example_*.py"), ROOT / "llama"]:
        (folder / path.name).symlink_to(path)
    shutil.copyfile(STORIES / "tokenizer.model", folder / "tokenizer.model")
    for name, (layout, files) in CHECKPOINTS.items():
        written = folder / name if layout == "meta" else folder / f"{name}-as-meta"
        write_meta(written, shards=files if layout == "meta" else 1)
        if layout == "hf":
            convert(written, folder / name, to="hf", shards=files)
    return folder


def run_command(command: str, place: Path) -> str:
    """What it prints."""
    if command in NOT_RUN:
        return ""
    program, *arguments = shlex.split(stand_in(command))
    assert program in PROGRAMS, f"{command}: say in NOT_RUN why it is not run"
    done = run([*PROGRAMS[program], *arguments], timeout_s=120, cwd=place)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def printed(place: Path) -> Iterator[dict[Block, Future[str]]]:
    """What the commands of each block print, one after the other; two blocks run at a time."""

    def run_all(block: Block) -> str:
        return "".join(run_command(command, place) for command in block.commands)

    with ThreadPoolExecutor(2) as pool:
        yield {block: pool.submit(run_all, block) for block in SHELL}


def test_a_block_is_a_command_or_python_or_their_output_or_a_table() -> None:
    for text in PAGES.values():
        languages = re.findall(r"^```(.*)\n(?:.*\n)*?```$", text, re.MULTILINE)
        assert set(languages) <= {"sh", "python", "text", ""}


def test_the_readme_has_one_screen_of_what_it_is_and_less_than_200_lines() -> None:
    assert len(README.splitlines()) < 200


def test_the_lists_of_this_file_name_nothing_that_the_readme_does_not() -> None:
    assert set(NOT_RUN) <= set(COMMANDS)
    for said in STAND_INS:
        assert any(said in command for command in COMMANDS), said
    for name in CHECKPOINTS:
        assert any(f" {name}/" in command for command in COMMANDS), name


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.commands[-1][:60])
def test_the_commands_run_and_print_what_is_shown(
    block: Block, printed: dict[Block, Future[str]]
) -> None:
    output = printed[block].result()
    if block.shown is not None:
        assert_shown(output, block.shown)


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_the_python_runs_and_prints_what_is_shown(page: str, place: Path) -> None:
    """One block after the other, as a reader types them in."""
    python = [block for block in PYTHON if block.page == page]
    code = "".join(f"{block.code}\nprint({MARK!r})\n" for block in python)
    done = run([sys.executable, "-c", code], timeout_s=100, cwd=place)
    assert done.returncode == 0, done.stderr
    for block, output in zip(python, done.stdout.split(f"{MARK}\n"), strict=False):
        if block.shown is not None:
            assert_shown(output, block.shown)


def row(label: str) -> list[str]:
    """The cells of a table's row that begins so, on any page."""
    found = re.search(rf"^\| {label}.*\|$", "\n".join(PAGES.values()), re.M)
    return [cell.strip() for cell in found[0].split("|")[2:-1]]


def test_the_tables_of_sizes_are_what_the_formulas_give() -> None:
    def plan(model: str, length: int, ranks: int = 1) -> Plan:
        return Plan(replace(architecture(model)[0], max_seq_len=length), ranks=ranks)

    models = [("2-7b", 2**11), ("3.1-8b", 2**17), ("3.1-8b", 2**19), ("3.1-405b", 2**17)]
    plans = [plan(f"llama-{model}", length) for model, length in models]
    assert row("cache of one row, float16") == [format_bytes(p.cache_bytes) for p in plans]
    ratios = [f"{p.cache_bytes / p.weights_bytes:.2f}" for p in plans]
    assert row("against the weights") == ratios

    shared = [("13b", 2), ("70b", 8), ("70b", 4)]
    plans = [plan(f"llama-2-{model}", 4096, ranks) for model, ranks in shared]
    assert row("holds weights")[1:] == [f"{p.weights_bytes / 1e9:.1f} GB" for p in plans]
    per_position = row("holds of the cache, per position")[1:]
    assert per_position == [f"{p.token_bytes / 1e3:.0f} kB" for p in plans]
    whole = [plan(f"llama-2-{model}", 4096).weights_bytes / 1e9 for model in ("7b", "13b", "70b")]
    assert "7B needs {:.1f} GB, 13B {:.0f} GB and 70B {:.0f} GB".format(*whole) in README
