"""Import rules and the shape of the repository, read from the sources."""

import ast
import re
from pathlib import Path

import pytest

from tests.ranks import ROOT

# Which of our packages, and of those of utils, may import which. "utils" alone stands for the files
# at its root.
LAYERS = {
    "utils": {"utils"},
    "contract": {"utils", "utils.ranks", "contract"},
    "utils.ranks": {"utils", "utils.ranks"},
    "utils.command": {"utils", "utils.ranks", "utils.command"},
    "utils.measure": {"utils", "utils.ranks", "contract", "utils.measure"},
    "utils.plan": {
        "utils",
        "contract",
        "utils.ranks",
        "utils.command",
        "utils.measure",
        "utils.plan",
    },
    "utils.rundir": {"utils", "utils.ranks", "utils.rundir"},
    "utils.sweep": {"utils", "utils.ranks", "utils.command", "utils.rundir", "utils.sweep"},
    "utils.checkpoint": {
        "utils",
        "contract",
        "utils.ranks",
        "utils.command",
        "utils.rundir",
        "utils.checkpoint",
    },
}
LAYERS["utils.report"] = {*LAYERS, "utils.report"}
LAYERS["utils.prove"] = {*LAYERS, "utils.prove"}
ALLOWED = LAYERS | {
    package: {package, *LAYERS} - {"utils.report", "utils.prove"}
    for package in ("data", "models", "optim")
}
ALLOWED["trial"] = {"trial", "data", "models", "optim", *LAYERS} - {"utils.report", "utils.prove"}
PACKAGES = ("utils", "data", "models", "optim", "trial")
OURS = {*PACKAGES, "contract", "pretrain", "tests"}
FOLDERS = sorted(
    {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
)
# what all lines of research may import of one: trained language models, and their text
DOORS = {"models.language.targets", "data.language.tokens"}
HEAVY = {"wandb", "datasets", "sklearn", "pandas"}  # imported where they are used


def sources(folder: str) -> list[Path]:
    """The files of a folder, or the one file of this name."""
    file = ROOT / f"{folder}.py"
    return [file] if file.is_file() else sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """The modules a file imports, by their full names; of `from a import b` both."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def package_of(module: str) -> str:
    """The package of a module; of utils, the one within it."""
    first, _, rest = module.partition(".")
    package = f"utils.{rest.partition('.')[0]}"
    return package if first == "utils" and package in LAYERS else first


def package_of_file(path: Path) -> str:
    return package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    files = [
        path for path in sources(package.replace(".", "/")) if package_of_file(path) == package
    ]
    assert files
    for path in files:
        assert {
            package_of(module) for module in imports(path) if module.partition(".")[0] in OURS
        } <= ALLOWED[package], path


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_what_is_imported_from_this_repository_is_there(folder: str) -> None:
    """Also by the files that only slow tests, a GPU or Slurm start."""
    published = "bench_step.py"  # it also imports the models of others
    for path in (file for file in sources(folder) if file.name != published):
        for name in imports(path):
            module, _, attribute = name.rpartition(".")
            if top({name}) & OURS and module:
                file, inside = (ROOT / each.replace(".", "/") for each in (module, name))
                there = file.with_suffix(".py").exists() or inside.with_suffix(".py").exists()
                assert there or inside.is_dir(), f"{path}: there is no {attribute} in {module}"


def test_every_folder_of_utils_is_a_layer() -> None:
    within = [path.relative_to(ROOT / "utils").parts for path in sources("utils")]
    folders = {f"utils.{parts[0]}" for parts in within if len(parts) > 1}
    assert folders == {*LAYERS} - {"utils", "contract"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_opens_with_what_it_is_for(folder: str) -> None:
    files = {*(ROOT / folder).glob("*.py")} - {ROOT / folder / "__init__.py"}
    assert [path for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_a_readme_says_what_each_folder_is_for() -> None:
    tree = (ROOT / "README.md").read_text().partition("## The repository")[2].split("```")[1]
    named = {Path(name) for name in re.findall(r"^([\w.]+/?)  +\S", tree, re.MULTILINE)}
    for package in ("data", "models", "utils"):
        rows = re.findall(
            r"^\| `(\w+)` \|", (ROOT / package / "README.md").read_text(), re.MULTILINE
        )
        named |= {Path(package) / name for name in rows}
    missing = {Path(folder) for folder in FOLDERS} - {Path("optim/sync")} - named
    assert not missing, f"add {missing} to the tree in README.md, or to its package's README"
    assert not [name for name in named if not (ROOT / name).exists()]


def test_folders_of_tests_mirror_those_of_the_packages() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in sources("tests")}
    own = {Path(name) for name in (".", "bench", "gpu", "slurm")}
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders - own)


@pytest.mark.parametrize("package", ["models", "data"])
def test_no_line_of_research_imports_another(package: str) -> None:
    lines = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} - {"build"}
    assert lines
    for path in sources(package):
        folder = path.parent.name
        allowed = lines if folder == "build" else {folder}
        modules = [name for name in imports(path) if not name.startswith(tuple(DOORS))]
        names = [module.split(".") for module in modules]
        used = {parts[1] for parts in names if parts[0] == package and len(parts) > 1}
        assert used & lines <= allowed, path
        assert "build" not in used or folder == "build", path


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    for folder in PACKAGES:
        for path in sources(folder):
            assert not top(imports(path, top_level_only=True)) & HEAVY, path
    assert not top(imports(ROOT / "pretrain.py")) & HEAVY


def test_nothing_is_unpickled() -> None:
    """But tensors, by the one command that imports what torch has saved."""
    calls = {}
    for path in (ROOT / "pretrain.py", *(path for each in PACKAGES for path in sources(each))):
        assert not imports(path) & {"pickle", "torch.load"}, path
        assert "allow_pickle=True" not in path.read_text(), path
        if found := re.findall(r"torch\.load\(.*", path.read_text()):
            calls[path.name] = found
    ((file, (call,)),) = calls.items()
    assert file == "foreign.py"
    assert "weights_only=True" in call


def test_the_program_imports_everything_once_at_its_top() -> None:
    assert imports(ROOT / "pretrain.py") == imports(ROOT / "pretrain.py", top_level_only=True)


def test_the_loop_names_no_task() -> None:
    text = (ROOT / "pretrain.py").read_text()
    code = text.split('"""', 2)[2]
    assert not re.findall(
        r"\b(sudoku|maze|arc|mnist|digits|trm|hrm|gpt|cnn)\b", code, flags=re.IGNORECASE
    )
