"""Each net with each kind of data that it takes: in all precisions, and planned without numbers."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pretrain
from contract import Context, Noise, Spec
from data.source import settings_of
from data.stream import first_batch, to_tensors
from models.layers import RotaryEmbedding
from models.objective import flops_per_example, lower_is_better, rehearse, trained
from optim.groups import build_dense
from optim.optimizer_state import VALUES, OptimizerState
from tests.data.digits.test_images import write_idx
from tests.making import make_objective, needs_of
from tests.ranks import ROOT, words
from tests.runs import (
    FLOAT32,
    TINY_CANDIDATES,
    TINY_CNN,
    TINY_GPT,
    TINY_PREFIX,
    TINY_SYMBOLS,
    TINY_TRM,
    Once,
    config_of,
)
from tests.steps import steps_of, trainer_on
from tests.trial.test_trial import MyObjective
from trial.optimizers import remembered
from utils import transfer
from utils.command.instantiate import make
from utils.measure import metrics
from utils.plan.needs import META, Needs
from utils.ranks.distributed import Dist

ALONE = Dist()
TOY = ["global_batch_size=16", "max_steps=3", "data.num_features=6", "data.held_out=16"]
COMPONENTS = words("""
    arch=components arch.C=4 arch.loss.warmup_steps=1 arch.loss.subset=1 global_batch_size=16
    max_steps=3 data.held_out=16
""")
FACTS = words("data.facts=3 data.asked=2 data.held_out=16 max_steps=3")
FACT_READER = [
    *(key for key in TINY_GPT if key.startswith(("arch.", "eval"))),
    *words("arch=gpt data=fact_text data.seq_len=32 global_batch_size=16"),
    *FACTS,
]
FACTS_PREFIX = [*(key for key in TINY_PREFIX if not key.startswith("data")), "data=facts", *FACTS]
TRM_ALONE = ("arch.puzzle_emb_len=1", "arch.no_ACT_continue=false")
TEXT = [argument for argument in TINY_GPT if not argument.startswith("data")]
# what stands in braces is a folder that the test makes
LINES = {
    "hrm puzzles": ["arch=hrm", *(key for key in TINY_TRM[1:] if key not in TRM_ALONE)],
    "trm puzzles": TINY_TRM,
    "grid puzzles": [
        *words("arch=grid arch.hidden_size=8 arch.H_cycles=2 arch.L_cycles=3"),
        *(each for each in TINY_TRM[1:] if not each.startswith(("arch", "puzzle_emb"))),
    ],
    "symbols puzzles": TINY_SYMBOLS,
    "candidates puzzles": TINY_CANDIDATES,
    "candidates puzzles wired": [*TINY_CANDIDATES, "arch.num_heads=null"],
    "cnn digits": TINY_CNN,
    "cnn mnist": [*TINY_CNN, "data=mnist", "data_path={mnist}"],
    "gpt tokens": TINY_GPT,
    "gpt tokens recomputing": [*TINY_GPT, "arch.recompute=true"],
    "gpt stream": [*TEXT, "data=stream", "data.seq_len=16", "data_path={texts}"],
    "tms features": ["arch=tms", "data=features", *TOY],
    "resid_mlp features": ["arch=resid_mlp", "data=features", "arch.hidden_size=8", *TOY],
    "induction induction": words("""
        arch=induction data=induction data.seq_len=8 data.held_out=16 global_batch_size=16
        max_steps=3
    """),
    "components features": [*COMPONENTS, "data=features", "arch.target={tms}"],
    "components tokens": [
        *COMPONENTS[:-1],
        *(each for each in TINY_GPT if each.startswith("data")),
        "arch.target={gpt}",
    ],
    "prefix passages": [*TINY_PREFIX, "arch.readers={readers}"],
    "prefix facts": [*FACTS_PREFIX, "arch.readers=[{fact_reader}]"],
    "gpt fact_text": FACT_READER,
}
NETS = [name for name in LINES if name not in ("cnn mnist", "gpt tokens recomputing", "gpt stream")]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    tms_target: Path,
    gpt_target: Path,
    readers: str,
    once: Once,
) -> dict[str, str]:
    """Replaces the names in braces."""
    folder = tmp_path_factory.mktemp("folders")
    for name in ("mnist", "texts"):
        (folder / name).mkdir()
    write_idx(folder / "mnist", compressed=False)
    for number in range(100):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number}, of some length\n" * 9)
    made = {"mnist": folder / "mnist", "texts": folder / "texts"}
    made |= {"tms": tms_target, "gpt": gpt_target, "fact_reader": once(*FACT_READER).directory}
    return {name: str(path) for name, path in made.items()} | {"readers": readers}


def line_of(name: str, folders: dict[str, str], *more: str) -> list[str]:
    line = [*LINES[name], *more]
    for key, folder in folders.items():
        line = [argument.replace(f"{{{key}}}", folder) for argument in line]
    return line


def test_every_net_and_kind_of_data_is_tested() -> None:
    for group, place in (("arch", 0), ("data", 1)):
        names = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert {name.split()[place] for name in LINES} == names


COUNTED = [
    pytest.param(name, marks=[] if name in ("trm puzzles", "gpt tokens") else pytest.mark.slow)
    for name in LINES
]


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted_without_numbers_is_what_a_pass_takes(
    name: str, folders: dict[str, str]
) -> None:
    # what is computed once for all examples without a feature, nobody can count beforehand
    all_features = ["data.probability=1"] if name == "components features" else []
    cfg = config_of(*line_of(name, folders, *FLOAT32, *all_features))
    source = make(cfg.data, "data", settings_of(cfg.plain()))

    def counted(device: torch.device, step: bool) -> Needs:
        objective = pretrain.make_objective(cfg.arch, 0, source.spec, device)
        if step:
            optimizers = build_dense(cfg.optim["dense"], trained(objective))
            memory = OptimizerState(optimizers, trained(objective))
            for parameter in trained(objective).values():
                parameter.grad = torch.zeros_like(parameter)
            for optimizer in optimizers:
                optimizer.step()
            state = {name: tensor for name, tensor in memory.state().items() if VALUES not in name}
        else:
            state = remembered(cfg.optim["dense"], trained(objective))
        first = partial(first_batch, source, cfg.seed, device)
        return needs_of(objective, state, cfg.ema, first)

    real = counted(torch.device("cpu"), step=True)
    found = counted(META, step=False)
    if name == "grid puzzles":  # whose passes are counted 2 % too large
        assert found.first == pytest.approx(real.first, rel=0.03)
        found = replace(found, first=real.first, each=real.each)
    assert found == real
    assert real.first >= real.each > 0
    assert 0 < real.trained == real.gradients <= real.remembered
    if name.startswith("prefix"):
        assert real.frozen > 0, "the model has no gradients, and nothing remembers it"


def test_operations_of_an_example() -> None:
    batch = {"inputs": torch.ones(4, 3), "labels": torch.zeros(4, dtype=torch.long)}
    objective = MyObjective(nn.Linear(3, 2))
    flops = flops_per_example(objective, batch, Context(0.0, Noise(0, 0, [0])))
    assert flops == 2 * 3 * 2 * 2, "forward, and backward to weights alone"


def test_the_guide_s_objective_counts_well_predicted_tokens_less() -> None:
    guide = (ROOT / "docs" / "adding-an-objective.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    example: dict[str, Any] = {}
    exec(compile(code, "docs/adding-an-objective.md", "exec"), example)
    shape = {"num_layers": 1, "hidden_size": 8, "num_heads": 2}
    plain = make_objective("gpt", Spec(vocab_size=8, seq_len=4), **shape)
    keys = {"chunk_tokens": None, "z_loss": 0.0}
    batch = {"inputs": torch.randint(0, 8, (2, 4)), "labels": torch.randint(0, 8, (2, 4))}
    batch["labels"][0, 1] = -100
    context = Context(0.0, Noise(0, 0, range(1)))
    same, focal = (example["Focal"](plain.model, gamma=gamma, **keys) for gamma in (0.0, 2.0))
    assert_close(same(batch, None, context).loss, plain(batch, None, context).loss)
    assert 0 < focal(batch, None, context).loss < plain(batch, None, context).loss
    assert focal(batch, None, context).weight == 7
    assert focal.predict(batch).metrics == plain.predict(batch).metrics
    rehearse(focal, batch, context, keep=True)
    assert all(parameter.grad is not None for parameter in focal.parameters())


@pytest.mark.parametrize("name", ["trm puzzles", "gpt tokens"])
def test_angles_are_as_precise_as_the_net(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    for dtype, error in (("float32", 1e-6), ("float64", 1e-14)):
        line = line_of(name, folders, f"arch.forward_dtype={dtype}")
        modules = trainer_on(ALONE, tmp_path / dtype, *line).objective.modules()
        tables = [module for module in modules if isinstance(module, RotaryEmbedding)]
        assert tables
        for table in tables:
            length, width = table.cos.shape
            rates = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
            angles = torch.outer(torch.arange(length, dtype=torch.float64), rates).repeat(1, 2)
            assert (table.cos.double() - angles.cos()).abs().max() <= length * error
            assert (table.sin.double() - angles.sin()).abs().max() <= length * error


@pytest.mark.parametrize("name", NETS)
def test_every_net_takes_steps_in_each_precision(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    for dtype in ("bfloat16", "float16", "float64"):  # all others are in float32
        line = line_of(name, folders, f"arch.forward_dtype={dtype}")
        trainer = trainer_on(ALONE, tmp_path / dtype, *line)
        for step in steps_of(trainer, 2):
            step()
        trainer.sync.check_finite("raise", newest=True)
        means = trainer.meter.read(trainer.dist)
        assert torch.isfinite(torch.tensor(means["loss"])), dtype


class WithoutFloat64(TorchDispatchMode):
    """Fails like a device that has no float64."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **kwargs or {})
        made = {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        assert torch.float64 not in made, f"{operation} makes float64"
        return out


@pytest.mark.parametrize("name", NETS)
def test_every_net_trains_on_a_device_without_float64(
    name: str, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (transfer, metrics):
        monkeypatch.setattr(module, "widest", lambda device: torch.float32)
    trainer = trainer_on(ALONE, tmp_path, *line_of(name, folders, *FLOAT32))
    with WithoutFloat64():
        for step in steps_of(trainer, 2):
            step()
        trainer.sync.check_finite("raise", newest=True)
        assert trainer.meter.read(trainer.dist)
        trainer.objective.eval()
        for set_name, examples in trainer.source.eval_sets().items():
            if set_name == "sample":  # drawn on the CPU
                continue
            batch = to_tensors([examples.read(np.arange(1))])
            with torch.no_grad():
                trainer.objective.predict(batch)


def test_a_sweeper_gets_less_for_what_is_better() -> None:
    results = {"eval/accuracy": 0.75, "eval/kl": 0.5}
    asked = "eval/accuracy", "-eval/kl", "eval/unknown"
    assert [lower_is_better(metric, results) for metric in asked] == [-0.75, 0.5, None]
