"""All ranks of a pipeline in one process, a thread each; channels are first in, first out, as they are between processes."""
from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.pipeline.microbatches import batch
from autoshard.pipeline.pipelined import Pipelined, pipelined_as, stage_plan
from autoshard.pipeline.turns import turns_of
from autoshard.planner.stages import plan_traced
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.execute.backends import backend_of
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.pipeline.runner import Runner
from autoshard.runtime.pipeline.stage_program import StageProgram
from autoshard.runtime.pipeline.step import PipelineStep
from autoshard.runtime.pipeline.variant import _names
from autoshard.runtime.pipeline.wires import Message
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.route import route_of

PATIENCE = 300.0


@dataclass(eq=False)
class Threads:
    """In place of `Wires`. `change`: what becomes of a rank's messages on their way, for planted faults."""

    me: int
    channels: dict[tuple[int, int, str], queue.Queue]
    change: Callable[[list[Message]], list[Message]] = lambda messages: messages
    device: torch.device = torch.device("cpu")
    posted: dict[tuple[int, int, str], list[Message]] = field(default_factory=lambda: defaultdict(list))
    arrived: dict[Message, torch.Tensor] = field(default_factory=dict)
    shapes: dict[Message, tuple[Any, ...]] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)

    def send(self, message: Message, value: torch.Tensor) -> None:
        self.sent.append(message)
        self._channel((message.source, message.target, message.channel)).put(value.clone())

    def post(self, message: Message, shape: Any, dtype: torch.dtype) -> None:
        if message not in self.shapes:
            self.shapes[message] = (tuple(shape), dtype)
            self.posted[message.source, message.target, message.channel].append(message)

    def take(self, message: Message) -> torch.Tensor:
        key = message.source, message.target, message.channel
        while message not in self.arrived:
            value = self._channel(key).get(timeout=PATIENCE)
            self.arrived[self.posted[key].pop(0)] = value
        value = self.arrived.pop(message)
        assert (tuple(value.shape), value.dtype) == self.shapes.pop(message), f"{message} has another shape than its receive"
        return value

    def _channel(self, key: tuple[int, int, str]) -> queue.Queue:
        """Made by whichever end comes first; `setdefault` is atomic, a defaultdict is not."""
        return self.channels.setdefault(key, queue.Queue())

    def flush(self) -> None:
        """Nothing is under way: channels hold copies."""


class _Model:
    def name_who_left(self, e: Exception) -> None:
        """Nobody leaves a process that all are in."""


def ranks_of(model: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: str, options: Any, loss: Any, wires: type = Threads,
             plan: Plan | None = None) -> tuple[Plan, list[PipelineStep]]:
    """The plan, and the step of every rank."""
    asked = Options.of({"pipeline": options}, cluster="cpu-gloo")
    traced = batch.traced(model, inputs, {}, asked.pipeline, loss_fn=loss)
    plan = plan or plan_traced(traced, parse_mesh(mesh), asked, has_loss=True)
    made = pipelined_as(traced.graph, plan)
    channels: dict[tuple[int, int, str], queue.Queue] = {}
    return plan, [_rank(model, traced, plan, made, r, wires(r, channels)) for r in range(len(made.table.ranks))]


def _rank(model: nn.Module, traced: Any, plan: Plan, made: Pipelined, r: int, wires: Any) -> PipelineStep:
    place = Place(made.submesh, None, (0,) * made.submesh.ndim, {}, torch.device("cpu"))
    stored, mine = Stored(model, place), made.stages_of(r)
    stored.keep_only(_names(made, mine))
    stored.settle({n: p for n, p in plan.placements.items() if n in stored.params or n in stored.buffers}, 0, graph=traced.graph)
    programs = {}
    for s in mine:
        own = stage_plan(plan, made, s)
        graph = with_recompute(made.cut.stages[s].graph, own.recompute)
        lowered = lower(graph, own, made.submesh, schedule(graph, own, made.submesh, route_of(own)))
        programs[s] = StageProgram.of(made.cut.stages[s], own, lowered, place, stored, traced.calling, backend_of("eager"))
    return PipelineStep(made, traced.calling, plan, Runner(programs, made.table, turns_of(made.table, made.cut.stages, r), wires, stored), place, stored)


def loss_of(step: PipelineStep, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One forward and backward on a rank."""
    (loss,) = step.run(inputs, [None] * len(inputs), 1, _Model())
    loss.backward()
    return loss


def train(steps: list[PipelineStep], inputs: tuple[torch.Tensor, ...]) -> list[float]:
    """One forward and backward on all ranks; the loss of each."""
    return on_threads(steps, lambda step: loss_of(step, inputs).item())


def on_threads(steps: list[PipelineStep], work: Callable[[PipelineStep], Any]) -> list[Any]:
    """What `work` gives for every rank, each on a thread of its own. Raises the first error of any."""
    found: list[Any] = [None] * len(steps)
    errors: list[BaseException] = []

    def rank(i: int) -> None:
        try:
            found[i] = work(steps[i])
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(steps))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return found


def gradients(steps: list[PipelineStep]) -> dict[str, list[torch.Tensor]]:
    """Of every parameter, on each rank that has it."""
    out: dict[str, list[torch.Tensor]] = defaultdict(list)
    for step in steps:
        for name, p in step.stored.params.items():
            if p.grad is not None:
                out[name].append(p.grad)
    return out
