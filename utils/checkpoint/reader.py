"""Checkpoints as folders of safetensors files: whole or known to be damaged, and never
unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from utils.checkpoint import contents, manifest, tensorfiles
from utils.checkpoint import meta as metas
from utils.checkpoint.manifest import MANIFEST
from utils.checkpoint.stepfolders import identity, pointed, resolved, steps_in
from utils.checkpoint.tensorfiles import Unreadable
from utils.command.instantiate import check_special
from utils.command.values import leaves
from utils.errors import ConfigError, brief

if TYPE_CHECKING:  # the digest does without, and answers a second earlier
    from torch import Tensor

    Group = dict[str, Tensor]

T = TypeVar("T")
ANOTHER = "use another step_* folder"
TRIES = 5  # beside a run that goes on, and deletes what it keeps no longer


def load(
    path: str | Path, only: Collection[str] | None = None, verified: bool = False
) -> tuple[dict[str, Group], dict[str, Any]]:
    """The groups (all, or these) and the meta of a step folder, or of the one that a path leads to;
    a bare safetensors file is the first of the groups. `verified`: somebody has compared the bytes
    with the manifest before.
    """
    path = Path(path)
    if is_weights(path):
        return {next(iter(only or [""])): _tensors_in(path, path)}, {}
    return reading(path, lambda folder: _groups_in(folder, path, only, verified))


def read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: its step, its groups, and what its writer added."""
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


def load_shards(
    path: str | Path, shards: Iterable[int], verified: bool = False
) -> dict[int, Group]:
    """The state of these shards, from whatever pieces the ranks that saved it wrote."""
    path, wanted = Path(path), list(shards)
    return reading(path, lambda folder: _shards_in(folder, path, wanted, verified))


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
    """Whether it is a file of weights alone, and not `latest` or `best`, which point to a
    checkpoint.
    """
    return os.path.isfile(path) and not pointed(path)


def step_folder(path: Path) -> Path:
    """The folder that a path means: itself, what it points to, or the latest of a run or
    checkpoints folder.
    """
    folder = resolved(path)
    if not folder.exists():
        raise ConfigError(
            f"checkpoint={path}: no such file or folder; give a run folder, a step_* folder or a"
            " .safetensors file"
        )
    if (folder / "meta.json").exists() or (folder / MANIFEST).exists():
        return folder
    for pointer in [path] if pointed(path) else [path / "latest", path / "checkpoints" / "latest"]:
        if pointer.is_file():
            if not (name := pointed(pointer)):
                raise ConfigError(
                    f"checkpoint={path}: {pointer} does not name a step; give one of the step_*"
                    " folders beside it"
                )
            if (folder := resolved(pointer.parent / name)).is_dir():
                return folder
            raise ConfigError(
                f"checkpoint={path}: {pointer.name} names {name}, which is not there; give one of"
                " the other step_* folders"
            )
    raise ConfigError(
        f"checkpoint={path}: holds no meta.json, latest or checkpoints/latest; give a run folder or"
        " a step_* folder"
    )


def verify(folder: Path) -> str:
    """Empty when every byte of the checkpoint is as it was written and a run can go on from it,
    else one line: the file, and why not.
    """
    folder = resolved(folder)
    return manifest.damage(folder) or contents.problem(folder)


def newest_whole(
    directory: Path, say: Callable[[str], None], before: int | None = None
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
            found = identity(resolved(folder))
            if not (problem := verify(folder)):
                return folder
            if identity(resolved(folder)) != found:
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
    """What the disk refuses is said of the path that the user gave."""
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
    _refuse_damaged(folder, path, {"meta.json"})
    try:
        meta = metas.read(folder)
        if (folder / MANIFEST).exists():  # a run has written it, and all that it writes
            metas.check_run(meta, folder)
        return meta
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint={path}: {folder / 'meta.json'} cannot be read ({brief(error)}); {ANOTHER}"
        ) from None


def _groups_in(
    folder: Path, path: Path, only: Collection[str] | None, verified: bool
) -> tuple[dict[str, Group], dict[str, Any]]:
    meta = _meta_in(folder, path)
    groups = [group for group in meta["groups"] if only is None or group in only]
    if not verified:
        _refuse_damaged(folder, path, {f"{group}.safetensors" for group in groups})
    return {group: _tensors_in(folder / f"{group}.safetensors", path) for group in groups}, meta


def _shards_in(folder: Path, path: Path, wanted: list[int], verified: bool) -> dict[int, Group]:
    pieces = {
        file: owned
        for file, owned in contents.pieces_in(folder).items()
        if any(shard in owned for shard in wanted)
    }
    states: dict[int, Group] = {shard: {} for shard in wanted}
    for shard in wanted:
        if not any(shard in owned for owned in pieces.values()):
            raise ConfigError(
                f"checkpoint={path}: {folder.name} holds no state of shard {shard}; keep the number"
                " of shards"
            )
    if not verified:
        _refuse_damaged(folder, path, {file.name for file in pieces})
    for file, owned in pieces.items():
        for key, tensor in _tensors_in(
            file, path, tuple(f"{shard}/" for shard in wanted if shard in owned)
        ).items():
            number, _, name = key.partition("/")
            states[int(number)][name] = tensor
    return states


def _digest_of(folder: Path, path: Path) -> str:
    if problem := verify(folder):
        raise ConfigError(f"checkpoint={path}: {folder.name} is damaged ({problem}); {ANOTHER}")
    entries = []
    for file in folder.glob("[!.]*.safetensors"):
        group = "shards" if contents.PIECE.fullmatch(file.name) else file.stem
        entries += [
            (f"{group}/{name}", file, entry) for name, entry in tensorfiles.entries(file).items()
        ]
    total = hashlib.sha256()
    for name, file, entry in sorted(entries, key=lambda known: known[0]):
        total.update(json.dumps([name, entry.dtype, entry.shape, entry.size]).encode())
        manifest.hash_into(total, file, entry.start, entry.size)
    return total.hexdigest()


def _tensors_in(file: Path, path: Path, prefixes: tuple[str, ...] = ("",)) -> Group:
    try:
        stored = tensorfiles.read(file, prefixes)
    except Unreadable as error:
        fix = "" if file == path else f"; {ANOTHER}"
        raise ConfigError(f"checkpoint={path}: {file.name} {error}{fix}") from None
    # torch.compile's prefix in published files
    tensors = {key.removeprefix("_orig_mod."): tensor for key, tensor in stored.items()}
    if len(tensors) < len(stored):
        raise ConfigError(
            f"checkpoint={path}: {file.name} has the same names with and without _orig_mod.; keep"
            " one of each"
        )
    return tensors


def _refuse_damaged(folder: Path, path: Path, names: Collection[str]) -> None:
    if not (folder / MANIFEST).exists():
        # an older checkpoint, or one made by hand: readable, but nothing says what it should be
        return
    if problem := manifest.damage(folder, names):
        raise ConfigError(f"checkpoint={path}: {folder.name} is damaged ({problem}); {ANOTHER}")
