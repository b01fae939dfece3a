"""Writes docs/api.md: each class of contract.py with its first sentence, and links to its lines."""

import ast
from pathlib import Path

DOCS = Path(__file__).parent
HEAD = """# What your code implements and receives

Names link to [contract.py](../contract.py), which describes what goes in, what comes out, and when
a run calls it. `python docs/api.py` makes this page anew.

| class | what it is | its names |
|---|---|---|
"""


def first_sentence(node: ast.ClassDef) -> str:
    text = " ".join((ast.get_docstring(node) or "").split())
    return text.partition(". ")[0].rstrip(".:")


def link(name: str, node: ast.stmt) -> str:
    return f"[`{name}`](../contract.py#L{node.lineno})"


def members(node: ast.ClassDef) -> str:
    """Links to the public methods and attributes of a class."""
    found = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            found.setdefault(item.name, item)
        elif isinstance(item, ast.AnnAssign):
            found.setdefault(ast.unparse(item.target), item)
        elif isinstance(item, ast.Assign):
            found.setdefault(ast.unparse(item.targets[0]), item)
    return ", ".join(link(name, item) for name, item in found.items() if name[0] != "_")


def page() -> str:
    tree = ast.parse((DOCS.parent / "contract.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return HEAD + "".join(
        f"| {link(node.name, node)} | {first_sentence(node)} | {members(node)} |\n"
        for node in classes
    )


if __name__ == "__main__":
    (DOCS / "api.md").write_text(page())
