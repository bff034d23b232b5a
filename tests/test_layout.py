"""The shape of the code: which way imports point, how long functions are, that it is described."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import llama

PACKAGE = Path(llama.__file__).parent
ROOT = PACKAGE.parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(text) for name, text in MODULES.items()}

# A module may import those before it, and no other of the package.
LAYERS = [
    *["parallel.__init__", "checkpoints.__init__", "server.__init__"],  # empty
    *["errors", "device", "kv_cache", "sampling", "kernels", "quantize"],
    *["vocabulary", "checkpoints.files", "checkpoints.text", "tokenizer", "detokenizer", "chat"],
    *["parallel.groups", "parallel.layers", "model", "parameters", "sizes", "prefix_cache"],
    *[
        "parallel.ranks",
        "compile",
        "checkpoints.config",
        "checkpoints.adapter",
        "checkpoints.reader",
    ],
    *["checkpoints.meta", "checkpoints.hf", "checkpoints.gguf", "checkpoints.quantized"],
    *["checkpoints.load", "checkpoints.convert"],
    *["requests", "speculate", "engine", "predictions", "session", "generation", "__init__"],
    *["evaluate", "memory", "cli", "repl"],
    *["server.schema", "server.answers", "server.gate", "server.runner", "server.metrics"],
    *["server.app", "server.serve", "__main__"],
]


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "llama":
            parent = (node.module or "").removeprefix("llama").lstrip(".")
            for alias in node.names:
                child = f"{parent}.{alias.name}".lstrip(".")
                yield child if child in MODULES else parent or "__init__"
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("llama.")]
            yield from (name.removeprefix("llama.") for name in names)


def code_lines(text: str) -> int:
    """Lines that are neither blank, nor comments, nor part of a docstring."""
    described = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            described |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and i not in described
        for i, line in lines
    )


def test_every_module_has_its_place() -> None:
    assert set(MODULES) <= set(LAYERS)
    assert len(set(LAYERS)) == len(LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    below = LAYERS[: LAYERS.index(module)]
    assert set(imported(TREES[module])) <= set(below)


@pytest.mark.parametrize("module", MODULES)
def test_no_file_has_more_than_330_lines_of_code_and_no_function_more_than_45(module: str) -> None:
    assert code_lines(MODULES[module]) <= 330
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 45, f"{module}.{node.name} has {lines} lines"


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_says_what_it_is(module: str) -> None:
    """A docstring for each module, and for each public function that is not a method."""
    tree = TREES[module]
    assert ast.get_docstring(tree) or module == "__main__" or not tree.body
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name}"


def test_the_package_imports_what_it_requires_and_nothing_else() -> None:
    required = set(re.findall(r"^\w+", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    # Extras, imported where they are used.
    extras = {"matplotlib", "tokenizers", "gguf", "fastapi", "uvicorn", "prometheus_client"}
    extras |= {"starlette", "pydantic", "prompt_toolkit", "lm_eval"}
    extras |= {"jinja2", "typing_extensions"}  # torch brings them
    found: set[str] = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    found -= {"llama", *sys.stdlib_module_names}
    assert required <= found
    assert found <= required | extras


def test_an_editable_install_is_found_in_the_folder_above_the_clone(tmp_path: Path) -> None:
    """There Python sees the clone too, as a folder without code that is called llama."""
    pytest.importorskip("setuptools", minversion="70.1", reason="it builds no wheel alone")
    clone, site = tmp_path / "llama", tmp_path / "site"
    (clone / "llama").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, clone / name)
    (clone / "llama" / "__init__.py").touch()
    build = f"import setuptools.build_meta as build; build.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    find = f"import site; site.addsitedir({str(site)!r}); import llama"
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"{find}; print(llama.__file__)"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(found.stdout.strip()) == clone / "llama" / "__init__.py"
