"""The language model: every option against its definition, continuations against no cache, and
Llama's own code.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.testing import assert_close

from contract import IGNORE, Context, Noise, Spec
from data.tokenizer import TextSpec
from models.language import llama
from models.language.causal_lm import CausalLM
from models.objective import saved_tensors
from tests.making import make_objective
from tests.ranks import ROOT
from utils.errors import ConfigError

SPEC = TextSpec(vocab_size=23, seq_len=12, token_bytes=(0, *[1] * 11, *[3] * 11))
SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "mlp_width": 24}
NOTHING = Context(0.0, Noise(0, 0, [0]))


def make(chunk: int | None = None, **keys) -> CausalLM:
    objective = make_objective("gpt", SPEC, loss={"chunk_tokens": chunk}, **SMALL | keys)
    torch.manual_seed(0)
    # as after some training: norms that do something, an output that says something
    for parameter in objective.parameters():
        larger = 1 + torch.rand_like(parameter)
        parameter.data = parameter.data * larger * (1 if parameter.ndim == 1 else 3)
    return objective


def batch_of(rows: int, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(23, (rows, length + 1), generator=draw, dtype=torch.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def scores(objective: CausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return objective.model.logits(objective.model(batch["inputs"], batch.get("documents")))


def test_the_published_size_has_the_published_number_of_parameters() -> None:
    arch = OmegaConf.load(ROOT / "conf/experiment/lm_1b3.yaml").arch
    with torch.device("meta"):
        net = make_objective("gpt", Spec(vocab_size=8192, seq_len=2048), **arch).model
    assert sum(p.numel() for p in net.parameters()) == 1_266_780_160


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_nobody_sees_the_future_or_another_document(kv_heads: int) -> None:
    objective, batch = make(kv_heads=kv_heads), batch_of(3)
    before = scores(objective, batch)
    batch["inputs"][:, 7] = (batch["inputs"][:, 7] + 1) % 23
    after = scores(objective, batch)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amin(-1).amax() > 0
    batch["documents"] = torch.tensor([0] * 5 + [1] * 7).expand(3, -1)
    apart = scores(objective, batch)
    assert_close(apart[:, :5], scores(objective, {"inputs": batch["inputs"][:, :5]}))
    assert_close(
        apart[:, 5:], scores(objective, {"inputs": batch["inputs"][:, 5:]}), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("keys", [{}, {"kv_heads": 2, "tied": True}, {"qk_norm": True}])
def test_pieces_and_recomputation_change_nothing(keys: dict) -> None:
    keys = {**keys, "forward_dtype": "float64"}  # gradients of 200 round to 1e-4 in float32
    batch, plain = batch_of(4), make(**keys)
    batch["labels"][0, :5] = IGNORE
    out = plain(batch, None, NOTHING)
    out.loss.backward()
    assert int(out.weight) == 43
    logits, labels = scores(plain, batch), batch["labels"].long()
    assert_close(out.loss, F.cross_entropy(logits.mT, labels, reduction="sum"))
    for other in (make(7, **keys), make(recompute=True, **keys)):
        same = other(batch, None, NOTHING)
        same.loss.backward()
        assert_close(same.loss, out.loss)
        for ours, wanted in zip(other.parameters(), plain.parameters(), strict=True):
            assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-4)


def test_dropout_is_for_training_alone() -> None:
    plain, dropping = make(), make(dropout=0.5)
    batch = batch_of(4)
    with torch.no_grad():
        loss, other = (objective(batch, None, NOTHING).loss for objective in (plain, dropping))
        assert abs(other - loss) > 0.01 * loss
        assert dropping(batch, None, NOTHING).loss == other, "a step has one noise"
        later = Context(0.0, Noise(0, 1, [0]))
        assert dropping(batch, None, later).loss != other
        dropping.eval()
        assert dropping.predict(batch).metrics == plain.eval().predict(batch).metrics


def test_logits_of_a_piece_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, batch, lengths = make(20), batch_of(4), list[int]()
    logits = objective.model.logits
    monkeypatch.setattr(
        objective.model, "logits", lambda hidden: [lengths.append(len(hidden)), logits(hidden)][1]
    )
    out = objective(batch, None, NOTHING)
    (2 * out.loss).backward()
    assert lengths == [20, 20, 8]
    plain = make()
    (2 * plain(batch, None, NOTHING).loss).backward()
    assert objective.model.lm_head.weight.grad is not None
    assert_close(objective.model.lm_head.weight.grad, plain.model.lm_head.weight.grad)


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_z_loss_is_added_in_training_and_counts_in_no_evaluation(chunk: int | None) -> None:
    batch, plain, other = batch_of(4), make(), make()
    batch["labels"][0, :5] = IGNORE
    other.chunk_tokens, other.z_loss = chunk, 0.01
    without, out = plain(batch, None, NOTHING), other(batch, None, NOTHING)
    logs = torch.logsumexp(scores(plain, batch), -1)[batch["labels"] != IGNORE]
    assert_close(out.loss, without.loss + 0.01 * logs.square().sum())
    assert_close(other.predict(batch).metrics["loss"][0], without.loss.detach())
    out.loss.backward()
    without.loss.backward()
    assert_close(out.metrics["log_z2"], (logs.square().sum(), without.weight))
    first, second = (each.model.lm_head.weight.grad for each in (plain, other))
    assert not torch.allclose(first, second), "it pulls at the logits"


def test_bits_per_byte_count_the_bytes_of_what_was_predicted() -> None:
    objective, batch = make(), batch_of(4)
    batch["labels"][2:] = IGNORE
    metrics = objective.predict(batch).metrics
    counted = batch["labels"] != IGNORE
    labels, logits = batch["labels"][counted].long(), scores(objective, batch)[counted]
    nats = -float(logits.detach().log_softmax(-1)[range(24), labels].sum())
    assert int(metrics["loss"][1]) == 24
    assert float(metrics["loss"][0]) == pytest.approx(nats, rel=1e-5)
    assert float(metrics["bpb"][0]) == pytest.approx(nats / math.log(2), rel=1e-5)
    assert int(metrics["bpb"][1]) == sum(SPEC.token_bytes[label] for label in labels.tolist())


def continuation(
    objective: CausalLM,
    prompt: torch.Tensor,
    length: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
):
    rows = len(prompt)
    batch = {
        "inputs": prompt,
        "continuation": torch.zeros(rows, length, dtype=torch.int32),
        "temperature": torch.full((rows,), temperature),
        "top_k": torch.full((rows,), top_k, dtype=torch.int32),
        "sample_seed": torch.full((rows,), seed),
    }
    prediction = objective.predict(batch)
    assert not prediction.metrics
    return prediction.outputs["continuation"]


OPTIONS: list[dict] = [
    {},
    {"kv_heads": 2, "qk_norm": True},
    {"qk_norm": True, "qk_weights": True, "qkv_bias": True, "head_dim": 8},
]


@pytest.mark.parametrize("keys", OPTIONS)
def test_a_greedy_continuation_needs_no_cache(keys: dict) -> None:
    objective, prompt = make(**keys), batch_of(3, 4)["inputs"]
    tokens = prompt.long()
    for _ in range(8):
        likeliest = scores(objective, {"inputs": tokens})[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, likeliest), 1)
    made = tokens[:, 4:].int()
    assert torch.equal(continuation(objective, prompt, 8), made)
    assert len(set(made.flatten().tolist())) > 3, "always the same token: the test shows little"


def test_prompts_of_several_lengths_are_continued_as_each_by_itself() -> None:
    objective, prompt = make(), batch_of(5, 8)["inputs"]
    lengths = torch.tensor([3, 8, 3, 5, 8])
    batch = {
        "inputs": prompt,
        "prompt_length": lengths,
        "continuation": torch.zeros(5, 6, dtype=torch.int32),
    }
    zeros = torch.zeros(5, dtype=torch.int32)
    batch |= {"temperature": zeros, "top_k": zeros, "sample_seed": zeros}
    made = objective.predict(batch).outputs["continuation"]
    for row, length in enumerate(lengths.tolist()):
        alone = continuation(objective, prompt[row : row + 1, :length], 6)
        assert torch.equal(made[row : row + 1].int(), alone)


def test_a_continuation_goes_on_when_the_context_is_full() -> None:
    objective, prompt = make(), batch_of(2, 20)["inputs"]
    made = continuation(objective, prompt, 40)
    assert made.shape == (2, 40)
    tokens = torch.cat((prompt[:, -12:], made[:, :1]), 1).long()
    expected = scores(objective, {"inputs": tokens[:, -6:]})[:, -1].argmax(-1)
    assert torch.equal(made[:, 1], expected.int()), (
        "the later half of a full context is the next one's prompt"
    )


def test_draws_depend_on_seed_and_temperature_and_stay_among_the_likeliest() -> None:
    objective, prompt = make(), batch_of(1, 4)["inputs"]
    drawn = [continuation(objective, prompt, 30, 1.0, 0, seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    greedy = continuation(objective, prompt, 30)
    assert torch.equal(continuation(objective, prompt, 30, 1.0, 1, 5), greedy)
    firsts = {int(continuation(objective, prompt, 1, 2.0, 3, seed)) for seed in range(60)}
    assert firsts == set(scores(objective, {"inputs": prompt})[0, -1].topk(3).indices.tolist())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_net_that_has_diverged_still_says_something(value: float) -> None:
    objective, prompt = make(), batch_of(2, 4)["inputs"]
    objective.model.norm.weight.data.fill_(value)
    for temperature, top_k in ((0.8, 0), (0.8, 3), (0.0, 0)):
        made = continuation(objective, prompt, 20, temperature, top_k)
        assert made.shape == (2, 20)
        assert ((made >= 0) & (made < 23)).all()


def test_norms_without_weights_are_exported_as_qwen3s_with_ones(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    keys = {"qk_norm": True, "kv_heads": 2, "tied": True, "rms_norm_eps": 1e-3}
    ours, batch = make(**keys), batch_of(3)
    weights = {name.removeprefix("model."): tensor for name, tensor in saved_tensors(ours).items()}
    llama.write(tmp_path, weights, ours.model.shape, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = theirs(batch["inputs"].long()).logits
    expected = scores(ours, batch)
    assert expected.std() > 0.1, "logits this small show little"
    assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    read = ours.published(str(tmp_path))
    assert all(torch.equal(read[name], tensor) for name, tensor in saved_tensors(ours).items())
    with pytest.raises(ConfigError, match=r"holds another net; add arch.qk_norm=True"):
        make(**keys | {"qk_norm": False}).published(str(tmp_path))
    theirs.model.layers[1].self_attn.k_norm.weight.data[2] = 1.5
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers.1.self_attn.k_norm.weight is not 1 everywhere"):
        ours.published(str(tmp_path))
