"""Components that begin as readers of inputs."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from contract import Noise
from models.decomposition.decompose import Decompose
from models.decomposition.first_inputs import start_at_inputs
from tests.models.decomposition.test_components import objective_on
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


@pytest.fixture(scope="module")
def objective(tms_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Decompose:
    return objective_on(tms_target, tmp_path_factory.mktemp("first"))[0]


def test_columns_are_different_inputs_and_then_any(objective: Decompose) -> None:
    """Of two shards; zeros are no inputs, and columns without an input stay."""
    model, V = objective.model, objective.model.factors(0)[0]
    before = V.detach().clone()
    first = torch.tensor([[0, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0.6, 0, 0, 0]]).double()
    second = torch.tensor([[0, 3, 4, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0.5, 0, 0]]).double()
    for seed in range(5):
        V.data.copy_(before)
        start_at_inputs(
            model, [[x, x[:, :2]] for x in (first, second)], Noise(seed, 0, [0, 1]), Dist()
        )
        one, two, between = [0.0, 1, 0, 0, 0], [0.0, 0, 1, 0, 0], [0.0, 0.6, 0.8, 0, 0]
        # the second shard offers two inputs, of which either may come first
        found = [[round(value, 6) for value in column] for column in V[:, :4].t().tolist()]
        assert sorted(found) == sorted([one, one, two, between])
        assert found[0] == one, "the first shard offers nothing else"
        assert found[1] == two, "the one between is like the first: its cosine is 0.6"
        assert_close(V[:, 4:], before[:, 4:])


def test_embeddings_have_no_inputs_to_begin_at(gpt_target: Path, tmp_path: Path) -> None:
    arguments = ("arch.modules=[embed_tokens]", "arch.init=inputs")
    with pytest.raises(ConfigError, match="init=inputs: embed_tokens is an embedding, which has"):
        objective_on(gpt_target, tmp_path, *arguments)
