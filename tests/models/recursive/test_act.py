"""The recursive objective: what a slot remembers, what counts, and that compiling or casting
changes nothing else.
"""

from __future__ import annotations

import copy

import pytest
import torch

from models.layers import GridRotaryEmbedding, SwiGLU, gated_width, rotate
from models.objective import Context
from models.recursive.act import LOSSES, ActObjective
from models.recursive.hrm import HRM
from models.recursive.trm import TRM
from utils.errors import ConfigError
from utils.measure.metrics import Metric
from utils.noise import Noise
from utils.spec import IGNORE, Spec

SPEC = Spec(vocab_size=6, seq_len=9, table_rows=5)
SIZES = {
    "H_cycles": 2,
    "L_cycles": 2,
    "H_layers": 1,
    "L_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "expansion": 2.0,
    "puzzle_emb_ndim": 16,
    "pos_encodings": "rope",
    "halt_max_steps": 4,
    "halt_exploration_prob": 0.5,
    "forward_dtype": "float32",
}
NETS = {
    "hrm": lambda **k: HRM(SPEC, **SIZES | k),
    "trm": lambda **k: TRM(SPEC, **SIZES | {"no_ACT_continue": True, "puzzle_emb_len": 3} | k),
    "trm_mlp": lambda **k: TRM(SPEC, **SIZES | {"mlp_t": True, "pos_encodings": "none"} | k),
    "hrm_learned": lambda **k: HRM(SPEC, **SIZES | {"pos_encodings": "learned"} | k),
}


def make(name: str, **keys) -> ActObjective:
    torch.manual_seed(0)
    objective = ActObjective(NETS[name](**keys), "stablemax_cross_entropy")
    with torch.no_grad():  # undecided halting, so that slots go different ways
        objective.model.inner.q_head.bias.zero_()
        objective.model.inner.q_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return objective


def batch_of(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    return {
        "inputs": draw(6, rows, 9),
        "labels": draw(6, rows, 9),
        "puzzle_identifiers": draw(5, rows),
    }


def steps(objective: ActObjective, batches: list[dict[str, torch.Tensor]], shards=(0, 1)):
    """Outputs of consecutive steps, carrying on."""
    carry, outs = None, []
    for step, batch in enumerate(batches):
        carry = objective.initial_carry(batch) if carry is None else carry
        outs.append(objective(batch, carry, Context(0.0, Noise(3, step, list(shards)))))
        carry = outs[-1].carry
    return outs


@pytest.mark.parametrize("name", NETS)
def test_a_slot_keeps_its_puzzle_until_it_halts(name: str) -> None:
    batches = [batch_of(8, seed) for seed in range(6)]
    outs = steps(make(name), batches)
    halted_ever = kept_ever = False
    for before, after, batch in zip(outs, outs[1:], batches[1:], strict=False):
        halted = before.carry.halted
        torch.testing.assert_close(
            after.carry.batch["inputs"][halted], batch["inputs"][halted], rtol=0, atol=0
        )
        torch.testing.assert_close(
            after.carry.batch["inputs"][~halted],
            before.carry.batch["inputs"][~halted],
            rtol=0,
            atol=0,
        )
        expected = torch.where(halted, 1, before.carry.steps + 1)
        torch.testing.assert_close(
            after.carry.steps, expected.to(after.carry.steps.dtype), rtol=0, atol=0
        )
        halted_ever, kept_ever = (
            halted_ever or bool(halted.any()),
            kept_ever or bool((~halted).any()),
        )
    assert halted_ever, "no slot ever halted: the test shows nothing"
    assert kept_ever, "every slot halted at once: the test shows nothing"
    assert all(int(out.carry.steps.max()) <= 4 for out in outs)


@pytest.mark.parametrize("name", NETS)
def test_slots_do_not_see_each_other(name: str) -> None:
    """A step over two shards is the two steps over one shard each: sums add, carries
    concatenate.
    """
    whole, halves = make(name), [make(name), make(name)]
    batches = [batch_of(8, seed) for seed in range(4)]
    outs = steps(whole, batches)
    for i, objective in enumerate(halves):
        mine = [{key: rows[4 * i : 4 * i + 4] for key, rows in batch.items()} for batch in batches]
        parts = steps(objective, mine, shards=[i])
        for out, part in zip(outs, parts, strict=True):
            torch.testing.assert_close(
                out.carry.steps[4 * i : 4 * i + 4], part.carry.steps, rtol=0, atol=0
            )
            torch.testing.assert_close(
                out.carry.state[0][4 * i : 4 * i + 4], part.carry.state[0], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", NETS)
def test_padding_rows_count_nowhere(name: str) -> None:
    plain, padded = make(name), make(name)
    batch = batch_of(4)
    more = {key: torch.cat([rows, rows]) for key, rows in batch.items()}
    more["labels"] = torch.cat([batch["labels"], torch.full_like(batch["labels"], IGNORE)])
    (short,), (long,) = steps(plain, [batch], [0]), steps(padded, [more], [0, 1])
    short.loss.backward()
    long.loss.backward()
    torch.testing.assert_close(long.loss, short.loss)
    assert int(long.weight) == int(short.weight) == 4
    for key, (total, count) in short.metrics.items():
        torch.testing.assert_close(
            torch.stack([p.double() for p in long.metrics[key]]),
            torch.stack([total.double(), count.double()]),
        )
    for a, b in zip(padded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    ((ids, _),) = padded.model.inner.puzzle_emb.take_row_grads()
    assert ids[4:].tolist() == [-1] * 4, "padding rows would train a puzzle"


def test_exploration_is_noise_of_step_and_shard_only() -> None:
    batch = batch_of(64)
    halted = [
        steps(make("hrm"), [batch], shards)[0].carry.halted for shards in ([0, 1], [0, 1], [0, 2])
    ]
    assert torch.equal(halted[0], halted[1])
    assert torch.equal(halted[0][:32], halted[2][:32])
    wild = steps(make("hrm", halt_exploration_prob=1.0), [batch])[0].carry.halted
    assert not wild.any(), "an exploring slot thinks two steps at least"


@pytest.mark.parametrize(
    ("dtype", "apart"),
    [
        pytest.param("float32", 1e-5, marks=pytest.mark.slow),
        pytest.param("bfloat16", 0.08, marks=pytest.mark.slow),
    ],
)
def test_compiling_changes_no_number_and_no_key(dtype: str, apart: float) -> None:
    """In half precision eager norms and rotations are computed in another way, so rounding differs
    there: gradients of either are up to 0.05 off those of float64.
    """
    eager = make("trm", forward_dtype=dtype)
    compiled = copy.deepcopy(eager)
    compiled.model.compile(dynamic=False, backend="aot_eager")
    batches = [batch_of(8, seed) for seed in range(2)]
    for a, b in zip(steps(eager, batches), steps(compiled, batches), strict=True):
        torch.testing.assert_close(a.loss, b.loss, rtol=apart, atol=0)
        a.loss.backward()
        b.loss.backward()
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert torch.linalg.vector_norm(a.grad - b.grad) <= apart * torch.linalg.vector_norm(
            a.grad
        ), name
    assert list(eager.state_dict()) == list(compiled.state_dict())


def test_weights_are_cast_once_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, casts = make("trm", forward_dtype="bfloat16"), []
    parameters = {id(p) for p in objective.parameters()}
    original = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda self, *a, **k: (casts.append(id(self)), original(self, *a, **k))[1],
    )
    steps(objective, [batch_of(4)], [0])
    seen = [i for i in casts if i in parameters]
    assert sorted(seen) == sorted(parameters), (
        "every weight is cast exactly once, however many cycles use it"
    )


def test_bfloat16_and_float64_follow_float32() -> None:
    batch = batch_of(8)
    base = steps(make("trm"), [batch])[0].loss
    double = make("trm", forward_dtype="float64").double()
    torch.testing.assert_close(steps(double, [batch])[0].loss, base.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        steps(make("trm", forward_dtype="bfloat16"), [batch])[0].loss.float(),
        base.float(),
        rtol=0.05,
        atol=0.05,
    )


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"num_heads": 3}, "arch.hidden_size=16"),
        (
            {"pos_encodings": "rope2d", "hidden_size": 12},
            "arch.num_heads=2 gives heads of 6; rope2d needs multiples of 4",
        ),
        ({"puzzle_emb_ndim": 64, "puzzle_emb_len": 2}, "arch.puzzle_emb_len=2"),
        ({"puzzle_emb_ndim": 0}, "arch.puzzle_emb_ndim=0"),
    ],
)
def test_impossible_sizes_are_named(keys: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        NETS["hrm"](**keys)


def test_the_objective_knows_which_way_its_metrics_are_better() -> None:
    objective = make("trm")
    asked = {
        text: objective.judging_metric(text)
        for text in ("", "eval/lm_loss", "eval/all/q_halt_loss", "eval/steps", "-eval/steps")
    }
    assert {text: str(metric) for text, metric in asked.items()} == {
        "": "eval/exact_accuracy",
        "eval/lm_loss": "-eval/lm_loss",
        "eval/all/q_halt_loss": "-eval/all/q_halt_loss",
        "eval/steps": "eval/steps",
        "-eval/steps": "-eval/steps",
    }


def test_a_headline_of_which_less_is_better_keeps_its_sign_however_it_is_named() -> None:
    objective = make("trm")
    objective.headline = Metric("kl", lower_is_better=True)
    assert {str(objective.judging_metric(text)) for text in ("", "eval/kl", "-eval/kl")} == {
        "-eval/kl"
    }
    assert str(objective.judging_metric("eval/all/kl")) == "-eval/all/kl"


def test_the_gated_product_may_be_normed() -> None:
    mlp = SwiGLU(8, gated_width(8, 2.0, 4), norm_eps=1e-5)
    x = torch.randn(3, 8)
    gate, up = mlp.gate_up_proj(x).chunk(2, -1)
    product = gate * up
    normed = product / (product.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(mlp(x), mlp.down_proj(torch.sigmoid(gate) * normed))
    assert mlp.gate_up_proj.weight.shape == (2 * 12, 8), (
        "two thirds of 16, rounded up to a multiple of 4"
    )
    assert make("trm", mlp_norm=True).model.inner.L_level.layers[0].mlp.norm_eps == 1e-5


@pytest.mark.parametrize("loss", ["stablemax_cross_entropy", "softmax_cross_entropy"])
def test_a_part_of_the_target_is_spread_over_all_tokens(loss: str) -> None:
    logits, labels = (
        torch.randn(2, 3, 5, dtype=torch.float64),
        torch.tensor([[0, 4, 2], [1, IGNORE, 3]]),
    )
    # minus log probabilities
    every = torch.stack(
        [LOSSES[loss](logits, torch.full_like(labels, token)) for token in range(5)], -1
    )
    chosen = torch.where(
        labels == IGNORE, 0.0, every.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    )
    spread = torch.where(labels == IGNORE, 0.0, every.mean(-1))
    torch.testing.assert_close(
        LOSSES[loss](logits, labels, 0.2).double(),
        (0.8 * chosen + 0.2 * spread).double(),
        rtol=1e-6,
        atol=1e-6,
    )
    assert torch.equal(LOSSES[loss](logits, labels), LOSSES[loss](logits, labels, 0.0))


def test_cycles_grow_in_three_stages() -> None:
    objective, passes = make("trm", H_cycles=3, L_cycles=4, depth_warmup=0.5), []
    objective.model.inner.L_level.register_forward_hook(lambda *_: passes.append(1))
    batch, seen = batch_of(4), []
    for progress in (0.0, 0.24, 0.25, 0.49, 0.5, 1.0):
        objective(batch, objective.initial_carry(batch), Context(progress, Noise(0, 0, [0])))
        seen.append(len(passes))
        passes.clear()
    assert seen == [1 * (2 + 1)] * 2 + [2 * (3 + 1)] * 2 + [3 * (4 + 1)] * 2
    objective.predict(batch)
    assert len(passes) == 4 * 3 * (4 + 1), "evaluations think as deep as they can"
    passes.clear()
    objective.rehearse(batch, Context(0.0, Noise(0, 0, [0])))
    assert len(passes) == 3 * (4 + 1), "what a step takes is measured at its deepest"
    assert make("trm").model.cycles(0.0) == (2, 2)


def test_only_the_start_that_does_best_is_learned_from() -> None:
    """As many nets as starts, each thinking alone from its own scratchpad and the shared answer,
    tell who has won.
    """
    objective = make("trm", starts=3)
    inits = torch.cat((objective.model.inner.L_init[None], objective.model.inner.L_more_inits))
    assert len({tuple(init.tolist()) for init in inits}) == 3
    batch = batch_of(16)
    carry, winners = objective.initial_carry(batch), set()
    for step in range(3):
        ctx = Context(0.0, Noise(3, step, [0]))
        refilled = objective._refill(carry, batch)
        rows = objective.model.puzzle_rows(refilled.batch["puzzle_identifiers"]).detach()
        z_H, z_L = refilled.state
        alone = [
            objective.model((z_H, z_L[:, start]), refilled.batch["inputs"], rows, None)
            for start in range(3)
        ]
        losses = torch.stack(
            [
                objective.token_loss(logits, refilled.batch["labels"]).mean(-1).detach()
                for _, logits, _ in alone
            ]
        )
        best = losses.argmin(0)
        winners |= set(best.tolist())
        objective.zero_grad()
        out = objective(batch, carry, ctx)
        assert float(out.metrics["lm_loss"][0]) == pytest.approx(
            float(losses.amin(0).sum()), rel=1e-5
        )
        for slot, start in enumerate(best.tolist()):
            torch.testing.assert_close(out.carry.state[0][slot], alone[start][0][0][slot])
        for start in range(3):
            torch.testing.assert_close(out.carry.state[1][:, start], alone[start][0][1])
        out.loss.backward()
        carry = out.carry
    assert len(winners) > 1, "one start always won: the test shows nothing"
    got = [parameter.grad.clone() for parameter in objective.parameters()]
    one = make("trm")
    one.load_state_dict(objective.state_dict(), strict=False)
    z_L_of_best = z_L[torch.arange(16), best]
    one(
        batch,
        type(carry)(
            (z_H, z_L_of_best), refilled.steps, torch.zeros(16, dtype=torch.bool), refilled.batch
        ),
        ctx,
    ).loss.backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in one.parameters()])


def test_one_start_is_enough_to_answer() -> None:
    objective, one = make("trm", starts=4), make("trm")
    one.load_state_dict(objective.state_dict(), strict=False)
    batch = batch_of(8)
    assert torch.equal(
        objective.predict(batch).outputs["logits"], one.predict(batch).outputs["logits"]
    )


def test_rotary_positions_of_a_grid() -> None:
    """Attention between two cells depends only on the distances of their rows and columns."""
    cos_sin = GridRotaryEmbedding(8, 2, 25, 100.0, torch.float64)()
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    queries, keys = (rotate(x.expand(1, 1, 27, 8), cos_sin)[0, 0] for x in (query, key))
    scores = queries @ keys.T
    places = [(-2, -2), (-1, -1), *((cell // 5, cell % 5) for cell in range(25))]
    by_distance: dict[tuple[int, int], list[float]] = {}
    for (row, column), line in zip(places, scores, strict=True):
        for (other_row, other_column), score in zip(places, line.tolist(), strict=True):
            by_distance.setdefault((row - other_row, column - other_column), []).append(score)
    assert len(by_distance) > 81
    assert max(max(same) - min(same) for same in by_distance.values()) < 1e-12
    firsts = sorted(same[0] for same in by_distance.values())
    assert len(set(firsts)) == len(firsts), "different distances differ"
    with pytest.raises(ConfigError, match=r"rope2d: 10 tokens are not a square grid"):
        GridRotaryEmbedding(8, 2, 10, 100.0)
    assert make("trm", pos_encodings="rope2d").model.inner.rotary_emb.cos.shape == (3 + 9, 8)
