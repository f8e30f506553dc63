"""One case of pipeline parity: a model trained three AdamW steps in stages, against the same model on one process."""
from __future__ import annotations

import copy
import pickle
import time
import traceback
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import load_cluster
from autoshard.pipeline.cutting.cut_points import even_cuts
from autoshard.pipeline.microbatches.batch import traced
from autoshard.runtime.pipeline.wires import SENT, Message
from models import bert, dlrm, gpt, llama, moe, t5, vit
from tests.dist.harness import whole

MODELS = {"gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "t5": t5, "moe": moe, "dlrm": dlrm}
ROWS, SEQ, STEPS = 2, 8, 3
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """`cuts`: names of modules, or () for even ones, or None for searched ones, which take several times as long. A micro-batch has two rows."""

    model: str
    mesh: str
    microbatches: int
    schedule: str = "1f1b"
    cuts: tuple[str, ...] | None = ()
    chunks: int = 0

    @property
    def stages(self) -> int:
        mesh = parse_mesh(self.mesh)
        return mesh.sizes[mesh.index("pp")] * (self.chunks or 1)

    def options(self, cuts: tuple[str, ...]) -> autoshard.Pipeline:
        return autoshard.Pipeline(microbatches=self.microbatches, schedule=self.schedule, cuts=cuts or "auto", chunks=self.chunks or "auto",
                                  inexact="accept" if self.model == "moe" else "error")


@dataclass(frozen=True)
class Result:
    """`error`: largest difference over max(norm, 1e-6 x norm of all gradients), of `worst`; `as_planned`: whether the messages sent are the
    plan's transfers, value by value, and their bytes."""

    case: Case
    error: float = 0.0
    worst: str = ""
    as_planned: bool = False
    messages: int = 0
    seconds: float = 0.0
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= TOLERANCE and self.as_planned


def subject(case: Case) -> tuple[Any, tuple[torch.Tensor, ...], Any]:
    """Equal on all ranks; vectors get noise, so that no gradient is zero in exact arithmetic."""
    torch.manual_seed(zlib.crc32(case.model.encode()))
    module = MODELS[case.model]
    lengths = {"seq": SEQ} if case.model in ("gpt", "llama", "bert", "moe", "t5") else {}
    more = {"layers": 4} if case.model != "dlrm" and case.chunks else {}
    model, batch = module.build(batch=ROWS * case.microbatches * (2 if "dp" in case.mesh else 1), **lengths, **more)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    return model.double().train(), tuple(t.double() if t.is_floating_point() else t for t in batch), module.loss


def reference_loss(case: Case, model: Any, batch: tuple[torch.Tensor, ...], loss: Any) -> torch.Tensor:
    """Of moe, whose balance loss is not linear in the batch, the mean over micro-batches; else the batch's."""
    if case.model != "moe":
        return loss(model(*batch[:-1]), batch[-1])
    parts = zip(*(t.chunk(case.microbatches) for t in batch), strict=True)
    return sum(loss(model(*part[:-1]), part[-1]) for part in parts) / case.microbatches


def cuts_of(case: Case, known: dict[tuple[str, int], tuple[str, ...]]) -> tuple[str, ...]:
    """Of a case; the even ones are worked out by one rank, once per model and number of stages. () for searched ones."""
    if case.cuts is None or case.cuts:
        return case.cuts or ()
    key = case.model, case.stages
    if key not in known:
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            model, batch, loss = subject(case)
            found = [even_cuts(traced(model, batch, {}, autoshard.Pipeline(), loss_fn=loss).graph, load_cluster("cpu-gloo"), case.stages)]
        dist.broadcast_object_list(found, 0)
        known[key] = found[0]
    return known[key]


def run_case(case: Case, cuts: tuple[str, ...]) -> Result:
    model, batch, loss = subject(case)
    reference = copy.deepcopy(model)
    compiled = autoshard.compile(model, case.mesh, batch, loss_fn=loss, cluster="cpu-gloo", pipeline=case.options(cuts), cache=False, time_limit=10.0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (compiled, reference)]
    errors: dict[str, float] = {}
    sent: list[tuple[Message, int]] = []
    for step in range(STEPS):
        token = SENT.set(lambda message, nbytes: sent.append((message, nbytes))) if step == 0 else None
        got = compiled(*batch)
        if token is not None:
            SENT.reset(token)
        want = reference_loss(case, reference, batch, loss)
        errors[f"loss {step}"] = abs(got.item() - want.item()) / abs(want.item())
        got.backward()
        want.backward()
        _compare(errors, f"gradient in step {step} of", compiled, reference, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _compare(errors, "weight", compiled, reference, gradients=False)
    _no_parameter_lost(compiled, reference)
    worst = max(errors, key=lambda k: errors[k])
    return Result(case, errors[worst], worst, _as_planned(compiled, sent), len(sent))


def _compare(errors: dict[str, float], what: str, compiled: Any, reference: Any, gradients: bool) -> None:
    expected = dict(reference.named_parameters())
    scale = sum(float(p.grad.norm()) ** 2 for p in expected.values() if p.grad is not None) ** 0.5 if gradients else 0.0
    for name, p in compiled.named_parameters():
        got, want = (p.grad, expected[name].grad) if gradients else (p, expected[name])
        assert (got is None) == (want is None), f"gradient of {name}"
        if want is not None:
            errors[f"{what} {name}"] = float((whole(got) - want.detach()).norm()) / max(float(want.detach().norm()), 1e-6 * scale)


def _no_parameter_lost(compiled: Any, reference: Any) -> None:
    """Every parameter is on some rank: a layer that no stage has would train nothing and say nothing."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [n for n, _ in compiled.named_parameters()])
    assert set().union(*names) == {n for n, _ in reference.named_parameters()}, "parameters are lost"


def _as_planned(compiled: Any, sent: list[tuple[Message, int]]) -> bool:
    """Every transfer of this rank's stages, for every micro-batch, once, with its bytes, in the order of micro-batches."""
    plan, me = compiled.plan, compiled.place.coordinates[0]
    rank_of = {s.index: s.rank for s in plan.stages}
    planned = Counter((t["value"], m, rank_of[t["from"]], rank_of[t["to"]], t["window"], t["nbytes"]) for t in plan.pipeline["transfers"]
                      if rank_of[t["from"]] == me != rank_of[t["to"]] for m in range(plan.pipeline["microbatches"]))
    found = [(m.value, m.microbatch, m.source, m.target, m.channel.split()[0], n) for m, n in sent if m.channel != "step"]
    by_value: dict[str, list[int]] = {}
    for value, m, *_ in found:
        by_value.setdefault(value, []).append(m)
    return Counter(found) == planned and all(ms == sorted(ms) for ms in by_value.values())


def run_cases(cases: list[Case], deadline: float | None = None, journal: str | None = None) -> list[Result]:
    """Each case's worst rank. The first rank adds every result to the file `journal` as soon as it is there (`read_journal`)."""
    out: list[Result] = []
    cuts: dict[tuple[str, int], tuple[str, ...]] = {}
    for case in cases:
        late = torch.tensor(int(deadline is not None and time.time() > deadline))
        dist.broadcast(late, 0)
        if late:
            break
        start = time.perf_counter()
        try:
            result = run_case(case, cuts_of(case, cuts))
        except Exception:
            result = Result(case, failure=traceback.format_exc())
        worst: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(worst, replace(result, seconds=time.perf_counter() - start))
        out.append(max(worst, key=lambda r: (bool(r.failure), not r.as_planned, r.error)))
        if journal is not None and dist.get_rank() == 0:
            with open(journal, "ab") as file:
                pickle.dump(out[-1], file)
    return out


def read_journal(path: str) -> list[Result]:
    """What a launch came to, also one that ended early."""
    found: list[Result] = []
    with open(path, "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            found.append(pickle.load(file))
    return found


def world_of(case: Case) -> int:
    return parse_mesh(case.mesh).size
