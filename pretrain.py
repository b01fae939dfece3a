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
class Job:
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
        job = build(cfg, dist, run, source, objective)
    start = resume.take_up(job, start)
    with dist.agreed():
        check_names(cfg, source.eval_sets(), objective, lambda rows: to_device(to_tensors([rows]), dist.device))
    check_same(objective.state_dict(), dist)  # hosts may hold different files under one name
    if resume.is_finished(start, job.total_steps):
        run.confirm_finished(job.step)
        run.say(f"{cfg.run_name} is finished, {job.step:,} steps: {run.directory}; resume=false would begin again")
        return job.results.get(job.headline.name)
    # last: whatever can be wrong is known before a former run is moved aside
    wandb = {"mode": cfg.wandb.mode, "project": cfg.project_name, "name": cfg.run_name, "id": start.meta.get("wandb_id")}
    run.begin(OmegaConf.to_yaml(cfg), wandb, start.step if start.continues else None, job.evaluation_due)
    run.say(f"{cfg.run_name}: {sum(p.numel() for p in job.parameters.values()):,} parameters, {job.total_steps:,} steps")
    run.say(hardware.describe(dist))
    if cfg.eval_only:
        if stop := evaluate(job):
            run.stop(stop, job.step, "an evaluation saves nothing")
    else:
        with Keeper(job, start.step if start.continues else -1) as job.keeper:
            train(job)
    run.finish(job.step)
    return job.results.get(job.headline.name)


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


def build(cfg: DictConfig, dist: Dist, run: Run, source: Source, objective: Objective) -> Job:
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
    job = Job(
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
    if job.ema is not None:
        for optimizer in job.sparse:
            optimizer.before_update.append(job.ema.before_rows_change)
    if peak_flops(dist.device, objective.model.dtype):
        job.flops_per_example = objective.flops_per_example(*beginning(owned[:1]))
    if cfg.compile is True or (cfg.compile == "auto" and dist.device.type == "cuda"):
        objective.compile_net()
    return job


@cli.told_at_once
def train(job: Job) -> None:
    """Step, log, evaluate and save, until the run has its length or somebody asks it to stop."""
    from data.stream import ShardStream, train_loader
    from utils.measure.metrics import Clock

    job.objective.train()
    stream = ShardStream(job.source, job.parts, job.step, job.total_steps)
    with closing(train_loader(stream, job.cfg.num_workers, job.dist.device.type == "cuda")) as loader:
        between_steps(job, job.dist.sums(job.keeper.notices()))
        clock = Clock()
        while job.step < job.total_steps:
            with clock.waiting():
                _, parts = next(loader)
            verdict = train_step(job, parts)
            job.step += 1
            clock.steps, clock.examples = clock.steps + 1, clock.examples + job.cfg.global_batch_size
            last = job.step == job.total_steps
            if job.step % job.cfg.log_interval == 0 or last:
                log(job, clock)
                clock = Clock()
            job.evaluation_due = last or job.source.is_eval_step(job.step)
            if between_steps(job, verdict.notices):
                clock = Clock()
        job.keeper.settle()


def between_steps(job: Job, told: Sequence[float]) -> bool:
    """Evaluate, save, stop, as all ranks have agreed. Returns whether there was an evaluation, which takes its time."""
    stop, wanted = job.keeper.heed(told)
    evaluated = job.evaluation_due and not stop
    if evaluated:
        stop = evaluate(job)
        wanted = wanted or job.cfg.checkpoint_every_eval or job.step == job.total_steps
    job.keeper.save_if(wanted, bool(stop), evaluated and not stop)
    if stop:
        job.keeper.settle()
        same = "the same command" if job.cfg.resume is not False else "the same command without resume=false"
        job.run.stop(stop, job.step, f"{same} goes on from there")
    return evaluated


def train_step(job: Job, parts: list[dict]) -> Verdict:
    """One step: sum locally, reduce, divide once, update."""
    from models.objectives.base import Context, to_device
    from optim.schedule import set_lr
    from utils.noise import Noise

    cfg, objective, reducer = job.cfg, job.objective, job.reducer
    reducer.zero()
    outs = []
    for i, (shards, part) in enumerate(zip(job.parts, parts, strict=True)):
        batch = to_device(part, job.dist.device)
        context = Context(job.step / job.total_steps, Noise(cfg.seed, job.step, shards, job.dist.device))
        outs.append(objective(batch, job.slots.get(i, partial(objective.initial_carry, batch)), context))
        with reducer.backward(last=i == len(parts) - 1):
            outs[-1].loss.backward()
    verdict = reducer.finish([out.weight for out in outs], [grad for s in job.sparse for grad in s.local_grads()], job.keeper.notices())
    if not verdict.finite:
        refuse(job, verdict)
        return verdict

    for shards, out in zip(job.parts, outs, strict=True):
        job.meter.add({**out.metrics, "loss": (out.loss, out.weight)}, shards[0])
    if cfg.grad_clip is not None:
        reducer.clip(cfg.grad_clip)
    set_lr([*job.sparse, *job.dense], job.schedule(job.step + 1))
    for optimizer in (*job.sparse, *job.dense):
        optimizer.step()
    if job.ema is not None:
        job.ema.update()
    job.slots.put(out.carry for out in outs)
    return verdict


def refuse(job: Job, verdict: Verdict) -> None:
    """A step whose gradients are not finite: all ranks know, and all do the same."""
    for optimizer in job.sparse:
        optimizer.zero_grad()  # forgets the step's look-ups
    if job.cfg.on_nonfinite == "raise":
        raise RunError(f"on_nonfinite=raise: step {job.step + 1}: {verdict.problem}; lower lr, set grad_clip, or use on_nonfinite=skip")
    job.slots.put([None] * len(job.parts))  # fresh slots: the same ones would fail again, as the weights stay
    job.run.say(f"skipped step {job.step + 1}: {verdict.problem}")


def log(job: Job, clock: Clock) -> None:
    """One row of metrics, named as users of the published code know them."""
    from utils.measure.hardware import peak_flops, peak_memory

    means = job.meter.read(job.dist)
    row = {f"train/{name}": value for name, value in means.items()}
    row |= {"train/lr": job.dense[-1].param_groups[0]["lr"], "epoch": job.step / job.source.steps_per_epoch}
    row |= clock.speeds(max(1, job.source.spec.seq_len), job.reducer.take_wait_s(), job.keeper.take_stall_s())
    row["memory/peak_bytes"] = peak_memory(job.dist.device)
    if job.flops_per_example:
        peak = peak_flops(job.dist.device, job.objective.model.dtype) or 1.0
        row["speed/mfu"] = job.flops_per_example * row["speed/examples_per_s"] / job.dist.world_size / peak
    job.run.log(job.step, row)
    headline = job.objective.headline.name
    job.run.progress(job.step, job.total_steps, means.get("loss"), headline, means.get(headline), row["speed/examples_per_s"])


@cli.told_at_once
def evaluate(job: Job) -> int:
    """Every example of every set exactly once over all ranks. Returns the signal that cut it short, or 0."""
    import torch

    from data.stream import eval_batches, num_eval_batches
    from models.objectives.base import to_device
    from utils.measure.evaluation import Abandoned, Evaluation

    cfg, dist = job.cfg, job.dist
    size = cfg.eval_batch_size or min(1024, max(1, cfg.global_batch_size // 8))
    evaluation = Evaluation(dist, job.run.directory, job.run.say, cfg.eval_save_outputs)
    job.objective.eval()
    try:
        with torch.no_grad(), job.ema.applied() if job.ema is not None else nullcontext():
            for name, examples in job.source.eval_sets().items():
                mine, total = eval_batches(examples, size, dist.rank, dist.world_size), num_eval_batches(examples, size)
                evaluation.run(job.step, name, mine, total, lambda batch: job.objective.predict(to_device(batch, dist.device)))
    except Abandoned:
        return signals.agreed(dist.sums(signals.flags()))
    finally:
        job.objective.train()
    job.evaluation_due, job.results = False, evaluation.results()
    if job.results:
        job.run.log(job.step, job.results)
        job.run.say(f"step {job.step}, held out: {evaluation.summary()}")
    if evaluation.first is not None and (cfg.eval_only or job.step == job.total_steps):
        batch, answers = evaluation.first
        job.run.say(job.source.describe({key: rows[0].numpy() for key, rows in batch.items()}, answers[0].numpy()))
    return 0


if __name__ == "__main__":
    main()
