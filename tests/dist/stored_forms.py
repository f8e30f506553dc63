"""What holds for parameters that lie on ranks in a form of their own (padded, in shares of parts): users see them as they are in the model."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import distribute_tensor

import autoshard
from tests.dist.harness import assert_near, same_gradients, twins, whole

Loss = Callable[[nn.Module, tuple[Any, ...]], torch.Tensor]


@dataclass(frozen=True)
class StoredForm:
    """A model with a batch; (model, seeds, mesh, options) -> the compiled module; the loss of that, and of the model on one device."""

    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    compiled: Callable[..., nn.Module]
    loss: Loss
    alone: Loss

    def clips_alike(self, seeds: dict) -> None:
        """torch's clipping and autoshard's see the norm of one device."""
        for clip in (torch.nn.utils.clip_grad_norm_, None):
            model, reference, batch = twins(self.build, torch.float64)
            fast = self.compiled(model, seeds)
            self.loss(fast, batch).backward()
            self.alone(reference, batch).backward()
            want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            got = clip(fast.parameters(), 0.1) if clip else autoshard.clip_grad_norm_(fast, 0.1)
            assert_near("norm", whole(got), want, 1e-12)
            same_gradients(fast, reference, 1e-9)

    def goes_on(self, folder: str, at: int, seeds: dict, mesh: str) -> None:
        """Step number `at` of a training that goes from one form and number of ranks to another through checkpoints."""
        model, reference, batch = twins(self.build, torch.float64)
        fast = self.compiled(model, seeds, mesh)
        fast.prepare(*batch)
        one, two = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (fast, reference))
        for _ in range(at):
            self.alone(reference, batch).backward()
            two.step()
            two.zero_grad()
        if at:
            params, state = get_state_dict(fast, one)
            dcp.load({"model": params, "optimizer": state}, checkpoint_id=f"{folder}/{at - 1}")
            set_state_dict(fast, one, model_state_dict=params, optim_state_dict=state)
            for name, p in reference.named_parameters():
                assert_near(f"{name} read in step {at}", fast.get_parameter(name), p, 1e-9)
        self.assert_same_step(fast, reference, batch, one, two)
        params, state = get_state_dict(fast, one)
        dcp.save({"model": params, "optimizer": state}, checkpoint_id=f"{folder}/{at}")
        dist.barrier()

    def assert_same_step(self, fast: nn.Module, reference: nn.Module, batch: tuple[Any, ...], one: torch.optim.Optimizer,
                         two: torch.optim.Optimizer) -> None:
        got, want = self.loss(fast, batch), self.alone(reference, batch)
        assert_near("loss", got, want, 1e-9)
        got.backward()
        want.backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
        for name, p in reference.named_parameters():
            assert_near(f"{name} after the step", fast.get_parameter(name), p, 1e-9)

    def takes_whole_state(self, seeds: dict, mesh: str) -> None:
        """Weights and optimizer state of one device, whole on all ranks or on the first alone. Whoever cuts a tensor as a parameter lies gets its piece."""
        model, reference, batch = twins(self.build, torch.float64)
        two = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-5)
        for _ in range(2):
            self.alone(reference, batch).backward()
            two.step()
            two.zero_grad()
        weights, state = get_state_dict(reference, two)
        for sent in (False, True):
            fast = self.compiled(copy.deepcopy(model), seeds, mesh)
            fast.prepare(*batch)
            one = torch.optim.AdamW(fast.parameters(), lr=1e-2, eps=1e-5)
            here = not sent or dist.get_rank() == 0
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sent)
            set_model_state_dict(fast, copy.deepcopy(weights) if here else {}, options=options)
            set_optimizer_state_dict(fast, one, copy.deepcopy(state) if here else {}, options=options)
            for name, p in reference.named_parameters():
                mine, placed = fast.get_parameter(name), fast.get_parameter(name).placements
                assert_near(f"{name} as {placed}, sent: {sent}", mine, p, 1e-12)
                assert_near(f"state of {name} as {placed}, sent: {sent}", one.state[mine]["exp_avg"], two.state[p]["exp_avg"], 1e-12)
                again = distribute_tensor(p.detach(), mine.device_mesh, placed)
                assert torch.equal(again.to_local(), mine.to_local()) and torch.equal(again.full_tensor(), p), f"{name} distributed as {placed}"
            other, both = copy.deepcopy(reference), copy.deepcopy(two.state_dict())
            third = torch.optim.AdamW(other.parameters())
            third.load_state_dict(both)
            self.assert_same_step(fast, other, batch, one, third)

    def from_checkpoint(self, folder: str, seeds: dict) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
        """A model on the meta device from a checkpoint of whole tensors; beside it the model on one device, and the batch."""
        _, reference, batch = twins(self.build, torch.float64)
        dcp.save({n: t.detach() for n, t in reference.state_dict().items()}, checkpoint_id=folder)
        with torch.device("meta"):
            empty = self.build()[0].double()
        fast = self.compiled(empty, seeds, checkpoint=folder)
        assert_near("loss", self.loss(fast, batch), self.alone(reference, batch), 1e-9)
        for name, p in reference.named_parameters():
            assert torch.equal(fast.get_parameter(name).full_tensor(), p), name
        return fast, reference, batch
