"""Train any model of this repository on any number of ranks: `python pretrain.py experiment=demo`.

Top to bottom: the command line becomes a configuration (`main`), a configuration becomes the parts of a run
(`build`), and the parts become a trained model (`train`: step, log, evaluate, save).
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from utils import cli, config
from utils.errors import ConfigError, RunError

if TYPE_CHECKING:  # torch takes a second to import: not before the command line is known to be right
    import torch

    from data.source import Source
    from models.objectives.base import Objective
    from optim.allreduce import Reducer
    from optim.ema import EMA
    from optim.schedule import Schedule
    from optim.sparse_signsgd import SparseSignSGD
    from utils.distributed import Dist
    from utils.metrics import Clock
    from utils.run import Run


@dataclass
class Job:
    """The parts of one run. Ranks differ in `dist` and `parts` alone."""

    cfg: DictConfig
    dist: Dist
    run: Run
    source: Source
    objective: Objective
    parameters: dict[str, torch.nn.Parameter]
    parts: list[range]  # this rank's shards, cut into micro-batches
    sparse: list[SparseSignSGD]
    dense: list[torch.optim.Optimizer]
    schedule: Schedule
    reducer: Reducer
    ema: EMA | None
    total_steps: int
    step: int = 0
    flops_per_example: int = 0


@hydra.main(config_path=str(config.CONF), config_name="pretrain", version_base="1.3")
def app(raw: DictConfig) -> float | None:
    """One job of the command line: a run, or one of a sweep."""
    return cli.run_job(raw, pretrain)


def main() -> None:
    """Everything of the command line; never returns."""
    cli.main(app)


def pretrain(cfg: DictConfig) -> float | None:
    """One run from its resolved configuration; the objective metric on every rank, for sweepers."""
    from optim.replicas import check_same
    from utils import distributed, hardware
    from utils.run import Run

    dist = distributed.start(cfg.device, cfg.backend, cfg.timeout_s)
    cfg = config.publish(cfg, dist)
    hardware.tune()
    source, objective = build_problem(cfg, dist)
    run = Run(Path(cfg.checkpoint_path), dist)
    with dist.agreed():
        job = build(cfg, dist, run, source, objective)
        if cfg.eval_only:
            load_weights(job)
        check_names(job)
    if cfg.eval_only:
        check_same(objective.state_dict(), dist)  # hosts may hold different files under one name
    with dist.agreed():  # last: whatever can be wrong is known before a former run is moved aside
        run.begin(OmegaConf.to_yaml(cfg), {"mode": cfg.wandb.mode, "project": cfg.project_name, "name": cfg.run_name})
    with run:
        run.say(f"{cfg.run_name}: {sum(p.numel() for p in job.parameters.values()):,} parameters, {job.total_steps:,} steps")
        run.say(hardware.describe(dist))
        results = evaluate(job, show=True) if cfg.eval_only else train(job)
        run.say(f"files: {run.directory}")
    return results.get(cfg.objective_metric or f"eval/{objective.headline}")


def build_problem(cfg: DictConfig, dist: Dist) -> tuple[Source, Objective]:
    """The data and the net, the same on every rank."""
    import torch

    from optim.replicas import same_everywhere
    from utils.targets import make

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
    from utils.hardware import peak_flops
    from utils.noise import Noise
    from utils.targets import make

    parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    tables = objective.tables()
    shard_size = cfg.global_batch_size // cfg.shards
    owned = dist.owned_shards(cfg.shards)
    per_part = max(1, (cfg.micro_batch_size or cfg.global_batch_size) // shard_size)
    total_steps = cfg.max_steps or source.total_steps
    job = Job(
        cfg=cfg, dist=dist, run=run, source=source, objective=objective, parameters=parameters,
        parts=[owned[i : i + per_part] for i in range(0, len(owned), per_part)],
        sparse=build_sparse(cfg.optim.sparse, tables, shard_size * len(dist.owned_shards(cfg.shards, rank=0)), dist),
        dense=build_dense(cfg.optim.dense, parameters),
        schedule=build_schedule(cfg.optim.schedule, total_steps, source.steps_per_epoch),
        reducer=make(cfg.sync, "sync", parameters, dist),
        ema=EMA(parameters, tables, cfg.ema_rate) if cfg.ema else None,
        total_steps=total_steps,
    )  # fmt: skip
    if job.ema is not None:
        for optimizer in job.sparse:
            optimizer.before_update.append(job.ema.before_rows_change)
    if peak_flops(dist.device, objective.model.dtype):
        shard = owned[:1]
        batch = to_device(to_tensors([source.train_batch(0, shard[0])]), dist.device)
        job.flops_per_example = objective.flops_per_example(batch, Context(0.0, Noise(cfg.seed, 0, shard, dist.device)))
    if cfg.compile is True or (cfg.compile == "auto" and dist.device.type == "cuda"):
        objective.compile_net()
    return job


def train(job: Job) -> dict[str, float]:
    """All steps of the run, then the last evaluation."""
    from data.stream import ShardStream, train_loader
    from utils.metrics import Clock, Meter

    meter, clock, results = Meter(), Clock(), {}
    carries: list[Any] = [None] * len(job.parts)
    job.objective.train()
    stream = ShardStream(job.source, job.parts, job.step, job.total_steps)
    with closing(train_loader(stream, job.cfg.num_workers, job.dist.device.type == "cuda")) as loader:
        while job.step < job.total_steps:
            with clock.waiting():
                _, parts = next(loader)
            carries, counted = train_step(job, parts, carries, meter)
            job.step += 1
            clock.steps, clock.examples = clock.steps + 1, clock.examples + counted
            last = job.step == job.total_steps
            if job.step % job.cfg.log_interval == 0 or last:
                log(job, meter.read(job.dist), clock)
                clock = Clock()
            if job.source.is_eval_step(job.step) or last:
                if last or job.cfg.checkpoint_every_eval:
                    save(job)
                results = evaluate(job, show=last)
                clock = Clock()
    return results


def train_step(job: Job, parts: list[dict], carries: list[Any], meter: Any) -> tuple[list[Any], float]:
    """One step: sum locally, reduce, divide once, update. Returns the carries and the examples that counted."""
    from models.objectives.base import Context, to_device
    from optim.schedule import set_lr
    from utils.noise import Noise

    cfg, objective, reducer = job.cfg, job.objective, job.reducer
    reducer.zero()
    outs = []
    for i, (shards, batch) in enumerate(zip(job.parts, parts, strict=True)):
        batch = to_device(batch, job.dist.device)
        context = Context(job.step / job.total_steps, Noise(cfg.seed, job.step, shards, job.dist.device))
        carry = objective.initial_carry(batch) if carries[i] is None else carries[i]
        outs.append(objective(batch, carry, context))
        with reducer.sending() if i == len(parts) - 1 else nullcontext():
            outs[-1].loss.backward()
    verdict = reducer.finish(sum(out.weight for out in outs), [grad for s in job.sparse for grad in s.local_grads()])
    if not verdict.finite:
        refuse(job, verdict)
        return [None] * len(carries), 0.0  # fresh slots: the same ones would fail again, as the weights stay

    for out in outs:
        meter.add({**out.metrics, "loss": (out.loss, out.weight)})
    if cfg.grad_clip is not None:
        reducer.clip(cfg.grad_clip)
    set_lr([*job.sparse, *job.dense], job.schedule(job.step + 1))
    for optimizer in (*job.sparse, *job.dense):
        optimizer.step()
    if job.ema is not None:
        job.ema.update()
    return [out.carry for out in outs], verdict.weight


def refuse(job: Job, verdict: Any) -> None:
    """A step whose gradients are not finite: all ranks know, and all do the same."""
    what = (
        f"step {job.step + 1}: the gradient is not finite, first seen in {verdict.parameter or 'a sparse table'}"
        f" and on rank {', '.join(map(str, verdict.ranks)) or 'none alone (the sum overflowed)'}"
    )
    for optimizer in job.sparse:
        optimizer.zero_grad()  # forgets the step's look-ups
    if job.cfg.on_nonfinite == "raise":
        raise RunError(f"on_nonfinite=raise: {what}; lower lr, set grad_clip, or use on_nonfinite=skip")
    job.run.say(f"skipped {what}")


def log(job: Job, means: dict[str, float], clock: Clock) -> None:
    """One row of metrics, named as users of the published code know them."""
    from utils.hardware import peak_flops, peak_memory

    seconds = clock.seconds
    row = {f"train/{name}": value for name, value in means.items()}
    row |= {
        "train/lr": job.dense[-1].param_groups[0]["lr"],
        "epoch": job.step / job.source.steps_per_epoch,
        "speed/examples_per_s": clock.examples / seconds,
        "speed/tokens_per_s": clock.examples * max(1, job.source.spec.seq_len) / seconds,
        "speed/step_ms": 1e3 * seconds / max(1, clock.steps),
        "speed/data_wait_ms": 1e3 * clock.waited / max(1, clock.steps),
        "speed/all_reduce_ms": 1e3 * job.reducer.take_wait_s() / max(1, clock.steps),
        "memory/peak_bytes": peak_memory(job.dist.device),
    }
    if job.flops_per_example:
        peak = peak_flops(job.dist.device, job.objective.model.dtype) or 1.0
        row["speed/mfu"] = job.flops_per_example * clock.examples / seconds / job.dist.world_size / peak
    job.run.log(job.step, row)
    headline = job.objective.headline
    job.run.progress(job.step, job.total_steps, means.get("loss"), headline, means.get(headline), row["speed/examples_per_s"])


def evaluate(job: Job, show: bool = False) -> dict[str, float]:
    """Every example of every set exactly once over all ranks; `show` prints the first one and the answer to it."""
    import torch

    from data.stream import eval_batches, num_eval_batches
    from models.objectives.base import to_device
    from utils.evaluation import Evaluation
    from utils.metrics import means

    cfg, dist, objective = job.cfg, job.dist, job.objective
    size = cfg.eval_batch_size or min(1024, max(1, cfg.global_batch_size // 8))
    names: list[str] = []
    sums, firsts = {}, []
    objective.eval()
    with torch.no_grad(), job.ema.applied() if job.ema is not None else nullcontext():
        for set_name, examples in job.source.eval_sets().items():
            if not len(examples):
                continue
            evaluation = Evaluation(dist, cfg.eval_save_outputs)
            mine = eval_batches(examples, size, dist.rank, dist.world_size)
            names, sums[set_name] = evaluation.run(
                mine, num_eval_batches(examples, size), lambda b: objective.predict(to_device(b, dist.device))
            )
            with dist.agreed():
                evaluation.save(job.run.directory / f"step_{job.step}_{set_name.replace('/', '_')}_preds.{dist.rank}.safetensors")
            firsts.append(evaluation.first)
    objective.train()
    if not sums:
        return {}
    results = {f"eval/{name}": value for name, value in means(names, torch.stack(list(sums.values())).sum(0)).items()}
    if len(sums) > 1:
        results |= {f"eval/{key}/{name}": value for key, total in sums.items() for name, value in means(names, total).items()}
    job.run.log(job.step, results)
    job.run.say(f"step {job.step}, held out: " + "  ".join(f"{name} {results[f'eval/{name}']:.4f}" for name in names))
    if show and firsts[0] is not None:
        batch, answers = firsts[0]
        job.run.say(job.source.describe({key: rows[0].numpy() for key, rows in batch.items()}, answers[0].numpy()))
    return results


def load_weights(job: Job) -> None:
    """`eval_only`: the weights of a checkpoint, and its averaged ones when `ema` is on."""
    from utils.checkpoint import load, load_into

    groups, meta = load(job.cfg.checkpoint)
    load_into(job.objective, groups["model"], f"checkpoint={job.cfg.checkpoint}")
    if job.ema is not None:
        if "ema" not in groups:
            raise ConfigError(f"ema=true: checkpoint={job.cfg.checkpoint} holds no averaged weights; use ema=false")
        job.ema.load(groups["ema"])
    job.step = meta.get("step", 0)


def check_names(job: Job) -> None:
    """Metrics and outputs that the configuration names must exist: asked of one empty row, before any training."""
    import torch

    from data.stream import to_tensors
    from models.objectives.base import to_device
    from utils.evaluation import check_names_known

    sets = {name: examples for name, examples in job.source.eval_sets().items() if len(examples)}
    if sets and (job.cfg.objective_metric or job.cfg.eval_save_outputs):
        row = to_device(to_tensors([next(iter(sets.values())).padding(1)]), job.dist.device)
        with torch.no_grad():
            prediction = job.objective.eval().predict(row)
        job.objective.train()
        check_names_known(job.cfg.objective_metric, job.cfg.eval_save_outputs, list(sets), row, prediction)


def save(job: Job) -> None:
    """A checkpoint of weights and step, written by rank 0."""
    from utils import checkpoint

    if job.dist.is_main:
        groups = {"model": job.objective.state_dict()} | ({"ema": job.ema.state()} if job.ema is not None else {})
        meta = {"step": job.step, "fingerprint": job.source.spec.fingerprint, "config": OmegaConf.to_yaml(job.cfg)}
        checkpoint.save(job.run.directory / "checkpoints", job.step, groups, meta)


if __name__ == "__main__":
    main()
