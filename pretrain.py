"""Train any model of this repository on any number of ranks: `python pretrain.py experiment=demo`.

Top to bottom: the command line becomes a configuration (`main`), a configuration becomes the parts of a run
(`build`), and the parts become a trained model (`train`: step, log, evaluate, save).
"""

from __future__ import annotations

from utils.ranks import early

if __name__ == "__main__":
    early.begin()

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig, OmegaConf

from utils.command import cli, config
from utils.errors import ConfigError, RunError
from utils.ranks import signals

if TYPE_CHECKING:  # torch takes a second to import: not before the command line is known to be right
    import torch

    from data.source import Source
    from models.objectives.base import Objective
    from optim.ema import EMA
    from optim.schedule import Schedule
    from optim.sparse_signsgd import SparseSignSGD
    from optim.sync.allreduce import Reducer, Verdict
    from utils.checkpoint.carries import Slots
    from utils.checkpoint.policy import Keeper
    from utils.checkpoint.resume import Start
    from utils.measure.metrics import Clock, Meter, Metric
    from utils.ranks.distributed import Dist
    from utils.rundir.directory import Run


@dataclass
class Trainer:
    """The parts of one run. Ranks differ in `dist`, `parts` and `slots` alone."""

    cfg: DictConfig
    dist: Dist
    run: Run
    source: Source
    objective: Objective
    parameters: dict[str, torch.nn.Parameter]
    parts: list[range]  # this rank's shards, cut into micro-batches
    slots: Slots
    meter: Meter
    sparse: list[SparseSignSGD]
    dense: list[torch.optim.Optimizer]
    schedule: Schedule
    reducer: Reducer
    ema: EMA | None
    total_steps: int
    headline: Metric  # what the run is judged by, by its name in evaluations
    keeper: Keeper = field(init=False)
    step: int = 0
    evaluation_due: bool = False
    results: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: float | None = None  # value of the metric that the run is judged by, and which that is
    best_of: str = ""
    resumed_from: str = ""
    flops_per_example: int = 0


@hydra.main(config_path=str(config.CONF), config_name="pretrain", version_base="1.3")
def app(raw: DictConfig) -> float | None:
    return cli.run_job(raw, pretrain)


def main() -> None:
    cli.main(app)


def pretrain(cfg: DictConfig) -> float | None:
    """One run from its resolved configuration; the objective metric on every rank, for sweepers."""
    from utils.measure import hardware
    from utils.ranks import distributed
    from utils.rundir.directory import Run

    dist = distributed.start(cfg.device, cfg.backend, cfg.timeout_s, Path(cfg.checkpoint_path or "."))
    signals.defer()
    cfg = config.publish(cfg, dist)
    hardware.tune(cfg.exact)
    with Run(Path(cfg.checkpoint_path), dist, cfg.eval_only) as run:
        return train_or_evaluate(cfg, dist, run)


def train_or_evaluate(cfg: DictConfig, dist: Dist, run: Run) -> float | None:
    """The run, once its directory is its own."""
    from data.stream import to_tensors
    from models.objectives.base import to_device
    from optim.replicas import check_same
    from utils.checkpoint import resume
    from utils.checkpoint.policy import Keeper
    from utils.measure import hardware
    from utils.measure.evaluation import check_names

    start = resume.find(cfg, dist, run.say)
    source, objective = build_problem(cfg, dist, run, start)
    with dist.agreed():
        trainer = build(cfg, dist, run, source, objective)
    start = resume.take_up(trainer, start)
    with dist.agreed():
        check_names(cfg, source.eval_sets(), objective, lambda rows: to_device(to_tensors([rows]), dist.device))
    check_same(objective.state_dict(), dist)  # hosts may hold different files under one name
    if resume.is_finished(start, trainer.total_steps):
        run.confirm_finished(trainer.step)
        run.say(f"{cfg.run_name} is finished, {trainer.step:,} steps: {run.directory}; resume=false would begin again")
        return trainer.results.get(trainer.headline.name)
    # last: whatever can be wrong is known before a former run is moved aside
    wandb = {"mode": cfg.wandb.mode, "project": cfg.project_name, "name": cfg.run_name, "id": start.meta.get("wandb_id")}
    run.begin(OmegaConf.to_yaml(cfg), wandb, start.step if start.continues else None, trainer.evaluation_due)
    run.say(f"{cfg.run_name}: {sum(p.numel() for p in trainer.parameters.values()):,} parameters, {trainer.total_steps:,} steps")
    run.say(hardware.describe(dist))
    if cfg.eval_only:
        if stop := evaluate(trainer):
            run.stop(stop, trainer.step, "an evaluation saves nothing")
    else:
        with Keeper(trainer, start.step if start.continues else -1) as trainer.keeper:
            train(trainer)
    run.finish(trainer.step)
    return trainer.results.get(trainer.headline.name)


def build_problem(cfg: DictConfig, dist: Dist, run: Run, start: Start) -> tuple[Source, Objective]:
    """The data and the net, the same on every rank."""
    import torch

    from optim.replicas import same_everywhere
    from utils.checkpoint.init_from import begin_with
    from utils.command.instantiate import make

    with dist.main_first():  # it may fill a cache
        source = make(cfg.data, "data")
    prints = dist.all_gather_text(source.spec.fingerprint)
    if len(set(prints)) > 1:
        other = next(rank for rank, text in enumerate(prints) if text != prints[0])
        raise ConfigError(
            f"data_path={cfg.data_path}: the dataset of rank {other} differs from rank 0's; copy the same files to every host"
        )
    with dist.agreed(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)  # initialisers draw from the global generator, on the CPU for every device
        arch = {key: value for key, value in cfg.arch.items() if key != "loss"}
        objective = make(cfg.arch.loss, "arch.loss", make(arch, "arch", source.spec)).to(dist.device)
        if objective.model.dtype == torch.float64:
            objective.double()
        if cfg.init_from and dist.is_main and start.folder is None:
            begin_with(objective, cfg.init_from, objective.tables(), run.say)
    same_everywhere({**dict(objective.named_parameters()), **dict(objective.named_buffers())}, dist)
    objective.prepare(dist)
    return source, objective


def build(cfg: DictConfig, dist: Dist, run: Run, source: Source, objective: Objective) -> Trainer:
    """Everything that updates the weights."""
    from data.stream import to_tensors
    from models.objectives.base import Context, to_device
    from optim.ema import EMA
    from optim.groups import build as build_dense
    from optim.groups import build_sparse
    from optim.schedule import build_schedule
    from utils.checkpoint.carries import Slots
    from utils.checkpoint.policy import NOTICES
    from utils.command.instantiate import make
    from utils.measure.hardware import peak_flops
    from utils.measure.metrics import Meter
    from utils.measure.micro_batch import shards_at_once
    from utils.noise import Noise

    parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    tables = objective.tables()
    owned = dist.owned_shards(cfg.shards)
    total_steps = cfg.max_steps or source.total_steps

    def beginning(shards: Sequence[int]) -> tuple[dict[str, torch.Tensor], Context]:
        """What the first step would see of these shards."""
        batch = to_device(to_tensors([source.train_batch(0, shard) for shard in shards]), dist.device)
        return batch, Context(0.0, Noise(cfg.seed, 0, shards, dist.device))

    size = shards_at_once(cfg, len(owned), dist.device, parameters.values(), lambda n: objective.rehearse(*beginning(owned[:n])))
    parts = [owned[i : i + size] for i in range(0, len(owned), size)]
    trainer = Trainer(
        cfg=cfg, dist=dist, run=run, source=source, objective=objective, parameters=parameters,
        parts=parts, slots=Slots(parts, lambda: objective.initial_carry(beginning(owned[:1])[0])), meter=Meter(cfg.shards),
        sparse=build_sparse(
            cfg.optim.sparse, tables, cfg.global_batch_size // cfg.shards * len(dist.owned_shards(cfg.shards, rank=0)), dist
        ),
        dense=build_dense(cfg.optim.dense, parameters),
        schedule=build_schedule(cfg.optim.schedule, total_steps, source.steps_per_epoch),
        reducer=make(cfg.sync, "sync", parameters, dist, notices=NOTICES),
        ema=EMA(parameters, tables, cfg.ema_rate) if cfg.ema else None,
        total_steps=total_steps,
        headline=objective.judged_by(cfg.objective_metric),
    )  # fmt: skip
    if trainer.ema is not None:
        for optimizer in trainer.sparse:
            optimizer.before_update.append(trainer.ema.before_rows_change)
    if peak_flops(dist.device, objective.model.dtype):
        trainer.flops_per_example = objective.flops_per_example(*beginning(owned[:1]))
    if cfg.compile is True or (cfg.compile == "auto" and dist.device.type == "cuda"):
        objective.compile_net()
    return trainer


@cli.told_at_once
def train(trainer: Trainer) -> None:
    """Step, log, evaluate and save, until the run has its length or somebody asks it to stop."""
    from data.stream import ShardStream, train_loader
    from utils.measure.metrics import Clock

    trainer.objective.train()
    stream = ShardStream(trainer.source, trainer.parts, trainer.step, trainer.total_steps)
    with closing(train_loader(stream, trainer.cfg.num_workers, trainer.dist.device.type == "cuda")) as loader:
        between_steps(trainer, trainer.dist.sums(trainer.keeper.notices()))
        clock = Clock()
        while trainer.step < trainer.total_steps:
            with clock.waiting():
                _, parts = next(loader)
            verdict = train_step(trainer, parts)
            trainer.step += 1
            clock.steps, clock.examples = clock.steps + 1, clock.examples + trainer.cfg.global_batch_size
            last = trainer.step == trainer.total_steps
            if trainer.step % trainer.cfg.log_interval == 0 or last:
                log(trainer, clock)
                clock = Clock()
            trainer.evaluation_due = last or trainer.source.is_eval_step(trainer.step)
            if between_steps(trainer, verdict.notices):
                clock = Clock()
        trainer.keeper.settle()


def between_steps(trainer: Trainer, told: Sequence[float]) -> bool:
    """Evaluate, save, stop, as all ranks have agreed. Returns whether there was an evaluation, which takes its time."""
    stop, wanted = trainer.keeper.heed(told)
    evaluated = trainer.evaluation_due and not stop
    if evaluated:
        stop = evaluate(trainer)
        wanted = wanted or trainer.cfg.checkpoint_every_eval or trainer.step == trainer.total_steps
    trainer.keeper.save_if(wanted, bool(stop), evaluated and not stop)
    if stop:
        trainer.keeper.settle()
        same = "the same command" if trainer.cfg.resume is not False else "the same command without resume=false"
        trainer.run.stop(stop, trainer.step, f"{same} goes on from there")
    return evaluated


def train_step(trainer: Trainer, parts: list[dict]) -> Verdict:
    """One step: sum locally, reduce, divide once, update."""
    from models.objectives.base import Context, to_device
    from optim.schedule import set_lr
    from utils.noise import Noise

    cfg, objective, reducer = trainer.cfg, trainer.objective, trainer.reducer
    reducer.zero()
    outs = []
    for i, (shards, part) in enumerate(zip(trainer.parts, parts, strict=True)):
        batch = to_device(part, trainer.dist.device)
        context = Context(trainer.step / trainer.total_steps, Noise(cfg.seed, trainer.step, shards, trainer.dist.device))
        outs.append(objective(batch, trainer.slots.get(i, partial(objective.initial_carry, batch)), context))
        with reducer.backward(last=i == len(parts) - 1):
            outs[-1].loss.backward()
    verdict = reducer.finish(
        [out.weight for out in outs], [grad for s in trainer.sparse for grad in s.local_grads()], trainer.keeper.notices()
    )
    if not verdict.finite:
        refuse(trainer, verdict)
        return verdict

    for shards, out in zip(trainer.parts, outs, strict=True):
        trainer.meter.add({**out.metrics, "loss": (out.loss, out.weight)}, shards[0])
    if cfg.grad_clip is not None:
        reducer.clip(cfg.grad_clip)
    set_lr([*trainer.sparse, *trainer.dense], trainer.schedule(trainer.step + 1))
    for optimizer in (*trainer.sparse, *trainer.dense):
        optimizer.step()
    if trainer.ema is not None:
        trainer.ema.update()
    trainer.slots.put(out.carry for out in outs)
    return verdict


def refuse(trainer: Trainer, verdict: Verdict) -> None:
    """A step whose gradients are not finite: all ranks know, and all do the same."""
    for optimizer in trainer.sparse:
        optimizer.zero_grad()  # forgets the step's look-ups
    if trainer.cfg.on_nonfinite == "raise":
        raise RunError(f"on_nonfinite=raise: step {trainer.step + 1}: {verdict.problem}; lower lr, set grad_clip, or use on_nonfinite=skip")
    trainer.slots.put([None] * len(trainer.parts))  # fresh slots: the same ones would fail again, as the weights stay
    trainer.run.say(f"skipped step {trainer.step + 1}: {verdict.problem}")


def log(trainer: Trainer, clock: Clock) -> None:
    """One row of metrics, named as users of the published code know them."""
    from utils.measure.hardware import peak_flops, peak_memory

    means = trainer.meter.read(trainer.dist)
    row = {f"train/{name}": value for name, value in means.items()}
    row |= {"train/lr": trainer.dense[-1].param_groups[0]["lr"], "epoch": trainer.step / trainer.source.steps_per_epoch}
    row |= clock.speeds(max(1, trainer.source.spec.seq_len), trainer.reducer.take_wait_s(), trainer.keeper.take_stall_s())
    row["memory/peak_bytes"] = peak_memory(trainer.dist.device)
    if trainer.flops_per_example:
        peak = peak_flops(trainer.dist.device, trainer.objective.model.dtype) or 1.0
        row["speed/mfu"] = trainer.flops_per_example * row["speed/examples_per_s"] / trainer.dist.world_size / peak
    trainer.run.log(trainer.step, row)
    headline = trainer.objective.headline.name
    trainer.run.progress(trainer.step, trainer.total_steps, means.get("loss"), headline, means.get(headline), row["speed/examples_per_s"])


@cli.told_at_once
def evaluate(trainer: Trainer) -> int:
    """Every example of every set exactly once over all ranks. Returns the signal that cut it short, or 0."""
    import torch

    from data.stream import eval_batches, num_eval_batches
    from models.objectives.base import to_device
    from utils.measure.evaluation import Abandoned, Evaluation

    cfg, dist = trainer.cfg, trainer.dist
    size = cfg.eval_batch_size or min(1024, max(1, cfg.global_batch_size // 8))
    evaluation = Evaluation(dist, trainer.run.directory, trainer.run.say, cfg.eval_save_outputs)
    trainer.objective.eval()
    try:
        with torch.no_grad(), trainer.ema.applied() if trainer.ema is not None else nullcontext():
            for name, examples in trainer.source.eval_sets().items():
                mine, total = eval_batches(examples, size, dist.rank, dist.world_size), num_eval_batches(examples, size)
                evaluation.run(trainer.step, name, mine, total, lambda batch: trainer.objective.predict(to_device(batch, dist.device)))
    except Abandoned:
        return signals.agreed(dist.sums(signals.flags()))
    finally:
        trainer.objective.train()
    trainer.evaluation_due, trainer.results = False, evaluation.results()
    if trainer.results:
        trainer.run.log(trainer.step, trainer.results)
        trainer.run.say(f"step {trainer.step}, held out: {evaluation.summary()}")
    if evaluation.first is not None and (cfg.eval_only or trainer.step == trainer.total_steps):
        batch, answers = evaluation.first
        trainer.run.say(trainer.source.describe({key: rows[0].numpy() for key, rows in batch.items()}, answers[0].numpy()))
    return 0


if __name__ == "__main__":
    main()
