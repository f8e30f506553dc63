"""One case of parity: a model trained three AdamW steps under a plan, against the same model on one process."""
from __future__ import annotations

import copy
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import autoshard
from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.base.plan import Plan
from autoshard.cost.cluster import Cluster
from autoshard.runtime.trace_collectives import recorded_collectives
from autoshard.verification.reprice import collectives_in, reprice
from models import bert, dlrm, gpt, llama, mlp, moe, resnet, t5, vit
from tests.dist.forced import PLANS, VALUE, on_batch
from tests.dist.harness import whole

BATCH, SEQ, STEPS = 4, 8, 3
OWN = {"mlp": mlp, "gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "resnet": resnet, "moe": moe, "t5": t5, "dlrm": dlrm}
HF = ("hf-gpt2", "hf-llama", "hf-bert", "hf-mixtral")
MODELS = (*OWN, *HF)
SEARCHED = {"searched, cpu-gloo": "cpu-gloo", "searched, h100-dgx": "h100-dgx"}
SLOW_DEVICE = str(Path(__file__).with_name("slow-device.toml"))
"""Forced plans are for a machine where work is worth splitting: seeds fix parameters and inputs, and with real prices
tiny models gather them and compute whole."""
NOISE = 4.0
FLOAT32_PLANS = ("searched, h100-dgx", "tensor parallel")


@dataclass(frozen=True)
class Case:
    """`inputs`: "global" or "local"; `dtype`: "float64" or "float32"."""

    model: str
    mesh: str
    plan: str
    inputs: str = "global"
    dtype: str = "float64"

    @property
    def tolerance(self) -> float:
        if self.dtype == "float32":
            return 1e-5
        return 1e-6 if self.model in HF else 1e-9

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that cut a local batch."""
        names = parse_mesh(self.mesh).names
        return names[:-1] if self.plan == "tensor parallel" and len(names) > 1 else names


@dataclass(frozen=True)
class Result:
    """What a case gave. `error`: largest difference over max(norm, 1e-6 x norm of all gradients), of `worst`;
    `allowed`: its tolerance, or in float32 NOISE times what one process is itself off from float64, if that is more.
    `repriced`: relative difference of the re-priced step to the plan's objective. `failure`: a traceback."""

    case: Case
    error: float = 0.0
    worst: str = ""
    allowed: float = 0.0
    collectives: int = 0
    as_planned: bool = False
    repriced: float = 0.0
    seconds: float = 0.0
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.allowed and self.as_planned and self.repriced <= 1e-9


def cases(models: tuple[str, ...], meshes: tuple[str, ...], float32: bool = True) -> Iterator[Case]:
    """The matrix: every plan with global and local inputs in float64, two plans in float32."""
    for mesh in meshes:
        for model in models:
            for plan in (*SEARCHED, *PLANS):
                yield Case(model, mesh, plan)
                yield Case(model, mesh, plan, "local")
            if float32:
                yield from (Case(model, mesh, plan, "global", "float32") for plan in FLOAT32_PLANS)


@dataclass(frozen=True)
class Subject:
    """A model, one batch as (args, kwargs), and how a loss comes out of a call."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Any] | None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(t.shape) for t in pytree.tree_leaves((self.args, self.kwargs))]

    def reference_loss(self, model: nn.Module) -> torch.Tensor:
        if self.loss_fn is None:
            return model(**self.kwargs).loss
        return self.loss_fn(model(*self.args[:-1]), self.args[-1])


def subject(case: Case) -> Subject:
    """Equal on all ranks. Vectors get noise: AdamW's step on a gradient that is zero in exact arithmetic (the
    bias of attention keys) is rounding noise, and the tolerance is relative to the weight's norm."""
    torch.manual_seed(zlib.crc32(case.model.encode()))
    if case.model in HF:
        model, kwargs = _hf(case.model, case.dtype)
        args, loss_fn = (), None
    else:
        module = OWN[case.model]
        lengths = {"seq": SEQ} if case.model in ("gpt", "llama", "bert", "moe", "t5") else {}
        model, args = module.build(batch=BATCH, **lengths)
        kwargs, loss_fn = {}, module.loss
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    dtype = getattr(torch, case.dtype)
    args = tuple(t.to(dtype) if t.is_floating_point() else t for t in args)
    return Subject(model.to(dtype).train(), args, kwargs, loss_fn)


def _hf(name: str, dtype: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Tiny models of transformers with SDPA attention, without dropout. torch's grouped matmul has no float64, so Mixtral
    gathers its experts' weights there."""
    import transformers as tf
    tf.logging.set_verbosity_error()
    small = {"vocab_size": 128, "use_cache": False, "attn_implementation": "sdpa", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    wide = {**small, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "max_position_embeddings": 32}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    make: dict[str, Callable[[], nn.Module]] = {
        "hf-gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**small, n_embd=64, n_layer=2, n_head=4, n_positions=32,
                                                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
        "hf-llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**wide, num_key_value_heads=2)),
        "hf-bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**wide, **drop)),
        "hf-mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(
            **wide, num_key_value_heads=2, num_local_experts=4,
            experts_implementation="batched_mm" if dtype == "float64" else "grouped_mm")),
    }
    model = make[name]()
    return model, {"input_ids": torch.randint(1, 128, (BATCH, SEQ)), "labels": torch.randint(1, 128, (BATCH, SEQ))}


def seeds_of(case: Case, what: Subject, mesh: Mesh) -> dict[str, VALUE]:
    """Seeds of a forced plan; local inputs are on the batch axes."""
    forced = PLANS[case.plan](what.model, what.shapes, mesh) if case.plan in PLANS else {}
    return forced | on_batch(what.shapes, mesh, case.batch_axes) if case.inputs == "local" else forced


def plan_of(case: Case, time_limit: float) -> Plan:
    what, mesh = subject(case), parse_mesh(case.mesh)
    return autoshard.plan(what.model, mesh, what.args, what.kwargs, loss_fn=what.loss_fn, training=True, seeds=seeds_of(case, what, mesh),
                          inputs=case.inputs, cluster=SEARCHED.get(case.plan, SLOW_DEVICE), time_limit=time_limit)


def run_cases(todo: list[Case], folder: str, time_limit: float, deadline: float | None = None) -> list[Result]:
    """On every rank: plan the cases, shared out between the ranks, then run them together. Cases that differ only
    in how inputs come in share a plan where seeds agree. `deadline`: wall-clock time after which no case starts."""
    results = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for i in range(0, len(todo), world):
        batch = todo[i:i + world]
        if _late(deadline):
            break
        if rank < len(batch):
            _plan_to(Path(folder, f"{i + rank}"), batch[rank], time_limit)
        dist.barrier()
        results += [_run_safely(case, Path(folder, f"{i + k}")) for k, case in enumerate(batch)]
        dist.barrier()
    return results


def _late(deadline: float | None) -> bool:
    late = torch.tensor(deadline is not None and time.time() > deadline, dtype=torch.int32)
    dist.broadcast(late, 0)
    return bool(late)


def _plan_to(path: Path, case: Case, time_limit: float) -> None:
    try:
        plan_of(case, time_limit).save(path.with_suffix(".json"))
    except Exception:
        path.with_suffix(".error").write_text(traceback.format_exc())


def _run_safely(case: Case, path: Path) -> Result:
    start = time.perf_counter()
    if path.with_suffix(".error").exists():
        return Result(case, failure="planning: " + path.with_suffix(".error").read_text())
    try:
        result = run_case(case, Plan.load(path.with_suffix(".json")))
    except Exception:
        result = Result(case, failure=traceback.format_exc())
    return replace(result, seconds=time.perf_counter() - start)


def run_case(case: Case, plan: Plan) -> Result:
    """Three AdamW steps. In float32 only the loss and gradients of the first step are compared: AdamW turns rounding
    noise of small gradients into full steps."""
    what = subject(case)
    reference = copy.deepcopy(what.model)
    device_mesh = _device_mesh(plan.mesh)
    model = autoshard.compile(what.model, device_mesh, loss_fn=what.loss_fn, training=True, plan=plan, inputs=case.inputs,
                              batch_axes=case.batch_axes, cluster=SEARCHED.get(case.plan, SLOW_DEVICE), cache=False)
    args, kwargs = pytree.tree_map(lambda t: _piece(t, case, plan.mesh), (what.args, what.kwargs))
    model.prepare(*args, **kwargs)  # lowering evaluates collectives on shapes; those are not calls
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    noise = _noise(case) if case.dtype == "float32" else {}
    errors: list[tuple[float, str, float]] = []
    for step in range(STEPS if case.dtype == "float64" else 1):
        with recorded_collectives(model.place.device_mesh) as issued:
            out = model(*args, **kwargs)
            loss = out if what.loss_fn else out.loss
            loss.backward()
        want = what.reference_loss(reference)
        want.backward()
        errors.append((_off(loss, want), f"loss, step {step}", case.tolerance))
        errors += [(e, f"gradient of {n}, step {step}", max(case.tolerance, NOISE * noise.get(n, 0.0)))
                   for n, e in _gradient_errors(model, reference).items()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if case.dtype == "float64":
        errors += [(e, f"updated {n}", case.tolerance) for n, e in _state_errors(model, reference).items()]
    worst = max(errors, key=lambda e: (e[0] != e[0], e[0] / e[2]))  # nan first
    return Result(case, *worst, len(issued), *_prices(model, plan, issued))


def _device_mesh(mesh: Mesh) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    return init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)


def _piece(t: torch.Tensor, case: Case, mesh: Mesh) -> torch.Tensor:
    if case.inputs == "global":
        return t
    index, rank = 0, dist.get_rank()
    coordinates = []
    for n in reversed(mesh.sizes):
        coordinates.insert(0, rank % n)
        rank //= n
    pieces = 1
    for name, n, c in zip(mesh.names, mesh.sizes, coordinates, strict=True):
        if name in case.batch_axes:
            index, pieces = index * n + c, pieces * n
    return t.chunk(pieces)[index].clone()


def _off(got: torch.Tensor, want: torch.Tensor, scale: float = 0.0) -> float:
    got, want = whole(got).double(), want.detach().double()
    if got.shape != want.shape:
        return float("inf")
    difference = (got - want).norm().item()
    return difference / max(want.norm().item(), 1e-6 * scale) if difference else 0.0


def _gradient_errors(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    scale = torch.stack([g.double().norm() for g in wanted.values() if g is not None]).norm().item()
    errors = {}
    for name, p in model.named_parameters():
        want = wanted[name]
        if (p.grad is None) != (want is None):
            errors[name] = float("inf")
        elif want is not None:
            errors[name] = _off(p.grad, want, scale)
    return errors


def _noise(case: Case) -> dict[str, float]:
    """What gradients of one process in float32 are off from float64: where the exact gradient is zero (the bias of
    attention keys), or batch norm sees few values, float32 has no digits to compare."""
    exact, single = subject(replace(case, dtype="float64")), subject(case)
    with torch.no_grad():
        for p, q in zip(exact.model.parameters(), single.model.parameters(), strict=True):
            p.copy_(q)
    for s in (exact, single):
        s.reference_loss(s.model).backward()
    return _gradient_errors(single.model, exact.model)


def _state_errors(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    wanted = dict(reference.named_parameters()) | dict(reference.named_buffers())
    got = dict(model.named_parameters()) | dict(model.named_buffers())
    return {n: _off(t, wanted[n]) for n, t in got.items()}


def _prices(model: Any, plan: Plan, issued: list[Any]) -> tuple[bool, float]:
    """Whether the collectives issued are those of the schedule, in its order, and stand for the planned ones; and how far the
    re-priced program is from the plan, with and without buckets."""
    step = model._latest[1]
    planned = Counter((c.kind, c.axis, c.nbytes) for c in plan.collectives)
    meant = Counter((c.kind, c.axis, c.nbytes) for call in step.issues for c in call.planned())
    ordered = [[(c.kind, c.axis, c.nbytes) for c in calls]
               for calls in (issued, step.issues, step.lowered.schedule.calls, collectives_in(step.lowered))]
    same = all(calls == ordered[0] for calls in ordered) and meant == planned
    price = reprice(step.graph, step.lowered, Cluster.from_snapshot(plan.cluster), "adamw")
    off = abs(price.planned_s - plan.objective_s), abs(price.executed_s - plan.predicted["bucketed_s"])
    return same, max(off) / plan.objective_s
