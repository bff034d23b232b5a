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
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}

# Each module may import those before it, and no other of the package.
LAYERS = [
    *["errors", "files", "kv_cache", "layers", "tokenizer", "sampling", "runtime", "terminal"],
    *["model", "chat", "text", "prefix", "config", "quantize", "compiled"],
    *["checkpoint", "memory", "convert", "cache_file", "decoding", "ranks", "loading"],
    *["predictions", "requests", "turns"],
    *["generation", "__init__", "__main__"],
]


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "llama":
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llama."):
            yield node.module.removeprefix("llama.")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("llama.")]
            yield from (name.removeprefix("llama.") for name in names)


def test_every_module_has_its_place() -> None:
    assert set(LAYERS) == set(MODULES)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_point_one_way(module: str) -> None:
    below = LAYERS[: LAYERS.index(module)]
    assert set(imported(MODULES[module])) <= set(below)


@pytest.mark.parametrize("module", LAYERS)
def test_no_function_has_more_than_50_lines_of_code(module: str) -> None:
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 50, f"{module}.{node.name} has {lines} lines"


@pytest.mark.parametrize("module", LAYERS)
def test_everything_public_says_what_it_is(module: str) -> None:
    """A docstring for each module, and for each public function that is no method."""
    tree = MODULES[module]
    assert ast.get_docstring(tree) or module == "__main__"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name}"


def test_the_package_imports_what_it_requires_and_nothing_else() -> None:
    required = set(re.findall(r"^\w+", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    plot = {"matplotlib"}  # an extra, which `python -m llama memory --plot` asks for by name
    found: set[str] = set()
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    assert found - set(sys.stdlib_module_names) - {"llama"} == required | plot


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
