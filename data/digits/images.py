"""28×28 images of digits: scikit-learn's small ones, or MNIST from idx files or the hub."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from contract import Arrays, Evaluator, Examples, RunSettings, Spec
from data.digits.evaluators import Confusion, Mistakes
from data.example_text import ExampleText
from data.files import content_hash, load_from_hub
from data.order import EpochSource
from utils.errors import ConfigError, brief
from utils.files import read_bytes

SIDE = 28
CLASSES = 10
MNIST_HUB = "ylecun/mnist"
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
SHADES = " .:-=+*#%@"

Images = tuple[np.ndarray, np.ndarray]  # (N, 28, 28) and (N,), both uint8


@dataclass(frozen=True)
class ImageSpec(Spec):
    """The facts of images for a net."""

    num_classes: int = 0
    image_shape: tuple[int, ...] = ()


class ImageSource(EpochSource):
    """Training batches and the test set of a digit dataset."""

    def __init__(self, run: RunSettings, *, dataset: Literal["digits", "mnist"]) -> None:
        (images, labels), test = _load(dataset, run.data_path)
        spec = ImageSpec(
            num_classes=CLASSES,
            image_shape=(SIDE, SIDE),
            fingerprint=content_hash({"images": images, "labels": labels}),
            name=run.data_path or dataset,
        )
        super().__init__(run, spec, _examples(images, labels), test=_examples(*test))

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return [Confusion(CLASSES), Mistakes(), ExampleText(image_text)]


def image_text(example: Arrays, answer: np.ndarray) -> str:
    """Draws an image in characters, every other row, as they are taller than wide."""
    shades = example["inputs"].astype(np.int64) * len(SHADES) // 256
    picture = ["".join(SHADES[shade] for shade in row).rstrip() for row in shades[::2]]
    label = int(example["labels"])
    verdict = "correct" if label == answer else f"wrong, it is {label}"
    return "\n".join([*picture, f"answer: {int(answer)} ({verdict})"])


def _examples(images: np.ndarray, labels: np.ndarray) -> Examples:
    return Examples({"inputs": images, "labels": labels.astype(np.int32)})


def _load(dataset: str, data_path: str | None) -> tuple[Images, Images]:
    if dataset == "digits":
        if data_path is not None:
            raise ConfigError(
                f"data_path={data_path}: data=digits comes with scikit-learn and reads no folder;"
                " use data=mnist"
            )
        return small_digits()
    if data_path is None:
        return _from_hub("train"), _from_hub("test")
    return _from_folder(Path(data_path), "train"), _from_folder(Path(data_path), "test")


def small_digits() -> tuple[Images, Images]:
    """Returns scikit-learn's 8×8 digits, enlarged. A fifth of each class is for testing."""
    table = _scikit_learns_table()
    pixels, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.uint8)
    # never the run's seed: the test set is the same in every run
    shuffled = np.random.default_rng(0).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[by_class[::5]] = True
    # 20×20 within a margin, as in MNIST's images
    larger = torch.nn.functional.interpolate(
        torch.from_numpy(pixels[:, None] / 16), size=(20, 20), mode="bilinear"
    )
    margin = ((0, 0), (4, 4), (4, 4))
    inputs = np.pad((larger[:, 0] * 255).round().to(torch.uint8).numpy(), margin)
    return (inputs[~held_out], labels[~held_out]), (inputs[held_out], labels[held_out])


def _scikit_learns_table() -> np.ndarray:
    """Reads a row of 64 pixels, from 0 to 16, and the label of each of 1,797 digits."""
    # The file is read without importing the package, which would take a second. Looking up a module
    # inside the package would import it, too.
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    folder = Path(package.submodule_search_locations[0])
    with gzip.open(folder / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",")


def _from_hub(split: str) -> Images:
    remedy = "give data_path=FOLDER with the idx files"
    rows = load_from_hub(f"data=mnist: {MNIST_HUB}", remedy, MNIST_HUB, split)
    images = np.stack([np.asarray(image, np.uint8) for image in rows["image"]])
    return images, np.asarray(rows["label"], np.uint8)


def _from_folder(folder: Path, split: str) -> Images:
    try:
        images, labels = (_read_idx(folder, name) for name in IDX_FILES[split])
        if images.shape != (len(labels), SIDE, SIDE) or labels.max() >= CLASSES:
            raise ValueError(f"images of shape {images.shape}, labels up to {labels.max()}")
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise ConfigError(
            f"data_path={folder}: {', '.join(IDX_FILES[split])} (or .gz) cannot be read as MNIST's"
            f" ({brief(error)}); download its four idx files again"
        ) from None
    return images, labels


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """Reads an idx file, compressed or not: the number of dimensions, their sizes, bytes."""
    if os.path.exists(folder / name):
        content = read_bytes(folder / name)
    else:
        content = gzip.decompress(read_bytes(folder / f"{name}.gz"))
    header = 4 + 4 * content[3]  # a magic number whose last byte counts the dimensions; their sizes
    shape = np.frombuffer(content[4:header], ">i4")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
