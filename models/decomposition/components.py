"""A frozen net whose matrices are each a sum of rank-one components, of which few are needed for an
input.

Stochastic Parameter Decomposition: Bushnaq, Braun, Sharkey 2025 (arXiv 2506.20790).
"""

# B batch, P passes, N rows, C components of a matrix, K of all matrices, S matrices

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.decomposition.gates import make_gates
from models.decomposition.seams import Seam, replaced, seams_of, ties
from models.decomposition.toy import Toy
from models.layers import parse_dtype, widen
from models.sizes import check_memory, check_sizes
from models.targets import GPT, load
from utils.errors import ConfigError
from utils.spec import Spec

MOST_COMPONENTS = 1_000_000  # of a matrix


class Mask(NamedTuple):
    """How much of a matrix an input gets: of each of its components, and of what they do not add up
    to (none: nothing).
    """

    components: Tensor
    rest: Tensor | None = None


class Part(nn.Module):
    """V U, in place of a matrix W [inputs, outputs]; component c is V[:, c] U[c]."""

    def __init__(self, width_in: int, width_out: int, components: int) -> None:
        super().__init__()
        self.V = nn.Parameter(torch.randn(width_in, components) * width_in**-0.5)
        self.U = nn.Parameter(torch.randn(components, width_out) * components**-0.5)


class Components(nn.Module):
    """The target and its parts. A part that is tied to another has no weights of its own."""

    def __init__(
        self,
        spec: Spec,
        target: str | None,
        modules: Sequence[str],
        C: int,
        gates: Mapping[str, Any],
        forward_dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.dtype = parse_dtype(forward_dtype)
        self.target = load(
            target,
            spec,
            forward_dtype,
            (Toy, GPT),
            "arch=tms, resid_mlp and gpt can be taken apart",
        )
        self.decode = spec.decode
        self.seams = {seam.name: seam for seam in chosen(modules, seams_of(self.target.net))}
        self.names, seams = list(self.seams), list(self.seams.values())
        self.ties = ties(seams)
        shapes = [seam.matrix.shape for seam in seams]
        own = {
            name: shape
            for number, (name, shape) in enumerate(zip(self.names, shapes, strict=True))
            if number not in self.ties
        }
        check_sizes({"C": MOST_COMPONENTS}, {"C": C})
        check_memory(C * sum(rows + columns for rows, columns in own.values()))
        self.parts = nn.ModuleDict(
            {name.replace(".", "-"): Part(shape[0], shape[1], C) for name, shape in own.items()}
        )
        indexed = [seam.name for seam in seams if seam.indexed]
        self.C = C
        self.gates = make_gates(
            gates["kind"], [C] * len(seams), [shape[0] for shape in shapes], gates["width"], indexed
        )

    @property
    def predicts_tokens(self) -> bool:
        """Else it is a toy model: examples without positions, and no answer but numbers."""
        return isinstance(self.target.net, GPT)

    def factors(self, number: int) -> tuple[Tensor, Tensor]:
        """V and U of a matrix."""
        first, turned = self.ties.get(number, (number, False))
        part: Any = self.parts[self.names[first].replace(".", "-")]
        return (part.U.t(), part.V.t()) if turned else (part.V, part.U)

    def columns(self, number: int) -> slice:
        """Returns the columns of a matrix's components among all."""
        return slice(number * self.C, (number + 1) * self.C)

    def outputs(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Returns the target's outputs; logits where it predicts tokens."""
        net: Any = self.target.net
        return net.logits(net(x, documents)) if self.predicts_tokens else net(x)

    def watched(self, x: Tensor, documents: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Returns the target's outputs and the inputs of each matrix."""
        seen: dict[str, Tensor] = {}

        def watching(number: int, given: Tensor) -> Tensor:
            seen[self.names[number]] = given
            return self.as_it_is(number, given)

        with torch.no_grad():
            out = self.masked(
                x,
                {number: partial(watching, number) for number in range(len(self.names))},
                documents,
            )
        return out, [seen[name] for name in self.names]

    def gate(self, inputs: Sequence[Tensor]) -> Tensor:
        """The gate of each component [..., K] before clamping to 0…1; float32 or wider."""
        read = (
            [self._inner(number, x) for number, x in enumerate(inputs)]
            if self.gates.reads_inner
            else inputs
        )
        return self.gates([widen(x).flatten(0, -2) for x in read]).unflatten(0, read[0].shape[:-1])

    def masked(
        self,
        x: Tensor,
        masks: Mapping[int, Callable[[Tensor], Tensor]],
        documents: Tensor | None = None,
    ) -> Tensor:
        """Returns the target's outputs with these matrices replaced."""
        with replaced(
            self.seams, {self.names[number]: compute for number, compute in masks.items()}
        ):
            return self.outputs(x, documents)

    def summed(self, number: int, x: Tensor, mask: Mask) -> Tensor:
        """An input times the masked sum of a matrix's components, and times its share of what they
        do not add up to.
        """
        seam, U = self.seams[self.names[number]], self.factors(number)[1].to(self.dtype)
        inner, m = self._inner(number, x), mask.components.to(self.dtype)
        if mask.rest is None:
            y = (inner * m) @ U
        elif self.dtype.itemsize < 4:  # where x W - x V U would be rounding alone
            rest = seam.times(x, self._difference(number).to(self.dtype))
            y = torch.addcmul((inner * m) @ U, mask.rest.to(self.dtype), rest)
        else:
            share = mask.rest.to(self.dtype)
            y = torch.addcmul(
                (inner * (m - share)) @ U, share, seam.times(x, seam.matrix.to(self.dtype))
            )
        return y if seam.bias is None else y + seam.bias.to(self.dtype)

    def as_it_is(self, number: int, x: Tensor) -> Tensor:
        """Applies the target's own matrix to an input."""
        module = self.seams[self.names[number]].module
        return type(module).forward(module, x)

    def _inner(self, number: int, x: Tensor) -> Tensor:
        """How much of each component an input has."""
        return self.seams[self.names[number]].times(x, self.factors(number)[0].to(self.dtype))

    def differences(self) -> list[Tensor]:
        """W - V U of each matrix that has weights of its own."""
        return [
            self._difference(number) for number in range(len(self.names)) if number not in self.ties
        ]

    def _difference(self, number: int) -> Tensor:
        return widen(self.seams[self.names[number]].matrix) - torch.mm(*self.factors(number))


def chosen(patterns: Sequence[str], seams: Mapping[str, Seam]) -> list[Seam]:
    """Matrices whose whole names match, in the net's order; every pattern must match some."""
    matched = set()
    for pattern in patterns:
        try:
            matching = [name for name in seams if re.fullmatch(pattern, name)]
        except re.error as error:
            raise ConfigError(
                f"arch.modules={pattern}: not a regular expression ({error}); correct it"
            ) from None
        if not matching:
            raise ConfigError(
                f"arch.modules={pattern}: matches no matrix; there are {', '.join(list(seams)[:8])}"
            )
        matched.update(matching)
    if not matched:
        raise ConfigError("arch.modules=[]: chooses no matrix; for example arch.modules=['.*']")
    return [seam for name, seam in seams.items() if name in matched]
