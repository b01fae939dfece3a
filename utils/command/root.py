"""The keys of every run: types, bounds, marks and help; conf/pretrain.yaml has their defaults.

`Config` is what a run gets: all its keys, checked, named and frozen.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from typing_extensions import TypedDict

from utils.command.marks import (
    A_PATH,
    MAY_CHANGE,
    NAMES_PROJECT,
    SAME_RUN,
    Fraction,
    Keys,
)

Plain = dict[str, Any]


class Wandb(Keys):
    """W&B."""

    mode: Literal["auto", "online", "offline", "disabled"]
    """auto: online with credentials, offline without"""


class Sweep(Keys):
    """How a sweep runs its jobs."""

    jobs: PositiveInt
    """Jobs at once, each with separate GPUs and an equal part of the cores"""
    ranks: PositiveInt
    """Ranks of each job, which torchrun starts on this machine"""
    on_error: Literal["continue", "stop"]
    """Whether the other jobs continue when one fails"""
    only: PositiveInt | None
    """Run this job alone, counted from 1: for job arrays"""


class Expected(Keys):
    """Where a metric should be after so many steps."""

    metric: str
    at: dict[int, Annotated[list[float], Field(min_length=2, max_length=2)]]
    """Lowest and highest value by step: {1000: [0.97, 1.0]}"""


class Dense(TypedDict):
    """An optimizer, and the pattern of the parameters that it gets."""

    match: str
    optimizer: Plain


class Optim(TypedDict):
    dense: list[Dense]
    sparse: NotRequired[Plain | None]
    schedule: NotRequired[Plain | None]


class Root(Keys):
    """All keys: the groups, whose keys are defined beside the classes that take them, and the
    rest."""

    arch: Plain
    data: Plain
    optim: Optim
    sync: Plain
    # Data
    data_path: Annotated[str | None, MAY_CHANGE, NAMES_PROJECT, A_PATH]
    """A built dataset; null: what the kind of data falls back to, generated boards for puzzles"""
    # Length: in epochs, as in HRM, or in steps: max_steps overrides epochs, which may be null then
    global_batch_size: PositiveInt | None
    """Examples in a step, over all ranks, a multiple of shards; null: the data decides"""
    epochs: Annotated[PositiveInt | None, MAY_CHANGE]
    """Passes over the training data"""
    eval_interval: PositiveInt | None
    """Epochs between two evaluations, which are also the unit in which steps are packed; null:
    at the end only
    """
    eval_every_steps: Annotated[PositiveInt | None, MAY_CHANGE]
    """Steps between two evaluations, besides those by epochs"""
    max_steps: Annotated[PositiveInt | None, MAY_CHANGE]
    """End after this many steps, whatever epochs says"""
    # Optimisation
    lr: NonNegativeFloat
    """Peak learning rate"""
    lr_min_ratio: Fraction
    """Final learning rate as a fraction of lr; 1: constant"""
    lr_decay_share: Annotated[float, Field(gt=0, le=1)] | None
    """null: the rate falls along half a cosine; a fraction: the rate is constant until this
    fraction of the steps is left, then falls linearly
    """
    lr_warmup_steps: NonNegativeInt
    """Steps of linear warmup to lr"""
    beta1: Annotated[float, Field(ge=0, lt=1)]
    """Decay of the mean of gradients; SGD: momentum"""
    beta2: Annotated[float, Field(ge=0, lt=1)]
    """Decay of the mean of squared gradients"""
    weight_decay: NonNegativeFloat
    grad_clip: PositiveFloat | None
    """Largest global gradient norm"""
    on_nonfinite: Annotated[Literal["raise", "skip"], SAME_RUN]
    """What to do with a step whose gradients are not finite"""
    ema: bool
    """Evaluate an exponential moving average of the weights, puzzle tables excepted"""
    ema_rate: Annotated[float, Field(ge=0, lt=1)]
    """Decay of the average in each step"""
    ema_warmup: bool
    """The average of step t decays by (1 + t) / (10 + t) as long as that is less than ema_rate, so
    that short runs are not judged by the weights that they began with
    """
    trial: Annotated[bool, SAME_RUN]
    """Before the first step of a new run, check that its data and net keep the laws that make it
    the same run at any number of ranks
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seeds weights, data order and all noise"""
    # How the global batch is cut: no result depends on the number of ranks or on micro-batches,
    # but for rounding
    shards: PositiveInt
    """Equal parts of the global batch; ranks own whole shards. Part of the run: its random
    numbers depend on it
    """
    plan: Annotated[Literal["auto", "show", False], SAME_RUN]
    """auto: estimates the memory and sets micro_batch_size; show: prints the estimate and ends"""
    plan_cards: Annotated[str | None, SAME_RUN]
    """GPUs that plan=show plans for, in GiB: 8x80 are eight of 80; null: those of this machine"""
    micro_batch_size: Annotated[PositiveInt | Literal["auto"] | None, SAME_RUN]
    """Examples at once on one rank, at least one shard; null: all; auto: what fits on the GPU"""
    exact: bool
    """The same bits at 1, 2, 4 and 8 ranks: adds gradients shard by shard in a fixed tree;
    slower
    """
    float64: bool
    """Compute in float64, slowly, to tell a mistake from rounding; also give
    arch.forward_dtype=float64 where a net has that key
    """
    # The machine
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$"), SAME_RUN]
    """auto: cuda where there is one. mps: an Apple GPU, on one rank; not tried"""
    backend: Annotated[Literal["auto", "gloo", "nccl"], SAME_RUN]
    compile: Annotated[bool | Literal["auto"], SAME_RUN]
    """auto: on for CUDA"""
    timeout_s: Annotated[PositiveFloat, SAME_RUN]
    """Seconds that a collective may wait for a lost rank"""
    num_workers: Annotated[int, Field(ge=0, le=256), SAME_RUN]
    """Loader processes per rank, for slow data; 0: the training process loads"""
    # Checkpoints
    resume: Annotated[str | bool | Literal["auto"], SAME_RUN, A_PATH]
    """auto, true: continue where this run ended; a checkpoint: start there; false: begin again
    and move the former run aside
    """
    init_from: Annotated[str | None, A_PATH]
    """Start with the weights of this checkpoint"""
    checkpoint_interval: Annotated[PositiveInt | None, SAME_RUN]
    """Steps between two saves; null: not by steps"""
    checkpoint_minutes: Annotated[PositiveFloat | None, SAME_RUN]
    """Minutes between two saves; null: not by time"""
    checkpoint_every_eval: Annotated[bool, SAME_RUN]
    """Save after every evaluation"""
    keep: Annotated[PositiveInt | None, SAME_RUN]
    """Number of last checkpoints that are kept, besides the best by objective_metric; null:
    all
    """
    # Evaluation and files
    eval_only: Annotated[bool, SAME_RUN]
    """Evaluate checkpoint, and do not train"""
    checkpoint: Annotated[str | None, SAME_RUN, A_PATH]
    """The run folder, checkpoint or weights that eval_only evaluates"""
    eval_batch_size: Annotated[PositiveInt | None, SAME_RUN]
    """null: an eighth of the global batch, at most 1024"""
    eval_examples: Annotated[PositiveInt | None, SAME_RUN]
    """Evaluate only so many first examples of each set, for a quick look; null: all"""
    eval_save_outputs: Annotated[list[str], SAME_RUN]
    """Names of inputs and outputs that evaluations write to files"""
    checkpoint_path: Annotated[Annotated[str, Field(pattern=r"[^./]/*$")] | None, SAME_RUN]
    """The run's directory; null: runs/<project_name>/<run_name>"""
    project_name: Annotated[str | None, SAME_RUN]
    """null: the name of the data's folder, or of the choice of data"""
    run_name: Annotated[str | None, SAME_RUN]
    """null: derived from the configuration"""
    objective_metric: Annotated[Annotated[str, Field(pattern="[^-]")] | None, SAME_RUN]
    """The metric that picks the best checkpoint and that sweepers optimise; lower is better for
    -eval/x and for what the objective lists in `costs`; null: the objective's main metric
    """
    # Reporting
    log_interval: Annotated[PositiveInt, SAME_RUN]
    """Steps between two log entries"""
    profile_steps: Annotated[Annotated[int, Field(ge=1, le=1000)] | None, SAME_RUN]
    """Number of steps of rank 0, after the third, that are traced into trace.json in the run's
    directory
    """
    report: Annotated[bool, SAME_RUN]
    """Draw report.html in the run's directory, at every evaluation and at the end"""
    expected: Annotated[Expected | None, SAME_RUN]
    """Where a metric should be after so many steps, which the report shows as a band from the
    lowest to the highest value: {metric: eval/exact_accuracy, at: {1000: [0.99, 1.0]}}
    """
    log: Annotated[list[Literal["wandb", "trackio", "tensorboard"]], SAME_RUN]
    """Services that get metrics beside metrics.jsonl; one that fails is off, and the run goes on"""
    wandb: Annotated[Wandb, SAME_RUN]
    # Sweeps: python pretrain.py -m seed=0,1,2
    sweep: Annotated[Sweep, SAME_RUN]
    # Keys that only some choices have: HRM and TRM, optim=muon, puzzles, tokens and streams
    puzzle_emb_lr: NonNegativeFloat = 0.0
    puzzle_emb_weight_decay: NonNegativeFloat = 0.0
    muon_lr: NonNegativeFloat = 0.0
    muon_weight_decay: NonNegativeFloat = 0.0
    data_paths: Annotated[list[str] | None, MAY_CHANGE, NAMES_PROJECT, A_PATH] = None
    """Several datasets, as in TRM"""
    data_paths_test: Annotated[list[str] | None, A_PATH] = None
    """Evaluate on these instead"""
    evaluators: Annotated[list[Any] | None, SAME_RUN] = None
    """null: arc on ARC data, as in TRM, else none; arc, or [{name: arc@ARC}] as TRM spells it:
    answers to all augmentations of a puzzle vote
    """
    tokens_per_update: PositiveInt | None = None
    """Tokens of a step, a multiple of shards × data.seq_len"""
    max_tokens: Annotated[PositiveInt | None, MAY_CHANGE] = None
    """End after this many tokens, in whole steps"""

    def plain(self) -> Plain:
        """Dicts, lists and values, as YAML and JSON write them."""
        return self.model_dump(exclude_unset=True)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns a copy in which these keys have these values; `arch.target` and
        `arch.readers[0]` are in a group.
        """
        changed: Plain = {}
        for path, value in values.items():
            first, *below = re.findall(r"\w+", path)
            if not below:
                changed[first] = value
                continue
            section: Any = changed.setdefault(first, copy.deepcopy(getattr(self, first)))
            *around, last = (int(step) if step.isdecimal() else step for step in below)
            for step in around:
                section = section[step]
            section[last] = value
        return self.model_copy(update=changed)


class Config(Root):
    """The configuration of one run, with its name. Nothing edits it: what a run settles itself,
    such as `compile=auto`, makes another one, by `with_values`.
    """

    project_name: str
    run_name: str
    checkpoint_path: str
