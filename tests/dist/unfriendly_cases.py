"""Training at sizes that divide nowhere: vocabulary 251, 6 heads on 4 ranks, 5 rows on 2, 3 heads of keys, 7 experts on 2, sequence 37 on 4, ranks
whose share is nothing. Each case trains three AdamW steps, goes through a checkpoint into another mesh and trains on."""
from __future__ import annotations

import copy
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.verification.models.forms import floats
from models import bert, gpt, llama, moe
from tests.dist.harness import assert_near, same_gradients
from tests.support import experts, fused_models, uneven_models
from tests.support.in_float64 import InFloat64

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any] | None]
"""Model, args, kwargs, and the loss of (output, last arg) or None where the model returns its loss."""
SLOW = str(Path(__file__).with_name("slow-device.toml"))
"""Work is worth splitting there, whatever the size; with real prices tiny models are computed whole."""
VOCAB, STEPS = 251, 3
EXACT, ROUNDED = 1e-9, 1e-6
"""Tolerances: of float64, and where transformers computes in float32."""


@dataclass(frozen=True)
class Case:
    """`seeds` None: searched. `other`: the mesh that the checkpoint goes on in, with a searched plan. `says`: what a note of the plan has.
    `tolerance`: 1e-6 where transformers computes in float32 whatever its weights are; `wide`: float64 instead, so the tolerance is that of all others."""

    name: str
    build: Callable[[], Built]
    mesh: str
    seeds: Mapping[str, Any] | None = None
    other: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    tolerance: float = EXACT
    wide: bool = False

    @property
    def world(self) -> int:
        return parse_mesh(self.mesh).size

    @property
    def title(self) -> str:
        how = "searched" if self.seeds is None else "forced"
        return f"{self.name}, {self.mesh}, {how}" + "".join(f", {k} {v}" for k, v in self.options.items()) + ", all in float64" * self.wide

    def on(self, backend: str) -> Case:
        """With another backend. Inductor's kernels round float32 otherwise than torch's, which Adam magnifies where gradients are small: of the
        Mixtral here one process under inductor is 4.5e-7 from one without, in a router's weight whose tolerance is 2.7e-7. So nothing is float32 there."""
        return replace(self, options={**self.options, "backend": backend},
                       **({"wide": True, "tolerance": EXACT} if backend == "inductor" and self.tolerance == ROUNDED else {}))


@dataclass(frozen=True)
class Outcome:
    """`failure`: a traceback, or ""; `seconds` of wall clock."""

    case: Case
    collectives: str
    notes: tuple[str, ...]
    seconds: float
    failure: str = ""

    @property
    def line(self) -> str:
        """A row of a table."""
        how = "**failed**" if self.failure else "ok"
        case, calls = self.case, self.collectives or "none"
        return f"| {case.title} | {case.other or '-'} | {calls} | {case.tolerance:.0e} | {how} | {self.seconds:.0f} |"


# ---- models

def narrow_decoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Nine words and six hidden features: on four ranks the last one has none of them."""
    return uneven_models.build(vocab=9, hidden=6)

def own(module: Any, **sizes: Any) -> Callable[[], Built]:
    def build() -> Built:
        model, inputs = module.build(**{"layers": 2, "vocab": VOCAB, **sizes})
        return model, inputs, {}, module.loss

    return build


def with_loss(build: Callable[[], Any], loss: Callable[..., Any] | None = None) -> Callable[[], Built]:
    def built() -> Built:
        model, inputs = build()
        return model, inputs, {}, loss

    return built


def hf(kind: str, batch: int = 5, seq: int = 9, **sizes: Any) -> Callable[[], Built]:
    """A family of transformers at unfriendly sizes, with SDPA attention and nothing random."""
    def build() -> Built:
        import transformers as tf

        tf.logging.set_verbosity_error()
        common = {"vocab_size": VOCAB, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        config = tf.AutoConfig.for_model(kind, **common, **sizes)
        for name in [n for n in vars(config) if ("drop" in n or n.endswith("pdrop")) and isinstance(getattr(config, n), float)]:
            setattr(config, name, 0.0)
        ids = torch.randint(1, VOCAB, (batch, seq))
        return tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), (), {"input_ids": ids, "labels": ids.clone()}, None

    return build


def of_experts(name: str, **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        model, (ids,) = experts.build(name, **more)
        return model, (), {"input_ids": ids, "labels": ids.clone()}, None

    return build


# ---- cases

GPT, LLAMA = {"width": 24, "heads": 6}, {"width": 24, "heads": 6, "kv_heads": 3, "hidden": 37}
SIX, ROTARY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}, {"intermediate_size": 37, "max_position_embeddings": 64}
PADS = {"pad": "all"}

CASES = (
    Case("vocabulary 251, 37 features", with_loss(uneven_models.build), "tp=2", uneven_models.SPLIT, "tp=1,dp=2", says=("251 computed as 252",)),
    Case("vocabulary 251, 37 features", with_loss(uneven_models.build), "tp=4", None, "dp=2,tp=2", says=("251 computed as 252",)),
    Case("gpt, 5 rows", own(gpt, batch=5, seq=9, **GPT), "dp=2", None, "tp=2", PADS, says=("5 computed as 6",)),
    Case("gpt, 5 rows and 6 heads", own(gpt, batch=5, seq=9, **GPT), "dp=2,tp=2", None, "tp=4", PADS),
    Case("llama, 6 heads of 3, 37 features", own(llama, batch=5, seq=9, **LLAMA), "tp=4", None, "dp=2,tp=2", PADS, says=("computed as 8",)),
    Case("llama, 6 heads of 3, 37 features", own(llama, batch=5, seq=9, **LLAMA), "dp=2,tp=2", None, "tp=4", PADS, says=("5 computed as 6",)),
    Case("llama, 6 heads of 3, 37 features", own(llama, batch=4, seq=9, **LLAMA), "tp=2", None, "dp=2"),
    Case("llama, sequence 37", own(llama, batch=1, seq=37, **LLAMA), "cp=4", None, "cp=2,tp=2"),
    Case("gpt, sequence 37", own(gpt, batch=2, seq=37, context=40, **GPT), "tp=4", None, "dp=2,tp=2", PADS),
    Case("bert, a mask, 5 rows, 6 heads", own(bert, batch=5, seq=9, **GPT), "tp=4", None, "dp=2,tp=2", PADS),
    Case("moe, 7 experts", own(moe, batch=4, seq=9, experts=7, hidden=37, **GPT), "ep=2", None, "dp=2"),
    Case("grouped experts, 7", of_experts("exact", experts=7), "ep=2", None, "dp=2"),
    Case("mixtral, 7 experts", of_experts("mixtral", experts=7), "ep=2", None, "dp=2", tolerance=ROUNDED),
    Case("fused q|k|v and gate|up", with_loss(fused_models.build, fused_models.loss), "tp=2", fused_models.SPLIT_HEADS, "dp=2"),
    Case("fused q|k|v and gate|up", with_loss(fused_models.build, fused_models.loss), "tp=4", None, "dp=2,tp=2", PADS),
    Case("nothing on the last rank: 9 words, 6 features", with_loss(narrow_decoder), "tp=4", uneven_models.SPLIT, "dp=2,tp=2", PADS,
         says=("9 computed as 12", "6 computed as 8")),
    Case("nothing on the last rank: 9 words, 6 features", with_loss(narrow_decoder), "dp=2,tp=2", None, "tp=4", PADS),
    Case("gpt2", hf("gpt2", n_embd=24, n_layer=2, n_head=6, n_positions=64), "tp=4", None, "dp=2,tp=2", PADS, tolerance=ROUNDED),
    Case("gpt2, 5 rows", hf("gpt2", n_embd=24, n_layer=2, n_head=6, n_positions=64), "dp=2", None, "tp=2", PADS,
         tolerance=ROUNDED),  # its rows are not padded: some op on their way has no rule for pads
    Case("phi3, 6 heads of 3", hf("phi3", **SIX, **ROTARY, num_key_value_heads=3), "tp=4", None, "dp=2,tp=2", PADS, tolerance=ROUNDED),
    Case("falcon, 1 head of keys", hf("falcon", **SIX, max_position_embeddings=64, multi_query=True), "tp=2", None, "dp=2", tolerance=ROUNDED),
    Case("gpt_bigcode, 1 head of keys", hf("gpt_bigcode", n_embd=24, n_layer=2, n_head=6, n_positions=64), "tp=4", None, "dp=2,tp=2",
         tolerance=ROUNDED),
    Case("qwen2, 6 heads of 2", hf("qwen2", **SIX, **ROTARY, num_key_value_heads=2), "tp=4", None, "dp=2,tp=2", PADS, tolerance=ROUNDED),
    Case("deepseek_v3, 8 experts", of_experts("deepseek_v3", batch=5), "ep=4", None, "dp=2,ep=2", tolerance=ROUNDED),
    Case("vocabulary 251, 37 features", with_loss(uneven_models.build), "tp=2", uneven_models.SPLIT, "", {"backend": "inductor"}),
    Case("gpt, 5 rows", own(gpt, batch=5, seq=9, **GPT), "dp=2", None, "", {"backend": "inductor", **PADS}, says=("5 computed as 6",)),
)

# ---- what is run

def run_cases(todo: list[int], folder: str, backend: str = "") -> list[Outcome]:
    """On every rank; `todo`: places in CASES, which cannot be sent to a process. The first rank says how each of them ended. `backend`: instead of
    what the cases say."""
    found = []
    for i in todo:
        case = CASES[i].on(backend) if backend else CASES[i]
        found.append(_run_safely(case, f"{folder}/{i}"))
        if dist.get_rank() == 0:
            print(found[-1].line, flush=True)
    return found


def _run_safely(case: Case, folder: str) -> Outcome:
    start, seen = time.perf_counter(), []
    try:
        _run(case, folder, seen)
        failure = ""
    except Exception:
        failure = traceback.format_exc()
    failed = torch.tensor(bool(failure), dtype=torch.int32)
    dist.all_reduce(failed)
    calls = Counter(c.kind for c in seen[0].collectives) if seen else {}
    return Outcome(replace(case, build=type(None)), ", ".join(f"{n} {kind}" for kind, n in sorted(calls.items())), seen[0].notes if seen else (),
                   time.perf_counter() - start, failure or ("another rank failed" if failed else ""))


def _run(case: Case, folder: str, seen: list[autoshard.Plan]) -> None:
    model, reference, args, kwargs, loss_fn = _twins(case)
    fresh = copy.deepcopy(model)
    compiled = _compiled(case, model, case.mesh, case.seeds, loss_fn)
    _prepare(case, compiled, args, kwargs)
    plan = compiled.plan
    seen.append(plan)
    assert all(any(text in note for note in plan.notes) for text in case.says), f"{case.says} is in none of {plan.notes}"
    assert plan.collectives, "a plan that splits nothing tests nothing"

    def loss(m: nn.Module) -> torch.Tensor:
        with InFloat64() if case.wide and m is reference else nullcontext():
            out = loss_fn(m(*args[:-1]), args[-1]) if loss_fn and m is reference else m(*args, **kwargs)
        return out if isinstance(out, torch.Tensor) else out["loss"]

    one, two = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (compiled, reference))
    for step in range(STEPS):
        _step(step, compiled, reference, (one, two), loss, case.tolerance)
    _same_weights("after training", compiled, reference, case.tolerance)
    if case.other:
        params, state = get_state_dict(compiled, one)
        dcp.save({"model": params, "optimizer": state}, checkpoint_id=folder)
        dist.barrier()
        elsewhere = _compiled(case, fresh, case.other, None, loss_fn)
        _prepare(case, elsewhere, args, kwargs)
        one = _loaded(elsewhere, folder)
        _same_weights(f"read on {case.other}", elsewhere, reference, case.tolerance)
        _step(STEPS, elsewhere, reference, (one, two), loss, case.tolerance)
        _same_weights(f"after a step on {case.other}", elsewhere, reference, case.tolerance)


def _prepare(case: Case, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with InFloat64() if case.wide else nullcontext():
        compiled.prepare(*args, **kwargs)
    if case.wide:
        found = floats(compiled._latest[1].graph)
        assert found == {torch.float64}, f"{case.title}: the program has {found}, so 1e-9 cannot be asked of it"


def _loaded(compiled: nn.Module, folder: str) -> torch.optim.Optimizer:
    """An optimizer, and the module with it filled from a checkpoint; what they held before is overwritten."""
    with torch.no_grad():
        for p in compiled.parameters():
            p.zero_()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    params, state = get_state_dict(compiled, optimizer)
    dcp.load({"model": params, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(compiled, optimizer, model_state_dict=params, optim_state_dict=state)
    return optimizer


def _step(step: int, compiled: nn.Module, reference: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...],
          loss: Callable[[nn.Module], torch.Tensor], tol: float) -> None:
    got, want = loss(compiled), loss(reference)
    assert_near(f"loss of step {step}", got, want, tol)
    got.backward()
    want.backward()
    same_gradients(compiled, reference, tol, step)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _same_weights(when: str, compiled: nn.Module, reference: nn.Module, tol: float) -> None:
    for name, p in reference.named_parameters():
        assert_near(f"{name} {when}", compiled.get_parameter(name), p, tol)


def _compiled(case: Case, model: nn.Module, mesh: str, seeds: Mapping[str, Any] | None, loss_fn: Any) -> Any:
    return autoshard.compile(model, mesh, loss_fn=loss_fn, training=True, cluster=SLOW, cache=False, seeds=dict(seeds or {}), time_limit=20,
                             **case.options)


def _twins(case: Case) -> tuple[nn.Module, nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """Equal on all ranks. Vectors get noise: AdamW's step on a gradient that is zero in exact arithmetic (the bias of attention keys) is
    rounding noise, and the tolerance is relative to the weight's norm."""
    torch.manual_seed(0)
    model, args, kwargs, loss_fn = case.build()
    model = model.double().train()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    args = tuple(t.double() if t.is_floating_point() else t for t in args)
    return model, copy.deepcopy(model), args, kwargs, loss_fn
