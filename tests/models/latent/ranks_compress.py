"""Checks that a step and an evaluation find all tensors on the right device, with frozen models on
two; no GPU is needed.

Fake tensors know their device and refuse to be combined with others. Their devices are of a kind
that PyTorch reserves for extensions; it is set up for a whole process, so this is one of its own:
`python -m tests.models.latent.ranks_compress MODEL MODEL`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from models.frozen import Frozen
from models.latent import compress, prefix
from tests.models.latent.test_compress import CONTEXT, batch_of, make, source_of
from utils.ranks.distributed import Dist

LOSSES = {"answer": 1.0, "gist": 1.0}


def main(folders: list[str]) -> None:
    _setup_privateuseone_for_python_backend("card")
    source = source_of(folders)
    rows = batch_of(source)
    # short: it takes long
    held_out = {
        name: tensor.squeeze(1)[:, -2:] if tensor.ndim == 3 else tensor
        for name, tensor in rows.items()
    }
    # PyTorch's takes no fakes
    Frozen.to = lambda part, where: changed(part, lambda tensor: tensor.to(where))
    objective, mode = make(source, folders, **LOSSES), FakeTensorMode()
    there = [torch.device("card", index) for index in range(2)]
    # fakes have no values, so nobody can read them as text
    compress.texts_of = lambda context: [b"cupboardab47"] * len(context)
    prefix.devices_of = lambda dist, count: there
    changed(objective, mode.from_tensor)
    batches = [
        {name: mode.from_tensor(tensor) for name, tensor in each.items()}
        for each in (rows, held_out)
    ]
    with mode, torch.no_grad():
        changed(objective, lambda tensor: tensor.to(there[0]))
        batch, asked = (
            {name: tensor.to(there[0]) for name, tensor in each.items()} for each in batches
        )
        objective.model.spread_out(Dist())
        print(*(next(part.parameters()).device for part in objective.model.frozen), end=": ")
        found = {objective(batch, None, CONTEXT).loss.device}
        found |= {
            output.device
            for output in objective.predict({**asked, "other": asked["context"]}).outputs.values()
        }
        print(*found, end="; ")
        # now inputs are sent to the other model's device
        objective.model.device_of = lambda number: there[0 if number else 1]
        try:
            objective(batch, None, CONTEXT)
            print("met")
        except RuntimeError as error:
            print("refused" if "device" in str(error) else error)


def changed(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """All its tensors."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    made = change(tensor.data)
                    tensors[name] = (
                        nn.Parameter(made, requires_grad=False)
                        if isinstance(tensor, nn.Parameter)
                        else made
                    )


if __name__ == "__main__":
    main(sys.argv[1:])
