"""Latents in place of a text: every loss against what it stands for, what trains, and what
evaluations compare with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.latent.language_models import open_model
from data.stream import to_tensors
from models.latent.compress import Compress
from models.latent.generation import NO_PREFIX, answer_logits, generate
from models.latent.prefix import BEGIN, Encoder, bytes_of, rounded
from models.objective import Context
from tests.making import make_objective, make_source
from tests.ranks import check_ended_well, run_module
from utils.errors import ConfigError
from utils.latent import ANSWER_INPUTS, WIRES
from utils.measure.evaluator import Prediction
from utils.noise import Noise
from utils.ranks.distributed import Dist

FORM = {"context": "{context}\\n", "question": "{question}", "answer": "{answer}\\n"}
CONTEXT = Context(0.0, Noise(0, 0, [0]))


@pytest.fixture(scope="module")
def source(reader_folders: list[str]) -> Any:
    return source_of(reader_folders)


def source_of(folders: list[str], global_batch_size: int = 8, at_once: int = 1) -> Any:
    return make_source(
        "qa",
        seed=0,
        shards=2,
        global_batch_size=global_batch_size,
        at_once=at_once,
        epochs=3,
        models=folders,
        context_bytes=48,
        answer_tokens=4,
        form=FORM,
        stories={"train": 20, "test": 6, "facts": 3},
    )


def make(
    source: Any, folders: list[str], latents: int = 4, answer: float = 0.0, **keys: Any
) -> Compress:
    losses = {"answer": answer, "gist": keys.pop("gist", 0.0), "hidden": keys.pop("hidden", 0.0)}
    objective = make_objective(
        "prefix",
        source.spec,
        models=folders,
        latents=latents,
        wire=6,
        encoder={"width": 16, "layers": 1, "heads": 2},
        adapter_width=16,
        spread=2,
        gist_width=16,
        forward_dtype="float64",
        loss=losses,
        **keys,
    )
    objective.prepare(Dist(), source, CONTEXT.noise)
    return objective


def batch_of(source: Any, step: int = 0) -> dict[str, Tensor]:
    return to_tensors([source.train_batch(step, shard) for shard in (0, 1)])


def held_out(
    source: Any, objective: Compress, rows: list[int], padding: int = 0
) -> tuple[dict[str, Tensor], Prediction]:
    examples = source.eval_sets()["test"]
    batch = to_tensors([examples.read(np.array(rows)), examples.padding(padding)])
    with torch.no_grad():
        return batch, objective.predict(batch)


@pytest.mark.parametrize("deep", [False, True])
def test_losses_are_means_over_examples_and_models(
    source: Any, reader_folders: list[str], deep: bool
) -> None:
    batch = batch_of(source)
    objective = make(source, reader_folders, deep=deep, answer=2.0, gist=0.5)
    model = objective.model
    z = model.transmit(model.encode(batch["context"]))
    answer_cost = gist_cost = torch.zeros((), dtype=torch.float64)
    for number in (0, 1):
        answer = batch[f"answer_{number}"].squeeze(1)
        begin = torch.full((8, 1), source.spec.language_models[number].begin_token)
        prompt = torch.cat((begin, batch[f"question_{number}"].squeeze(1)), 1)
        logits = answer_logits(model.net(number), model.adapt(number, z), prompt, answer)
        for row, wanted in zip(logits, answer, strict=True):
            length = int((wanted >= 0).sum())
            answer_cost = answer_cost + F.cross_entropy(row[:length], wanted[:length].long()) / 2
    for row, text in zip(model.gist(z), batch["context"], strict=True):
        gist_cost = gist_cost + F.cross_entropy(row[text >= 0], text[text >= 0].long())
    out = objective(batch, None, CONTEXT)
    torch.testing.assert_close(out.loss, 2 * answer_cost + 0.5 * gist_cost)
    assert (out.weight, out.metrics.keys()) == (8, {"answer", "gist", "exact_match"})
    alone = make(source, reader_folders, deep=deep, gist=1.0)(batch, None, CONTEXT)
    torch.testing.assert_close(alone.loss, gist_cost)
    assert "answer" not in alone.metrics, "what has no coefficient is not computed"


def test_hidden_bytes_neither_reach_the_latents_nor_are_predicted(
    source: Any, reader_folders: list[str]
) -> None:
    """Other bytes in their places change nothing, other bytes elsewhere do; answers are from the
    whole text.
    """
    context, noise = batch_of(source)["context"], Noise(0, 0, [0, 1])
    gone, there = noise.uniform("hidden", context.shape) < 0.3, context >= 0
    assert 0.2 < gone[there].double().mean() < 0.4

    def loss(changed: Tensor, **losses: float) -> float:
        found = make(source, reader_folders, **(losses or {"gist": 1.0, "hidden": 0.3}))
        batch = {**batch_of(source), "context": changed}
        return found(batch, None, Context(0.0, noise)).loss.item()

    model = make(source, reader_folders, gist=1.0, hidden=0.3).model
    z = model.transmit(model.encode(context.masked_fill(gone & there, BEGIN)))
    rows = [
        F.cross_entropy(logits[row >= 0], row[row >= 0].long())
        for logits, row in zip(model.gist(z), context.masked_fill(gone, -1), strict=True)
    ]
    assert loss(context) == pytest.approx(sum(rows).item(), rel=1e-6)
    assert loss(context.masked_fill(gone & there, 120)) == loss(context)
    assert loss(context.masked_fill(~gone & there, 120)) != loss(context)
    assert loss(context, answer=1.0, hidden=0.3, gist=1e-9) == pytest.approx(
        loss(context, answer=1.0), rel=1e-6
    )


def test_questions_answered_together_cost_what_they_cost_alone(reader_folders: list[str]) -> None:
    """Texts with two, two and one question: every loss counts each question once, and what is empty
    not at all.
    """
    apart, together = (
        source_of(reader_folders, global_batch_size=size, at_once=most)
        for size, most in ((60, 1), (40, 2))
    )
    objective = make(apart, reader_folders, answer=1.0, gist=1.0)
    outs = [objective(batch_of(source), None, CONTEXT) for source in (apart, together)]
    assert [int(out.weight) for out in outs] == [60, 60]
    torch.testing.assert_close(outs[1].loss, outs[0].loss)
    for name, (total, _) in outs[0].metrics.items():
        torch.testing.assert_close(outs[1].metrics[name][0], total, msg=name)


def test_frozen_models_get_no_gradient_and_are_not_saved(
    source: Any, reader_folders: list[str]
) -> None:
    objective = make(source, reader_folders, answer=1.0, gist=1.0)
    objective(batch_of(source), None, CONTEXT).loss.backward()
    frozen = {name for name, _ in objective.named_parameters() if ".frozen." in f".{name}"}
    assert frozen
    assert all((p.grad is None) == (name in frozen) for name, p in objective.named_parameters())
    kept = [*objective.saved(), *objective.shared(), *objective.trained()]
    assert not any("frozen" in name for name in kept)
    assert [part["path"] for part in objective.frozen().values()] == reader_folders


def test_only_latents_reach_a_model_and_each_model_is_reached(
    source: Any, reader_folders: list[str]
) -> None:
    """Another text in the model's own tokens changes nothing: of a text it sees what the encoder
    makes of its bytes. Padding changes nothing either.
    """
    objective, batch = make(source, reader_folders, answer=1.0), batch_of(source)
    loss = objective(batch, None, CONTEXT).loss
    for number in (0, 1):
        changed = {**batch, f"context_{number}": batch[f"context_{number}"].roll(1, 0)}
        assert torch.equal(objective(changed, None, CONTEXT).loss, loss)
    other = {**batch, "context": batch["context"].roll(1, 0)}
    assert not torch.equal(objective(other, None, CONTEXT).loss, loss)
    wider = {
        name: rows if name == "context" else F.pad(rows, (0, 3), value=-1)
        for name, rows in batch.items()
    }
    torch.testing.assert_close(objective(wider, None, CONTEXT).loss, loss)
    z, encode = objective.model.encode(batch["context"]), objective.model.encode
    assert (batch["context"][:, 39:] < 0).all()
    torch.testing.assert_close(z, encode(batch["context"][:, :39]))
    torch.testing.assert_close(z.square().mean(-1), torch.ones_like(z[..., 0]), rtol=1e-3, atol=0)


def encoder(layers: int, mlp: bool, nearness: float) -> Encoder:
    torch.manual_seed(0)
    return Encoder(8, 2, 6, 16, layers, 2, mlp, nearness, torch.float64).double()


@pytest.mark.parametrize(
    ("layers", "mlp", "adds_up"), [(0, False, True), (0, True, False), (1, False, False)]
)
def test_without_layers_and_mlp_each_byte_counts_for_itself(
    layers: int, mlp: bool, adds_up: bool
) -> None:
    """What two bytes give together is the sum of what each gives, once attention is even."""
    net = encoder(layers, mlp, nearness=1.0)
    net.gather.q_proj.weight.data.zero_()
    found = []
    net.gather.register_forward_hook(lambda module, given, made: found.append(made))
    net(torch.tensor([list(text) for text in (b"cup 12ab", b"cup 34ab", b"cup 14ab", b"cup 32ab")]))
    first, second, third, fourth = found[0].detach()
    assert torch.allclose(first + second, third + fourth) == adds_up


@pytest.mark.parametrize(("nearness", "apart"), [(3.0, True), (-20.0, False)])
def test_latents_begin_with_the_bytes_near_them(nearness: float, apart: bool) -> None:
    net = encoder(0, False, nearness)
    first, second = net(torch.tensor([list(text) for text in (b"cup 12ab", b"cup 12az")]))
    same = [torch.allclose(*pair) for pair in zip(first, second, strict=True)]
    assert same == [apart, False], "the first latent is far from the last byte"


@pytest.mark.parametrize(
    ("way", "levels", "size"), [("float16", None, 96), ("int8", 255, 64), ("int4", 15, 40)]
)
def test_latents_arrive_to_the_precision_of_their_bytes(
    way: str, levels: int | None, size: int
) -> None:
    z = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(0))
    off = 2**-10 if levels is None else 1.02 / (levels - 1)
    arrived = rounded(z, way)
    assert not torch.equal(arrived, z)
    assert ((arrived - z).abs() <= off * z.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(rounded(torch.zeros(1, 2, 3), way), torch.zeros(1, 2, 3))
    if levels:
        assert len(rounded(torch.linspace(-1, 1, 10_001).view(1, 1, -1), way).unique()) == levels
    assert bytes_of(8, 6, way) == size, "a scale of two bytes for each latent that is rounded"


@pytest.mark.parametrize("number", [0, 1])
def test_evaluations_answer_from_latents_and_from_baselines(
    number: int, source: Any, reader_folders: list[str]
) -> None:
    """A truncated text ends as the form ends a text: the question stands on a line of its own."""
    objective = make(source, reader_folders, answer=1.0, latents=2, send="int4")
    batch, found = held_out(source, objective, [0, 1, 2, 3])
    assert found.outputs.keys() == {
        f"answer/{way}/{number}" for way in ANSWER_INPUTS for number in (0, 1)
    } | {f"bytes/{way}" for way in ANSWER_INPUTS} | {"wire"}
    sizes = {way: found.outputs[f"bytes/{way}"].tolist() for way in ANSWER_INPUTS}
    assert sizes["text"] == [38] * 4  # three cupboards of 12 bytes, and what stands between them
    assert (sizes["float16"], sizes["int8"], sizes["int4"]) == ([24] * 4, [16] * 4, [10] * 4)
    assert (sizes["nothing"], sizes["cut"]) == ([0] * 4, [10] * 4)
    assert [WIRES[way] for way in found.outputs["wire"].tolist()] == ["int4"] * 4
    tokenizer = open_model("arch.models[0]", reader_folders[number]).tokenizer
    net, begin = objective.model.net(number), tokenizer.begin
    before = objective.model.adapt(number, rounded(objective.model.encode(batch["other"]), "int4"))
    prompt = torch.cat((torch.full((4, 1), begin), batch[f"question_{number}"]), 1)
    first = answer_logits(net, before, prompt, batch[f"answer_{number}"])[:, 0].argmax(-1)
    assert found.outputs[f"answer/other/{number}"][:, 0].tolist() == first.tolist()
    for row, example in enumerate(source.eval_sets()["test"]._examples.examples[:4]):
        tokens = tokenizer.encode([example.context])[0][:4].tolist()  # two positions a latent
        for way, text in (
            ("cut", f"{example.context[:10]}\n"),
            ("first", f"{tokenizer.decode(tokens)}\n"),
            ("nothing", ""),
        ):
            parts = tokenizer.encode([text, example.question])
            whole = torch.tensor([[begin, *parts[0], *parts[1]]], dtype=torch.int32)
            with torch.no_grad():
                wanted = generate(net, NO_PREFIX, whole, 4)[0]
            assert found.outputs[f"answer/{way}/{number}"][row].tolist() == wanted.tolist(), way
        shown = [  # tokens of both models count, with equal weights
            len(reader.decode(reader.cuts["first"](example.context.encode(), 4)[0])) - 1
            for reader in source.spec.language_models
        ]
        assert sizes["first"][row] == sum(min(38, size) for size in shown) / 2


def test_an_example_is_judged_alike_in_every_batch(source: Any, reader_folders: list[str]) -> None:
    """The other rows of a batch, padding included, do not matter, so any number of ranks gives the
    same.
    """
    objective = make(source, reader_folders, answer=1.0)
    _, together = held_out(source, objective, [0, 1, 2, 3], padding=2)
    sums: dict[str, Any] = {}
    for row in range(4):
        _, alone = held_out(source, objective, [row])
        for name, output in alone.outputs.items():
            assert torch.equal(output[0], together.outputs[name][row]), name
        for name, pair in alone.metrics.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0, 0]), pair, strict=True)]
    for name, (total, count) in together.metrics.items():
        assert float(total) == pytest.approx(float(sums[name][0]))
        assert int(count) == int(sums[name][1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"latents": 90}, r"arch.latents=90: with a question and room for an answer there are 190"),
        ({"answer": 0.0}, "arch.loss.answer=0: all losses are 0"),
        ({"hidden": 0.3}, r"arch.loss.gist=0: arch.loss.alone=0.0 and arch.loss.hidden=0.3"),
    ],
)
def test_impossible_keys_are_refused(
    keys: dict[str, Any], message: str, source: Any, reader_folders: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make(source, reader_folders, **{"answer": 1.0} | keys)


def test_models_may_lie_on_devices_of_their_own(reader_folders: list[str]) -> None:
    (said,) = check_ended_well(run_module(1, "tests.models.latent.ranks_compress", *reader_folders))
    assert said.stdout == "card:0 card:1: card:0; refused\n"
