"""Nets that others are about: from runs, averaged or not, of any precision, and from folders with a
Llama model.
"""

import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from contract import Context, Noise
from models.objective import load_tensors, saved_tensors
from tests.models.decomposition.test_components import objective_on, with_gradients
from tests.runs import TINY_CNN, TINY_GPT, TINY_TMS, Result, train
from tests.steps import trainer_on
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def test_a_target_that_is_not_as_it_was_written_is_refused(
    tms_target: Path, tmp_path: Path
) -> None:
    """One bit of a weight, which safetensors does not notice."""
    shutil.copytree(tms_target, tmp_path / "target")
    for file in (tmp_path / "target").glob("checkpoints/step_*/model.safetensors"):
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^arch\.target=.*: step_\d+ is damaged \(model\.safe"):
        objective_on(tmp_path / "target", tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_averaged_is_its_average(tmp_path: Path) -> None:
    run = train(tmp_path / "target", *TINY_TMS, "max_steps=10", "ema=true", "ema_rate=0.5")
    objective, _, _ = objective_on(run.directory, tmp_path)
    there = objective.model.target.net.linear1.weight
    assert_close(there, run.weights("ema")["dense/model.linear1.weight"].double(), rtol=0, atol=0)
    assert (there - run.weights()["model.linear1.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_says_nearly_the_same(dtype: str, tms_target: Path, tmp_path: Path) -> None:
    """Nor is the rounding of products taken for what components do not add up to."""
    keys = ["arch.loss.subset=1", "arch.loss.warmup_steps=400"]
    exact, batch, ctx = objective_on(tms_target, tmp_path / "a", *keys, "arch.C=20")
    low, _, _ = objective_on(
        tms_target, tmp_path / "b", *keys, "arch.C=20", f"arch.forward_dtype={dtype}"
    )
    load_tensors(low, {name: tensor.float() for name, tensor in saved_tensors(exact).items()})
    near = {"rtol": 0.2, "atol": 1e-3} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-6}
    wanted, gradients = with_gradients(exact, batch, ctx)
    logits, others = with_gradients(low, batch, ctx)
    assert_close(logits.double(), wanted, **near)
    assert others.keys() == gradients.keys()
    assert all(gradient.isfinite().all() for gradient in others.values())


def test_texts_of_several_documents_keep_them_apart(gpt_target: Path, tmp_path: Path) -> None:
    objective, batch, _ = objective_on(gpt_target, tmp_path)
    batch = {name: tensor[:1] for name, tensor in batch.items()}
    cut = {**batch, "documents": torch.tensor([[0] * 9 + [1] * 7], dtype=torch.int32)}
    tail = {name: tensor[:, 9:] for name, tensor in batch.items()}
    with torch.no_grad():
        both, alone = objective.predict(cut), objective.predict(tail)
        # positions are counted on over documents, so the tail by itself stands elsewhere: rotary
        # attention sees distances alone
        assert_close(both.outputs["gates"][:, 9:], alone.outputs["gates"], rtol=1e-5, atol=1e-6)
    out = objective(cut, None, Context(0.0, Noise(0, 0, [0])))
    assert torch.isfinite(out.loss)


@pytest.mark.slow
def test_recomputing_targets_are_taken_apart(tmp_path: Path) -> None:
    """Recomputing activations would compute matrices again after their replacements are gone."""
    run = train(
        tmp_path / "gpt", *TINY_GPT, "max_steps=2", "data.max_new_tokens=0", "arch.recompute=true"
    )
    objective, batch, ctx = objective_on(run.directory, tmp_path)
    assert objective.model.names[0] == "embed_tokens"
    assert objective.model.names[-1] == "lm_head"
    _, gradients = with_gradients(objective, batch, ctx)
    assert all(
        gradient.abs().sum() > 0 for name, gradient in gradients.items() if ".parts." in name
    )


@pytest.mark.slow
def test_what_cannot_be_a_target_is_refused(
    tms_target: Path, gpt_target: Path, tmp_path: Path
) -> None:
    small = [
        "experiment=tms_5_2",
        "max_steps=1",
        "global_batch_size=8",
        "arch.C=2",
        "data.held_out=0",
        "arch.loss.warmup_steps=0",
    ]
    taken: Result = train(tmp_path / "taken", *small, f"arch.target={tms_target}")
    with pytest.raises(ConfigError, match=r"arch\.target=.*taken: is itself about another net"):
        objective_on(taken.directory, tmp_path)
    with pytest.raises(ConfigError, match=r"arch\.target=.*for 5 features: arch=gpt needs text"):
        trainer_on(Dist(), tmp_path / "run", "experiment=tms_5_2", f"arch.target={gpt_target}")
    image = train(tmp_path / "cnn", *TINY_CNN, "max_steps=1")
    digits = ["arch=components", *TINY_CNN[1:]]
    with pytest.raises(ConfigError, match=r"arch\.target=.*cnn: holds a CNN; arch=tms, "):
        trainer_on(Dist(), tmp_path / "run", *digits, f"arch.target={image.directory}")
