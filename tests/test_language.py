"""Language models end to end: what a prompt becomes, and Llama's folders in and out."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from data.build import tokens as builder
from data.language.sample import shown
from models.language import llama
from tests.ranks import assert_one_line, run_line, words
from tests.runs import QUIET, TINY_GPT, Once, Result, launched, train


@pytest.fixture
def gpt(once: Once) -> Result:
    return once(*TINY_GPT, "ema=true", "ema_rate=0.9")


def test_bits_per_byte_are_those_of_the_loss(gpt: Result) -> None:
    for loss, bits in zip(gpt.series("eval/loss"), gpt.series("eval/bpb"), strict=True):
        assert bits == pytest.approx(loss / math.log(2), rel=2e-2), (
            "bytes, and hardly a token that begins a file"
        )


def shown_by_transformers(folder: Path, prompt: str, length: int) -> str:
    """A greedy continuation by transformers, as evaluations show it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    net = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    asked = tokenizer(prompt, return_tensors="pt")
    made = net.generate(**asked, max_new_tokens=length, do_sample=False)
    said = tokenizer.decode(made[0], skip_special_tokens=True)
    return shown(said).partition("\n")[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["lm", "shakespeare"])
def test_recipes_generate_the_same_text_in_transformers(recipe: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{number} is {number + 1}, less one. " for number in range(3000)))
    built = ["--input", str(texts), "--train-bpe", "300", "--val-share", "0.1"]
    if recipe == "shakespeare":
        built = ["--input", str(texts), "--tokenizer", "bytes", "--val-share", "0.1"]
    assert builder.main([*built, "--output-dir", str(tmp_path / "data")]) == 0
    tiny = words(f"""
        experiment={recipe} data_path={tmp_path}/data arch.num_layers=2 arch.hidden_size=48
        arch.forward_dtype=float32 max_steps=60 tokens_per_update=null global_batch_size=16
        data.seq_len=48 data.val_tokens=500 eval_every_steps=null
    """)
    run = train(tmp_path / "run", *tiny)
    asked = ["eval_only=true", "data.prompt=7 is", "data.temperature=0", "data.max_new_tokens=30"]
    ours = train(tmp_path / "asked", f"checkpoint={run.directory}", *asked).stdout
    (text,) = [line for line in ours.splitlines() if line.startswith("7 is")]
    llama.export(str(run.directory), str(tmp_path / "theirs"))
    assert shown_by_transformers(tmp_path / "theirs", "7 is", 30) == text
    assert len(text) > 20


@pytest.mark.slow
def test_a_prompt_is_continued_and_the_weights_travel_as_llamas(
    gpt: Result, tmp_path: Path
) -> None:
    asked = ["eval_only=true", "data.prompt=def", "data.temperature=0", "data.max_new_tokens=12"]
    # the rest is the run's own
    asked_of = train(tmp_path / "asked", f"checkpoint={gpt.directory}", *asked).stdout
    (text,) = [line for line in asked_of.splitlines() if line.startswith("def")]

    export = ["-m", "models.language.llama", str(gpt.directory), str(tmp_path / "llama")]
    done = launched([sys.executable, *export])
    assert done.stdout.startswith(f"{tmp_path}/llama: averaged weights of step 23, ")
    assert done.stdout.endswith(" parameters, with their tokenizer\n")
    assert shown_by_transformers(tmp_path / "llama", "def", 12) == text

    begun = train(
        tmp_path / "begun", *TINY_GPT, f"init_from={tmp_path}/llama", "max_steps=1", "lr=0"
    )
    assert begun.series("eval/loss")[0] == pytest.approx(gpt.series("eval/loss")[-1], abs=1e-5)
    other = [*TINY_GPT, *QUIET, f"init_from={tmp_path}/llama", "arch.kv_heads=2"]
    line = f"init_from={tmp_path}/llama: holds another net; add arch.kv_heads=1\n"
    assert_one_line(run_line(other, tmp_path), line)
