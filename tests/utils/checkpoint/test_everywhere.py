"""One digest, whatever number of ranks saved a checkpoint or went on from it, and in whatever way
they share tensors.
"""

from pathlib import Path

import pytest

from tests.data.recursive.helpers import ragged_groups, write_dataset
from tests.ranks import check_ended_well, run_module
from tests.utils.checkpoint.ranks_everywhere import WAYS
from utils.checkpoint import reader

MODULE = "tests.utils.checkpoint.ranks_everywhere"


@pytest.mark.slow
def test_one_digest(tmp_path: Path) -> None:
    """A checkpoint of one number of ranks is continued and saved by others."""
    chain, ways = (1, 4, 3, 2, 1), [*WAYS]
    write_dataset(tmp_path / "data", ragged_groups(38))
    write_dataset(tmp_path / "data", ragged_groups(11), split="test")
    before, trained = "none", []
    for place, ranks in enumerate(chain):
        arguments = [str(tmp_path / "data"), str(tmp_path / "runs"), before, *ways]
        check_ended_well(run_module(ranks, MODULE, *arguments, timeout=150))
        before = str(ranks)
        folders = [tmp_path / "runs" / f"{way}-{ranks}" / "checkpoints" / "step_3" for way in ways]
        for folder in folders:
            files = {file.name for file in folder.glob("*.safetensors")}
            groups = ("ema", "model", "optimizer", "shards")
            assert files == {f"{group}.safetensors" for group in groups}
        digests = [reader.digest(folder) for folder in folders]
        trained = trained or digests
        # at every place, each way has gone on from the one after it
        assert digests == [trained[(number + place) % len(ways)] for number in range(len(ways))]
