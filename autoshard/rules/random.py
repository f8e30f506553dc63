"""Random ops: replicas draw the same numbers, shards draw different ones, on every backend.

Every op draws from a generator of its own, seeded by (the step's seed, the op's key, which shard this is).
The ambient generator is neither read nor advanced, and drawing again (recomputation) gives the same
numbers. Numbers differ from the ones the unsharded model would draw; their distribution does not."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.graph import Call
from autoshard.rules.notation import rule
from autoshard.rules.parts import dims_but, shard_axes
from autoshard.rules.types import LocalContext

aten = torch.ops.aten
MAX_SHARDS = 1 << 20
FILL: dict[str, Callable[[torch.Tensor, float, float, torch.Generator], torch.Tensor]] = {
    "uniform": lambda x, a, b, g: x.uniform_(a, b, generator=g),
    "normal": lambda x, a, b, g: x.normal_(a, b, generator=g),
    "bernoulli": lambda x, a, b, g: x.bernoulli_(a, generator=g),
    "integers": lambda x, a, b, g: x.random_(int(a), int(b), generator=g),
    "exponential": lambda x, a, b, g: x.exponential_(a, generator=g),
}


@torch.library.custom_op("autoshard::draw", mutates_args=(), schema=(
        "(Tensor stream, int key, str kind, SymInt[] size, float a, float b, ScalarType dtype, Tensor? like, "
        "Device? device) -> Tensor"))
def draw(stream: torch.Tensor, key: int, kind: str, size: Sequence[int], a: float, b: float, dtype: torch.dtype,
         like: torch.Tensor | None, device: torch.device | None) -> torch.Tensor:
    """A tensor of `size` filled from the distribution `kind` (see FILL) with parameters `a`, `b`, on the
    device of `like`, else on `device`. Equal (stream, key) give equal numbers."""
    device = like.device if like is not None else torch.device(device or "cpu")
    digest = hashlib.blake2b(f"{int(stream)}/{key}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
    return FILL[kind](torch.empty(size, dtype=dtype, device=device), a, b, generator)


@draw.register_fake
def _(stream: torch.Tensor, key: int, kind: str, size: Sequence[int], a: float, b: float, dtype: torch.dtype,
      like: torch.Tensor | None, device: torch.device | None) -> torch.Tensor:
    device = like.device if like is not None else torch.device(device or "cpu")
    return torch.empty(size, dtype=dtype, device=device)


def _draw(ctx: LocalContext, kind: str, a: float = 0.0, b: float = 1.0, like: Any = None, output: int = 0,
          dtype: torch.dtype | None = None, size: Sequence[int] | None = None) -> Any:
    """Numbers for this rank's shard of output `output`."""
    stream = aten.mul.Tensor(ctx.seed(), MAX_SHARDS)
    if axes := shard_axes(ctx.outputs[output]):
        stream = aten.add.Tensor(stream, ctx.index(axes))
    dtype = dtype or ctx.call.outputs[output].dtype
    size = list(ctx.local_out(output)) if size is None else list(size)
    device = None if like is not None else dict(ctx.call.kwargs).get("device")
    return torch.ops.autoshard.draw.default(stream, ctx.op_key, kind, size, float(a), float(b), dtype, like, device)


def _dropout(ctx: LocalContext, x: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    if train is False or p == 0:
        return aten.clone.default(x), aten.ones_like.default(x, dtype=torch.bool)
    keep = _draw(ctx, "bernoulli", 1.0 - p, like=x, output=1)
    return aten.mul.Scalar(aten.mul.Tensor(x, keep), 0.0 if p == 1 else 1.0 / (1.0 - p)), keep


def _uniform(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    a, b = ctx.call.argument("from", 0.0), ctx.call.argument("to", 1.0)
    return _draw(ctx, "uniform", a, b, like=_first_tensor(ctx, args))


def _normal(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    a, b = ctx.call.argument("mean", 0.0), ctx.call.argument("std", 1.0)
    return _draw(ctx, "normal", a, b, like=_first_tensor(ctx, args))


def _normal_around(ctx: LocalContext, mean: Any, std: Any = 1.0, *size: Any, **kwargs: Any) -> Any:
    """normal.*: mean and std are numbers or tensors."""
    like = _first_tensor(ctx, (mean, std))
    noise = _draw(ctx, "normal", 0.0, 1.0, like=like)
    if like is None:
        return aten.add.Scalar(aten.mul.Scalar(noise, std), mean)
    return aten.add.Tensor(aten.mul.Tensor(noise, std), mean)


def _bernoulli(ctx: LocalContext, x: Any, p: Any = None, **kwargs: Any) -> Any:
    """Probability `p`, or per element: `p` as a tensor, or `x` itself when there is no `p`."""
    if isinstance(p, (int, float)):
        return _draw(ctx, "bernoulli", p, like=x)
    out = ctx.call.outputs[0].dtype
    drawn = _draw(ctx, "uniform", like=x, dtype=torch.float32)
    return aten._to_copy.default(aten.lt.Tensor(drawn, x if p is None else p), dtype=out)


def _integers(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    low, high = ctx.call.argument("low", 0), ctx.call.argument("high")
    return _draw(ctx, "integers", low, high, like=_first_tensor(ctx, args))


def _exponential(ctx: LocalContext, x: Any, lambd: float = 1.0, **kwargs: Any) -> Any:
    return _draw(ctx, "exponential", lambd, like=x)


def _randperm(ctx: LocalContext, n: int, **kwargs: Any) -> Any:
    return aten._to_copy.default(aten.argsort.default(_draw(ctx, "uniform", dtype=torch.float64)),
                                 dtype=ctx.call.outputs[0].dtype)


def _multinomial(ctx: LocalContext, probs: Any, num_samples: int, replacement: bool = False, **kwargs: Any) -> Any:
    """With replacement by inverting the distribution function; without, the largest of p / Exponential(1)."""
    dtype = ctx.call.inputs[0].dtype
    if not replacement:
        race = _draw(ctx, "exponential", 1.0, like=probs, dtype=dtype, size=ctx.local_in(0))
        return aten.topk.default(aten.div.Tensor(probs, race), num_samples)[1]
    reached = aten.cumsum.default(probs, -1)
    total = aten.slice.Tensor(reached, -1, ctx.local_in(0)[-1] - 1)
    drawn = aten.mul.Tensor(_draw(ctx, "uniform", like=probs, dtype=dtype), total)
    return aten.clamp.default(aten.searchsorted.Tensor(reached, drawn, right=True), 0, ctx.local_in(0)[-1] - 1)


def _first_tensor(ctx: LocalContext, args: Sequence[Any]) -> Any:
    """The local tensor a `_like` op takes its device from; None when the op takes no tensor."""
    return next((a for a in args if not isinstance(a, (int, float, list, tuple))), None) if ctx.call.inputs else None


def _samples_line(call: Call) -> str:
    dims = dims_but(call, (-1,)).split()
    return f"{' '.join(dims)} -> {' '.join((*dims[:-1], 's!'))}"


def _factory(local: Any) -> Any:
    return rule("-> ...", family="random", local=local)


def _like(local: Any) -> Any:
    return rule("... -> ...", family="random", local=local)


RULES = {
    aten.native_dropout.default: rule("... -> ..., ...", family="random", local=_dropout),
    aten.bernoulli.default: _like(_bernoulli),
    aten.bernoulli.p: _like(_bernoulli),
    aten.bernoulli.Tensor: rule("..., ... -> ...", family="random", local=_bernoulli),
    aten.rand.default: _factory(_uniform),
    aten.rand_like.default: _like(_uniform),
    aten.uniform.default: _like(_uniform),
    aten.randn.default: _factory(_normal),
    aten.randn_like.default: _like(_normal),
    aten.normal_functional.default: _like(_normal),
    aten.normal.Tensor_float: _like(_normal_around),
    aten.normal.float_Tensor: _like(_normal_around),
    aten.normal.Tensor_Tensor: rule("..., ... -> ...", family="random", local=_normal_around),
    aten.normal.float_float: _factory(_normal_around),
    aten.randint.default: _factory(_integers),
    aten.randint.low: _factory(_integers),
    aten.randint_like.default: _like(_integers),
    aten.randint_like.low_dtype: _like(_integers),
    aten.exponential.default: _like(_exponential),
    aten.randperm.default: rule("-> n!", family="random", local=_randperm),
    aten.multinomial.default: rule(_samples_line, family="random", local=_multinomial),
}
