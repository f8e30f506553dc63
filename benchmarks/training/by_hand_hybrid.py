"""Layers dealt out over the ranks of a data-parallel run: whole experts, whole embedding tables.

The rest of the model sees its rank's samples; what goes to a dealt-out layer travels by all-to-all and comes back so. This is
expert parallelism (GShard, arXiv 2006.16668) and table-wise sharding of recommenders (DLRM, arXiv 1906.00091).
"""
from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh


def deal_out_experts(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Each rank keeps its part of dim 0 of the batched expert weights. False where they do not deal out evenly."""
    spread = [m for m in model.modules() if type(m).__name__ == "Experts"]
    if any(m.up.shape[0] % mesh.size() for m in spread):
        return False
    for experts in spread:
        for name, weight in list(experts.named_parameters()):
            mine = weight.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
            experts.register_parameter(name, nn.Parameter(mine))
        experts.forward = MethodType(_with_tokens_sent(experts.forward, mesh), experts)
    return True


def _with_tokens_sent(compute: Callable[[Tensor], Tensor], mesh: DeviceMesh) -> Callable[[nn.Module, Tensor], Tensor]:
    n = mesh.size()

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        """x: [experts, tokens of this rank, width], same out."""
        e, t, d = x.shape
        there = _exchanged(x, mesh).view(n, e // n, t, d).transpose(0, 1).reshape(e // n, n * t, d)
        back = compute(there).view(e // n, n, t, d).transpose(0, 1).reshape(e, t, d)
        return _exchanged(back, mesh)

    return forward


def deal_out_tables(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Each rank keeps some tables whole and looks the whole batch up in them. False where they do not deal out evenly."""
    n = mesh.size()
    if len(model.tables) % n:
        return False
    k = len(model.tables) // n
    first = k * mesh.get_local_rank()
    model.tables = nn.ModuleList(model.tables[first:first + k])

    def features(self: nn.Module, x: Tensor, sparse: Tensor) -> Tensor:
        """x: [batch of this rank, width]; sparse: [whole batch, tables, hot] -> [batch of this rank, tables + 1, width]."""
        bags = torch.stack([table(sparse[:, first + i]).mean(dim=1) for i, table in enumerate(self.tables)], dim=1)
        mine = _exchanged(bags, mesh).view(n, -1, k, bags.shape[-1])
        return torch.cat((x.unsqueeze(1), mine.transpose(0, 1).flatten(1, 2)), dim=1)

    def forward(self: nn.Module, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = features(self, x, sparse)
        products = torch.bmm(rows, rows.transpose(1, 2))
        row, column = torch.tril_indices(rows.shape[1], rows.shape[1], offset=-1, device=x.device)
        return self.top(torch.cat((x, products[:, row, column]), dim=1)).squeeze(1)

    model.forward = MethodType(forward, model)
    return True


def _exchanged(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Piece i of dim 0 goes to rank i, and so do gradients."""
    return all_to_all_single_autograd(x.contiguous(), None, None, mesh.get_group())


def average(parameters: list[nn.Parameter]) -> None:
    """Gradients of dealt-out layers are sums over all ranks' losses; data parallelism means their average."""
    ranks = dist.get_world_size()

    def divide(p: Tensor) -> None:
        p.grad.div_(ranks)

    for p in parameters:
        p.register_post_accumulate_grad_hook(divide)
