"""Latents in place of a passage: how much of it they keep, compared with the model's own losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from contract import IGNORE, Batch, Context, Noise, Prediction, RunSettings
from data.latent.asked import Answers, AskKeys, Said, asked
from data.stream import eval_batches
from data.tokenizer import Bytes
from models.latent.compress import Compress
from models.latent.encoder import arrived, as_sent, bytes_sent
from models.latent.prefix import causal
from models.latent.shares import Shares
from models.latent.stand_ins import WAYS, scores_after
from models.layers import Past
from tests.making import make_objective, make_source
from utils.errors import ConfigError
from utils.transfer import batch_to_device

CONTEXT = Context(0.0, Noise(0, 0, [0]))
PASSAGE, TEXT, LATENTS = 8, 5, 3
ROWS = 6
CPU = torch.device("cpu")
KEYS = {"latents": LATENTS, "wire": 6, "forward_dtype": "float64", "send": "float16"}
ENCODER = {"width": 16, "layers": 1, "heads": 2, "refiner": 1, "states": False}


@pytest.fixture(scope="module")
def paths(readers: str) -> list[str]:
    return readers.strip("[]").split(",")


@pytest.fixture(scope="module")
def source(paths: list[str]) -> Any:
    keys = {"passage_len": PASSAGE, "gap": 2, "text": TEXT, "readers": paths}
    text = {"mebibytes": 1, "bpe": None}
    return make_source("passages", **keys, embedded=text, shards=1, global_batch_size=ROWS)


@pytest.fixture(scope="module")
def batch(source: Any) -> Batch:
    rows = source.train_batch(0, 0)
    return batch_to_device({name: torch.from_numpy(row) for name, row in rows.items()}, CPU)


@pytest.fixture
def make(paths: list[str], source: Any) -> Any:
    def made(
        loss: dict[str, float] | None = None, begin: int | None = None, **keys: Any
    ) -> Compress:
        encoder = ENCODER | keys.pop("encoder", {})
        told = tuple(replace(reader, begin_token=begin) for reader in source.spec.readers)
        spec = replace(source.spec, readers=told)
        return make_objective(
            "prefix", spec, readers=paths, encoder=encoder, loss=loss or {}, **KEYS | keys
        )

    return made


@pytest.mark.parametrize("states", [True, False])
def test_all_but_the_readers_trains(states: bool, make: Any, batch: Batch) -> None:
    objective = make({"teacher": 1.0, "gist": 1.0}, deep=True, encoder={"states": states})
    for adapter in objective.model.adapters:
        nn.init.normal_(adapter.deep.weight)  # at first it is zero, and gradients end there
    objective(batch, None, CONTEXT).loss.backward()
    for name, parameter in objective.named_parameters():
        trains = not name.startswith("model.readers.")
        assert parameter.requires_grad == trains
        assert (parameter.grad is not None and bool(parameter.grad.any())) == trains, name


@torch.no_grad()
def test_losses_by_hand(make: Any, batch: Batch) -> None:
    objective = make({"text": 2.0, "teacher": 3.0, "gist": 0.5})
    model = objective.model
    out = objective(batch, None, CONTEXT)
    z, text, teacher, count = model(batch), 0.0, 0.0, torch.zeros(ROWS, dtype=torch.int64)
    for number in range(2):
        net, labels = model.net(number), batch[f"labels_{number}"].long()
        adapted, _ = model.prefix(number, z)
        for row in range(ROWS):  # without any padding
            wanted = labels[row][labels[row] != IGNORE]
            read = batch[f"text_{number}"][row][: len(wanted)].long()
            passage = batch[f"passage_{number}"][row]
            found = logits_after(net, adapted[row], read)
            text += float(F.cross_entropy(found, wanted, reduction="sum"))
            known = logits_after(net, net.embed(passage[passage >= 0].long()), read)
            logs = found.log_softmax(-1), known.log_softmax(-1)
            teacher += float(F.kl_div(*logs, log_target=True, reduction="sum"))
            count[row] += len(wanted)
    gist = F.cross_entropy(objective.gist(z).mT, batch["passage"].long(), reduction="none")
    gist_sum = float((gist.mean(1) * count).sum())
    assert out.weight == count.sum()
    assert_close(float(out.metrics["loss"][0]), text)
    assert_close(float(out.metrics["teacher"][0]), teacher)
    assert_close(float(out.loss), 2 * text + 3 * teacher + 0.5 * gist_sum)


def logits_after(net: Any, prefix: Tensor, tokens: Tensor) -> Tensor:
    stream = torch.cat((prefix, net.embed(tokens)))[None]
    return net.logits(net.read(stream))[0, len(prefix) :]


@pytest.mark.parametrize("begin", [None, 65])
def test_every_way_is_what_the_reader_says_of_it(
    begin: int | None, make: Any, batch: Batch
) -> None:
    """Row by row and without padding: vectors that are read, and keys and values that are kept."""
    objective = make(begin=begin)
    model, z = objective.model, objective.model(batch)
    places = LATENTS
    for number in range(2):
        net = model.net(number)
        found, _ = scores_after(model, number, batch, z, z.roll(1, 0))
        assert found.keys() == WAYS.keys()
        for row in range(ROWS):
            labels = batch[f"labels_{number}"][row].long()
            labels = labels[labels != IGNORE]
            text = batch[f"text_{number}"][row][: len(labels)].long()
            passage = batch[f"passage_{number}"][row]
            passage = passage[passage >= 0].long()
            vectors = net.embed(passage)
            before = passage.new_tensor([] if begin is None else [begin])
            begun = net.embed(before)
            likely = net.logits(net.read(torch.cat((begun, vectors))[None]))[0, len(begun) : -1]
            unlikely = F.cross_entropy(likely, passage[1:], reduction="none")
            chosen = 1 + unlikely.topk(min(places, len(unlikely))).indices.sort().values
            wanted = {
                "none": vectors[:0],
                "last": vectors[-places:],
                "whole": vectors,
                "last_bytes": vectors[-model.sent_bytes // 2 :],
                "latents": model.prefix(number, z)[0][row],
            }
            if len(passage) > places:
                wanted["surprising"] = vectors[chosen]
            for way, prefix in wanted.items():
                logits = logits_after(net, torch.cat((begun, prefix)), text)
                nats = F.cross_entropy(logits, labels, reduction="sum")
                right = (logits.argmax(-1) == labels).sum()
                wanted_row = torch.stack((nats.double(), right.double()))
                assert_close(found[way][row], wanted_row, msg=way)
            nats = F.cross_entropy(
                kept_last(net, before, passage, text, places), labels, reduction="sum"
            )
            assert_close(found["kv_last"][row, 0], nats.double())


def kept_last(net: Any, before: Tensor, passage: Tensor, text: Tensor, places: int) -> Tensor:
    """Scores of a text that sees what begins every text, and the last positions of a passage, which
    saw all of it: by a mask over both.
    """
    both = torch.cat((before, passage, text))[None]
    length, known = both.shape[1], len(before) + len(passage)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[known:, len(before) : max(len(before), known - places)] = False
    return net.logits(net.read(net.embed(both), sees[None, None]))[0, known:]


@pytest.mark.parametrize("begin", [None, 65])
def test_all_keys_kept_are_the_whole_passage(begin: int | None, make: Any, batch: Batch) -> None:
    """SnapKV that keeps as many keys as there are is no selection at all."""
    model = make(latents=PASSAGE, begin=begin).model
    found, _ = scores_after(model, 0, batch, model(batch), model(batch))
    assert_close(found["kv_seen"], found["whole"])
    fewer = make().model
    kept = scores_after(fewer, 0, batch, fewer(batch), fewer(batch))[0]["kv_seen"]
    assert not torch.allclose(kept, found["whole"])


def test_a_deep_prefix_adds_to_keys_and_values_at_the_latents(make: Any, batch: Batch) -> None:
    objective = make(deep=True)
    model, z = objective.model, objective.model(batch)
    text = batch["text_0"]
    shallow = model.logits(0, model.prefix(0, z)[0], text)
    vectors, added = model.prefix(0, z)
    assert_close(model.logits(0, vectors, text, added), shallow)  # nothing, at first
    nn.init.normal_(model.adapters[0].deep.weight)
    vectors, added = model.prefix(0, z)
    net = model.net(0)
    block, x = net.blocks[0], torch.cat((vectors, net.embed(text.clamp_min(0))), 1)
    cos, sin = (table[: x.shape[1]] for table in net.rotary_emb())
    _, key, value = block.self_attn.heads_of(block.attn_norm(x), (cos, sin))
    found_key, found_value = added[0].extend(key, value)
    assert_close(found_key[:, :, LATENTS:], key[:, :, LATENTS:])
    assert_close(found_value[:, :, LATENTS:], value[:, :, LATENTS:])
    assert_close(found_key[:, :, :LATENTS], key[:, :, :LATENTS] + added[0].key)
    assert not torch.allclose(model.logits(0, vectors, text, added), shallow)


def test_latents_as_they_are_sent() -> None:
    z = torch.linspace(-2, 2, 5 * LATENTS * 16).view(5, LATENTS, 16).requires_grad_()
    for way, error in (("float16", 1e-3), ("int8", 2e-2)):
        sent = as_sent(z, way)
        assert 0 < (sent - z).abs().max() < error
        (gradient,) = torch.autograd.grad(sent.sum(), z)
        assert torch.equal(gradient, torch.ones_like(z)), "rounding passes gradients on"
    levels = as_sent(z, "int8").detach() / as_sent(z, "int8").abs().amax(-1, True).detach() * 127
    assert_close(levels, levels.round(), rtol=0, atol=1e-3)
    assert (bytes_sent(LATENTS, 16, "float16"), bytes_sent(LATENTS, 16, "int8")) == (96, 54)


def test_padding_is_seen_by_nobody() -> None:
    sees = causal(torch.tensor([[False, True, True]]))[0, 0]
    assert sees.tolist() == [[True, False, False], [False, True, False], [False, True, True]]


def test_a_past_is_seen_where_a_mask_says_so(make: Any, batch: Batch) -> None:
    """A text behind keys and values of a passage has the scores of both read together."""
    net = make().model.net(0)
    both = torch.randint(256, (2, 7))
    whole = net.logits(net(both))
    past = [Past() for _ in net.blocks]
    sees = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    net.read(net.embed(both[:, :4]), sees[..., :4, :4], None, past)
    positions = torch.arange(4, 7).expand(2, -1)
    states = net.read(net.embed(both[:, 4:]), sees[..., 4:, :], positions, past)
    assert_close(net.logits(states), whole[:, 4:])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"latents": 9}, "arch.latents=9: must not exceed data.passage_len=8"),
        ({"loss": {"text": 0.0}}, "arch.loss.text=0: all losses are 0"),
        ({"encoder": {"heads": 3}}, "arch.encoder.width=16: is not a multiple of two times"),
    ],
)
def test_impossible_keys_are_refused(keys: dict[str, Any], message: str, make: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make(**keys)


def test_the_control_is_another_passage_in_batches_of_any_size(make: Any, source: Any) -> None:
    objective, held_out = make(), source.eval_sets()["val"]
    indices, half = np.arange(4), len(held_out) // 2

    def scored(rows: np.ndarray) -> Tensor:
        batch = {name: torch.from_numpy(array) for name, array in held_out.read(rows).items()}
        return objective.predict(batch_to_device(batch, CPU)).outputs["scores"]

    together = scored(indices)
    assert_close(together, torch.cat([scored(row) for row in np.split(indices, 4)]))
    control, own = together[:, 0, 2], together[:, 0, 0]
    assert not torch.isclose(control, own).any(), "nats"
    rows = held_out.passages.read(indices), held_out.passages.read(indices + half)
    mixed = {name: torch.from_numpy(rows["passage" in name][name]) for name in rows[0]}
    z, batch = objective.model(mixed), {n: torch.from_numpy(r) for n, r in rows[0].items()}
    assert_close(control, scores_after(objective.model, 0, batch, z, z)[0]["latents"][:, 0])


def test_a_passage_that_is_worth_nothing_has_no_share(make: Any) -> None:
    """The whole passage helps the first reader, and not the second."""
    shares, passages = Shares(make().model), 50
    scores = torch.full((passages, 2, len(WAYS), 2), 10.0, dtype=torch.float64)
    ways = {way: number for number, way in enumerate(WAYS)}
    luck = torch.linspace(-1, 1, passages)
    scores[:, 0, ways["whole"], 0] -= 4 + luck
    scores[:, 0, ways["latents"], 0] -= 3
    scores[:, 1, ways["whole"], 0] -= 0.01 + luck
    scores[:, 1, ways["latents"], 0] -= 3
    rows = torch.cat((scores.flatten(2), scores.new_full((passages, 2, 1), 5.0)), 2)
    order = torch.randperm(passages).numpy()
    shares.add(order, {}, Prediction({}, {"scores": rows[order]}))
    report = shares.report(shares.rows())
    assert report.metrics == {"share": pytest.approx(0.75), "share_0": pytest.approx(0.75)}
    assert report.text.endswith(
        "No shares for reader 1: the whole passage saves it 0.01 ± 0.16 nats."
    )
    (table,) = (json.loads(content)["rows"] for content in report.files.values())
    assert [row[4:] for row in table if row[0] == 1] == [[None] * 3] * len(WAYS)


def test_latents_of_ones_own_passage_answer_elsewhere(
    make: Any, source: Any, tmp_path: Path
) -> None:
    """As the readers themselves continue it, and again from a file of latents alone."""

    def answers(objective: Compress, passage: str, prompt: str = "d") -> Any:
        keys = AskKeys(
            readers=[], passage=passage, prompt=prompt, max_new_tokens=2, temperature=0.0, top_k=0
        )
        run, readers = RunSettings(eval_only=True), source._readers
        (only,) = asked(run, keys, Bytes(), PASSAGE, readers).values()
        ((_, rows),) = eval_batches(only, 1)
        prediction = objective.predict(batch_to_device(rows, CPU))
        assert not objective.evaluators(only.padding(1))
        evaluator = Answers(readers)
        evaluator.add(np.arange(1), rows, prediction)
        return rows, prediction.outputs, evaluator.report(evaluator.rows())

    objective = make()
    with torch.no_grad():
        rows, outputs, report = answers(objective, "and more to come")
        z = arrived({"numbers": outputs["numbers"]}, torch.float64)
        for number in range(2):
            net, prompt = objective.model.net(number), rows[f"prompt_{number}"][0]
            passage = rows[f"passage_{number}"][0]
            starts = {
                "latents": objective.model.prefix(number, z)[0][0],
                "none": net.embed(prompt[:0]),
                "whole": net.embed(passage[passage >= 0]),
            }
            for way, start in starts.items():
                for token in outputs[f"{way}_{number}"][0]:
                    assert logits_after(net, start, prompt)[-1].argmax() == token
                    prompt = torch.cat((prompt, token[None]))
                prompt = rows[f"prompt_{number}"][0]
        assert report.text.startswith(f"{LATENTS * 6 * 2} bytes of latents are sent")
        assert "reader 1 from the whole passage, 8 bytes:\nd" in report.text
        # in another process, which never sees the passage
        file = tmp_path / "latents.safetensors"
        file.write_bytes(report.files["latents.safetensors"])
        _, again, told = answers(objective, str(file))
        assert torch.equal(again["latents_1"], outputs["latents_1"])
        assert "whole_1" not in again
        assert told.text.count("reader") == 4
        other = make(encoder={"refiner": 0})
        with pytest.raises(ConfigError, match="holds latents of another run"):
            answers(other, str(file))
        with pytest.raises(ConfigError, match="has 3 tokens, and these latents stand for 8"):
            answers(objective, "and")
        with pytest.raises(ConfigError, match=r"data\.prompt=abcdefg: takes 7 tokens of"):
            answers(objective, "and more to come", prompt="abcdefg")


@torch.no_grad()
def test_the_page_shows_what_readers_say_from_latents(make: Any, source: Any) -> None:
    objective, evaluator = make(), Said(source._readers)
    rows = source.eval_sets()["val"].read(np.arange(5))
    # the first reader predicts only the second token: the others are read, or not there
    rows["labels_0"][:, [0, 2, 3, 4]], rows["text_0"][:, 3:] = IGNORE, IGNORE
    batch = batch_to_device({name: torch.from_numpy(row) for name, row in rows.items()}, CPU)
    prediction = objective.predict(batch)
    said, labels = (
        named[f"{n}_0"] for named, n in ((prediction.outputs, "said"), (batch, "labels"))
    )
    said[0], said[1] = labels[0], ord("~")
    evaluator.add(np.arange(5), batch, prediction)
    (content,) = evaluator.report(evaluator.rows()).files.values()
    table = json.loads(content)["rows"]
    assert [row[1] for row in table] == [0, 1] * 3
    for at, (passage, _, text, told, verdict) in enumerate(table[::2]):
        read = bytes(rows["text_0"][at, :3].tolist()).decode()
        whole = rows["passage_0"][at]
        assert (passage, text) == (bytes(whole[whole >= 0].tolist()).decode(), read)
        assert told == (read if at == 0 else f"{read[:2]}{chr(said[at, 1])}")
        if at < 2:
            assert verdict == ("right", "wrong: 0 of 1 tokens right")[at]
