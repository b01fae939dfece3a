"""Nets that a run uses as they are: filled from files of their own, never trained, never saved, never sent to other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from utils.errors import ConfigError, brief
from utils.files import open_plain

Tensors = Iterable[tuple[str, Tensor]]


class Frozen(nn.Module):
    """A net with the weights of a safetensors file, or of a folder of them, in the files' own precision.

    `requires_grad` is off, so no optimizer, bucket or average takes them up, and it stays in evaluation mode whatever
    the net around it does. A checkpoint of the run names the path and the hash instead of the weights.
    """

    def __init__(
        self, net: nn.Module, path: str, files: Sequence[Path] | None = None, read: Callable[[Sequence[Path]], Tensors] | None = None
    ) -> None:
        """`files`: those that count, where the path alone does not tell; `read`: what they hold, by the net's own names."""
        super().__init__()
        self.net, self.path = net, path
        files = list(files or _files(Path(path)))
        try:
            self.sha256 = _hash(files)
            _fill(net, (read or _tensors)(files), path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors ({brief(error)}); give a whole file, or a folder of them") from None
        self.requires_grad_(False)
        self.train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def train(self, mode: bool = True) -> Frozen:
        """Dropout stays off and running statistics stay where they are."""
        return super().train(False)


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("[!.]*.safetensors")) if path.is_dir() else [path] if path.exists() else []
    if not files:
        raise ConfigError(f"{path}: no such file, or a folder without any; give a .safetensors file, or a folder of them")
    return files


def _hash(files: list[Path]) -> str:
    """What `sha256sum FILE` prints, or for several files `sha256sum *.safetensors | sha256sum`."""
    hashes = []
    for file in files:
        with open_plain(file) as stream:
            hashes.append(hashlib.file_digest(stream, "sha256").hexdigest())
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(hashes, files, strict=True))
    return hashes[0] if len(files) == 1 else hashlib.sha256(lines.encode()).hexdigest()


def _fill(net: nn.Module, tensors: Tensors, path: str) -> None:
    """Tensor by tensor in place of the net's own: at no time is there a second copy of the whole."""
    own = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    missing, filled = dict.fromkeys(net.state_dict()), set()
    for name, tensor in tensors:
        if name not in missing:
            raise ConfigError(f"{path}: holds {name}, which is not in this net or comes twice; use the files of the net that is frozen")
        there, here = (f"{tuple(t.shape)} of {'floats' if t.is_floating_point() else t.dtype}" for t in (tensor, own[name]))
        if there != here:
            raise ConfigError(f"{path}: {name} is {there} there and {here} in this net; use the files of the net that is frozen")
        own[name].data = tensor.to(own[name].device)  # which may be one without numbers
        filled.add(id(own[name]))
        del missing[name]
    left = [name for name in missing if id(own[name]) not in filled]  # files hold tied weights under one of their names
    if left:
        raise ConfigError(f"{path}: {left[0]} is missing from it; use the files of the net that is frozen")


def _tensors(files: Sequence[Path]) -> Tensors:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                # in memory of its own: a view into the file lies anywhere, and BLAS rounds by alignment
                yield name, opened.get_tensor(name).clone()
