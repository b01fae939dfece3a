import gzip
from pathlib import Path

import numpy as np
import pytest

from data.digits.images import IDX_FILES, ImageSource
from tests.data.helpers import everything, shown
from tests.making import make_source
from utils.errors import ConfigError


def source(**changes) -> ImageSource:
    run = {"seed": 0, "shards": 4, "global_batch_size": 60, "epochs": 4, "eval_interval": 2}
    return make_source("digits", **run | changes)


def idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + values


def write_idx(folder, compressed: bool, train: int = 50, test: int = 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    written = {}
    for split, count in (("train", train), ("test", test)):
        for file, shape in zip(IDX_FILES[split], ((count, 28, 28), (count,)), strict=True):
            written[file] = rng.integers(0, 10, shape).astype(np.uint8)
            content = idx(shape, written[file].tobytes())
            if compressed:
                file, content = f"{file}.gz", gzip.compress(content)
            (folder / file).write_bytes(content)
    return written


def test_digits_are_real_split_once_and_the_same_for_every_seed():
    one, other = source(), source(seed=1)
    assert one.spec == other.spec
    assert (one.spec.num_classes, one.spec.image_shape) == (10, (28, 28))
    tests = [everything(made.eval_sets()["test"]) for made in (one, other)]
    assert (tests[0]["inputs"] == tests[1]["inputs"]).all()
    assert 355 <= len(tests[0]["labels"]) <= 364
    assert np.bincount(tests[0]["labels"]).min() >= 34  # every digit has its share
    assert tests[0]["inputs"].dtype == np.uint8
    assert tests[0]["inputs"].max() == 255


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files_are_read(tmp_path, compressed):
    written = write_idx(tmp_path, compressed)
    made = source(dataset="mnist", data_path=str(tmp_path), global_batch_size=20)
    test = everything(made.eval_sets()["test"])
    assert (test["inputs"] == written["t10k-images-idx3-ubyte"]).all()
    assert (test["labels"] == written["t10k-labels-idx1-ubyte"]).all()
    assert made.length.total_steps == 2 * (2 * 50 // 20)


def test_an_example_is_drawn_with_its_answer():
    made = source()
    example = {name: array[0] for name, array in everything(made.eval_sets()["test"]).items()}
    label = int(example["labels"])
    text = shown(made, "test", example, np.array(label))
    assert text.endswith(f"answer: {label} (correct)")
    assert "@" in text
    assert "wrong, it is" in shown(made, "test", example, np.array((label + 1) % 10))


IMAGES, LABELS = IDX_FILES["train"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (IMAGES, None),
        (IMAGES, idx((50, 28, 28), bytes(50 * 784 - 1))),
        (IMAGES, idx((49, 28, 28), bytes(49 * 784))),
        (f"{IMAGES}.gz", gzip.compress(bytes(9000), mtime=0)[:-9]),
        (LABELS, idx((50,), bytes([11] * 50))),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, file: str, content: bytes | None) -> None:
    write_idx(tmp_path, False)
    (tmp_path / file.removesuffix(".gz")).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^data_path={tmp_path}: .*{file.removesuffix('.gz')}"):
        source(dataset="mnist", data_path=str(tmp_path), global_batch_size=20)
