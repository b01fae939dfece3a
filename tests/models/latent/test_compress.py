"""Latents in place of a text: every loss against what it stands for, what trains, and what
evaluations compare with.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.latent.language_models import open_model
from data.latent.qa import QASource
from data.stream import to_tensors
from models.latent import wire
from models.latent.compress import USUAL, Compress
from models.latent.generation import NO_PREFIX, answer_logits, generate
from models.latent.prefix import BEGIN, Encoder, Prefix
from models.objective import Context
from tests.making import make_source
from tests.ranks import check_ended_well, run_module
from utils.errors import ConfigError
from utils.latent import ANSWER_INPUTS, WIRES
from utils.measure.evaluator import Prediction
from utils.noise import Noise
from utils.ranks.distributed import Dist

FORM = {"context": "{context}\\n", "question": "{question}", "answer": "{answer}\\n"}
ENCODER = {"width": 16, "layers": 1, "heads": 2, "refiner": 1}
LOSSES = {
    "answer": 0.0,
    "first": 0.0,
    "first_k": 0.0,
    "k": 2,
    "distill": 0.0,
    "temperature": 2.0,
    "gist": 0.0,
    "hidden": 0.0,
    "align": 0.0,
    "scale": 0.0,
}
SETTINGS = ("k", "temperature", "hidden")  # those of LOSSES' keys that are no losses
CONTEXT = Context(0.0, Noise(0, 0, [0]))


@pytest.fixture(scope="module")
def source(reader_folders: list[str]) -> QASource:
    return source_of(reader_folders)


def source_of(folders: list[str], global_batch_size: int = 8, at_once: int = 1) -> QASource:
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
    source: QASource, folders: list[str], deep: bool = True, latents: int = 4, **losses: float
) -> Compress:
    torch.manual_seed(0)
    net = Prefix(
        source.spec,
        folders,
        latents,
        6,
        ENCODER,
        adapter_width=16,
        spread=2,
        deep=deep,
        gist_width=16,
        forward_dtype="float64",
    )
    objective = Compress(net, **LOSSES | (losses or {"answer": 1.0})).double()
    objective.prepare(Dist(), source, CONTEXT.noise)
    return objective


def batch_of(source: QASource, step: int = 0) -> dict[str, Tensor]:
    return to_tensors([source.train_batch(step, shard) for shard in (0, 1)])


def held_out(
    source: QASource, objective: Compress, rows: list[int], padding: int = 0
) -> tuple[dict[str, Tensor], Prediction]:
    import numpy as np

    examples = source.eval_sets()["test"]
    batch = to_tensors([examples.read(np.array(rows)), examples.padding(padding)])
    with torch.no_grad():
        return batch, objective.predict(batch)


@pytest.mark.parametrize("deep", [False, True])
def test_each_loss_is_a_mean_over_examples_and_models(
    source: QASource, reader_folders: list[str], deep: bool
) -> None:
    batch = batch_of(source)
    alone = {
        name: make(source, reader_folders, deep, **{name: 1.0})(batch, None, CONTEXT)
        for name in LOSSES
        if name not in SETTINGS
    }
    objective = make(source, reader_folders, deep)
    z = objective.model.transmit(objective.model.encode(batch["context"]))
    wanted = dict.fromkeys(alone, 0.0)
    prefixes = []
    rows = {
        name: tensor.squeeze(1) if tensor.ndim == 3 else tensor for name, tensor in batch.items()
    }
    for number in (0, 1):
        net, answer = objective.model.net(number), rows[f"answer_{number}"]
        begin = torch.full((8, 1), source.spec.language_models[number].begin_token)
        said = torch.cat((begin, rows[f"question_{number}"]), 1)
        prefix, seen = objective.model.adapt(number, z)
        prefixes.append(prefix)
        student = answer_logits(net, (prefix, seen), said, answer)
        teacher = answer_logits(
            net,
            NO_PREFIX,
            torch.cat((begin, rows[f"context_{number}"], rows[f"question_{number}"]), 1),
            answer,
        )
        for row in range(8):
            length = int((answer[row] >= 0).sum())
            costs = F.cross_entropy(
                student[row, :length], answer[row, :length].long(), reduction="none"
            )
            apart = [
                (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum()
                for s, t in zip(student[row, :length] / 2, teacher[row, :length] / 2, strict=True)
            ]
            wanted["answer"] += costs.mean() / 2
            wanted["first"] += costs[0] / 2
            wanted["first_k"] += costs[:2].mean() / 2
            wanted["distill"] += 4 * torch.stack(apart).mean() / 2
            wanted["scale"] += (
                prefix[row].square().mean().sqrt()
                / net.embed_tokens.embedding_weight.square().mean().sqrt()
                - 1
            ) ** 2 / 2
    said_bytes = objective.model.gist(z)
    for row, text in enumerate(batch["context"]):
        there = text >= 0
        wanted["gist"] += F.cross_entropy(said_bytes[row][there], text[there].long())
    cosines = [
        F.normalize(prefix.detach(), dim=-1) @ F.normalize(prefix.detach(), dim=-1).mT
        for prefix in prefixes
    ]
    wanted["align"] = (cosines[0] - cosines[1]).square().mean((1, 2)).sum()
    for name, out in alone.items():
        assert out.loss.item() == pytest.approx(wanted[name].item(), rel=1e-6, abs=1e-9), name
        assert out.weight == 8
        assert out.metrics.keys() == {
            name,
            "exact_match",
        }, "what has no coefficient is not computed"
    both = make(source, reader_folders, deep, answer=2.0, gist=0.5)(batch, None, CONTEXT)
    assert both.loss.item() == pytest.approx(
        2 * wanted["answer"].item() + 0.5 * wanted["gist"].item()
    )


def test_hidden_bytes_neither_reach_the_latents_nor_are_predicted(
    source: QASource, reader_folders: list[str]
) -> None:
    """Other bytes in their places change nothing, other bytes elsewhere do; answers are from the
    whole text.
    """
    context = batch_of(source)["context"]
    noise = Noise(0, 0, [0, 1])
    objective = make(source, reader_folders, gist=1.0, hidden=0.3)
    gone = noise.uniform("hidden", context.shape) < 0.3

    def loss(changed: Tensor, **losses: float) -> float:
        found = make(source, reader_folders, **(losses or {"gist": 1.0, "hidden": 0.3}))
        batch = {**batch_of(source), "context": changed}
        return found(batch, None, Context(0.0, noise)).loss.item()

    there = context >= 0
    assert 0.2 < gone[there].double().mean() < 0.4
    z = objective.model.transmit(objective.model.encode(context.masked_fill(gone & there, BEGIN)))
    said, wanted = objective.model.gist(z), context.masked_fill(gone, -1)
    rows = [
        F.cross_entropy(logits[row >= 0], row[row >= 0].long())
        for logits, row in zip(said, wanted, strict=True)
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
    objective = make(
        apart,
        reader_folders,
        **dict.fromkeys(("answer", "first", "first_k", "distill", "gist", "align", "scale"), 1.0),
    )
    outs = [objective(batch_of(source), None, CONTEXT) for source in (apart, together)]
    assert [int(out.weight) for out in outs] == [60, 60]
    torch.testing.assert_close(outs[1].loss, outs[0].loss)
    for name, (total, _) in outs[0].metrics.items():
        torch.testing.assert_close(outs[1].metrics[name][0], total, msg=name)


def test_parts_of_a_batch_add_up(source: QASource, reader_folders: list[str]) -> None:
    objective = make(
        source, reader_folders, answer=1.0, first=1.0, distill=1.0, gist=1.0, align=1.0, scale=1.0
    )
    batch = batch_of(source)
    whole = objective(batch, None, CONTEXT)
    parts = [
        objective({name: rows[some] for name, rows in batch.items()}, None, CONTEXT)
        for some in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    assert sum(int(part.weight) for part in parts) == 8


def test_frozen_models_get_no_gradient_and_are_not_saved(
    source: QASource, reader_folders: list[str]
) -> None:
    objective = make(source, reader_folders, answer=1.0, gist=1.0)
    before = {name: tensor.clone() for name, tensor in objective.model.frozen.state_dict().items()}
    objective(batch_of(source), None, CONTEXT).loss.backward()
    frozen = {name for name, _ in objective.named_parameters() if ".frozen." in f".{name}"}
    assert frozen
    assert all(
        (parameter.grad is None) == (name in frozen)
        for name, parameter in objective.named_parameters()
    )
    assert not any(
        "frozen" in name for name in [*objective.saved(), *objective.shared(), *objective.trained()]
    )
    assert [part["path"] for part in objective.frozen().values()] == reader_folders
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in objective.model.frozen.state_dict().items()
    )


def test_only_latents_reach_a_model_and_each_model_is_reached(
    source: QASource, reader_folders: list[str]
) -> None:
    """Another text in the model's own tokens changes nothing: of a text it sees what the encoder
    makes of its bytes.
    """
    objective, batch = make(source, reader_folders), batch_of(source)
    loss = objective(batch, None, CONTEXT).loss
    for number in (0, 1):
        changed = {**batch, f"context_{number}": batch[f"context_{number}"].roll(1, 0)}
        assert torch.equal(objective(changed, None, CONTEXT).loss, loss)
    assert not torch.equal(
        objective({**batch, "context": batch["context"].roll(1, 0)}, None, CONTEXT).loss, loss
    )


def test_what_stands_behind_a_text_or_an_answer_changes_nothing(
    source: QASource, reader_folders: list[str]
) -> None:
    objective, batch = make(source, reader_folders, answer=1.0, gist=1.0), batch_of(source)
    wider = {
        name: F.pad(rows, (0, 3), value=-1) if name != "context" else rows
        for name, rows in batch.items()
    }
    torch.testing.assert_close(
        objective(wider, None, CONTEXT).loss, objective(batch, None, CONTEXT).loss
    )
    z = objective.model.encode(batch["context"])
    shorter = objective.model.encode(batch["context"][:, :39])
    assert (batch["context"][:, 39:] < 0).all()
    torch.testing.assert_close(z, shorter)
    torch.testing.assert_close(z.square().mean(-1), torch.ones_like(z[..., 0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("layers", "mlp", "adds_up"), [(0, False, True), (0, True, False), (1, False, False)]
)
def test_without_layers_and_mlp_each_byte_counts_for_itself(
    layers: int, mlp: bool, adds_up: bool
) -> None:
    """What two bytes give together is the sum of what each gives, once attention is even."""
    torch.manual_seed(0)
    net = Encoder(8, 2, 6, 16, layers, heads=2, refiner=0, mlp=mlp, dtype=torch.float64).double()
    net.gather.q_proj.weight.data.zero_()
    found = []
    net.gather.register_forward_hook(lambda module, given, made: found.append(made))
    net(torch.tensor([list(text) for text in (b"cup 12ab", b"cup 34ab", b"cup 14ab", b"cup 32ab")]))
    first, second, third, fourth = found[0].detach()
    assert torch.allclose(first + second, third + fourth) == adds_up


@pytest.mark.parametrize(("nearness", "apart"), [(3.0, True), (-20.0, False)])
def test_latents_begin_with_the_bytes_near_them(nearness: float, apart: bool) -> None:
    torch.manual_seed(0)
    net = Encoder(8, 2, 6, 16, 0, heads=2, refiner=0, mlp=False, nearness=nearness)
    first, second = net(torch.tensor([list(text) for text in (b"cup 12ab", b"cup 12az")]))
    same = [torch.allclose(*pair) for pair in zip(first, second, strict=True)]
    assert same == [apart, False], "the first latent is far from the last byte"


def test_evaluations_answer_from_everything(source: QASource, reader_folders: list[str]) -> None:
    objective = make(source, reader_folders)
    batch, found = held_out(source, objective, [0, 1, 2, 3])
    assert found.outputs.keys() == {
        f"answer/{way}/{number}" for way in ANSWER_INPUTS for number in (0, 1)
    } | {f"bytes/{way}" for way in ANSWER_INPUTS} | {"wire"}
    sizes = {way: found.outputs[f"bytes/{way}"].tolist() for way in ANSWER_INPUTS}
    assert sizes["text"] == [38] * 4  # three cupboards of 12 bytes, and what stands between them
    assert (sizes["float16"], sizes["int8"], sizes["int4"]) == ([48] * 4, [32] * 4, [20] * 4)
    assert sizes["nothing"] == [0] * 4
    assert all(8 <= count <= 38 for count in sizes["first"])
    z = objective.model.encode(batch["other"])
    said = torch.cat(
        (torch.full((4, 1), source.spec.language_models[0].begin_token), batch["question_0"]), 1
    )
    before = objective.model.adapt(0, wire.rounded(z, "float16"))
    first = answer_logits(objective.model.net(0), before, said, batch["answer_0"])[:, 0].argmax(-1)
    assert found.outputs["answer/other/0"][:, 0].tolist() == first.tolist()
    # questions differ
    assert (
        found.outputs["answer/nothing/0"][0] == found.outputs["answer/nothing/0"]
    ).float().mean() < 1


@pytest.mark.parametrize("number", [0, 1])
def test_baselines_are_what_a_model_with_no_encoder_would_be_given(
    number: int, source: QASource, reader_folders: list[str]
) -> None:
    """A truncated text ends as the form ends a text: the question stands on a line of its own."""
    objective = make(source, reader_folders, latents=2)
    objective.model.send = "int4"
    _, found = held_out(source, objective, [0, 1, 2, 3])
    tokenizer = open_model("arch.models[0]", reader_folders[number]).tokenizer
    assert found.outputs["bytes/int4"].tolist() == [10] * 4
    assert found.outputs["bytes/cut"].tolist() == [10] * 4
    assert [WIRES[way] for way in found.outputs["wire"].tolist()] == ["int4"] * 4
    for row, example in enumerate(source.eval_sets()["test"]._examples.examples[:4]):
        tokens = tokenizer.encode([example.context])[0][:4].tolist()  # two positions a latent
        for way, text in (
            ("cut", f"{example.context[:10]}\n"),
            ("first", f"{tokenizer.decode(tokens)}\n"),
        ):
            said = tokenizer.encode([text, example.question])
            whole = torch.tensor([[tokenizer.begin, *said[0], *said[1]]], dtype=torch.int32)
            with torch.no_grad():
                wanted = generate(objective.model.net(number), NO_PREFIX, whole, 4)[0]
            assert found.outputs[f"answer/{way}/{number}"][row].tolist() == wanted.tolist(), way
            if way == "cut" or number == 1:  # tokens of both models count, with equal weights
                continue
            sizes = [
                min(
                    38, len(reader.decode(reader.cuts["first"](example.context.encode(), 4)[0])) - 1
                )
                for reader in source.spec.language_models
            ]
            assert found.outputs["bytes/first"][row] == sum(sizes) / 2


def test_an_example_is_judged_alike_in_every_batch(
    source: QASource, reader_folders: list[str]
) -> None:
    """The other rows of a batch, padding included, do not matter, so any number of ranks gives the
    same.
    """
    objective = make(source, reader_folders)
    _, together = held_out(source, objective, [0, 1, 2, 3], padding=2)
    sums: dict[str, Any] = {}
    for row in range(4):
        _, alone = held_out(source, objective, [row])
        for name, output in alone.outputs.items():
            assert torch.equal(output[0], together.outputs[name][row]), name
        for name, (total, count) in alone.metrics.items():
            sums[name] = [
                a + b for a, b in zip(sums.get(name, [0, 0]), (total, count), strict=True)
            ]
    for name, (total, count) in together.metrics.items():
        assert float(total) == pytest.approx(float(sums[name][0]))
        assert int(count) == int(sums[name][1])


def test_bits_are_of_answers_and_what_ends_them(
    source: QASource, reader_folders: list[str]
) -> None:
    objective = make(source, reader_folders)
    batch, found = held_out(source, objective, [0, 1, 2], padding=1)
    total, count = found.metrics["bits/1"]
    assert int(count) == int((batch["answer_1"] >= 0).sum())
    assert float(total / count) == pytest.approx(math.log2(280), rel=0.3)  # it knows nothing
    right, of = found.metrics["exact_match"]
    assert (float(right), int(of)) == (0.0, 3)


def test_usual_texts_are_those_that_training_begins_with(
    source: QASource, reader_folders: list[str]
) -> None:
    usual = make(source, reader_folders).usual
    rows = [source.train_batch(step, 0)["context"] for step in range(USUAL // 4)]
    assert torch.equal(usual, torch.cat([torch.from_numpy(each) for each in rows]))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"latents": 90},
            (
                r"arch.latents=90: with a question and room for an answer there are 190 places, and"
                r" arch.models\[0\]=.* reads 96"
            ),
        ),
        ({"answer": 0.0}, "arch.loss.answer=0: all losses are 0"),
        (
            {"answer": 1.0, "hidden": 0.3},
            "arch.loss.hidden=0.3: is the share of bytes hidden from the gist",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    keys: dict[str, Any], said: str, source: QASource, reader_folders: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        make(source, reader_folders, **keys)


def test_texts_cannot_be_predicted_without_the_part_that_does(
    source: QASource, reader_folders: list[str]
) -> None:
    net = Prefix(
        source.spec,
        reader_folders,
        4,
        6,
        ENCODER,
        adapter_width=16,
        spread=2,
        deep=True,
        gist_width=0,
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"^arch.loss.gist=1.0: needs the part that predicts texts, and arch.gist_width=0 leaves"
            r" it out"
        ),
    ):
        Compress(net, **LOSSES | {"gist": 1.0})


def test_models_may_lie_on_devices_of_their_own(reader_folders: list[str]) -> None:
    (said,) = check_ended_well(run_module(1, "tests.models.latent.ranks_compress", *reader_folders))
    assert said.stdout == "card:0 card:1: card:0; refused\n"
