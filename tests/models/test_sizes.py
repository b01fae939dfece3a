"""Nets that cannot be, or that no machine can hold, are refused in a line that names the key."""

import time
from typing import Any

import pytest
import torch

from contract import Spec
from data.decomposition.features import FeatureSpec
from data.recursive.puzzles import PuzzleSpec
from tests.making import make_objective
from utils.errors import ConfigError

TEXT = Spec(vocab_size=256, seq_len=64)
BOARDS = PuzzleSpec(vocab_size=6, seq_len=9, table_rows=5)
OBLONG = PuzzleSpec(vocab_size=6, seq_len=60, table_rows=1)
FEATURES = FeatureSpec(num_features=5)
ABSURD = r"a net with [\d,]+ weights needs [\d,]+ GiB"
SCALING = {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 32}
# the net, its data, its keys, and what the line names
WRONG: list[tuple[str, Spec, dict[str, Any], str]] = [
    ("tms", TEXT, {}, "arch=tms needs features"),
    ("tms", FEATURES, {"hidden_size": 1 << 20, "identity_layers": 100}, ABSURD),
    ("resid_mlp", FEATURES, {"num_layers": 3}, "num_layers=3"),
    ("induction", FEATURES, {}, "arch=induction needs tokens"),
    ("induction", TEXT, {"hidden_size": 6, "num_heads": 2}, "hidden_size=6"),
    ("hrm", BOARDS, {"num_heads": 3}, "arch.hidden_size=512"),
    ("hrm", BOARDS, {"pos_encodings": "rope2d", "hidden_size": 48}, "arch.num_heads=8 gives heads"),
    ("hrm", BOARDS, {"puzzle_emb_ndim": 2048, "puzzle_emb_len": 2}, "arch.puzzle_emb_len=2"),
    ("hrm", BOARDS, {"chains": 4}, "arch.chains=4"),
    ("grid", OBLONG, {}, "arch=grid"),
    ("grid", BOARDS, {"puzzle_emb_ndim": 8}, "arch=grid"),
    ("symbols", OBLONG, {}, "arch=symbols solves square"),
    ("symbols", BOARDS, {}, "arch.symbols=None"),
    ("symbols", BOARDS, {"symbols": 6}, "arch.symbols=6"),
    ("grid", BOARDS, {"damping": 0.1}, "arch.damping"),
    ("symbols", BOARDS, {"symbols": 3, "hidden_size": 20}, "arch.hidden_size=20"),
    ("candidates", BOARDS, {}, "this net solves Sudoku boards"),
    ("gpt", TEXT, {"num_heads": 4, "kv_heads": 3}, "arch.kv_heads=3"),
    ("gpt", TEXT, {"head_dim": 5}, "arch.head_dim=5"),
    ("gpt", TEXT, {"qk_norm": False, "qk_weights": True}, "arch.qk_weights=true"),
    ("gpt", TEXT, {"rope_scaling": SCALING}, "arch.rope_scaling.low_freq_factor=4.0"),
    ("gpt", TEXT, {"num_layers": 1000, "hidden_size": 1 << 20, "num_heads": 8}, ABSURD),
]


@pytest.mark.parametrize(("arch", "spec", "keys", "named"), WRONG)
def test_an_impossible_net_is_refused_at_once(
    arch: str, spec: Spec, keys: dict[str, Any], named: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=named):
        make_objective(arch, spec, **keys)
    assert time.monotonic() - begun < 5


def test_a_net_without_numbers_may_have_any_size() -> None:
    with torch.device("meta"):
        net = make_objective("gpt", TEXT, num_layers=2, hidden_size=1 << 18, num_heads=8).model
    assert sum(p.numel() for p in net.parameters()) * 4 > 1 << 40
    matrices = [p.numel() for p in net.layers.parameters() if p.ndim == 2]
    assert net.shape.weights == sum(matrices)
