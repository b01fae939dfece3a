"""A frozen net whose matrices are sums of rank-one components. Each input should need few of them.

Stochastic Parameter Decomposition: Bushnaq, Braun, Sharkey 2025 (arXiv 2506.20790).
"""

# B batch, P passes, N rows, C components of a matrix, K of all matrices, S matrices

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from contract import Spec
from models.decomposition.gates import make_gates
from models.decomposition.induction import InductionHeads
from models.decomposition.seams import Compute, Seam, replaced, seams_of, ties
from models.decomposition.toy import Toy
from models.language.targets import GPT, GPT2, load_frozen
from models.layers import (
    ForwardDtype,
    check_memory,
    parse_dtype,
    widen,
)
from utils.command.marks import A_RUN, MAY_CHANGE, Keys
from utils.errors import ConfigError


class Mask(NamedTuple):
    """The masks of one matrix: of its components, and of the rest, W - V U. If `rest` is None, the
    rest is left out.
    """

    components: Tensor
    rest: Tensor | None = None


class Part(nn.Module):
    """V U, in place of a matrix W [inputs, outputs]; component c is V[:, c] U[c]."""

    def __init__(self, width_in: int, width_out: int, components: int) -> None:
        super().__init__()
        self.V = nn.Parameter(torch.randn(width_in, components) * width_in**-0.5)
        self.U = nn.Parameter(torch.randn(components, width_out) * components**-0.5)


class GatesKeys(Keys):
    """Gates."""

    kind: Literal["mlp", "vector_mlp", "shared_mlp"]
    """mlp: one for each component, which reads its activation; vector_mlp: one for each component,
    which reads the whole input; shared_mlp: one for all components of a matrix
    """
    width: PositiveInt
    """Hidden units of each MLP"""


class ComponentsKeys(Keys):
    """The keys under `arch`."""

    target: Annotated[str | None, A_RUN, MAY_CHANGE]
    """The net that is decomposed"""
    modules: list[str]
    """Patterns of names of matrices; each must match one. q_proj, k_proj, v_proj, gate_proj and
    up_proj are parts of fused matrices; a pattern that matches the fused matrix chooses it whole
    """
    C: PositiveInt | dict[str, PositiveInt]
    """Components of each matrix"""
    gates: GatesKeys
    forward_dtype: ForwardDtype
    init: Literal["random", "inputs"]
    """The directions with which components begin: drawn at random, or taken from the inputs of
    their matrix in the first step
    """


class Components(nn.Module):
    """A target net, and a `Part` for each chosen matrix. A matrix that shares its weights with an
    earlier one (see `ties`) shares its part, too.
    """

    def __init__(self, spec: Spec, keys: ComponentsKeys) -> None:
        super().__init__()
        self.dtype = parse_dtype(keys.forward_dtype)
        self.init = keys.init  # for the objective, which knows the data
        # the net to explain, which stays as it is
        self.target = load_frozen(
            keys.target,
            spec,
            keys.forward_dtype,
            (Toy, GPT, GPT2, InductionHeads),
            "arch=tms, resid_mlp, induction and gpt, and GPT-2, can be decomposed",
        )
        tokenizer = getattr(spec, "tokenizer", None)
        self.decode = None if tokenizer is None else tokenizer.decode
        chosen = choose_seams(keys.modules, seams_of(self.target.net))
        self.seams = {seam.name: seam for seam in chosen}
        self.names, seams = list(self.seams), list(self.seams.values())
        if keys.init == "inputs" and (indexed := [seam.name for seam in seams if seam.indexed]):
            raise ConfigError(
                f"arch.init=inputs: {indexed[0]} is an embedding, which has no input to begin at;"
                " leave it out of arch.modules, or use init=random"
            )
        # matrices with the same weights share their components
        self.ties = ties(seams)
        self.counts = components_of(keys.C, self.names)
        for number, (first, _) in self.ties.items():
            if self.counts[number] != self.counts[first]:
                raise ConfigError(
                    f"arch.C={keys.C}: gives {self.names[first]} {self.counts[first]} components"
                    f" and {self.names[number]} {self.counts[number]}, but these two share their"
                    " weights; give both the same number"
                )
        # all sizes first, so that a net too large for memory is refused before any part of it is
        # made
        sizes: dict[str, tuple[int, int, int]] = {}
        for number, (name, seam) in enumerate(self.seams.items()):
            if number not in self.ties:
                rows, columns = seam.matrix.shape
                sizes[_part_name(name)] = (rows, columns, self.counts[number])
        check_memory(sum(count * (rows + columns) for rows, columns, count in sizes.values()))
        self.parts = nn.ModuleDict({name: Part(*size) for name, size in sizes.items()})
        # gates and masks of all matrices lie side by side, in the matrices' order
        self.offsets = list(accumulate(self.counts, initial=0))
        self.gates = make_gates(keys.gates.kind, keys.gates.width, self.counts, seams)

    @property
    def predicts_tokens(self) -> bool:
        """True for a language model. A toy model's examples have no positions, and its outputs are
        numbers.
        """
        return isinstance(self.target.net, GPT | GPT2 | InductionHeads)

    def factors(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns V [inputs, C] and U [C, outputs] of a matrix."""
        first, transposed = self.ties.get(number, (number, False))
        part: Any = self.parts[_part_name(self.names[first])]
        return (part.U.t(), part.V.t()) if transposed else (part.V, part.U)

    def columns(self, number: int) -> slice:
        """Returns the indices of a matrix's components among those of all matrices."""
        return slice(self.offsets[number], self.offsets[number + 1])

    @property
    def total(self) -> int:
        """The number of components of all matrices."""
        return self.offsets[-1]

    def for_each_component(self, by_matrix: Tensor) -> Tensor:
        """Expands a value for each matrix [..., S] to one for each component [..., K]."""
        # the usual case, one number for all matrices, needs no tensor of counts
        if len(set(self.counts)) == 1:
            return by_matrix.repeat_interleave(self.counts[0], -1)
        counts = torch.tensor(self.counts, device=by_matrix.device)
        return by_matrix.repeat_interleave(counts, -1, output_size=self.total)

    def outputs(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Returns the target's outputs: logits if it predicts tokens."""
        # language models return hidden states, and their logits are a second call
        net: Any = self.target.net
        return net.logits(net(x, documents)) if self.predicts_tokens else net(x)

    def probe(self, x: Tensor, documents: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Returns the target's outputs, and the input of each matrix."""
        seen: dict[int, Tensor] = {}

        def watch(number: int, matrix_input: Tensor) -> Tensor:
            seen[number] = matrix_input
            return self.original(number, matrix_input)

        # the target computes with its own matrices, and each notes its input in passing
        matrices = range(len(self.names))
        instead = {number: partial(watch, number) for number in matrices}
        with torch.no_grad():
            out = self.run_with(x, instead, documents)
        return out, [seen[number] for number in matrices]

    def gate_logits(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns each component's gate [..., K] before clamping, in float32 or wider."""
        # gates read either activations, one number for each component, or whole inputs
        read = list(inputs)
        if self.gates.reads_activations:
            read = [self.activations(number, x) for number, x in enumerate(inputs)]
        return self.gates([widen(x).flatten(0, -2) for x in read]).unflatten(0, read[0].shape[:-1])

    def run_with(
        self,
        x: Tensor,
        instead: Mapping[int, Compute],
        documents: Tensor | None = None,
    ) -> Tensor:
        """Returns the target's outputs, with other computations in place of these matrices."""
        by_name = {self.names[number]: compute for number, compute in instead.items()}
        with replaced(self.seams, by_name):
            return self.outputs(x, documents)

    def multiply(self, number: int, x: Tensor, mask: Mask) -> Tensor:
        """Multiplies an input by the masked sum of a matrix's components plus its masked rest, and
        adds the bias.
        """
        seam, U = self.seams[self.names[number]], self.factors(number)[1].to(self.dtype)
        activations, m = self.activations(number, x), mask.components.to(self.dtype)
        if mask.rest is None:
            y = (activations * m) @ U
        elif self.dtype.itemsize < 4:  # in half precision x W - x V U would be little but rounding
            rest = seam.times(x, self._remainder(number).to(self.dtype))
            y = torch.addcmul((activations * m) @ U, mask.rest.to(self.dtype), rest)
        else:  # m · x V U + r · (x W - x V U), without the remainder as a matrix
            r = mask.rest.to(self.dtype)
            whole = seam.times(x, seam.matrix.to(self.dtype))
            y = torch.addcmul((activations * (m - r)) @ U, r, whole)
        return y if seam.bias is None else y + seam.bias.to(self.dtype)

    def original(self, number: int, x: Tensor) -> Tensor:
        """Multiplies an input by the target's own matrix."""
        return self.seams[self.names[number]].original(x)

    def activations(self, number: int, x: Tensor) -> Tensor:
        """Returns the activation of each component: an input times V."""
        return self.seams[self.names[number]].times(x, self.factors(number)[0].to(self.dtype))

    def remainders(self) -> list[Tensor]:
        """Returns W - V U of each matrix that does not share its weights with an earlier one."""
        return [
            self._remainder(number) for number in range(len(self.names)) if number not in self.ties
        ]

    def _remainder(self, number: int) -> Tensor:
        return widen(self.seams[self.names[number]].matrix) - torch.mm(*self.factors(number))


def _part_name(name: str) -> str:
    """Returns the name of a matrix's part; a module's own name has no dots."""
    return name.replace(".", "-")


def choose_seams(patterns: Sequence[str], seams: Mapping[str, Seam]) -> list[Seam]:
    """Returns the matrices whose whole names match a pattern, in the net's order.

    Every pattern must match some. One that matches a fused matrix chooses it, and not its parts.
    """
    # which pattern chose each matrix, for the error messages below
    pattern_of: dict[str, str] = {}  # by the name of a chosen matrix
    for pattern in patterns:
        matching = matches("arch.modules", pattern, seams)
        if not matching:
            listed = ", ".join(list(seams)[:8])
            raise ConfigError(f"arch.modules={pattern}: matches no matrix; there are {listed}")
        # `.*` matches a fused matrix and its parts, of which only the whole is meant
        whole = {seams[name].module for name in matching if seams[name].part is None}
        for name in matching:
            if seams[name].part is None or seams[name].module not in whole:
                pattern_of[name] = pattern
    if not pattern_of:
        raise ConfigError("arch.modules=[]: chooses no matrix; for example arch.modules=['.*']")
    # one pattern may choose a fused matrix and another one its part: it is unclear which is meant
    seams = {name: seam for name, seam in seams.items() if name in pattern_of}
    fused = {seam.module: name for name, seam in seams.items() if seam.part is None}
    for name, seam in seams.items():
        if seam.part is not None and seam.module in fused:
            whole_name = fused[seam.module]
            raise ConfigError(
                f"arch.modules={pattern_of[name]}: chooses {name}, a part of {whole_name}, which"
                f" {pattern_of[whole_name]} chooses; name one of the two"
            )
    return list(seams.values())


def components_of(C: int | Mapping[str, int], names: Sequence[str]) -> list[int]:
    """Returns the number of components of each matrix: `C`, or that of the first pattern that
    matches its name.
    """
    if isinstance(C, int):
        return [C] * len(names)
    # earlier patterns come before later ones, so that .* can close the list
    counts: dict[str, int] = {}
    for pattern, count in C.items():
        matching = matches("arch.C", pattern, names)
        if not matching:
            raise ConfigError(
                f"arch.C={pattern}: matches none of the chosen matrices, {', '.join(names[:8])}"
            )
        counts = dict.fromkeys(matching, count) | counts
    if missing := [name for name in names if name not in counts]:
        raise ConfigError(
            f"arch.C={dict(C)}: has no pattern for {missing[0]}; add .* as the last one"
        )
    return [counts[name] for name in names]


def matches(key: str, pattern: Any, names: Iterable[str]) -> list[str]:
    """Returns the names that a regular expression matches as a whole."""
    try:
        return [name for name in names if re.fullmatch(str(pattern), name)]
    except re.error as error:
        raise ConfigError(
            f"{key}={pattern}: not a regular expression ({error}); correct it"
        ) from None
