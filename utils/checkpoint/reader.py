"""Checkpoints as folders of safetensors files: whole or known to be damaged, and never
unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from utils.checkpoint import contents, manifest, tensorfiles
from utils.checkpoint import meta as metas
from utils.checkpoint.contents import Stored
from utils.checkpoint.manifest import MANIFEST
from utils.checkpoint.stepfolders import folder_or_aside, identity, read_pointer, steps_in
from utils.checkpoint.tensorfiles import Unreadable
from utils.command.instantiate import check_special
from utils.command.keys import leaves
from utils.errors import ConfigError, brief, visible

if TYPE_CHECKING:  # the digest does without, and answers a second earlier
    from torch import Tensor

    Group = dict[str, Tensor]

Tensors = dict[str, Stored]
T = TypeVar("T")
ANOTHER = "use another step_* folder"
TRIES = 5  # beside a run that goes on, and deletes what it keeps no longer


@dataclass
class Opened:
    """A checkpoint whose tensors are read when they are asked for."""

    folder: Path  # where its files lie
    groups: dict[str, Tensors]
    shards: dict[int, Tensors] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)  # of files, as the manifest states it


def load(
    path: str | Path, only: Collection[str] | None = None
) -> tuple[dict[str, Group], dict[str, Any]]:
    """The groups (all, or these) and the meta of a step folder, or of the one that a path leads to;
    a bare safetensors file is the first of the groups.
    """

    def read(opened: Opened) -> tuple[dict[str, Group], dict[str, Any]]:
        return {name: read_all(group) for name, group in opened.groups.items()}, opened.meta

    return _open(Path(path), only, [], read)


def load_shards(path: str | Path, shards: Iterable[int]) -> dict[int, Group]:
    """The state of these shards, from whatever files the ranks that saved it wrote."""

    def read(opened: Opened) -> dict[int, Group]:
        return {shard: read_all(tensors) for shard, tensors in opened.shards.items()}

    return _open(Path(path), [], list(shards), read)


def open_checkpoint(
    path: str | Path, only: Collection[str] | None = None, shards: Iterable[int] = ()
) -> Opened:
    """The same, without reading: only `meta.json` and sizes are compared with the manifest."""
    return _open(Path(path), only, list(shards), lambda opened: opened, hashed=False)


def read_all(tensors: Tensors) -> Group:
    """Reads whole tensors."""
    return {name: stored.read() for name, stored in tensors.items()}


def files_of(folder: Path, groups: Collection[str]) -> list[Path]:
    """The files in which these groups of a step folder lie."""
    files = sorted(folder.glob("[!.]*.safetensors"))
    return [file for group in groups for file in files if contents.group_of(file.name) == group]


def read_meta(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's metadata: its step, its groups, and what its writer added."""
    return reading(path, lambda folder: _meta_in(folder, path))


def config_in(path: str) -> dict[Any, Any]:
    """The configuration of the run that wrote a checkpoint; empty where nothing tells it.

    What it names under `arch` and `data` is of this repository, so that it can be made.
    """
    text = "" if is_weights(Path(path)) else read_meta(Path(path)).get("config", "")
    try:
        config = metas.config_of(text) if text else {}
        for key in {"arch", "data"} & config.keys():
            for inner, value in leaves(config[key], key):
                check_special(inner, value)
        return config
    except ValueError as error:
        raise ConfigError(f"checkpoint={path}: {error}; {ANOTHER}") from None


def digest(path: str | Path) -> str:
    """One sha256 over all tensors of a checkpoint: the same for any number of ranks that wrote
    it.
    """
    path = Path(path)
    return reading(path, lambda folder: _digest_of(folder, path))


def reading(path: Path, read: Callable[[Path], T]) -> T:
    """Read the folder that a path means. If a run that goes on has deleted or replaced it
    meanwhile, then what is there now.
    """
    problem = ""
    for _ in range(TRIES):
        with readable(path):
            try:
                folder = step_folder(path)
                before = identity(folder)
                result = read(folder)
                if identity(folder) == before:
                    return result
            except (ConfigError, OSError, Unreadable) as error:
                if problem == str(error):  # twice the same is not for a run that goes on
                    raise
                problem = str(error)
    raise _deleted_while_read(path)


def is_weights(path: Path) -> bool:
    """Returns whether it is a file of weights alone, and not `latest` or `best`, which point to a
    checkpoint.
    """
    return os.path.isfile(path) and not read_pointer(path)


def step_folder(path: Path) -> Path:
    """The folder that a path means: itself, what it points to, or the latest of a run or
    checkpoints folder.
    """
    folder = folder_or_aside(path)
    if not folder.exists():
        raise ConfigError(
            f"checkpoint={path}: no such file or folder; give a run folder, a step_* folder or a"
            " .safetensors file"
        )
    if (folder / "meta.json").exists() or (folder / MANIFEST).exists():
        return folder
    for pointer in (
        [path] if read_pointer(path) else [path / "latest", path / "checkpoints" / "latest"]
    ):
        if pointer.is_file():
            if not (name := read_pointer(pointer)):
                raise ConfigError(
                    f"checkpoint={path}: {pointer} does not name a step; give one of the step_*"
                    " folders beside it"
                )
            if (folder := folder_or_aside(pointer.parent / name)).is_dir():
                return folder
            raise ConfigError(
                f"checkpoint={path}: {pointer.name} names {name}, which is not there; give one of"
                " the other step_* folders"
            )
    raise ConfigError(
        f"checkpoint={path}: holds no meta.json, latest or checkpoints/latest; give a run folder or"
        " a step_* folder"
    )


def verify(folder: Path, hashed: bool = True) -> str:
    """Empty when every byte of the checkpoint is as it was written and a run can go on from it,
    else one line: the file, and why not. Unless it is `hashed`, the content of tensors may differ.
    """
    folder = folder_or_aside(folder)
    return visible(manifest.damage(folder, hashed=hashed) or contents.problem(folder))


def newest_whole(
    directory: Path, say: Callable[[str], None], before: int | None = None, hashed: bool = True
) -> Path | None:
    """The step folder of the highest step (`before` another one) that verifies; every one passed
    over on the way is named, once.

    To be read with the functions here: where a crash left the folder under its aside name alone,
    they find it there.
    """
    named: set[int] = set()
    for _ in range(TRIES):
        with readable(directory):
            steps = [step for step in steps_in(directory) if before is None or step < before]
        for i, step in enumerate(steps):
            folder = directory / f"step_{step}"
            identity_before = identity(folder_or_aside(folder))
            if not (problem := verify(folder, hashed)):
                return folder
            if identity(folder_or_aside(folder)) != identity_before:
                break  # a run that goes on has deleted it meanwhile, or written it anew
            if step not in named:
                named.add(step)
                rest = (
                    "going back to the one before" if steps[i + 1 :] else "there is none before it"
                )
                say(f"checkpoint {folder.name} is damaged ({problem}); {rest}")
        else:
            return None
    raise _deleted_while_read(directory)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Names the path that the user gave in errors of the disk."""
    try:
        yield
    except (OSError, Unreadable) as error:
        raise ConfigError(
            f"checkpoint={path}: cannot be read ({brief(error)}); give a folder that you may read"
        ) from None


def _deleted_while_read(path: Path) -> ConfigError:
    return ConfigError(
        f"checkpoint={path}: {TRIES} of them were deleted while they were read; copy one, or raise"
        " keep of the run that writes there"
    )


def _meta_in(folder: Path, path: Path) -> dict[str, Any]:
    refuse_damaged(folder, path, "meta.json".__eq__)
    try:
        meta = metas.read(folder)
        if (folder / MANIFEST).exists():  # a run has written it, and all that it writes
            metas.check_run(meta, folder)
        return meta
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint={path}: {folder / 'meta.json'} cannot be read ({brief(error)}); {ANOTHER}"
        ) from None


def _open(
    path: Path,
    only: Collection[str] | None,
    shards: list[int],
    read: Callable[[Opened], T],
    hashed: bool = True,
) -> T:
    def read_folder(folder: Path) -> T:
        with _refusing(path, f"; {ANOTHER}"):
            meta = _meta_in(folder, path)
            groups = [group for group in meta["groups"] if only is None or group in only]
            refuse_damaged(folder, path, partial(_is_of, groups, shards), hashed)
            tensors = {
                group: _plain(contents.find_group(folder, group), path, folder) for group in groups
            }
            states = _shards_in(folder, path, shards)
            return read(Opened(folder, tensors, states, meta, manifest.recorded_sha256(folder)))

    if not is_weights(path):
        return reading(path, read_folder)
    with _refusing(path):
        group = {next(iter(only or [""])): _plain(contents.find_tensors([path]), path, path)}
        return read(Opened(path.parent, group))


@contextmanager
def _refusing(path: Path, fix: str = "") -> Iterator[None]:
    """Names the path that the user gave, and the file that is refused."""
    try:
        yield
    except Unreadable as error:
        where = error.file or path.name
        raise ConfigError(f"checkpoint={path}: {where} {error}{fix}") from None


def _is_of(groups: Collection[str], shards: Collection[int], name: str) -> bool:
    """Returns whether a file holds something of these groups or shards."""
    if owned := contents.shards_of(name):
        return any(shard in owned for shard in shards)
    return contents.group_of(name) in groups


def _shards_in(folder: Path, path: Path, wanted: list[int]) -> dict[int, Tensors]:
    pieces = contents.pieces_in(folder) if wanted else {}
    states: dict[int, Tensors] = {shard: {} for shard in wanted}
    for shard in wanted:
        if not any(shard in owned for owned in pieces.values()):
            raise ConfigError(
                f"checkpoint={path}: {folder.name} holds no state of shard {shard}; keep the number"
                " of shards"
            )
    for file, owned in pieces.items():
        if any(shard in owned for shard in wanted):
            for key, entry in tensorfiles.entries(file).items():
                number, _, name = key.partition("/")
                if number.isdecimal() and int(number) in states:
                    stored = Stored(entry.dtype, entry.shape, [(file, entry)])
                    states[int(number)][name] = stored
    return states


def _digest_of(folder: Path, path: Path) -> str:
    if problem := verify(folder):
        raise ConfigError(f"checkpoint={path}: {folder.name} is damaged ({problem}); {ANOTHER}")
    groups = {group: contents.find_group(folder, group) for group in metas.read(folder)["groups"]}
    groups["shards"] = contents.find_tensors(contents.pieces_in(folder))
    tensors = {
        f"{group}/{name}": stored
        for group, members in groups.items()
        for name, stored in members.items()
    }
    total = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        total.update(json.dumps([name, stored.dtype, stored.shape, stored.size]).encode())
        for file, entry in stored.pieces:
            manifest.hash_into(total, file, entry.start, entry.size)
    return total.hexdigest()


def _plain(tensors: Tensors, path: Path, folder: Path) -> Tensors:
    """Without the prefix that torch.compile puts before names in published files."""
    plain = {name.removeprefix("_orig_mod."): stored for name, stored in tensors.items()}
    if len(plain) < len(tensors):
        raise ConfigError(
            f"checkpoint={path}: {folder.name} has the same names with and without _orig_mod.; keep"
            " one of each"
        )
    return plain


def refuse_damaged(
    folder: Path, path: Path, wanted: Callable[[str], bool], hashed: bool = True
) -> None:
    """Raises ConfigError for the first of the wanted files that is not as it was written."""
    if not (folder / MANIFEST).exists():
        # an older checkpoint, or one made by hand: readable, but nothing says what it should be
        return
    if problem := manifest.damage(folder, wanted, hashed):
        raise ConfigError(f"checkpoint={path}: {folder.name} is damaged ({problem}); {ANOTHER}")
