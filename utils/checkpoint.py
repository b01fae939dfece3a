"""Checkpoints as folders of safetensors files: whole or known to be damaged, and never unpickled.

`python -m utils.checkpoint digest PATH` prints one sha256 over all tensors of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import ConfigError

if TYPE_CHECKING:  # the digest does without, and answers a second earlier
    from torch import Tensor, nn

    Group = dict[str, Tensor]

STEP_FOLDER = re.compile(r"step_(\d+)")
PIECE = re.compile(r"shards\.(\d+)-(\d+)\.safetensors")
MANIFEST = "manifest.json"
CHUNK = 1 << 23  # large, so that a thread that hashes seldom asks for the interpreter
USAGE = "usage: python -m utils.checkpoint digest PATH    (a run folder, its checkpoints folder or a step_* folder)"


def load(path: str | Path, only: Collection[str] | None = None) -> tuple[dict[str, Group], dict[str, Any]]:
    """The groups (all, or these) and the meta of a step folder, a checkpoints or run folder (its latest), or a bare safetensors file."""
    path = Path(path)
    if path.is_file():
        return {"model": _read_tensors(path, path)}, {}
    folder, meta = step_folder(path), read_meta(path)
    groups = [group for group in meta["groups"] if only is None or group in only]
    _refuse_damaged(folder, path, {f"{group}.safetensors" for group in groups})
    return {group: _read_tensors(folder / f"{group}.safetensors", path) for group in groups}, meta


def read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: its step, its groups, and what its writer added."""
    folder = step_folder(path)
    _refuse_damaged(folder, path, {"meta.json"})
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"checkpoint={path}: {folder / 'meta.json'} cannot be read ({brief(error)}); use another step_* folder") from None
    groups = meta.get("groups") if isinstance(meta, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, str) and "/" not in group for group in groups):
        raise ConfigError(f"checkpoint={path}: {folder / 'meta.json'} names no groups of tensors; use another step_* folder")
    return meta


def load_into(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Fill a module, all keys and all shapes; `what` names the source in the error."""
    own, fix = module.state_dict(), "use the arch and data of the run that wrote it"
    for key in own:
        if key not in tensors:
            raise ConfigError(f"checkpoint={what}: {key} is missing from it; {fix}")
        there, here = tuple(tensors[key].shape), tuple(own[key].shape)
        if there != here:
            raise ConfigError(f"checkpoint={what}: {key} has shape {there} there and {here} here; {fix}")
    for key in tensors:
        if key not in own:
            raise ConfigError(f"checkpoint={what}: it holds {key}, which this model has not; use the arch of the run that wrote it")
    module.load_state_dict(dict(tensors))


def load_shards(path: str | Path, shards: Iterable[int]) -> dict[int, Group]:
    """The state of these shards, from whatever pieces the ranks that saved it wrote."""
    path = Path(path)
    folder = step_folder(path)
    pieces = {file: range(int(match[1]), int(match[2]) + 1) for file in folder.iterdir() if (match := PIECE.fullmatch(file.name))}
    found: dict[int, Group] = {shard: {} for shard in shards}
    for shard in found:
        if not any(shard in owned for owned in pieces.values()):
            raise ConfigError(f"checkpoint={path}: {folder.name} holds no state of shard {shard}; keep the number of shards")
    for file, owned in pieces.items():
        if not (mine := tuple(f"{shard}/" for shard in found if shard in owned)):
            continue
        _refuse_damaged(folder, path, {file.name})
        for key, tensor in _read_tensors(file, path, mine).items():
            number, _, name = key.partition("/")
            found[int(number)][name] = tensor
    return found


def step_folder(path: Path) -> Path:
    """The folder that a path means: itself, or the latest of a run or checkpoints folder."""
    folder = _resolved(path)
    if not folder.exists():
        raise ConfigError(f"checkpoint={path}: no such file or folder; give a run folder, a step_* folder or a .safetensors file")
    if (folder / "meta.json").exists() or (folder / MANIFEST).exists():
        return folder
    for checkpoints in (path, path / "checkpoints"):
        if not (checkpoints / "latest").is_file():
            continue
        name = (checkpoints / "latest").read_text(errors="replace").strip()
        if not STEP_FOLDER.fullmatch(name):
            raise ConfigError(f"checkpoint={path}: {checkpoints / 'latest'} does not name a step; give one of the step_* folders beside it")
        folder = _resolved(checkpoints / name)
        if not folder.is_dir():
            raise ConfigError(f"checkpoint={path}: latest names {name}, which is not there; give one of the other step_* folders")
        return folder
    raise ConfigError(f"checkpoint={path}: holds no meta.json, latest or checkpoints/latest; give a run folder or a step_* folder")


def verify(folder: Path) -> str:
    """Empty when every byte of the checkpoint is as it was written, else one line: the file, and what is wrong with it."""
    return _damage(_resolved(folder))


def newest_whole(directory: Path, say: Callable[[str], None]) -> Path | None:
    """The step folder of the highest step that verifies; every damaged one passed over on the way is told.

    To be read with the functions here: where a crash left the folder under its aside name alone, they find it there.
    """
    steps = steps_in(directory)
    for i, step in enumerate(steps):
        folder = directory / f"step_{step}"
        if not (problem := verify(folder)):
            return folder
        rest = "going back to the one before" if steps[i + 1 :] else "there is none before it"
        say(f"checkpoint {folder.name} is damaged ({problem}); {rest}")
    return None


def digest(path: str | Path) -> str:
    """One sha256 over all tensors of a checkpoint: the same for any number of ranks that wrote it."""
    path = Path(path)
    folder = step_folder(path)
    _refuse_damaged(folder, path)
    entries = [entry for file in folder.glob("[!.]*.safetensors") for entry in _raw_tensors(file, path)]
    total = hashlib.sha256()
    for name, dtype, shape, file, start, size in sorted(entries, key=lambda entry: entry[0]):
        total.update(json.dumps([name, dtype, shape, size]).encode())
        _hash_into(total, file, start, size)
    return total.hexdigest()


def steps_in(directory: Path) -> list[int]:
    """The steps that have a folder, newest first; also those found under the aside name alone."""
    names = [entry.name for entry in directory.iterdir() if entry.is_dir()] if directory.is_dir() else []
    names = [name.removeprefix(".").removesuffix(".replaced") if name.endswith(".replaced") else name for name in names]
    return sorted({int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name))}, reverse=True)


def replaced(folder: Path) -> Path:
    """Where a step folder is while a newer one of the same step takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def manifest_text(files: Mapping[str, Mapping[str, int | str]]) -> str:
    """The manifest, which carries a sha256 of its own content."""
    known = {name: dict(entry) for name, entry in sorted(files.items())}
    own = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return json.dumps({"files": known, "sha256": own}, indent=1) + "\n"


def manifest_entry(file: Path) -> dict[str, int | str]:
    """What the manifest says of a file."""
    total, size = hashlib.sha256(), file.stat().st_size
    _hash_into(total, file, 0, size)
    return {"bytes": size, "sha256": total.hexdigest()}


def _resolved(folder: Path) -> Path:
    # The writer died between moving the old one aside and the new one in: the old one is the checkpoint.
    return replaced(folder) if replaced(folder).is_dir() and not folder.is_dir() else folder


def _refuse_damaged(folder: Path, path: Path, names: Collection[str] | None = None) -> None:
    if names is not None and not (folder / MANIFEST).exists():
        return  # an older checkpoint, or one made by hand: readable, but nothing says what it should be
    if problem := _damage(folder, names):
        raise ConfigError(f"checkpoint={path}: {folder.name} is damaged ({problem}); use another step_* folder")


def _damage(folder: Path, names: Collection[str] | None = None) -> str:
    """What is wrong with these files, or with the whole folder."""
    try:
        files = _read_manifest(folder)
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST}: " + ("missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({brief(error)})")
    # Notes of a user or of a desktop are passed over, because nothing here reads them.
    present = {entry.name for entry in folder.glob("[!.]*.safetensors")}
    for name in sorted(files.keys() | present if names is None else names):
        try:
            problem = _file_damage(folder / name, files.get(name))
        except OSError as error:
            problem = f"cannot be read ({brief(error)})"
        if problem:
            return f"{name}: {problem}"
    return ""


def _file_damage(file: Path, expected: Mapping[str, int | str] | None) -> str:
    if expected is None:
        return f"unknown to {MANIFEST}"
    if not file.is_file():
        return "missing"
    if (size := file.stat().st_size) != expected.get("bytes"):
        return f"{size} of {expected.get('bytes')} bytes"
    return "" if manifest_entry(file) == expected else "sha256 differs"


def _read_manifest(folder: Path) -> dict[str, dict[str, int | str]]:
    text = (folder / MANIFEST).read_bytes().decode()
    try:
        files = json.loads(text)["files"]
        same = manifest_text(files) == text
    except (KeyError, TypeError, AttributeError):
        same = False
    if not same:
        raise ValueError("its own sha256 differs")
    for name in files:
        if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
            raise ValueError(f"names {name!r}, which is no file of this folder")
    return files


def _read_tensors(file: Path, path: Path, prefixes: tuple[str, ...] = ("",)) -> Group:
    """The tensors whose names start so, each in memory of its own: a view into the file lies anywhere, and BLAS rounds by alignment."""
    from safetensors import SafetensorError, safe_open

    _refuse_pickle(file, path)
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key).clone() for key in opened.keys() if key.startswith(prefixes)}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(file, path, brief(error)) from None
    return {key.removeprefix("_orig_mod."): tensor for key, tensor in tensors.items()}  # torch.compile's prefix in published files


def _raw_tensors(file: Path, path: Path) -> Iterator[tuple[str, str, list[int], Path, int, int]]:
    """Name, dtype, shape, file, start and size of all tensors of a file; torch is not needed for that."""
    from safetensors import SafetensorError, safe_open

    group = "shards" if PIECE.fullmatch(file.name) else file.stem
    _refuse_pickle(file, path)
    try:
        with safe_open(file, framework="np"), open(file, "rb") as stream:  # the library has checked the header that is read here
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (OSError, SafetensorError) as error:
        raise _damaged(file, path, brief(error)) from None
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield f"{group}/{name}", entry["dtype"], entry["shape"], file, 8 + length + start, end - start


def _refuse_pickle(file: Path, path: Path) -> None:
    try:
        with open(file, "rb") as stream:
            start = stream.read(4)
    except OSError as error:
        raise _damaged(file, path, brief(error)) from None
    if start == b"PK\x03\x04" or start[:1] == b"\x80":  # a zip as torch.save writes it, or a bare pickle
        raise ConfigError(
            f"checkpoint={path}: {file.name} is a pickle, which could run any code and is never read here; convert it once: "
            f"`safetensors.torch.save_file(torch.load({str(file)!r}, weights_only=True, map_location='cpu'), 'model.safetensors')`"
        )


def _damaged(file: Path, path: Path, problem: str) -> ConfigError:
    return ConfigError(f"checkpoint={path}: {file.name} is damaged or cut short ({problem}); use another step_* folder")


def _hash_into(total: Any, file: Path, start: int, size: int) -> None:
    chunk = memoryview(bytearray(min(CHUNK, max(1, size))))
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while size > 0 and (count := stream.readinto(chunk[: min(CHUNK, size)])):
            total.update(chunk[:count])
            size -= count


def brief(error: Exception) -> str:
    """What an error says, in a few words of one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = text.rpartition("I/O error: ")[2].partition(" (os error")[0]  # as safetensors words what the system said
    return " ".join(text.split())[:160] or type(error).__name__


def main(arguments: list[str]) -> int:
    """The command line; the exit status."""
    try:
        if len(arguments) != 2 or arguments[0] != "digest":
            raise ConfigError(USAGE)
        print(digest(arguments[1]))
        return 0
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
