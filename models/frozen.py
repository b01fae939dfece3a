"""Nets that a run uses as they are: read from files, never trained, saved or broadcast."""

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
ITS_FILES = "use the files of the net that is frozen"


class Frozen(nn.Module):
    """A net with the weights of a safetensors file or a folder of them, in the files' precision.

    Its parameters have no `requires_grad`, so that no optimizer, bucket or average takes them up,
    and it stays in evaluation mode whatever the net around it does. A checkpoint names its path and
    hash instead of holding its weights.
    """

    def __init__(
        self,
        net: nn.Module,
        path: str,
        files: Sequence[Path] | None = None,
        read: Callable[[Sequence[Path]], Tensors] | None = None,
    ) -> None:
        """Fills `net` from `files`, by default the safetensors files at `path`.

        `read` returns the tensors of the files by the net's own names.
        """
        super().__init__()
        self.net, self.path = net, path
        files = list(files or _files(Path(path)))
        try:
            self.sha256 = _hash(files)
            _fill(net, (read or _tensors)(files), path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"cannot be read as safetensors ({brief(error)})",
                value=path,
                remedy="give a whole file, or a folder of them",
            ) from None
        self.requires_grad_(False)
        self.train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def train(self, mode: bool = True) -> Frozen:
        """Does nothing: dropout stays off, and running statistics stay as they are."""
        return super().train(False)


def _files(path: Path) -> list[Path]:
    is_file = path.exists() and not path.is_dir()
    files = [path] if is_file else sorted(path.glob("[!.]*.safetensors"))
    if not files:
        raise ConfigError(
            "no such file, or a folder without safetensors files",
            value=path,
            remedy="give a .safetensors file, or a folder of them",
        )
    return files


def _hash(files: list[Path]) -> str:
    """Returns what `sha256sum FILE`, or `sha256sum *.safetensors | sha256sum`, prints."""
    hashes = []
    for file in files:
        with open_plain(file) as stream:
            hashes.append(hashlib.file_digest(stream, "sha256").hexdigest())
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(hashes, files, strict=True))
    return hashes[0] if len(files) == 1 else hashlib.sha256(lines.encode()).hexdigest()


def _fill(net: nn.Module, tensors: Tensors, path: str) -> None:
    """Puts tensors in place of the net's own, one by one: there is never a second copy of all."""
    live = {
        **dict(net.named_parameters(remove_duplicate=False)),
        **dict(net.named_buffers(remove_duplicate=False)),
    }
    # what is still to be filled, in the net's order; a tied weight is one tensor with two names
    missing, filled = dict.fromkeys(net.state_dict()), set()
    for name, tensor in tensors:
        if name not in missing:
            what = f"holds {name}, which is not in this net or comes twice"
            raise ConfigError(what, value=path, remedy=ITS_FILES)
        # precision may differ from the net's, as a file keeps its own; shapes may not
        there, here = _kind_of(tensor), _kind_of(live[name])
        if there != here:
            what = f"{name} is {there} there and {here} in this net"
            raise ConfigError(what, value=path, remedy=ITS_FILES)
        live[name].data = tensor.to(live[name].device)  # the meta device, where memory is planned
        filled.add(id(live[name]))
        del missing[name]
    # files hold tied weights under one of their names
    left = [name for name in missing if id(live[name]) not in filled]
    if left:
        raise ConfigError(f"{left[0]} is missing from it", value=path, remedy=ITS_FILES)


def _kind_of(tensor: Tensor) -> str:
    """Describes shape and type, as far as they must match."""
    kind = "floats" if tensor.is_floating_point() else tensor.dtype
    return f"{tuple(tensor.shape)} of {kind}"


def _tensors(files: Sequence[Path]) -> Tensors:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is not a dict)
                # a copy: a view into the file may be unaligned, and BLAS rounds by alignment
                yield name, opened.get_tensor(name).clone()
