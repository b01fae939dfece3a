"""Reads checkpoints: known to be whole or refused, and never unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from utils.checkpoint import format
from utils.checkpoint.folders import put_back, read_pointer, steps_in
from utils.checkpoint.format import MANIFEST, META, Stored, Unreadable
from utils.errors import ConfigError, brief, visible
from utils.files import first_problem, read_text

if TYPE_CHECKING:  # the digest does without, and answers a second earlier
    from torch import Tensor

T = TypeVar("T")
GROUP = re.compile(r"([^./]+)\.safetensors")
ANOTHER = "use another step_* folder"


@with_config(ConfigDict(extra="allow"))
class SavedConfig(TypedDict, total=False):
    """The configuration in meta.json."""

    arch: dict[str, Any]
    data: dict[str, Any]
    optim: dict[str, Any]


@with_config(ConfigDict(extra="allow"))
class Meta(TypedDict, total=False):
    """The keys of meta.json. A run writes all of them; imported weights need none."""

    # how far the run has come
    step: int
    lr: float
    evaluation_due: bool
    results: dict[str, float]  # of this step; empty if it was not evaluated
    best: float | None  # the best result so far, of the metric `best_of`
    best_of: str
    wandb_id: str | None
    resumed_from: str  # the checkpoint that `resume` named when the run began
    # what it is
    config: SavedConfig
    data: dict[str, str]  # texts by which each part of its data is recognised
    # parts of the net that are loaded from other files: `path` and `sha256` of each
    frozen: dict[str, dict[str, str]]
    # the arguments of runs that this one needs, by the keys that hold their paths
    needed_runs: dict[str, str]
    # what it was computed with
    code: str
    torch: str
    threads: int
    compile: bool
    device: str  # its kind
    ranks: int


META_KIND = TypeAdapter[Any](Meta)


@dataclass
class Checkpoint:
    """A checkpoint whose tensors are read when they are asked for."""

    path: Path  # of its step folder, or of a file of weights
    groups: dict[str, dict[str, Stored]]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Stored]:
        """All tensors, by `group/name`."""
        return {
            f"{group}/{name}": stored
            for group, members in self.groups.items()
            for name, stored in members.items()
        }


def open_checkpoint(
    path: str | Path, only: Collection[str] | None = None, hashed: bool = False
) -> Checkpoint:
    """Opens the checkpoint that a path leads to, or these of its groups. A bare safetensors file is
    the first of the groups.

    Files of tensors are compared with the manifest: their sizes, and their content if `hashed`.
    """
    return _open(Path(path), only, hashed, lambda checkpoint: checkpoint)


def load(
    path: str | Path, only: Collection[str] | None = None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Reads groups (all, or these) and the meta of a checkpoint."""

    def read(checkpoint: Checkpoint) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        groups = {
            group: {name: stored.read() for name, stored in tensors.items()}
            for group, tensors in checkpoint.groups.items()
        }
        return groups, checkpoint.meta

    return _open(Path(path), only, True, read)


def read_meta(path: str | Path) -> dict[str, Any]:
    """Returns a checkpoint's metadata: its step, and what its writer added."""
    return reading(Path(path), lambda folder: _meta(folder, format.read_manifest(folder)))


def config_in(path: str) -> dict[Any, Any]:
    """The configuration of the run that wrote a checkpoint; empty if unknown."""
    config = {} if is_weights(Path(path)) else read_meta(path).get("config", {})
    if "${" in json.dumps(config):  # could read this machine's environment
        what = "its configuration has interpolations, which no run writes"
        raise ConfigError(what, key="checkpoint", value=path, remedy=ANOTHER)
    return config


def averages_in(ema: Mapping[str, T]) -> dict[str, T]:
    """The averages in a checkpoint's group `ema`, by the names of the weights."""
    begin = "dense/"
    return {n.removeprefix(begin): average for n, average in ema.items() if n.startswith(begin)}


def digest(path: str | Path) -> str:
    """One sha256 over all tensors of a checkpoint: the same for any number of ranks that wrote
    it.
    """
    return reading(Path(path), _digest)


def reading(path: Path, read: Callable[[Path], T]) -> T:
    """Reads the step folder that a path means. If a run that goes on deletes it meanwhile, reads
    the one that is the newest then.
    """
    before, folder = "", path
    while True:
        try:
            folder = step_folder(path)
            return read(folder)
        except Unreadable as error:
            what = f"{folder.name} is damaged ({error})"
            problem = ConfigError(what, key="checkpoint", value=path, remedy=ANOTHER)
        except OSError as error:
            what = f"cannot be read ({brief(error)})"
            problem = ConfigError(what, key="checkpoint", value=path, remedy=ANOTHER)
        except ConfigError as error:
            problem = error
        if str(problem) == before:  # a run that goes on would have changed it
            raise problem from None
        before = str(problem)


def is_weights(path: Path) -> bool:
    """True for a file of weights alone, but not for `latest` and `best`, which point to a
    checkpoint.
    """
    return os.path.isfile(path) and not read_pointer(path)


def step_folder(path: Path) -> Path:
    """The folder that a path means: itself, what it points to, or the latest of a run or
    checkpoints folder.
    """
    if (path / MANIFEST).exists() or (path / META).exists():
        return path
    for pointer in (path, path / "latest", path / "checkpoints" / "latest"):
        if name := read_pointer(pointer):
            return pointer.parent / name
    remedy = "give a run folder or a step_* folder"
    if os.path.isfile(path):
        raise ConfigError("a file alone", key="checkpoint", value=path, remedy=remedy)
    remedy += ", or a .safetensors file where weights are enough"
    raise ConfigError("no checkpoint is there", key="checkpoint", value=path, remedy=remedy)


def verify(folder: Path, hashed: bool = True) -> str:
    """Empty when every file of a step folder is as it was written, else one line: the file, and
    what is wrong. Unless it is `hashed`, the content of tensors may differ.
    """
    try:
        _open_folder(folder, None, hashed)
    except Unreadable as error:
        return visible(str(error))
    return ""


def newest_whole(
    directory: Path, say: Callable[[str], None], before: int | None = None
) -> Path | None:
    """The step folder of a run's highest step (`before` another one) whose files are all there, in
    their sizes; each one that is skipped is logged. First undoes a replacement that a crash cut
    off.
    """
    put_back(directory)
    steps = [step for step in steps_in(directory) if before is None or step < before]
    for number, step in enumerate(steps, start=1):
        folder = directory / f"step_{step}"
        if not (problem := verify(folder, hashed=False)):
            return folder
        rest = "going back to the one before" if steps[number:] else "there is none before it"
        say(f"checkpoint {folder.name} is damaged ({problem}); {rest}")
    return None


def _open(
    path: Path, only: Collection[str] | None, hashed: bool, read: Callable[[Checkpoint], T]
) -> T:
    if not is_weights(path):
        return reading(path, lambda folder: read(_open_folder(folder, only, hashed)))
    try:
        group = next(iter(only or ["model"]))
        return read(Checkpoint(path, {group: format.read_header(path)}))
    except Unreadable as error:
        remedy = (
            "it may be damaged: copy it again"
            if path.suffix == format.SUFFIX
            else "what torch.save has written is never unpickled here: convert it once with"
            f" python -m utils.checkpoint import {path} FOLDER"
        )
        raise ConfigError(str(error), key="checkpoint", value=path, remedy=remedy) from None


def _open_folder(folder: Path, only: Collection[str] | None, hashed: bool) -> Checkpoint:
    files = format.read_manifest(folder)
    checkpoint = Checkpoint(folder, {}, _meta(folder, files))
    for name in files:
        if (match := GROUP.fullmatch(name)) and (only is None or match[1] in only):
            format.check_file(folder / name, files[name], hashed)
            checkpoint.groups[match[1]] = format.read_header(folder / name)
    return checkpoint


def _meta(folder: Path, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if META not in files:
        raise Unreadable(folder / META, f"not in {MANIFEST}")
    format.check_file(folder / META, files[META], hashed=True)
    try:
        meta = json.loads(read_text(folder / META))  # pydantic's own parser knows UTF-8 alone
        with first_problem():
            return META_KIND.validate_python(meta, strict=True)
    except (ValueError, RecursionError) as error:
        raise Unreadable(folder / META, brief(error)) from None


def _digest(folder: Path) -> str:
    tensors = _open_folder(folder, None, hashed=True).tensors
    total = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        total.update(json.dumps([name, stored.dtype, stored.shape, stored.size]).encode())
        format.hash_into(total, stored.file, stored.start, stored.size)
    return total.hexdigest()
