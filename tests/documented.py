"""Reads the project's *.md files: their commands, links and headings."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import ROOT

FOLDERS = ("conf", "data", "docs", "launch", "models", "optim", "tests", "trial", "utils")
COMMANDS = ("", "bash", "console", "sh")  # languages of fenced blocks that hold command lines
# Inline code is a command if it names one of these and something to do.
INLINE = re.compile(
    r"(?:[A-Z_]+=\S+ +)*(?:python3?|torchrun|make|sbatch|srun|mpirun|mpiexec|launch/\w+\.sh) +\S"
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One simple command, without redirections; `where` is the file and line of its text."""

    where: str
    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.variables]
        return " ".join([*assigned, shlex.join(self.words)])


def files() -> list[Path]:
    """Every *.md file of the project; datasets and runs hold none of ours."""
    nested = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *nested])


def commands(path: Path) -> list[Command]:
    """The commands in a file's fenced blocks and in its inline code."""
    lines = []
    variables: dict[str, str] = {}
    for number, line in logical_lines(path):
        where = f"{path.relative_to(ROOT)}:{number}"
        try:
            pieces = [parsed(where, piece, variables) for piece in simple_commands(line)]
        except ValueError:  # no shell understands it
            pieces = [Command(where, (), (line,))]
        lines += [piece for piece in pieces if piece]
    indented = ((number, line.strip()) for number, line, _ in fenced(path) if line[:4] == "    ")
    for number, code in itertools.chain(inline_code(path), indented):
        if INLINE.match(code):
            code = code.replace("checkpoint=…", "checkpoint=PATH")
            shown = " ".join(word for word in code.split(" ") if "…" not in word or word == "…]")
            if command := parsed(f"{path.relative_to(ROOT)}:{number}", shown, {}):
                lines.append(command)
    return lines


def fenced(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Each line with its number and, inside of a fenced block, the block's language."""
    language: str | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            language = line.strip().strip("`") if language is None else None
        else:
            yield number, line, language


def logical_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Command lines of fenced blocks: continued lines are joined, comments are gone."""
    before = ""
    for number, line, language in fenced(path):
        if language not in COMMANDS:
            continue
        text = before + re.sub(r"(^|\s+)#\s.*$", "", line).strip()
        before = ""
        if text.endswith("\\"):
            before = text[:-1]
        elif text:
            yield number, text


def inline_code(path: Path) -> Iterator[tuple[int, str]]:
    for number, text in paragraphs(path):
        for code in re.findall(r"`([^`]+)`", text):
            yield number, code.replace("\\|", "|")


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Text outside of fenced blocks, each row of a table by itself, with its last line number."""
    text, number = "", 0
    for number, line, language in fenced(path):
        if language is None and line.strip() and not line.startswith("|"):
            text = f"{text} {line.strip()}".strip()
            continue
        if text:
            yield number, text
            text = ""
        if language is None and line.strip():
            yield number, line
    if text:
        yield number, text


def simple_commands(line: str) -> list[str]:
    """A line cut at `;`, `&&` and `|`, without the words that make a loop."""
    pieces = re.findall(r"""(?:'[^']*'|"[^"]*"|[^;&|'"])+""", line)
    without_loop = [re.sub(r"^(do|then|done|fi)\b", "", piece.strip()).strip() for piece in pieces]
    return [piece for piece in without_loop if piece]


def parsed(where: str, piece: str, variables: dict[str, str]) -> Command | None:
    """One command; None for an assignment or the head of a loop, which sets `variables`."""
    if loop := re.match(r"for (\w+) in (\S+)", piece):
        variables[loop[1]] = loop[2]
        return None
    known = re.compile(r"\$\{?(\w+)\}?")
    filled = known.sub(lambda match: variables.get(match[1], "1"), piece)
    words = shlex.split(re.sub(r"\s*\d?>+\s*\S+", "", filled))
    if words[0] == "export":
        words = words[1:]
    assigned: dict[str, str] = {}
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        assigned[match[1]] = match[2]
        words = words[1:]
    if not words:
        variables |= assigned
        return None
    return Command(where, tuple(assigned.items()), tuple(words))


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Targets of links and pictures that are not on the web."""
    for number, text in paragraphs(path):
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                yield number, target


def anchors(path: Path) -> set[str]:
    """The anchors that the headings of a file get."""
    headings = [line.lstrip("#") for _, line, lang in fenced(path) if not lang and line[:1] == "#"]
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in headings}
