"""An objective's tensors by name: which ones train, are saved, are broadcast, or are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from models.frozen import Frozen
from models.sparse_embedding import SparseEmbedding
from utils.transfer import fill

T = TypeVar("T")


class NamedTensors(nn.Module):
    """The tensors of an objective, found by walking its modules; nothing here needs an override."""

    model: Any

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that optimizers may update, by name."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

    def tables(self) -> dict[str, SparseEmbedding]:
        """Returns the sparse tables that train, by name, for the sparse optimizer."""
        tables = {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, SparseEmbedding)
        }
        return self._without_frozen(tables)

    def frozen(self) -> dict[str, dict[str, str]]:
        """Returns the path and the hash of each frozen part, by its name."""
        modules = self.named_modules(
            remove_duplicate=False
        )  # a part may be reached by several names
        return {
            name: {"path": part.path, "sha256": part.sha256}
            for name, part in modules
            if isinstance(part, Frozen)
        }

    def saved(self) -> dict[str, Tensor]:
        """Returns the live tensors that a checkpoint holds, without those of frozen parts."""
        return self._without_frozen(self.state_dict())

    def load_saved(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies in what `saved` returned; raises KeyError if the names differ."""
        own = self.saved()
        wrong = sorted(own.keys() ^ tensors.keys())
        if wrong:
            raise KeyError(f"{wrong[0]} is only in the net or only in what is loaded")
        for name, tensor in own.items():
            fill(tensor, tensors, name)

    def shared(self) -> dict[str, Tensor]:
        """Returns the tensors that rank 0 broadcasts: all that are saved, and other buffers.

        Tables that are split over ranks are not among them.
        """
        split = {f"{name}.weights" for name, table in self.tables().items() if table.split}
        tensors = self.saved() | self._without_frozen(dict(self.named_buffers()))
        return {name: tensor for name, tensor in tensors.items() if name not in split}

    def _without_frozen(self, named: Mapping[str, T]) -> dict[str, T]:
        prefixes = tuple(f"{name}." for name in self.frozen())
        return {name: value for name, value in named.items() if not name.startswith(prefixes)}
