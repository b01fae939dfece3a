"""What ranks must see alike before the first step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.utils.checkpoint.helpers import on_ranks
from utils.errors import ConfigError
from utils.ranks.alike import check_same_data
from utils.ranks.distributed import Dist

SAME = {"the dataset": "x", "the evaluation set val": "9 y"}


@pytest.mark.parametrize(
    ("theirs", "part"),
    [
        (SAME, ""),
        (SAME | {"the evaluation set val": "8 y"}, "the evaluation set val"),
        (SAME | {"the evaluation set more": "1 z"}, "the evaluation set more"),
        ({"the dataset": "x"}, "the evaluation set val"),
    ],
)
def test_the_part_of_the_data_in_which_ranks_differ_is_named(
    theirs: Mapping[str, str], part: str
) -> None:
    seen = [SAME, theirs, SAME]

    def said(dist: Dist) -> str:
        try:
            check_same_data(seen[dist.rank], None, dist)
        except ConfigError as error:
            return str(error)
        return ""

    (line,) = {*on_ranks(3, said)}
    expected = f"data_path=null: {part} of rank 1 differs from rank 0's; give every host the same"
    assert line.startswith(expected) if part else not line
