"""Import rules and the shape of the repository, read from the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

# who may import whom, of ours
ALLOWED = {
    "utils": {"utils"},
    "data": {"data", "utils"},
    "models": {"models", "utils"},
    "optim": {"optim", "utils"},
}
OURS = {*ALLOWED, "pretrain", "tests"}
HEAVY = {"wandb", "datasets", "sklearn", "matplotlib", "pandas"}  # imported where they are used


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """The top packages a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_packages_import_only_what_they_may(folder: str) -> None:
    for path in sources(folder):
        assert imports(path) & OURS <= ALLOWED[folder], path


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    for folder in ALLOWED:
        for path in sources(folder):
            assert not imports(path, top_level_only=True) & HEAVY, path
    assert not imports(ROOT / "pretrain.py", top_level_only=True) & (HEAVY | {"torch", "numpy"})


def test_the_loop_names_no_task_and_fits_on_a_few_screens() -> None:
    text = (ROOT / "pretrain.py").read_text()
    assert text.count("\n") <= 350
    code = text.split('"""', 2)[2]
    assert not re.findall(r"\b(sudoku|maze|arc|mnist|digits|trm|hrm|gpt|cnn)\b", code, flags=re.IGNORECASE)


def test_files_are_short() -> None:
    for folder in ALLOWED:
        for path in sources(folder):
            assert path.read_text().count("\n") <= 300, path


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import os, sys; sys.argv = ['pretrain.py', '--help']; os._exit = lambda c: print('torch' in sys.modules)\n"
    code += "import pretrain; pretrain.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert "experiment" in done.stdout
