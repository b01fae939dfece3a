"""Trains any model of this repository on any number of ranks: `python pretrain.py experiment=demo`.

Read it from top to bottom. `pretrain` turns a configuration into a run: `build_problem` makes the
data and the net, `build_trainer` what updates the weights, and `train` takes steps (`train_step`)
and logs, evaluates and saves between them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

# read when torch is imported: where the host of a store dies, PyTorch prints a page of C++ frames
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from data.source import Arrays, RunSettings, Source
from data.stream import ShardStream, eval_batches, to_tensors, train_loader
from models import laws
from models.objective import Batch, Context, Objective, make_objective
from optim.agreement import Agreement
from optim.ema import EMA
from optim.groups import Clip, build_clips, build_dense, build_sparse
from optim.norms import Norms
from optim.optimizer_state import OptimizerState
from optim.replicas import broadcast_from_rank_0, check_files, check_same
from optim.schedule import Schedule, build_schedule, set_lr
from optim.sparse_signsgd import SparseSignSGD
from optim.split_tables import RowRangesOfTables
from optim.sync.base import Sync
from utils.checkpoint import folders, reader, resume
from utils.checkpoint.policy import Checkpointer
from utils.checkpoint.registry import Carries, Origin, Registry, RunState
from utils.command import cli, config
from utils.command.instantiate import make
from utils.command.keys import CONF, VERSION
from utils.command.limits import check_sync
from utils.measure import capacity, compiling, hardware
from utils.measure.evaluation import Evaluation, check_names
from utils.measure.evaluator import Prediction
from utils.measure.metrics import Clock, Meter, Metric
from utils.measure.micro_batch import shards_at_once
from utils.measure.profile import traced
from utils.noise import Noise
from utils.ranks import distributed, signals
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.status import started_again
from utils.sweep.needed_runs import make_needed_runs
from utils.transfer import batch_to_device


@dataclass
class Problem:
    """The data, the net and the ranks of a run: all that is built before the optimizers."""

    cfg: DictConfig
    dist: Dist
    run: RunDirectory
    source: Source
    objective: Objective
    sync: Sync
    wrapped: torch.nn.Module  # the objective as training calls it

    @property
    def shard_size(self) -> int:
        return self.source.length.examples_per_update // self.cfg.shards

    @property
    def owned(self) -> range:
        """This rank's shards."""
        return self.dist.owned_shards(self.cfg.shards)


@dataclass
class Trainer(Problem):
    """The parts of one run.

    Every rank has its own `dist`, its own shards, and hence its own `shard_groups`, `carries` and
    sums in `meter`. It reads data and measures speed by itself, and only rank 0 writes to `run`.
    Where `sync` or a table splits weights, a rank holds its share of `sync.parameters`, `dense`,
    `sparse` and `ema`. All else that the training depends on is equal on all ranks at every step.
    """

    shard_groups: list[range]  # this rank's shards, one group for each micro-batch
    carries: Carries  # state that slots keep from step to step
    meter: Meter
    agreement: Agreement  # whether recent steps were finite, and requests; read late on CUDA
    sparse: list[SparseSignSGD]
    dense: list[torch.optim.Optimizer]
    schedule: Schedule
    ema: EMA | None
    clips: list[Clip]  # norms to which gradients are scaled
    norms: Norms  # of logged steps
    judging_metric: Metric  # of evaluations; decides which checkpoint is the best
    flops_per_example: int = 0
    saved: Registry = field(init=False)  # what checkpoints hold
    checkpointer: Checkpointer = field(init=False)  # decides when they are written

    @property
    def total_steps(self) -> int:
        return self.source.length.total_steps

    @property
    def run_state(self) -> RunState:
        return self.saved.run_state

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.run_state.step

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self.sparse, *self.dense]


@hydra.main(config_path=str(CONF), config_name="pretrain", **VERSION)
def app(raw: DictConfig) -> float | None:
    return cli.run_job(raw, reader.config_in, pretrain)


def pretrain(cfg: DictConfig) -> float | None:
    """Trains or evaluates one run. Returns the objective metric on every rank, for sweepers."""
    dist = distributed.start(cfg.device, cfg.backend, cfg.timeout_s)
    signals.defer()
    cfg = make_needed_runs(config.publish(cfg, dist), dist, pretrain)
    hardware.tune(cfg.exact)
    compiling.keep_compiled_code()
    with RunDirectory(Path(cfg.checkpoint_path), dist, cfg.eval_only) as run, cli.reporting():
        again = started_again(Path(cfg.checkpoint_path))
        start = resume.find(cfg, dist, run.say, again)
        # planned for GPUs that are elsewhere
        best = "bfloat16" if cfg.plan_cards else hardware.forward_dtype(dist.device)
        resume.fix_arithmetic(cfg, start, dist, best)
        problem = build_problem(cfg, dist, run, start)
        with dist.agreed():
            trainer = build_trainer(problem)
        start = resume.restore(start, trainer.saved, cfg, dist, run.say, trainer.total_steps)
        try_laws(trainer, start)
        train_or_evaluate(trainer, start)
        return trainer.run_state.results.get(trainer.judging_metric.name)


def try_laws(trainer: Trainer, start: resume.Start) -> None:
    """Checks names of metrics, and before a new run whether source and objective keep the laws."""
    cfg, source, objective = trainer.cfg, trainer.source, trainer.objective
    device = trainer.dist.device
    is_new = cfg.check and start.folder is None and not cfg.eval_only
    if is_new:
        make_batch = partial(first_batch, cfg, source, device)
        with trainer.dist.agreed():
            laws.check_laws(source, objective, make_batch, cfg.shards, trainer.owned)
    check = partial(laws.check_prediction, objective) if is_new else None
    check_names(cfg, source, objective, partial(to_batch, device=device), check)


def train_or_evaluate(trainer: Trainer, start: resume.Start) -> None:
    """Does what is left of the run, which may be nothing."""
    cfg, run = trainer.cfg, trainer.run
    if start.is_finished(trainer.total_steps):
        run.confirm_finished(trainer.step)
        if trainer.dist.is_main:
            folders.tidy(run.directory / "checkpoints", run.say)
        run.say(
            f"{cfg.run_name} is finished, {trainer.step:,} steps: {run.directory}; resume=false"
            " would begin again"
        )
        return
    if cfg.compile == "auto":
        compile_long_run(trainer)
    open_directory(trainer, start)
    if cfg.eval_only:
        if stop := evaluate(trainer):
            run.stop(stop, trainer.step, "an evaluation saves nothing")
    else:
        metric, saved_step = trainer.judging_metric, start.step if start.continues else -1
        trainer.checkpointer = Checkpointer(cfg, run, trainer.saved, metric, saved_step)
        # an error is reported before the checkpointer waits for what is being written
        with trainer.checkpointer, cli.reporting():
            train(trainer)
    run.finish(trainer.step)


def open_directory(trainer: Trainer, start: resume.Start) -> None:
    """Opens the run's directory and log.

    Called after everything that can be refused, because it moves an earlier run aside.
    """
    cfg, run, objective = trainer.cfg, trainer.run, trainer.objective
    # tools that compare runs look up here which metric judges them
    text = OmegaConf.to_yaml({**cfg, "objective_metric": str(trainer.judging_metric)})
    wandb = {
        "mode": cfg.wandb.mode,
        "project": cfg.project_name,
        "name": cfg.run_name,
        "id": start.meta.get("wandb_id"),
    }
    saved_step = start.step if start.continues else None
    size = sum(p.numel() for p in objective.parameters() if p.requires_grad)
    data = trainer.source.spec.name
    facts = {
        "parameters": size,
        "dtype": str(objective.dtype).removeprefix("torch."),
        "data": data,
        "fingerprint": trainer.source.spec.fingerprint,
        "total_steps": trainer.total_steps,
        "examples_per_step": trainer.source.length.examples_per_update,
        "tokens_per_example": trainer.source.spec.seq_len,
    }
    run.begin(text, wandb, saved_step, trainer.run_state.evaluation_due, facts, cfg.report)
    run.say(f"{cfg.run_name}: {size:,} parameters, {trainer.total_steps:,} steps on {data}")
    if trainer.source.spec.epoch:
        run.say(trainer.source.spec.epoch)
    run.say(hardware.describe(trainer.dist, objective.dtype))


def build_problem(cfg: DictConfig, dist: Dist, run: RunDirectory, start: resume.Start) -> Problem:
    """Builds the data and the net, with the same bits on every rank."""
    with dist.main_first():  # it may fill a cache
        source: Source = make(cfg.data, "data", RunSettings.of(cfg))
    check_files({f"data_path={cfg.data_path}: the dataset": source.spec.fingerprint}, dist)
    with dist.agreed():
        sync = make(cfg.sync, "sync")
    if cfg.plan:
        fit_to_memory(cfg, dist, run, source, sync)
    with dist.agreed():
        objective = make_objective(cfg.arch, cfg.seed, source.spec)
        if cfg.init_from and dist.is_main and start.folder is None:
            objective.load_saved(resume.initial_weights(cfg.init_from, objective, run.say))
    objective.move_to_devices(dist)
    frozen = objective.frozen().items()
    check_files({f"{part['path']}: {name}": part["sha256"] for name, part in frozen}, dist)
    broadcast_from_rank_0(objective.shared(), dist)
    if start.folder is None and not cfg.eval_only:
        owned = dist.owned_shards(cfg.shards)
        objective.prepare(dist, source, Noise(cfg.seed, 0, owned, dist.device))
        check_same(objective.shared(), dist)
    return Problem(cfg, dist, run, source, objective, sync, sync.wrap(objective, dist))


def fit_to_memory(
    cfg: DictConfig, dist: Dist, run: RunDirectory, source: Source, sync: Sync
) -> None:
    """Applies `plan`: chooses a layout that fits, using a net on the meta device."""
    net = make_objective(cfg.arch, cfg.seed, source.spec, capacity.META)
    optimizer_state = OptimizerState(build_dense(cfg.optim.dense, net.trained())).like({}, 1)
    first = partial(first_batch, cfg, source, capacity.META)
    length, split = source.length, sync.splits_weights
    capacity.apply_plan(cfg, dist, length, split, net, optimizer_state, first, run.say)


def to_batch(rows: Arrays, device: torch.device) -> Batch:
    return batch_to_device(to_tensors([rows]), device)


def first_batch(
    cfg: DictConfig, source: Source, device: torch.device, shards: Sequence[int]
) -> tuple[Batch, Context]:
    """Returns what the first step would see of these shards."""
    rows = [source.train_batch(0, shard) for shard in shards]
    return batch_to_device(to_tensors(rows), device), Context(
        0.0, Noise(cfg.seed, 0, shards, device)
    )


def build_trainer(problem: Problem) -> Trainer:
    """Builds everything that updates the weights."""
    cfg, dist, source, objective = problem.cfg, problem.dist, problem.source, problem.objective
    parameters, tables = problem.sync.parameters, objective.tables()
    check_sync(cfg, dist.world_size, problem.shard_size)
    shard_groups = group_shards(problem)
    averaged_tables = tables if cfg.ema_tables else {}
    ema = EMA(parameters, averaged_tables, cfg.ema_rate, cfg.ema_warmup) if cfg.ema else None
    hooks = [ema.before_rows_change] if ema is not None else []
    most_rows = problem.shard_size * len(dist.owned_shards(cfg.shards, rank=0))
    first_shard = partial(first_batch, cfg, source, dist.device, problem.owned[:1])
    trainer = Trainer(
        **vars(problem),
        shard_groups=shard_groups,
        carries=Carries(shard_groups, lambda: objective.initial_carry(first_shard()[0])),
        meter=Meter(cfg.shards),
        agreement=Agreement(cfg.on_nonfinite, dist),
        sparse=build_sparse(cfg.optim.get("sparse"), tables, most_rows, dist, hooks),
        dense=build_dense(cfg.optim.dense, parameters),
        schedule=build_schedule(
            cfg.optim.schedule, source.length.total_steps, source.length.steps_per_epoch
        ),
        ema=ema,
        clips=build_clips(cfg.grad_clip, parameters),
        norms=Norms(problem.sync),
        judging_metric=objective.judging_metric(cfg.objective_metric),
    )
    if hardware.peak_flops(dist.device, objective.dtype):
        trainer.flops_per_example = objective.flops_per_example(*first_shard())
    if cfg.compile in (True, "max") or (cfg.compile == "auto" and dist.device.type == "cuda"):
        torch.compiler.set_stance("default")  # an earlier run in this process may have changed it
        objective.compile_net(graphs=cfg.compile == "max")
    trainer.saved = register_parts(trainer)
    return trainer


def compile_long_run(trainer: Trainer) -> None:
    """Compiles on a CPU if that pays, and writes down whether it did."""
    cfg, dist, objective = trainer.cfg, trainer.dist, trainer.objective
    if dist.device.type == "cuda" or trainer.sync.splits_weights:
        return
    first = partial(first_batch, cfg, trainer.source, dist.device)
    examples = trainer.source.length.examples_per_update

    def operations_per_step() -> float:
        return examples * objective.flops_per_example(*first(trainer.owned[:1]))

    dtype, steps = objective.dtype, trainer.total_steps
    long = compiling.is_long(cfg, dtype, steps, operations_per_step)
    if dist.broadcast_text("yes" if long else ""):
        one_pass = partial(objective.rehearse, *first(trainer.shard_groups[0]))
        compile_net, say = objective.compile_net, trainer.run.say
        cfg.compile = compiling.compile_if_faster(dist, one_pass, compile_net, say)


def group_shards(problem: Problem) -> list[range]:
    """Groups this rank's shards into micro-batches, which the device computes one after another."""
    owned, device = problem.owned, problem.dist.device

    def rehearse(shards: int) -> None:
        batch = first_batch(problem.cfg, problem.source, device, owned[:shards])
        problem.objective.rehearse(*batch)

    size = shards_at_once(
        problem.cfg,
        problem.shard_size,
        len(owned),
        device,
        problem.sync.parameters.values(),
        rehearse,
    )
    return [owned[i : i + size] for i in range(0, len(owned), size)]


def register_parts(trainer: Trainer) -> Registry:
    """Registers the state that checkpoints hold; for an evaluation, only weights and averages."""
    cfg, objective, ema = trainer.cfg, trainer.objective, trainer.ema
    row_ranges = RowRangesOfTables(trainer.sync, objective.tables())
    saved = Registry(partial(origin_of, trainer), row_ranges, trainer.owned)
    saved.add("model", objective.saved, objective.load_saved, any_precision=cfg.eval_only)
    if ema is not None:
        saved.add("ema", ema.state, ema.load, otherwise="use ema=false")
    if cfg.eval_only:
        return saved
    optimizer_state = OptimizerState(trainer.dense, skips=cfg.on_nonfinite == "skip")
    saved.add("optimizer", optimizer_state.state, optimizer_state.load, optimizer_state.like)
    carries, meter = trainer.carries, trainer.meter
    saved.add_by_shard("carry", carries.state, carries.load, carries.like, any_precision=True)
    sums_of_owned = partial(meter.state, trainer.owned)
    load_sums = partial(meter.load, device=trainer.dist.device)
    saved.add_by_shard("meter", sums_of_owned, load_sums, meter.like)
    trainer.source.register_state(saved)
    return saved


def origin_of(trainer: Trainer) -> Origin:
    """Returns what a checkpoint records about the run that writes it."""
    assert trainer.agreement.all_read, "a step that may not be finite must not be saved"
    base_lr = trainer.dense[-1].param_groups[0]["base_lr"]
    config: Any = OmegaConf.to_container(trainer.cfg)
    return Origin(
        config,
        trainer.source.spec.fingerprint,
        trainer.run.wandb_id,
        base_lr * trainer.schedule(trainer.step),
        trainer.objective.frozen(),
    )


def train(trainer: Trainer) -> None:
    """Takes steps; after each one logs, evaluates and saves as due."""
    cfg, run_state, length = trainer.cfg, trainer.run_state, trainer.source.length
    pins_memory = trainer.dist.device.type == "cuda"
    stream = ShardStream(trainer.source, trainer.shard_groups, run_state.step, length.total_steps)
    trainer.objective.train()
    traces = cfg.profile_steps if trainer.dist.is_main else None
    with (
        closing(train_loader(stream, cfg.num_workers, pins_memory)) as loader,
        traced(traces, trainer.run.directory, trainer.run.say) as step_is_done,
    ):
        # does what was due when the run was interrupted
        after_step(trainer, trainer.dist.sums(trainer.checkpointer.requests()))
        clock = restarted_clock(trainer)
        while run_state.step < length.total_steps:
            with clock.waiting():
                _, micro_batches = next(loader)
            train_step(trainer, micro_batches)
            run_state.step += 1
            step_is_done()
            clock.tick(length.examples_per_update)
            logs = is_logged(trainer, run_state.step)
            run_state.evaluation_due = length.evaluates_after(run_state.step)
            pauses = logs or run_state.evaluation_due or trainer.checkpointer.saves_now()
            if pauses or trainer.agreement.has_requests:
                trainer.agreement.read()  # before anything is logged or saved
            if logs:
                log(trainer, clock)
                clock = restarted_clock(trainer)
            if after_step(trainer, trainer.agreement.take_requests()):
                clock = restarted_clock(trainer)
        trainer.checkpointer.wait_until_saved()


def restarted_clock(trainer: Trainer) -> Clock:
    """Returns a new clock, and drops the waits that belong to the time before it."""
    trainer.sync.take_wait_s()
    trainer.checkpointer.take_stall_s()
    return Clock()


def is_logged(trainer: Trainer, step: int) -> bool:
    return step % trainer.cfg.log_interval == 0 or step == trainer.total_steps


def train_step(trainer: Trainer, micro_batches: list[Batch]) -> None:
    """Takes one step: sums gradients over micro-batches and ranks, divides once, then updates."""
    cfg, objective, sync, agreement = (
        trainer.cfg,
        trainer.objective,
        trainer.sync,
        trainer.agreement,
    )
    device, progress = trainer.dist.device, trainer.step / trainer.total_steps
    sync.zero()
    inputs = []
    for i, (shards, rows) in enumerate(zip(trainer.shard_groups, micro_batches, strict=True)):
        batch = batch_to_device(rows, device)
        carry = trainer.carries.get(i, partial(objective.initial_carry, batch))
        noise = Noise(cfg.seed, trainer.step, shards, device)
        inputs.append((batch, carry, Context(progress, noise)))
    objective.look_ahead([(batch, carry) for batch, carry, _ in inputs])
    totals: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for _ in range(objective.rounds()):
            statistics = [
                objective.statistics(batch, carry, replace(context, totals=totals))
                for batch, carry, context in inputs
            ]
            totals = totals | sync.sum_statistics(statistics)

    outputs = []
    for i, (batch, carry, context) in enumerate(inputs):
        with sync.backward(last=i == len(inputs) - 1):
            outputs.append(trainer.wrapped(batch, carry, replace(context, totals=totals)))
            outputs[-1].loss.backward()
    loss_weights = [out.weight for out in outputs]
    row_grads = [grad for optimizer in trainer.sparse for grad in optimizer.local_grads()]
    checked = {"the loss's weight": sync.finish(loss_weights)}
    checked |= {name: p.grad for name, p in sync.parameters.items() if p.grad is not None}
    agreement.ask(trainer.step + 1, checked, row_grads, trainer.checkpointer.requests())
    if reason := agreement.read(except_last=agreement.lag):
        skip(trainer, reason)
        return
    for shards, out in zip(trainer.shard_groups, outputs, strict=True):
        trainer.meter.add({**out.metrics, "loss": (out.loss, out.weight)}, shards[0])
    if is_logged(trainer, trainer.step + 1):
        trainer.norms.before_update()
    for names, max_norm in trainer.clips:
        sync.clip(max_norm, names)
    set_lr(trainer.optimizers, trainer.schedule(trainer.step + 1))
    for optimizer in trainer.optimizers:
        optimizer.step()
    trainer.norms.after_update()
    if trainer.ema is not None:
        trainer.ema.update()
    trainer.carries.put(out.carry for out in outputs)


def skip(trainer: Trainer, reason: str) -> None:
    """Skips a step whose gradients are not finite: the weights stay. All ranks do the same."""
    for optimizer in trainer.sparse:
        optimizer.zero_grad()  # drops the step's look-ups
    # unchanged weights and carries would fail again, so slots start afresh
    trainer.carries.put([None] * len(trainer.shard_groups))
    trainer.run.event("skipped", trainer.step + 1, reason=reason)
    trainer.run.say(f"skipped step {trainer.step + 1}: {reason}")


def log(trainer: Trainer, clock: Clock) -> None:
    """Logs one row of metrics, named as users of the published code know them."""
    spec, objective = trainer.source.spec, trainer.objective
    means = trainer.meter.read(trainer.dist)
    row = {f"train/{name}": value for name, value in means.items()}
    row["train/lr"] = trainer.dense[-1].param_groups[0]["lr"]
    row |= {f"train/{name}": norm for name, norm in trainer.norms.take().items()}
    if (steps_per_epoch := trainer.source.length.steps_per_epoch) is not None:
        row["epoch"] = trainer.step / steps_per_epoch
    waited_s, stalled_s = trainer.sync.take_wait_s(), trainer.checkpointer.take_stall_s()
    row |= clock.speeds(max(1, spec.seq_len), waited_s, stalled_s)
    speed = row["speed/examples_per_s"]
    row |= hardware.load(trainer.dist, objective.dtype, trainer.flops_per_example * speed)
    trainer.run.log(trainer.step, row)
    name = objective.headline.name
    trainer.run.progress(
        trainer.step, trainer.total_steps, means.get("loss"), name, means.get(name), speed
    )


def after_step(trainer: Trainer, requests: Sequence[float]) -> bool:
    """Evaluates, saves and stops as due, and as the sums of all ranks' requests say.

    Returns whether it evaluated.
    """
    cfg, run_state, checkpointer = trainer.cfg, trainer.run_state, trainer.checkpointer
    stop, wanted = checkpointer.decide(requests)
    evaluated = run_state.evaluation_due and not stop
    if evaluated:
        if run_state.step == trainer.total_steps:
            # an evaluation that fails must not lose the trained weights
            checkpointer.save_unsaved()
        stop = evaluate(trainer)
        wanted = wanted or cfg.checkpoint_every_eval or run_state.step == trainer.total_steps
    checkpointer.save_if(wanted, bool(stop), evaluated and not stop)
    if stop:
        checkpointer.wait_until_saved()
        without = " without resume=false" if cfg.resume is False else ""
        trainer.run.stop(stop, run_state.step, f"the same command{without} goes on from there")
    return evaluated


def evaluate(trainer: Trainer) -> int:
    """Evaluates every example of every set exactly once, split over the ranks.

    Returns the signal that cut it short, or 0.
    """
    cfg, dist, source, run_state = trainer.cfg, trainer.dist, trainer.source, trainer.run_state
    objective = trainer.objective
    size = cfg.eval_batch_size or min(1024, max(1, source.length.examples_per_update // 8))
    evaluation = Evaluation(dist, run_state.step, trainer.run, cfg.eval_save_outputs)
    averages = trainer.ema.applied() if trainer.ema is not None else nullcontext()
    clock = Clock()

    def predict(batch: Batch) -> Prediction:
        return objective.predict(batch_to_device(batch, dist.device))

    objective.eval()
    try:
        with torch.no_grad(), averages:
            for name, examples in source.eval_sets().items():
                evaluators = [*source.evaluators(name), *objective.evaluators(examples.padding(1))]
                batches = eval_batches(examples, size, dist.rank, dist.world_size)
                if stop := evaluation.run(name, batches, predict, evaluators):
                    return stop
    finally:
        objective.train()
    run_state.evaluation_due, run_state.results = False, evaluation.finish()
    if run_state.results:
        trainer.run.log(run_state.step, run_state.results)
        trainer.run.say(f"step {run_state.step}, held out: {evaluation.summary}")
        trainer.run.event("evaluated", run_state.step, seconds=round(clock.seconds, 3))
        trainer.run.draw_report()
    if evaluation.text and (cfg.eval_only or run_state.step == trainer.total_steps):
        trainer.run.say(evaluation.text)
    return 0


if __name__ == "__main__":
    cli.main(app)
