"""The recursive objective: what a slot remembers, what counts, and that compiling or casting
changes nothing else.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from contract import IGNORE, Noise
from data.recursive.puzzles import PuzzleSpec
from models.layers import SwiGLU, gated_width, rotate
from models.recursive.act import LOSSES, ActObjective
from models.recursive.recursion import Level
from models.recursive.sequence import GridRotaryEmbedding
from tests.making import make_objective
from tests.models.recursive.slots import rows_of, steps
from utils.errors import ConfigError

SPEC = PuzzleSpec(vocab_size=6, seq_len=9, table_rows=5)
SIZES = {
    "H_cycles": 2,
    "L_cycles": 2,
    "H_layers": 1,
    "L_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "expansion": 2.0,
    "halt_max_steps": 4,
    "halt_exploration_prob": 0.5,
    "forward_dtype": "float32",
}
NETS: dict[str, dict[str, Any]] = {
    "hrm": {},
    "trm": {"puzzle_emb_len": 3},
    "trm_mlp": {
        "mlp_t": True,
        "pos_encodings": "none",
        "puzzle_emb_len": 0,
        "no_ACT_continue": False,
    },
    "hrm_learned": {"pos_encodings": "learned"},
    "trm_noisy": {"random_start": True, "damping": 0.1, "path_noise": 0.3},
    "hrm_noisy": {"damping": 0.1, "path_noise": 0.3},
}


def make(name: str, **keys: Any) -> ActObjective:
    objective = make_objective(name[:3], SPEC, **SIZES | NETS[name] | keys)
    with torch.no_grad():  # undecided halting, so that slots go different ways
        objective.model.inner.q_head.bias.zero_()
        drawn = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
        objective.model.inner.q_head.weight.copy_(drawn)
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


@pytest.mark.parametrize("name", NETS)
def test_a_slot_keeps_its_puzzle_until_it_halts(name: str) -> None:
    batches = [batch_of(8, seed) for seed in range(6)]
    outs = steps(make(name), batches)
    halted_ever = kept_ever = False
    for before, after, batch in zip(outs, outs[1:], batches[1:], strict=False):
        halted, now = before.carry.halted, after.carry.batch["inputs"]
        assert torch.equal(now[halted], batch["inputs"][halted])
        assert torch.equal(now[~halted], before.carry.batch["inputs"][~halted])
        assert (after.carry.steps == torch.where(halted, 1, before.carry.steps + 1)).all()
        halted_ever |= bool(halted.any())
        kept_ever |= bool((~halted).any())
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
        rows = slice(4 * i, 4 * i + 4)
        parts = steps(objective, [rows_of(batch, rows) for batch in batches], shards=[i])
        for out, part in zip(outs, parts, strict=True):
            assert torch.equal(out.carry.steps[rows], part.carry.steps)
            assert_close(out.carry.state[0][rows], part.carry.state[0], rtol=1e-4, atol=1e-4)


def test_exploration_is_noise_of_step_and_shard_only() -> None:
    batch = batch_of(64)
    first, again, other = (
        steps(make("hrm"), [batch], shards)[0].carry.halted for shards in ([0, 1], [0, 1], [0, 2])
    )
    assert torch.equal(first, again)
    assert torch.equal(first[:32], other[:32])
    wild = steps(make("hrm", halt_exploration_prob=1.0), [batch])[0].carry.halted
    assert not wild.any(), "an exploring slot thinks two steps at least"


@pytest.mark.parametrize("name", ["hrm", "trm"])
def test_each_pass_keeps_a_share_of_its_state_and_adds_noise(name: str) -> None:
    model = make(name, damping=0.25, path_noise=0.5, forward_dtype="float64").model.double()
    batch, before = batch_of(4), []

    def record(level: torch.nn.Module, given: tuple[Any, ...], new: torch.Tensor) -> None:
        state, injected, cos_sin, noise = given
        x = state + injected
        for block in level.layers:
            x = block(x, cos_sin)
        assert_close(new, 0.25 * state + 0.75 * x + noise)
        before.append(noise)

    for module in model.modules():
        if isinstance(module, Level):
            module.register_forward_hook(record)
    state = model.fresh_state(Noise(3, 1, [0, 1]), *batch["inputs"].shape)
    passes = model.path_noise(Noise(3, 1, [0, 1]), state, 0.5)
    model(state, batch["inputs"], model.puzzle_rows(batch["puzzle_identifiers"]), passes)
    assert len(before) == len(passes) == 6
    assert all(torch.equal(used, drawn) for used, drawn in zip(before, passes, strict=True))
    together = torch.stack(passes)
    assert abs(float(together.std()) - 0.5) < 0.02
    assert float(together.abs().max()) > 1.2, "normal numbers, not cut at two sigma"
    assert len({tuple(row) for row in together.flatten(0, 2).tolist()}) == together[..., 0].numel()


def test_puzzles_begin_in_drawn_states() -> None:
    objective = make("trm", random_start=True)
    batches = [batch_of(400, seed) for seed in range(2)]
    first, second = steps(objective, batches)
    noise = Noise(3, 1, [0, 1])
    fresh = objective.model.fresh_state(noise, *batches[0]["inputs"].shape)
    assert abs(float(fresh[0].std()) - 1) < 0.01, "as large as the learned start"
    assert len({tuple(row) for row in fresh[1].flatten(1).tolist()}) == 400
    halted = first.carry.halted[:, None, None]
    assert 0 < int(halted.sum()) < 400
    start = [
        torch.where(halted, new, old) for new, old in zip(fresh, first.carry.state, strict=True)
    ]
    puzzles = second.carry.batch
    rows = objective.model.puzzle_rows(puzzles["puzzle_identifiers"])
    after, _, _ = objective.model.inner(start, puzzles["inputs"], rows)
    for expected, got in zip(after, second.carry.state, strict=True):
        assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not any(name.endswith("_init") for name in objective.state_dict()), "drawn, not stored"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "apart"),
    [("trm", "float32", 1e-5), ("trm", "bfloat16", 0.08), ("trm_noisy", "float32", 1e-5)],
)
def test_compiling_changes_no_number_and_no_key(
    name: str, dtype: str, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision eager norms and rotations are computed in another way, so rounding differs
    there: gradients of either are up to 0.05 off those of float64.
    """
    eager = make(name, forward_dtype=dtype)
    compiled = copy.deepcopy(eager)
    compiling = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiling)
    compiled.compile_net()
    batches = [batch_of(8, seed) for seed in range(2)]
    for a, b in zip(steps(eager, batches), steps(compiled, batches), strict=True):
        assert_close(a.loss, b.loss, rtol=apart, atol=0)
        a.loss.backward()
        b.loss.backward()
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert torch.linalg.vector_norm(a.grad - b.grad) <= apart * torch.linalg.vector_norm(
            a.grad
        ), name
    assert list(eager.state_dict()) == list(compiled.state_dict())


def test_compiled_code_gets_the_weights_themselves() -> None:
    """CUDA graphs need them in one place; copies in half precision lie elsewhere in each step."""
    objective, given = make("hrm", forward_dtype="bfloat16", H_cycles=1), set[int]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        given.update(value.data_ptr() for value in inputs if isinstance(value, nn.Parameter))
        return graph

    objective.model.compile(backend=backend, fullgraph=True)
    steps(objective, [batch_of(8)])
    assert given == {weight.data_ptr() for weight in objective.model.parameters()}


def test_bfloat16_and_float64_follow_float32() -> None:
    base = steps(make("trm"), [batch_of(8)])[0].loss
    for dtype, near in (("float64", 1e-4), ("bfloat16", 0.05)):
        loss = steps(make("trm", forward_dtype=dtype), [batch_of(8)])[0].loss
        assert_close(loss, base, rtol=near, atol=near, check_dtype=False)


def test_the_gated_product_may_be_normed() -> None:
    mlp = SwiGLU(8, gated_width(8, 2.0, 4), norm_eps=1e-5)
    x = torch.randn(3, 8)
    gate, up = mlp.gate_up_proj(x).chunk(2, -1)
    product = gate * up
    normed = product / (product.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(mlp(x), mlp.down_proj(torch.sigmoid(gate) * normed))
    assert mlp.gate_up_proj.weight.shape == (2 * 12, 8), (
        "two thirds of 16, rounded up to a multiple of 4"
    )


@pytest.mark.parametrize("loss", ["stablemax_cross_entropy", "softmax_cross_entropy"])
def test_a_part_of_the_target_is_spread_over_all_tokens(loss: str) -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    labels = torch.tensor([[0, 4, 2], [1, IGNORE, 3]])
    of_tokens = [LOSSES[loss](logits, torch.full_like(labels, token)) for token in range(5)]
    every = torch.stack(of_tokens, -1)  # minus log probabilities
    chosen = every.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    spread, chosen = (torch.where(labels == IGNORE, 0.0, of) for of in (every.mean(-1), chosen))
    smoothed = LOSSES[loss](logits, labels, 0.2).double()
    assert_close(smoothed, (0.8 * chosen + 0.2 * spread).double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(LOSSES[loss](logits, labels), LOSSES[loss](logits, labels, 0.0))


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
