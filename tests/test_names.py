"""The texts speak of nothing that is not there: code spans, options, files and links.

The texts are the Markdown pages and the docstrings of all code. A span is what stands between two
backticks; the words in it are looked up in the code itself, read as a tree and not imported.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Iterator

import pytest
from spawn import ROOT

import example_chat_completion
import example_text_completion
from llama import Llama
from llama import __main__ as command_line

PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "tests/golden/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
FILES = [
    path
    for folder in ("", "llama", "tests", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# Words of others, which our code never says.
FOREIGN = {
    *[
        "ruff",
        "mypy",
        "pytest",
        "cov",
        "branch",
        "report",
        "term",
        "missing",
    ],  # what runs the tests
    *["torchrun", "local", "ranks", "filter", "standalone", "nproc_per_node", "rdzv", "eth0"],
    *["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"],
    *["nccl", "gloo", "cuda", "HalfTensor", "FloatTensor"],  # as the original has them
    *["python", "assert", "O", "pip", "install", "tokenizers"],
}
# Words that stand for what the reader has.
STAND = {"DIR", "SRC", "DST", "FILE", "COMMAND", "N", "M", "R", "W", "F", "rand_new", "a", "p", "i"}
FOREIGN_OPTIONS = {
    *["--standalone", "--nproc_per_node", "--nnodes", "--node_rank", "--master_addr"],
    *["--master_port", "--local-ranks-filter"],  # of torchrun
    *["--cov", "--cov-branch", "--cov-report"],  # of pytest
    "--help",  # of every command
}
# What a checkpoint's folder, or a reader's, holds.
FOREIGN_FILES = {
    *["adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin", "model.gguf"],
    *["generation_config.json", "tokenizer_config.json", "chat_template.jinja"],
    *["consolidated.safetensors", "model-00001-of-0000N.gguf"],
    *["params.json", "config.json", "tokenizer.json", "tokenizer.model", "consolidated.00.pth"],
    *[
        "model.safetensors",
        "chat.safetensors",
        "FILE.png",
        "OUT.json",
        "tests/golden/rand_new/expected.json",
    ],
    *[
        "llama-2-7b/",
        ".pth",
        ".safetensors",
        "expected.json",
        ".cache/llama-benchmarks",
        ".venv/bin/activate",
    ],
}


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def texts() -> dict[str, str]:
    """By the name of the file; fenced blocks are left out."""
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    found = {n: re.sub(r"^```.*?^```$", "", t, flags=re.DOTALL | re.M) for n, t in pages.items()}
    return found | {str(p.relative_to(ROOT)): "\n\n".join(docstrings(t)) for p, t in TREES.items()}


SPANS = [(where, s) for where, text in texts().items() for s in re.findall(r"`([^`]+)`", text)]


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name in the code, and every word of its strings that are no prose."""
    for node in ast.walk(tree):
        for field in ("name", "module", "arg", "attr", "id", "asname"):
            yield from str(getattr(node, field, None) or "").split(".")
        if isinstance(node, ast.Constant) and re.fullmatch(r"\S+", str(node.value)):
            yield from re.findall(r"\w+", str(node.value))


def known_words() -> set[str]:
    words = {word for tree in TREES.values() for word in identifiers(tree)}
    words |= {word for path in FILES for word in re.findall(r"\w+", str(path.relative_to(ROOT)))}
    return words | set(dir(builtins)) | set(keyword.kwlist) | FOREIGN | STAND


def known_options() -> set[str]:
    """Of our commands, of the examples, and of the benchmarks: their arguments, or strings."""
    mains = [example_chat_completion.main, example_text_completion.main]
    commands: list[Callable[..., None]] = [*mains, *command_line.COMMANDS.values()]
    options = {f"--{name}" for main in commands for name in inspect.signature(main).parameters}
    for path, tree in TREES.items():
        if path.parent == ROOT / "benchmarks":
            options |= {f"--{word}" for word in identifiers(tree)}
            strings = [str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)]
            options |= {s for s in strings if s.startswith("--")}
    return options | FOREIGN_OPTIONS


def is_there(where: str, path: str) -> bool:
    """From the root, from the text's own folder, or inside the package or the tests."""
    folders = (ROOT, (ROOT / where).parent, ROOT / "llama", ROOT / "tests")
    return any((folder / path).exists() for folder in folders)


def test_every_word_in_a_code_span_is_in_the_code() -> None:
    known = known_words()
    for where, span in SPANS:
        without_values = re.sub(r"[\w./-]+\.(png|pth|model|safetensors|json)", "", span)
        for word in re.findall(r"[A-Za-z_]\w*", without_values):
            assert word in known or is_there(where, span), f"{where}: {word!r} in `{span}`"


def test_what_a_code_span_calls_is_defined_in_the_code_or_called_by_it() -> None:
    known = {"cuda", "Tensor"}  # of torch
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Call):
            known.add(ast.unparse(node.func).split(".")[-1])
    for where, span in SPANS:
        for name in re.findall(r"([A-Za-z_]\w*)\(", span):
            assert name in known, f"{where}: {name}() in `{span}`"


def test_attributes_of_our_classes_exist() -> None:
    classes = {
        node.name: set(identifiers(node))
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for where, span in SPANS:
        for owner, attribute in re.findall(r"\b([A-Z]\w+)\.(\w+)", span):
            if owner in classes:
                assert attribute in classes[owner], f"{where}: `{owner}.{attribute}`"


def test_options_exist_in_spans_and_in_the_commands_of_the_pages() -> None:
    known = known_options()
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
            assert option in known, f"{name}: {option}"
    for where, span in SPANS:
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            assert option in known, f"{where}: {option}"


def test_files_exist_in_spans_and_in_the_commands_of_the_pages() -> None:
    pattern = r"[\w./-]*\w\.(?:py|md|png|json|pth|safetensors)\b|(?:[\w.-]+/)+[\w.-]*"
    shell = {
        name: "".join(re.findall(r"^```sh\n(.*?)^```", (ROOT / name).read_text(), re.S | re.M))
        for name in PAGES
        if name != "README.md" and not name.startswith("docs/")  # whose commands are run
    }
    for where, text in [*SPANS, *shell.items()]:
        for path in re.findall(pattern, text):
            known = path in FOREIGN_FILES or is_there(where, path)
            assert known, f"{where}: {path} in {text!r}"


def test_links_lead_somewhere() -> None:
    for name in [*PAGES, "llama/stories/README.md"]:
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            page = ROOT / name if not path else (ROOT / name).parent / path
            assert page.exists(), f"{name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
                anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
                assert anchor in anchors, f"{name}: {target}"


@pytest.mark.parametrize("call", ["build", "others"])
def test_the_readme_has_a_row_for_each_option_and_build_says_what_each_does(call: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    heading = "argument of `build`" if call == "build" else "argument of a call"
    table = re.search(rf"\| {heading} \|.*\n((?:\|.*\n)+)", readme)[1]
    rows = {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    if call == "build":
        parameters = set(inspect.signature(Llama.build).parameters)
        described = set(re.findall(r"^    (\w+): ", inspect.getdoc(Llama.build), re.M))
        assert described == parameters
    else:
        calls = [
            "generate",
            "stream",
            "text_completion",
            "chat_completion",
            "stream_text",
            "stream_chat",
        ]
        signatures = [inspect.signature(getattr(Llama, name)).parameters for name in calls]
        prompts = {"self", "prompt_tokens", "prompts", "prompt", "dialogs", "dialog"}
        parameters = {name for signature in signatures for name in signature} - prompts
    assert rows == parameters
