"""`StalePipeline`: training with stale weights, which a user asks for by name (`autoshard.stale_pipeline`)."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch

from autoshard.base import quantities
from autoshard.base.random import mix
from autoshard.errors import InfeasibleError, UsageError
from autoshard.pipeline.action_lists.check import check
from autoshard.pipeline.action_lists.transfers import with_transfers
from autoshard.pipeline.schedules import make_schedule
from autoshard.pipeline.turns import turns_of
from autoshard.runtime.own_memory import apart
from autoshard.runtime.pipeline.module import PipelineModule
from autoshard.runtime.pipeline.runner import Run
from autoshard.runtime.pipeline.stash import Stash, StashingRunner
from autoshard.runtime.pipeline.step import PipelineStep
from autoshard.runtime.pipeline.wires import ONCE, STEP, Message
from autoshard.runtime.ranks.agree import alone, share

Batch = Callable[[int], tuple[Sequence[torch.Tensor], Sequence[Any], int]]
"""Number of a mini-batch -> its tensors, how each comes in, and the seed of its random ops. Asked once for each, in order."""


class StaleRank:
    """One rank. `optimizer`: of the parameters of its stage, None where there are none. Raises UsageError for tied weights."""

    def __init__(self, step: PipelineStep, optimizer: torch.optim.Optimizer | None) -> None:
        for name, stages in step.made.cut.tied:
            raise UsageError(f"{name} is read in stages {', '.join(map(str, stages))}, which would have to agree on it after every mini-batch; a "
                             "stale pipeline has no tied weights: give each stage its own, or use autoshard.compile")
        self.step, self.optimizer = step, optimizer
        self.stashes = {s: Stash(program, step.stored) for s, program in step.runner.programs.items()}

    @property
    def versions(self) -> int:
        """The most versions of its weights that the rank had at once."""
        return max((stash.most for stash in self.stashes.values()), default=1)

    def run(self, count: int, batch: Batch) -> torch.Tensor:
        """Train on mini-batches 0 .. count - 1; their losses, on every rank."""
        step, runner = self.step, self.step.runner
        table = with_transfers(make_schedule("1f1b", len(step.made.table.ranks), count))
        check(table)
        losses: list[torch.Tensor] = []

        def results(m: int, users: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
            losses.append(users[step.loss].detach().clone())
            return {step.loss: torch.ones_like(users[step.loss])}

        def micro(stage: int, m: int) -> Any:
            tensors, given, seed = batch(m)
            return step._micro(stage, 0, tensors, given, seed)

        turns = turns_of(table, step.made.cut.stages, runner.wires.me)
        stashing = StashingRunner(runner.programs, table, turns, runner.wires, runner.stored, self.stashes, self._update)
        with torch.no_grad():
            stashing.run(Run(micro, results))
            return self._shared(count, losses)

    def _update(self, grads: Mapping[str, torch.Tensor]) -> None:
        if self.optimizer is None:
            return
        for name, grad in zip(grads, apart(list(grads.values())), strict=True):
            self.step.stored.params[name].grad = self.step.as_gradient(name, grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _shared(self, count: int, losses: list[torch.Tensor]) -> torch.Tensor:
        """From the rank that has the last stage to the others."""
        step, wires = self.step, self.step.runner.wires
        if step.is_owner:
            found = torch.stack(losses)
            for other in step.others:
                wires.send(Message("losses", ONCE, step.owner, other, STEP), found)
            wires.flush()
            return found
        message = Message("losses", ONCE, step.owner, wires.me, STEP)
        (meta,) = (shown.meta for shown in step.shown if shown.index == step.loss)
        wires.post(message, (count,), meta.dtype)
        return wires.take(message)


class StalePipeline:
    """What `autoshard.stale_pipeline` returns, on each rank.

    module     the stages of this rank: parameters, `state_dict()`, and calls without gradients, as of `autoshard.compile`
    optimizer  of this rank's parameters; None where its stage has none
    versions   the most versions of its weights that this rank had at once: stage s of n (from 1) has n - s + 1"""

    def __init__(self, module: PipelineModule, optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
        assert module._latest is not None, "a pipeline is compiled for example inputs"
        self.module = module
        self._key, step = module._latest
        assert isinstance(step, PipelineStep), "a pipeline runs in stages"
        alone(module.place, lambda: _check_memory(step))
        trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = alone(module.place, lambda: made_by(optimizer, trained)) if trained else None
        self._rank = alone(module.place, lambda: StaleRank(step, self.optimizer))
        share(module.place, "a stale pipeline", lambda: "", module.options.running.timeout)

    @property
    def versions(self) -> int:
        return self._rank.versions

    def train(self, batches: Iterable[Sequence[Any]]) -> torch.Tensor:
        """Train on `batches`, which has a length; each is like the example inputs. Returns their losses [len(batches)], on every rank. All ranks call
        this with the same batches. The pipeline fills at the begin and drains at the end: weights are up to date behind it.

        Raises UsageError for batches without a length, of other shapes, or fewer than they said."""
        module = self.module
        count = alone(module.place, lambda: _length(batches))
        with module.place.pulse.together(f"train() on {count} mini-batches"):
            share(module.place, {"number of mini-batches": str(count), "shapes": repr(self._key[2])}, lambda: "", module.options.running.timeout)
        source = iter(batches)
        try:
            return self._rank.run(count, lambda m: self._next(source, m, count))
        except RuntimeError as e:
            module.name_who_left(e)
            raise

    def _next(self, source: Iterator[Sequence[Any]], m: int, count: int) -> tuple[Sequence[torch.Tensor], Sequence[Any], int]:
        batch = next(source, None)
        if batch is None:
            raise UsageError(f"there are {m} mini-batches, and their length is {count}; give batches that are as many as they say")
        module = self.module
        with torch.enable_grad():
            key, _, tensors = module._key(tuple(batch), {})
        if key != self._key:
            raise UsageError(f"mini-batch {m} ({', '.join(str(tuple(t.shape)) for t in tensors)}) differs from the example inputs in shapes, dtypes, "
                             "or the model is in another mode; drop a last batch that is smaller (DataLoader(drop_last=True)) and stay in train()")
        module._calls += 1
        assert module._seed is not None, "ranks agreed on a seed when the model was prepared"
        return tensors, key[-1], mix(module._seed, module._calls)


def made_by(optimizer: Any, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Raises UsageError for what makes no optimizer."""
    found = optimizer(params) if callable(optimizer) else optimizer
    if not isinstance(found, torch.optim.Optimizer):
        raise UsageError("optimizer: give a function that makes one of a list of parameters, lambda params: torch.optim.SGD(params, lr=0.1); every "
                         "rank has one for its own stage")
    return found


def _length(batches: Any) -> int:
    if not isinstance(batches, Sized) or not isinstance(batches, Iterable):
        raise UsageError(f"train() needs batches with a length, a list or a DataLoader, not {type(batches).__name__}: the schedule is made for all "
                         "of them; pass a stream in pieces, each a list")
    if len(batches) == 0:
        raise UsageError("train() got no batches")
    return len(batches)


def _check_memory(step: PipelineStep) -> None:
    """The plan is of one mini-batch at a time. Further ones bring what they save, and a version of the weights each."""
    ranks = len(step.made.table.ranks)
    for s in step.runner.programs:
        stage, further = step.plan.stages[s], ranks - 1 - step.runner.wires.me
        kinds = {k: float(stage.memory.get(k) or 0.0) for k in ("parameters", "saved")}
        needed, limit = stage.total + further * sum(kinds.values()), stage.memory.get("limit")
        if limit is not None and needed > limit:
            raise InfeasibleError(f"stage {s} ({stage.first} to {stage.last}) of a stale pipeline has {further} further mini-batches under way, each "
                                  f"with a version of its weights ({quantities.size(kinds['parameters'])}) and what it saves "
                                  f"({quantities.size(kinds['saved'])}): about {quantities.size(needed)}, and {quantities.size(float(limit))} are "
                                  "there; use fewer stages, smaller batches, or more ranks per stage", False)
