"""A language model edited by hand: the components of one byte are taken out of its matrices.

python -m tests.bench.bench_edit RUN [BYTE …]

RUN is a run of experiment=decompose_lm. The components of a byte are those that are needed there in
more than half of the cases where they are needed at all, in one half of the held-out text; what the
edit changes is measured in the other. Beside it, as many other components are taken out that are
needed about as often.
"""

import sys
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.decomposition.components import Components, Mask
from models.objective import make_objective
from tests.making import make_source
from utils.checkpoint import reader
from utils.errors import exit_status

BYTES = ["_", "(", "=", "q"]


@torch.no_grad()
def main() -> None:
    if len(sys.argv) < 2:
        print("skipped: give RUN, a run of experiment=decompose_lm")
        return
    run, *chosen = sys.argv[1:]
    config = reader.config_in(run)
    shape = {name: config["data"][name] for name in ("seq_len", "val_tokens", "max_new_tokens")}
    source = make_source("tokens", global_batch_size=8, max_steps=1, epochs=None, **shape)
    held_out = source.eval_sets()["val"]
    inputs = torch.from_numpy(held_out.read(np.arange(len(held_out)))["inputs"]).long()
    objective = make_objective(config["arch"], 0, source.spec)
    stored = reader.open_checkpoint(run, ["model"]).groups["model"]
    # a checkpoint holds no target: the objective has read it from its own run
    objective.load_state_dict({name: each.read() for name, each in stored.items()}, strict=False)
    net = objective.model
    assert isinstance(net, Components)

    half = len(inputs) // 2
    gates = net.gate_logits(net.probe(inputs[:half])[1])
    needed = (gates > config["arch"]["loss"]["live_above"]).flatten(0, 1)
    uses, read, text = needed.sum(0), inputs[:half].flatten(), inputs[half:]
    whole = outputs(net, text, torch.ones(net.total))
    print("| byte | components | KL there | KL elsewhere | as many others: there | elsewhere |")
    print("|---|---|---|---|---|---|")
    for byte in chosen or BYTES:
        own = 2 * needed[read == ord(byte)].sum(0) > uses
        others = (~own).nonzero().flatten()
        alike = (uses[others] - uses[own].float().mean()).abs().argsort()[: int(own.sum())]
        cells = [f"`{byte}`", f"{int(own.sum())}"]
        for gone in (own.nonzero().flatten(), others[alike]):
            edited = outputs(net, text, torch.ones(net.total).index_fill(0, gone, 0))
            error = F.kl_div(edited, whole, reduction="none", log_target=True).sum(-1)
            cells += [
                f"{error[there].mean():.4f}" for there in (text == ord(byte), text != ord(byte))
            ]
        print(f"| {' | '.join(cells)} |", flush=True)


def outputs(net: Components, text: Tensor, kept: Tensor) -> Tensor:
    """Returns the logarithms of probabilities with these components, and with the rest of each
    matrix.
    """

    def multiply(number: int, given: Tensor) -> Tensor:
        return net.multiply(number, given, Mask(kept[net.columns(number)], torch.ones(1)))

    matrices = {number: partial(multiply, number) for number in range(len(net.names))}
    return F.log_softmax(net.run_with(text, matrices), -1)


if __name__ == "__main__":
    sys.exit(exit_status(main))
