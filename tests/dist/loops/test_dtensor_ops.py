"""What training loops compute with the DTensors of a compiled model: the numbers of plain tensors, where torch alone gives others."""
from __future__ import annotations

import copy
import io
import math
import time
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import autoshard
from autoshard import _torch
from autoshard.errors import UsageError
from autoshard.runtime.params import dtensor_ops
from autoshard.runtime.params import told as telling
from autoshard.runtime.params import whole as whole_tensors
from tests.dist.harness import assert_near, on_ranks

pytestmark = pytest.mark.dist
NUMBERS = {
    "sum": lambda p: p.detach().sum().item(), "mean": lambda p: float(p.detach().mean()), "norm": lambda p: p.norm().item(), "largest": lambda p: p.max().item(),
    "count": lambda p: int((p > 0).sum()), "branch": lambda p: 1.0 if (p > p.max() * 0.9).any() else 0.0,
    "finite": lambda p: float(torch.isfinite(p.log()).all()), "product": lambda p: (1 + p / 10).prod().item(),
    "norm of norms": lambda p: torch.stack([p.norm(), 2 * p.norm()]).norm().item(), "inf norm": lambda p: p.norm(math.inf).item(),
    "one column": lambda p: p[:, -1:].sum().item(), "power": lambda p: F.normalize(_vector(p) @ p.detach(), dim=0).max().item(),
    "counts": lambda p: (1 + (p > 0).sum() + _like(p, 2) - (3 - (p > 1).sum())).item(), "of many": lambda p: ((p > 0).sum() + _like(p, 2 ** 24 + 1)).item(),
    "a number behind a tensor": lambda p: (p.sum() + _like(p, 2.0).double()).item() - (p.sum() + 2.0).item() + (2.0 - p.sum()).item(),
    "added in place": lambda p: (p.detach().sum().add_(1) + p.detach().norm().sub_(9).clamp_(max=0) + p.detach().mean().rsqrt_().pow_(3)).item(),
    "in a view": lambda p: (lambda t: (t.view(-1).clamp_(min=9), t.sum())[1])(p.detach().sum(1)).item(),
    "added up in place": lambda p: p.detach().sum().add_(p.detach().mul(2).sum(), alpha=3).mul_(2).item(),
    "joined norms": lambda p: (lambda t: torch.cat([t.view(1), (t * t).view(1)]).sum())(p.detach().norm()).item(),
    **{f"with {name}": lambda p, number=number: float(number(p.detach())) for name, number in {
        "eye": lambda p: (torch.eye(len(p), dtype=p.dtype) + p @ p.T).norm(), "a plain mask": lambda p: torch.where(_odd(p), p, 0.0).sum(),
        "plain weights": lambda p: (p.flatten() @ torch.arange(float(p.numel()), dtype=p.dtype)).cos(), "a plain factor": lambda p: (_odd(p) * p).norm(),
        "plain means": lambda p: torch.lerp(torch.ones(p.shape, dtype=p.dtype), p, 0.3).norm(), "quantiles": lambda p: p.abs().quantile(0.3),
        "the third": lambda p: p.abs().view(-1).kthvalue(3)[0], "picked": lambda p: p[p > 0].prod() + p[_odd(p).any(1)].sum(),
        "unique": lambda p: torch.unique(p.trunc()).sum(), "counts of": lambda p: torch.bincount(p.long().abs().flatten()).max(),
        "same": lambda p: torch.allclose(p, p + 1e-12) + 2 * torch.equal(p, p + 1), "sorted": lambda p: p.flatten().sort()[0][3],
        "histogram": lambda p: torch.histc(p, 7).square().sum(), "renormed": lambda p: p.renorm(2, 0, 0.5).sum(), "list": lambda p: sum(p.tolist()[0]),
        "numpy": lambda p: p.numpy()[-1].sum(), "text": lambda p: f"{p.sum():.3f}", "scan from the end": lambda p: (p.cumsum(-1).cos() + p.cumsum(-2).cos()).sum(),
        "largest from the end": lambda p: p.argmax(-2).sum() + 10 * p.argmax(-1).sum(), "svd": lambda p: torch.linalg.svdvals(p)[1],
        "filled with a number of it": lambda p: p.clone().fill_(p.max()).sum(), "sigmoid of a sum": lambda p: p.sum(0).sigmoid_().sum(),
        "noise of its sums": lambda p: (torch.manual_seed(3), torch.randn_like(p.sum(0)).square().sum() + torch.rand_like(p[:3], generator=_seeded()).sum())[1],
        "behind noise": lambda p: (torch.manual_seed(4), F.dropout(p), torch.rand_like(p), torch.randn(()))[3],
        "scan in place": lambda p: p.clone().T.cumsum_(0).cos().sum()}.items()},
    "many at once": lambda p: torch.tensor([[p.norm(), 2], [p.detach().sum(), (p > 0).sum()]]).sum().item() + int(torch.tensor([(p > 0).sum()])),
    "in inference mode": torch.inference_mode()(lambda p: float(torch.tensor([p.norm(), p[-1].sum(), p.detach().T.cos().sum(), p.view(-1).max()]).sum())),
    "by numbers and tensors": lambda p: (p.norm() * 2 + p.norm() * _like(p, 1.5).double() + p.norm() / 3 + p.norm() / torch.tensor(7.0).double()).item(),
    "numbers first": lambda p: (p.sum() / 2 + torch.div(2, p.sum()) + torch.mul(3, p.norm()) + _like(p, 2.0).double() / p.sum() + p.mean() / p.sum()).item(),
    "floors": lambda p: (p.sum() // 2 + p.sum() // _like(p, 0.3).double() + torch.div(p.norm(), 0.1, rounding_mode="trunc")).item(),
    "stacked": lambda p: torch.stack([p.detach().norm(), torch.tensor(1.0).double(), p.detach().max()]).sum().item() + torch.cat([p.sum().view(1), p.amax(0)]).sum().item(),
    "written sums": lambda p: (p.detach().sum(0).copy_(1.5).sum() + (p > 0).sum().copy_(torch.tensor(3.7)) + p.detach().norm().copy_((p > 1).sum()) / 3).item(),
    "a product in place": lambda p: ((1 + p.detach() / 10).prod().add_(1).mul_(2) + p.detach().prod().fill_(3)).item(), "a power in place": lambda p: p.detach().norm().pow_(p.detach().mean()).item(),
    "a vector": lambda p: len(_vector(p) @ p.detach()), "squeezed": lambda p: len(p.detach().sum(0, keepdim=True).squeeze_(0)),
}
LOSSES = {name: getattr(F, name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")}
PENALTIES = {
    **{name: lambda p, loss=loss: loss(p, p.detach().sign() * 2) for name, loss in LOSSES.items()},
    **{f"{name}, summed": lambda p, loss=loss: loss(p, p.detach().sign() * 2, reduction="sum") for name, loss in LOSSES.items()},
    "binary_cross_entropy": lambda p: F.binary_cross_entropy(p.sigmoid(), p.detach().cos().square()),
    "with logits": lambda p: F.binary_cross_entropy_with_logits(p, p.detach().cos().square()),
    "square": lambda p: p.square().sum(), "norm": lambda p: p.norm(), "columns": lambda p: p.norm(dim=0).sum(), "rows": lambda p: p.norm(dim=1).sum(),
    "kept columns": lambda p: (p.norm(dim=0, keepdim=True) * 2).sum(), "l3 columns": lambda p: torch.linalg.vector_norm(p, 3, 0).sum(),
    "kept": lambda p: torch.linalg.vector_norm(p, 2, None, True).sum(),
    "masked": lambda p: (p * (p > 0.5).any(0)).sum(), "masked by rows": lambda p: (p * (p > 1).any(1, keepdim=True)).square().sum(),
    "largest": lambda p: p.abs().amax(), "least": lambda p: p.amin(), "inf norm": lambda p: p.norm(math.inf),
    "all of it": lambda p: p.square().sum(dim=[]) * p.mean(dim=[], keepdim=True).sum() + p.std(),
    "cosine": lambda p: F.cosine_embedding_loss(p, p.detach().cos(), _vector(p).sign()),
    "counted": lambda p: F.cross_entropy(p, _classes(p), ignore_index=1).square(),
    "weighted": lambda p: F.cross_entropy(p, _classes(p), weight=p.detach().square().sum(0)).square(),
    "ones": lambda p: (p.sum(0) * torch.empty_like(p.sum(0)).fill_(2.0)).sum(),
    "mixed loss": lambda p: F.mse_loss(p, _odd(p).to(p.dtype)) + F.cross_entropy(p, torch.arange(len(p)) % 4),
    "behind a plain tensor": lambda p: (p * _shared(p)).flatten().cos().sum() + p.select(-1, 1).sum(),
    "read twice": lambda p: (lambda t: (t * t + t.exp()).sum())(p.log_softmax(1).gather(1, p.detach().argmax(-1, keepdim=True))),
    "embedded": lambda p: (lambda t: (t * t + t).sum())(F.embedding(torch.tensor([[0, 1], [5, 5]]), p)),
    "picked": lambda p: p[p.detach() > 0].square().sum() * p.mean(), "quantile": lambda p: p.quantile(0.4) + p.flatten().topk(3)[0].prod(),
    "orthogonal": lambda p: (p @ p.T - torch.eye(len(p), dtype=p.dtype)).norm(), "spectral": lambda p: torch.linalg.matrix_norm(p, 2),
    "masked by all": lambda p: p.sum() * (p > 1).any().double(),
}


WRITES = {
    "_foreach_copy_": lambda p: torch._foreach_copy_([p, p], [p * 2, p.flip(0).contiguous()]),
    "index_add_": lambda p: p.index_add_(0, _like(p, [1, 6, 1]), p[:3] * 2), "index_copy_": lambda p: p.index_copy_(1, _like(p, [4, 0]), p[:, :2] + 1),
    "index_copy_ rows": lambda p: p.index_copy_(0, _like(p, [7, 0]), p[:2] + 1), "eye_": nn.init.eye_,
    "copy_ of a whole": lambda p: p.copy_(torch.arange(float(p.numel())).view(p.shape)), "copy_ of a row": lambda p: p.copy_(torch.arange(6.0) - 2),
    "copy_ into a whole": lambda p: p.copy_(torch.zeros(p.shape, dtype=p.dtype).copy_(p * 2)),
    "a row": lambda p: p.__setitem__(3, 0) or p, "a row of it": lambda p: p.__setitem__(0, p[4]) or p,
    "an entry": lambda p: p.__setitem__((5, 4), 7.5) or p, "zero_ of a row": lambda p: (p[6].zero_(), p)[1],
    "mul_ of rows": lambda p: (p[1:5].mul_(3), p)[1], "rows, a column of these": lambda p: (p[1:][:, 2:].add_(9), p)[1],
    "columns": lambda p: p.__setitem__((slice(None), slice(1, 4)), torch.arange(3.0, dtype=p.dtype)) or p,
    "diagonal": lambda p: (p.diagonal().fill_(-2), p)[1], "data": lambda p: (p.data[2].sub_(1), p)[1],
    "chunks": lambda p: (p.chunk(3)[1].zero_(), p.split([1, 5], 1)[1].neg_(), p)[2],
    "pruned": lambda p: p.__setitem__(p.abs() < 2, -1) or p,
    "mul_ by a row": lambda p: p.mul_(torch.arange(6.0, dtype=p.dtype) - 2).add_(torch.ones(p.shape, dtype=p.dtype), alpha=3),
    "add_ into a whole": lambda p: p.copy_(torch.ones(len(p), 1, dtype=p.dtype).mul_(.9).add_(p.mean(1, keepdim=True), alpha=.1).expand(p.shape)),
    "sorted picks": lambda p: p.__setitem__(p > 0, p[p > 0].sort()[0]) or p, "flat": lambda p: (p.view(-1).mul_(0.5), p.flatten()[3:9].zero_(), p)[2],
    "scans": lambda p: p.cumprod_(-1).T.cumsum_(-1).T, "triangle": lambda p: p.triu_(-3), "norms of rows": lambda p: p.renorm_(2, 0, 3.0),
    "outer": lambda p: p.addr_(p.sum(1), torch.arange(6.0, dtype=p.dtype), alpha=0.1), "at least": lambda p: (torch._foreach_maximum_([p], -3.0), p)[1],
    "plain sum": lambda p: p.copy_(torch.eye(6, dtype=p.dtype).addmm_(p.T, p, beta=0.9).cos_()[:1].expand(p.shape)).add_(_odd(p)),
    "noise": lambda p: (torch.manual_seed(1), p.add_(torch.randn_like(p)).mul_(torch.bernoulli(p.sigmoid())).add_(torch.normal(p, 0.1)))[1],
    "drawn in place": lambda p: (torch.manual_seed(2), p.add_(p.clone().normal_(), alpha=0.1).add_(p.clone().exponential_()), p[1:5].random_(-2, 3), p)[3],
    "scatter_add_": lambda p: p.scatter_add_(0, _like(p, [[5] * 6, [0] * 6]), p[:2] * 3),
}


def _odd(p: torch.Tensor) -> torch.Tensor:
    """A plain mask as large as `p`."""
    return (torch.arange(p.numel()) % 3 == 1).view(p.shape)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _shared(p: torch.Tensor) -> torch.Tensor:
    """A plain tensor behind plain ops, which have a backward."""
    return (torch.arange(float(p.shape[1]), dtype=p.dtype, requires_grad=True) * 0.1).exp().square()


def _like(p: torch.Tensor, values: object) -> torch.Tensor:
    """Numbers as `p` is: a tensor, or a DTensor that is whole on every rank."""
    whole = torch.tensor(values)
    return DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim) if isinstance(p, DTensor) else whole


def _vector(p: torch.Tensor) -> torch.Tensor:
    """A number for every row."""
    return p.detach().narrow(1, 0, 1).flatten()


def _classes(p: torch.Tensor) -> torch.Tensor:
    """A class for every row."""
    classes = _like(p, [i % 4 for i in range(len(p))])
    return classes.redistribute(placements=[Shard(0) if q == Shard(0) else Replicate() for q in p.placements]) if isinstance(p, DTensor) else classes


def compare_weights(mesh: str, cases: list[tuple[tuple[int, int], str]]) -> None:
    """A weight of each shape, split as its seed says, in pieces that are equal or not."""
    for shape, seed in cases:
        torch.manual_seed(0)
        reference = nn.Linear(*reversed(shape), bias=False).double()
        with torch.no_grad():
            reference.weight.copy_(torch.randn(shape))
        compiled = autoshard.compile(copy.deepcopy(reference), mesh, (torch.zeros(2, shape[1]).double(),), seeds={"weight": seed},
                                     cluster="cpu-gloo", cache=False)
        assert not any(p.is_replicate() for p in compiled.weight.placements), f"{shape} {seed} is whole"
        for name, number in NUMBERS.items():
            assert number(compiled.weight) == pytest.approx(number(reference.weight), rel=1e-12), f"{name} of {shape} {seed}"
        for name, penalty in PENALTIES.items():
            got, want = (penalty(m.weight) for m in (compiled, reference))
            assert_near(f"{name} of {shape} {seed}", got, want, 1e-12)
            grads = (torch.autograd.grad(value, m.weight)[0] for value, m in ((got, compiled), (want, reference)))
            assert_near(f"gradient of {name} of {shape} {seed}", *grads, 1e-12)
        for name, write in WRITES.items():
            with torch.no_grad():
                write(compiled.weight)
                write(reference.weight)
            assert_near(f"{name} of {shape} {seed}", compiled.weight, reference.weight, 1e-12)
        x = torch.randn(2, shape[1]).double()
        assert_near(f"what {shape} {seed} computes", compiled(x), reference(x), 1e-12)


def loops_of_users() -> None:
    """Two loops with numbers in Python: steps that are not finite are left out, gradients and weights are clipped by hand."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    x, t = torch.randn(32, 16).double(), torch.randint(10, (32,))
    compiled = autoshard.compile(copy.deepcopy(reference), "d=2", loss_fn=F.cross_entropy, seeds={"0.weight": "d,-", "0.bias": "d", "2.weight": "-,d"},
                                 cluster="cpu-gloo", cache=False)
    losses = [_trained(m, lambda m=m, f=f: f(m)) for m, f in ((compiled, lambda m: m(x, t)), (reference, lambda m: F.cross_entropy(m(x), t)))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for (name, p), q in zip(compiled.named_parameters(), reference.parameters(), strict=True):
        assert_near(name, p, q, 1e-12)


def _trained(model: nn.Module, loss_of) -> list[float]:
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)  # reads norms as numbers
    losses = []
    for step in range(4):
        loss = loss_of() + 0.01 * sum(p.square().sum() for p in model.parameters()) + sum(F.mse_loss(p, torch.ones_like(p)) for p in model.parameters())
        loss.backward()
        losses.append(loss.item())
        gradient = model.get_parameter("0.weight").grad
        if step == 1:  # as in fp16, in one element, which one rank has
            with torch.no_grad():
                gradient.copy_(torch.where(gradient == gradient.max(), math.inf, gradient))
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            total = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.mul_(min(1.0, 0.5 / total))
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(min(1.0, 3.0 / p.norm().item()))
        optimizer.zero_grad()
    return losses


def test_two_ranks() -> None:
    on_ranks(2, compare_weights, "d=2", [((8, 6), "d,-"), ((8, 6), "-,d"), ((15, 6), "d,-")])


def test_four_ranks() -> None:
    on_ranks(4, compare_weights, "a=2,b=2", [((8, 6), "a,b"), ((8, 6), "b*a,-")])


def test_loops() -> None:
    on_ranks(2, loops_of_users)


def ranks_differ() -> None:
    one_rank_is_late()
    p = DTensor.from_local(torch.ones(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    whole, own = p.redistribute(placements=[Replicate()]), torch.rand(2, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    for _ in range(5):
        assert (torch.ones(3, 6) @ p.T).shape == (3, 8) and (p.add_(torch.rand(8, 6)) >= 1).all()  # each its own numbers into its own piece
    for mixed in (lambda: own @ p.T, lambda: F.linear(own, p), lambda: whole[:2].clone().add_(own), lambda: own + whole[:2], lambda: whole[:2].copy_(own),
                  lambda: p[:2] * own, lambda: torch.where(own > 0.5, p[:2], own), lambda: torch.lerp(p[:2], own, 0.5), lambda: p[:2] > own):
        with pytest.raises(UsageError, match="ranks have different numbers in the plain tensor of .2, 6."):
            mixed()
    torch.manual_seed(torch.distributed.get_rank())
    for draw in (lambda: whole.clone().normal_(), lambda: torch.rand_like(whole[:3]), lambda: torch.bernoulli(whole / 2)):
        with pytest.raises(UsageError, match="ranks draw different numbers in .* of a DTensor of .*: their generators are not in the same state. Seed all"):
            draw()
    p.clone().normal_()
    shares = DTensor.from_local(torch.rand(6, 18), p.device_mesh, [_torch.StridedShard(1, split_factor=3)], shape=torch.Size((6, 36)), stride=(36, 1))
    assert torch.equal(shares.flatten().full_tensor(), shares.full_tensor().flatten()), "pieces that are shares of parts (q|k|v)"
    schema = _torch.OpSchema(torch.ops.aten.rsub.Tensor, (p.amax(0)._spec, p[0]._spec), {})
    candidates = DTensor._op_dispatcher.sharding_propagator.decomp_strategy._get_candidate_placements(schema)
    assert candidates == sorted(candidates, key=str) and len(candidates) > 3, "ranks choose alike"
    told = []
    with patch.object(whole_tensors.log, "warning", told.append):
        for t in (whole, p, p):
            torch.save({"p": t}, io.BytesIO())
            assert bool(told) == (t is p)
    assert len(told) == 1 and "this rank's piece alone" in told[0]


def one_rank_is_late() -> None:
    compiled = autoshard.compile(nn.Linear(6, 8), "d=2", (torch.zeros(2, 6),), seeds={"weight": "d,-"}, cluster="cpu-gloo", cache=False)
    rank, told = torch.distributed.get_rank(), []
    with patch.object(telling, "LONG", 0.5), patch.object(telling.log, "warning", lambda text, *args: told.append(text % args)):
        time.sleep(4.0 * rank)
        compiled.weight.detach().sum().item()
    assert rank or len(told) == 1 and "rank 0 has waited" in told[0] and "test_dtensor_ops.py" in told[0] and "sum().item()" in told[0]


def test_ranks_that_differ_are_told() -> None:
    on_ranks(2, ranks_differ)


def test_nothing_is_mended_twice() -> None:
    """A function that torch has of its own stays."""
    kept, table = (lambda op, args, kwargs: None), _torch.functions_of_dtensors()
    op = torch.ops.aten.special_zeta.default
    table[op] = kept
    dtensor_ops.mend(op, lambda op, args, kwargs: NotImplemented)
    assert table.pop(op) is kept
