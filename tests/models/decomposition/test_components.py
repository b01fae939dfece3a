"""Components of a net: masks, passes, losses against a plain writing-down of the paper's
formulas.
"""

from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from torch.testing import assert_close

from contract import Context, Noise
from models.decomposition.components import Mask
from models.decomposition.decompose import Decompose, Losses
from models.decomposition.masking import Masks, masked_outputs
from models.decomposition.toy import TMS
from tests.ranks import ROOT, words
from tests.steps import trainer_on
from utils.errors import ConfigError
from utils.ranks.distributed import Dist

LOSS: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/arch/components.yaml").loss)
LOSS |= {"minimality": 0.1, "warmup_steps": 0}
del LOSS["_target_"]
COMMON = words("""
    arch=components optim=adamw arch.C=6 arch.forward_dtype=float64 arch.loss.warmup_steps=5
    max_steps=4
""")
TOY = [*COMMON, *words("data=features data.probability=0.3 global_batch_size=64")]
TEXT = COMMON + words("""
    data=tokens data.seq_len=16 data.embedded.mebibytes=1 data.max_new_tokens=0 data.val_tokens=500
    global_batch_size=8
""")


def objective_on(
    target: Path, folder: Path, *arguments: str
) -> tuple[Decompose, dict[str, Tensor], Context]:
    """As a run has it before its first step, with weights at random, and what that step would
    see.
    """
    line = [*(TEXT if "gpt" in str(target) else TOY), f"arch.target={target}", *arguments]
    trainer = trainer_on(Dist(), folder / "run", *line)
    objective: Any = trainer.objective
    torch.manual_seed(1)
    for parameter in objective.model.gates.parameters():
        torch.nn.init.normal_(parameter)
    batch = {name: torch.tensor(array) for name, array in trainer.source.train_batch(0, 0).items()}
    return objective, batch, Context(0.0, Noise(0, 0, [0]))


def changed(objective: Decompose, **keys: Any) -> Decompose:
    """Another objective on the same net."""
    return Decompose(objective.model, Losses(**{**LOSS, **keys})).double()


def with_gradients(
    objective: Decompose, batch: Mapping[str, Tensor], ctx: Context
) -> tuple[Tensor, dict[str, Tensor]]:
    objective.zero_grad()
    loss = objective(dict(batch), None, ctx).loss
    loss.backward()
    named = objective.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


class ByHand:
    """The toy model and its components without any of what makes them fast: every matrix by itself.
    A mask is what components are multiplied by, and what they leave of the matrix.
    """

    def __init__(self, objective: Decompose, batch: Mapping[str, Tensor]) -> None:
        self.model, net = objective.model, objective.model.target.net
        assert isinstance(net, TMS)
        self.x, self.W, self.b = batch["inputs"].double(), net.linear1.weight.t(), net.linear2.bias
        (self.V, self.U), (V2, _) = self.model.factors(0), self.model.factors(1)
        assert V2.data_ptr() == self.U.data_ptr(), "tied as the target is"
        self.said = torch.relu(self.x @ self.W @ self.W.t() + self.b)
        second = self.x @ self.W @ self.U.t()
        self.raw = [self.gate(self.x @ self.V, slice(0, 6)), self.gate(second, slice(6, 12))]

    def gate(self, inner: Tensor, columns: slice) -> Tensor:
        g = self.model.gates
        act = F.gelu(inner[:, :, None] * g.inward_KH[columns] + g.inward_bias_KH[columns])
        return (act * g.outward_KH[columns]).sum(-1) + g.outward_bias_K[columns]

    def errors(self, first: Any, second: Any) -> Tensor:
        """The error of each row under masks of the two matrices; None: as they are."""
        factors = (self.W, self.V, self.U), (self.W.t(), self.U.t(), self.V.t())
        hidden = self.x
        for (W, V, U), mask in zip(factors, (first, second), strict=True):
            if mask is None:
                hidden = hidden @ W
            else:
                m, rest = mask
                hidden = ((hidden @ V) * m) @ U + rest * (hidden @ (W - V @ U))
        return (torch.relu(hidden + self.b) - self.said).square().mean(-1)


def test_the_loss_is_the_papers(tms_target: Path, tmp_path: Path) -> None:
    objective, batch, ctx = objective_on(tms_target, tmp_path)
    loss, gradients = with_gradients(changed(objective, p=2.0), batch, ctx)
    h = ByHand(objective, batch)
    draws = ctx.noise.uniform("masks", (8, 2, 14)).double()
    masks: Any = [[], []]  # by loss and matrix
    for loss_number, matrix in product(range(2), range(2)):
        g, drawn = h.raw[matrix].clamp(0, 1), draws[:, loss_number]
        m = g + (1 - g) * drawn[:, 6 * matrix : 6 * matrix + 6]
        masks[loss_number].append((m, drawn[:, 12 + matrix, None]))
    stochastic = h.errors(*masks[0]).sum()
    layerwise = (h.errors(masks[1][0], None) + h.errors(None, masks[1][1])).sum() / 2
    raw = torch.cat(h.raw, 1)
    upper = torch.where(raw > 1, 1 + 0.01 * (raw - 1), raw.clamp(0, 1))
    faithfulness = (h.W - h.V @ h.U).square().mean()
    expected = stochastic + layerwise + 8 * faithfulness + 0.1 * (upper + 1e-12).square().sum()
    assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    # masks let gradients through as the lower sigmoid does: compare where no gate is closed or wide
    # open
    objective.zero_grad()
    expected.backward()
    inside = ((raw > 0) & (raw < 1)).all(0)
    assert inside.any()
    name = "model.gates.outward_bias_K"
    wanted = objective.get_parameter(name).grad
    assert_close(gradients[name][inside], wanted[inside], rtol=1e-9, atol=1e-12)


def test_passes_at_once_are_passes_one_by_one(tms_target: Path, tmp_path: Path) -> None:
    objective, batch, _ = objective_on(tms_target, tmp_path)
    model, x = objective.model, batch["inputs"].double()
    together, alone = (
        Masks(torch.rand(8, passes, 12).double(), torch.rand(8, passes, 2).double())
        for passes in (3, 1)
    )

    def one(masks: Masks, q: int, matrices: list[int]) -> Tensor:
        assert masks.rest is not None
        instead = {}
        for n in matrices:
            mask = Mask(masks.components[:, q, model.columns(n)], masks.rest[:, q, n : n + 1])
            instead[n] = partial(model.multiply, n, mask=mask)
        return model.run_with(x, instead)

    expected = [one(together, q, [0, 1]) for q in range(3)]
    expected += [one(alone, 0, [n]) for n in range(2)]
    (found,) = masked_outputs(model, x, None, together, alone)
    assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("losses", [{}, {"subset": 1.0, "p": 2.0}])
def test_empty_examples_count_though_only_one_is_computed(
    losses: dict, tms_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, batch, ctx = objective_on(tms_target, tmp_path)
    objective = changed(objective, **losses)
    batch["inputs"][[1, 4, 6]] = 0
    taken, repeats = objective._rows_to_compute(objective.model.probe(batch["inputs"].double())[1])
    assert taken is not None
    assert repeats is not None
    empty = int((batch["inputs"] == 0).all(1).sum())
    assert empty >= 3
    assert (len(taken), repeats[-1]) == (8 - empty + 1, empty)
    few = with_gradients(objective, batch, ctx)
    metrics = objective(batch, None, ctx).metrics
    monkeypatch.setattr(Decompose, "_rows_to_compute", lambda self, inputs: (None, None))
    all_of_them = with_gradients(objective, batch, ctx)
    assert_close(few, all_of_them, rtol=1e-9, atol=1e-12)
    assert_close(dict(metrics), dict(objective(batch, None, ctx).metrics), check_dtype=False)


def test_masks_of_a_language_model(gpt_target: Path, tmp_path: Path) -> None:
    """Nothing but each matrix itself is the net; nothing but all components is the net with V U in
    their places.
    """
    objective, batch, _ = objective_on(
        gpt_target, tmp_path, r"arch.modules=['layers\..*', embed_tokens]", "arch.C=20"
    )
    model, tokens = objective.model, batch["inputs"]
    assert objective.error_name == "kl"
    assert len(model.names) == 9
    said = model.probe(tokens)[0]
    assert_close(said, model.outputs(tokens))
    ones = torch.ones(1, 16, 20, dtype=torch.float64)
    as_target = {n: partial(model.multiply, n, mask=Mask(ones, ones[..., :1])) for n in range(9)}
    assert_close(model.run_with(tokens, as_target), said)
    products = {n: partial(model.multiply, n, mask=Mask(ones)) for n in range(9)}
    without = model.run_with(tokens, products)
    for number, seam in enumerate(model.seams.values()):
        V, U = model.factors(number)
        if seam.indexed:
            seam.module.embedding_weight.data = V @ U
        else:
            seam.module.weight.data = (V @ U).t()
    assert_close(model.outputs(tokens), without)
    assert objective._error(said, said).abs().max() < 1e-9
    logp, logq = said.log_softmax(-1), without.log_softmax(-1)
    assert_close(objective._error(without, said), (logp.exp() * (logp - logq)).sum(-1))


def test_evaluations_of_a_language_model(gpt_target: Path, tmp_path: Path) -> None:
    objective, batch, _ = objective_on(gpt_target, tmp_path, r"arch.modules=['layers\..*']")
    batch["labels"][0, 5:] = -100
    prediction = objective.predict(batch)
    said = objective.model.outputs(batch["inputs"])
    expected = F.cross_entropy(said.flatten(0, 1), batch["labels"].long().flatten())
    sums = prediction.metrics.items()
    mean = {name: float((total / count).detach()) for name, (total, count) in sums}
    assert mean["ce_target"] == pytest.approx(float(expected))
    assert mean["ce_rounded"] != mean["ce_masked"]
    counted = batch["labels"] != -100
    rounded = Masks(prediction.outputs["live"].double().unsqueeze(1), None)
    ((out,),) = masked_outputs(objective.model, batch["inputs"], None, rounded)
    error = objective._error(out, said)
    assert mean["kl_rounded"] == pytest.approx(error[counted].mean().item())
    live = prediction.outputs["live"][counted].sum(-1).double().mean()
    assert mean["l0"] == pytest.approx(float(live))
    assert sum(mean[f"l0/{name}"] for name in objective.model.names) == pytest.approx(mean["l0"])


def test_the_end_of_a_text_may_be_all_that_counts(gpt_target: Path, tmp_path: Path) -> None:
    objective, batch, ctx = objective_on(gpt_target, tmp_path)
    model, x = objective.model, batch["inputs"]
    alone = {"layerwise": 0.0, "faithfulness": 0.0, "minimality": 0.0}
    last = changed(objective, **alone, positions="last")
    out = last(batch, None, ctx)
    target_out, inputs = model.probe(x, batch.get("documents"))
    gates = model.gate_logits(inputs).clamp(0, 1)
    width = model.total + len(model.names)
    draws = ctx.noise.uniform("masks", (len(x), 1, 16, width)).double()
    masks = Masks.between(gates, draws)
    ((out_BLV,),) = masked_outputs(model, x, batch.get("documents"), masks)
    wanted, found = (each[:, -1].log_softmax(-1) for each in (target_out, out_BLV))
    kl_B = (wanted.exp() * (wanted - found)).sum(-1)
    assert_close(out.loss / out.weight, kl_B.mean())
    everywhere = changed(objective, **alone)(batch, None, ctx)
    assert abs(everywhere.loss - out.loss) > 1e-6


REFUSED = [
    ("[linear3]", r"arch\.modules=linear3: matches no matrix; there are linear1, linear2"),
    ("['(']", "not a regular expression"),
    ("[]", r"arch\.modules=\[\]: chooses no matrix"),
    (".* arch.loss.stochastic=0 arch.loss.layerwise=0", "stochastic, layerwise, subset are 0"),
    (".* arch.loss.positions=last", "last: compares outputs at the end of texts, and this net"),
    (".* arch.loss.known.identity=[x]", r"x: matches none of the chosen matrices, linear1"),
    (".* data.num_features=6", r"linear1\.weight is \(2, 5\) of floats there and \(2, 6\)"),
    (".* arch.target=null", "must name a net; give the folder of a run"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_impossible_keys_are_refused_in_one_line(
    change: str, message: str, tms_target: Path, tmp_path: Path
) -> None:
    modules, *more = change.replace(".*", "['.*']").split()
    with pytest.raises(ConfigError, match=message) as caught:
        objective_on(tms_target, tmp_path, f"arch.modules={modules}", *more)
    assert "\n" not in str(caught.value)


def test_gates_that_read_inputs_refuse_embeddings(gpt_target: Path, tmp_path: Path) -> None:
    arguments = "arch.modules=[embed_tokens]", "arch.gates.kind=shared_mlp"
    with pytest.raises(ConfigError, match="shared_mlp: reads the input of matrices, and embed_tok"):
        objective_on(gpt_target, tmp_path, *arguments)
