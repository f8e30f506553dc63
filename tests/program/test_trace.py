"""Traced graphs compute what eager PyTorch computes, keep its names, and refuse what is not one graph."""
import contextlib
import functools
import inspect
import os
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from small_models import Block, Stack
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from trace_parity import check_parity, state_of

from autoshard.base.graph import Ref
from autoshard.base.precision import Precision
from autoshard.base.roles import Role
from autoshard.errors import TraceError, UsageError
from autoshard.program.interpret import run
from autoshard.program.trace import trace
from models import bert, dlrm, gpt, llama, mlp, moe, resnet, t5, vit

MODELS = {m.__name__.split(".")[-1]: m for m in (mlp, gpt, llama, bert, vit, resnet, moe, t5, dlrm)}
aten = torch.ops.aten
trace = functools.partial(trace, raw=True)  # what is recorded; test_simplify.py is about what becomes of it


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Attention(nn.Module):
    def __init__(self, dropout=0.0, backend=None):
        super().__init__()
        self.qkv, self.dropout, self.backend = nn.Linear(8, 24), dropout, backend

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(self.backend) if self.backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)


class Weighted(nn.Module):
    """One weight of 8 and a body given as a function (module, x)."""

    def __init__(self, body):
        super().__init__()
        self.w, self.body = nn.Parameter(torch.randn(8)), body
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        return self.body(self, x)


def x48():
    return torch.randn(4, 8)


def targets_of(graph, phase=None):
    return {op.target for op in graph.of_kind("call") if phase in (None, op.phase)}


# --- parity with eager -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model, example = MODELS[name].build("tiny")
    traced = check_parity(model, example, loss_fn=MODELS[name].loss)
    names = {n for n, p in model.named_parameters()}
    assert {op.target for op in traced.graph.of_kind("param")} | set(traced.graph.unused) == names


def hugging_face(name):
    T = pytest.importorskip("transformers")
    small = dict(vocab_size=100, use_cache=False)
    llama_like = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
                      intermediate_size=64, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, **small)
    if name == "gpt2":
        return T.GPT2LMHeadModel(T.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=32, bos_token_id=1,
                                              eos_token_id=2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, **small))
    if name == "llama":
        return T.LlamaForCausalLM(T.LlamaConfig(**llama_like))
    if name == "mixtral":
        return T.MixtralForCausalLM(T.MixtralConfig(num_local_experts=4, **llama_like))
    return T.BertForMaskedLM(T.BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64,
                                          max_position_embeddings=32, attention_probs_dropout_prob=0, hidden_dropout_prob=0,
                                          vocab_size=100))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mixtral"])
def test_hugging_face(name, masked):
    if name == "mixtral":
        torch.set_default_dtype(torch.float32)  # its grouped matmul has no float64
    model, ids = hugging_face(name), torch.randint(3, 100, (2, 16))
    mask = {"attention_mask": torch.arange(16).expand(2, 16).lt(12).long()} if masked else {}
    traced = check_parity(model, (), {"input_ids": ids, "labels": ids, **mask}, tol=1e-5 if name == "mixtral" else 1e-12)
    assert [op.target for op in traced.graph.of_kind("tangent")] == [0], "only the loss of a ModelOutput gets a tangent"


CASES = {
    "conv and batch norm": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 6, 6)),
    "attention": lambda: (Attention(), torch.randn(2, 6, 8)),
    "attention, math": lambda: (Attention(backend=SDPBackend.MATH), torch.randn(2, 6, 8)),
    "attention, dropout": lambda: (Attention(dropout=0.4), torch.randn(2, 6, 8)),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), torch.randn(2, 6, 8)),
    "encoder layer, eval": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True).eval(), torch.randn(2, 6, 8)),
    "lstm": lambda: (nn.LSTM(8, 8, batch_first=True), torch.randn(2, 3, 8)),
    "dropout": lambda: (Block(0.5), x48()),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), x48()),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), x48()),
    "in place": lambda: (Weighted(lambda m, x: (x * m.w).add_(1).relu_()), x48()),
    "index assignment": lambda: (Weighted(lambda m, x: _assign(x * m.w)), x48()),
    "buffer written": lambda: (Weighted(lambda m, x: x * m.w + m.count.add_(x.sum(0)).mul_(2)), x48()),
    "buffer assigned": lambda: (Weighted(_assign_buffer), x48()),
    "constant": lambda: (Weighted(lambda m, x: x * m.w * torch.tensor(3.0) + torch.arange(8.0)), x48()),
    "input returned": lambda: (Weighted(lambda m, x: (x * m.w, x, None, 3)), x48()),
    "input that needs grad": lambda: (nn.Linear(8, 3), x48().requires_grad_()),
    "non-contiguous input": lambda: (nn.Linear(4, 3), x48().t()),
    "attribute set in forward": lambda: (Weighted(_remember), x48()),
    "no batch": lambda: (nn.Linear(8, 3), torch.randn(8)),
}


def _assign(y):
    y = y.clone()
    y[:, 0] = 1.0
    y[1:, 2:4] += 2
    return y


def _assign_buffer(m, x):
    m.count = 0.9 * m.count + x.sum(0)
    return x * m.w + m.count


def _remember(m, x):
    m.last = x * m.w
    return m.last.sum()


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    model, x = CASES[case]()
    check_parity(model, (x,), tol=1e-10 if case == "lstm" else 1e-12)
    assert not hasattr(model, "last")


def test_kwargs_and_baked_values():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale=1.0, mask=None):
            return {"y": super().forward(x) * scale + (0 if mask is None else mask), "scale": scale}

    traced = check_parity(Scaled(8, 3), (x48(),), {"scale": 2.0, "mask": torch.randn(3)})
    assert traced.calling.names == ("x", "mask")
    mask = torch.randn(3)
    assert traced.calling.flatten((x48(),), {"mask": mask, "scale": 2.0})[1] is mask
    with pytest.raises(UsageError, match="argument 2.0 and is called with 3.0"):
        traced.calling.flatten((x48(),), {"scale": 3.0, "mask": mask})
    with pytest.raises(UsageError, match=r"argument x was traced as \(4, 8\)"):
        traced.calling.flatten((torch.randn(5, 8),), {"scale": 2.0, "mask": mask})
    with pytest.raises(UsageError, match="other arguments"):
        traced.calling.flatten((x48(),), {"scale": 2.0})


def test_autocast_around_and_inside():
    def inside(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, m.w[None])
        return y.float().sum(), y

    torch.set_default_dtype(torch.float32)
    x = x48()
    for traced in (check_parity(Block(), (x,), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
                   check_parity(Weighted(inside), (x,))):
        casts = [op for op in traced.graph.of_kind("call") if op.target is aten._to_copy.default]
        assert {op.phase for op in casts} == {"forward", "backward"}


def test_tied_frozen_and_unused_parameters():
    model = nn.ModuleDict({"emb": nn.Embedding(10, 8), "body": Block(), "head": nn.Linear(8, 10), "spare": nn.Linear(2, 2)})
    model["head"].weight = model["emb"].weight
    model["body"].up.weight.requires_grad_(False)
    model.forward = lambda ids: model["head"](model["body"](model["emb"](ids)))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, ids):
            return self.parts["head"](self.parts["body"](self.parts["emb"](ids)))

    traced = check_parity(Tied(), (torch.randint(10, (4, 3)),))
    graph = traced.graph
    assert graph.tied == (("parts.head.weight", "parts.emb.weight"),)
    assert graph.unused == ("parts.spare.weight", "parts.spare.bias")
    grads = graph.outputs(Role.GRADIENT)
    assert "parts.emb.weight" in grads and "parts.body.up.weight" not in grads
    assert [op.target for op in graph.of_kind("param")].count("parts.emb.weight") == 1


def test_loss_keeps_names():
    traced = check_parity(nn.Linear(8, 5), (x48(), torch.randint(5, (4,))), loss_fn=F.cross_entropy)
    assert [op.target for op in traced.graph.of_kind("param")] == ["weight", "bias"]
    assert traced.graph.op("user:0").args[0].op in traced.graph.by_name
    with pytest.raises(UsageError, match="last positional argument is the target"):
        trace(nn.Linear(8, 5), (), {"input": x48()}, loss_fn=F.cross_entropy)


# --- recomputation -----------------------------------------------------------------------------------

def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpoint_recomputes_in_backward(p):
    traced = check_parity(Stack(lambda b, x: checkpoint(b, x, use_reentrant=False), p), (x48(),))
    recomputed = [op for op in traced.graph.ops if op.name.endswith("_recompute")]
    assert {op.phase for op in recomputed} == {"backward"}
    assert sum(op.target is aten.addmm.default for op in recomputed) == 3, "one matmul a block; the last needs none"
    dropouts = [op for op in traced.graph.ops if op.target is aten.native_dropout.default]
    assert len(dropouts) == (3 if p else 0), "drawn once"
    backward = {r for op in traced.graph.ops if op.phase == "backward" for r in op.refs}
    assert all(Ref(op.name, 1) in backward and Ref(op.name) not in backward for op in dropouts), "masks are kept, not what they were applied to"


def dropouts(*layers, calls=1):
    """A model that checkpoints torch's own modules: no line of the user's code runs in there."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.last = nn.Sequential(*layers), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(sum((i + 1) * checkpoint(self.layers, x, use_reentrant=False) for i in range(calls)))

    return Model()


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("layers", [
    lambda: (nn.Linear(8, 8), nn.Dropout(0.5)), lambda: (nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8)),
    lambda: (Stack(lambda b, x: b(x)), nn.Dropout(0.5)), lambda: (nn.Dropout(0.5), Stack(lambda b, x: checkpoint(b, x, use_reentrant=False), 0.5)),
], ids=["dropout last", "dropout first read later", "own code before", "nested"])
def test_what_is_checkpointed_draws_once_without_code_of_the_user(layers, calls):
    """One input may go through the same region several times, which backward runs again in the opposite order."""
    traced = check_parity(dropouts(*layers(), calls=calls), (x48(),))
    drawn = [op for op in traced.graph.ops if op.target is aten.native_dropout.default]
    assert drawn and {op.phase for op in drawn} == {"forward"}
    assert any(op.target is aten.addmm.default and op.name.endswith("_recompute") for op in traced.graph.ops)


def test_selective_checkpoint():
    context = functools.partial(create_selective_checkpoint_contexts, save_matmuls)
    traced = check_parity(Stack(lambda b, x: checkpoint(b, x, use_reentrant=False, context_fn=context)), (x48(),))
    recomputed = {op.target for op in traced.graph.ops if op.name.endswith("_recompute")}
    assert aten.gelu.default in recomputed and aten.addmm.default not in recomputed


def test_reentrant_checkpoint_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), Stack(lambda b, x: checkpoint(b, x, use_reentrant=True)))
    with pytest.raises(TraceError, match="pass use_reentrant=False"):
        trace(model, (x48(),))


# --- structure of the graph --------------------------------------------------------------------------

def test_phases_modules_and_sources():
    graph = trace(Stack(), (x48(),)).graph
    seen = set()
    for op in graph.ops:
        assert all(r.op in seen for r in op.refs), f"{op.name} reads a value made later"
        seen.add(op.name)
        if op.phase == "forward":
            assert all(graph.op(r.op).phase == "forward" for r in op.refs)
    matmuls = [op for op in graph.of_kind("call") if op.target in (aten.mm.default, aten.addmm.default)]
    assert {op.module for op in matmuls if op.phase == "backward"} == {op.module for op in matmuls if op.phase == "forward"}
    here = os.path.relpath(inspect.getfile(Block))
    for op in graph.of_kind("call"):
        assert op.source.startswith(f"{here}:"), op.where
    gelu = next(op for op in graph.ops if op.target is aten.gelu_backward.default)
    assert gelu.module == "blocks.2" and gelu.code == "return x + self.down(self.drop(F.gelu(self.up(x))))"


def test_no_device_in_the_graph_and_hashable():
    graph = trace(Weighted(lambda m, x: x * m.w + torch.arange(8.0, device=x.device)), (x48(),)).graph
    arange = next(op for op in graph.ops if op.target is aten.arange.default)
    assert dict(arange.kwargs) == {"dtype": torch.float64} or not arange.kwargs
    assert all(hash(call) for call in graph.calls.values())


def test_attributes_that_cannot_be_copied_are_shared():
    model = Stack()
    model.blocks[1].lock, model.generator = threading.Lock(), torch.Generator()
    graph = trace(model, (x48(),)).graph
    assert graph.hash == trace(Stack(), (x48(),)).graph.hash


def test_compiled_submodule_runs_as_python():
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(Block()))
    with torch.no_grad():
        traced = trace(model, (x48(),))
    assert aten.gelu.default in targets_of(traced.graph)


def test_inference_is_forward_only():
    model = Block(0.5).eval()
    with torch.no_grad():
        by_mode = trace(model, (x48(),)).graph
    with torch.inference_mode():
        trace(model, (x48(),))
    for graph in (by_mode, trace(model, (x48(),), training=False).graph):
        assert not graph.training and not graph.of_kind("tangent")
        assert {op.phase for op in graph.ops} == {"forward"}
        assert aten.native_dropout.default not in targets_of(graph)
    assert trace(model, (x48(),)).graph.training, "eval mode with gradients enabled is still differentiated"


class Counting(nn.Module):
    """Carries from call to call what a program does not."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.kept, self.seen, self.mean = nn.Linear(8, 8), 0, None, [], torch.ones(())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.kept = self.layer(x)
        self.seen.append(self.calls)
        self.mean = 0.9 * self.mean + 0.1 * self.kept.detach().mean()
        self.count += 1
        return self.kept * self.calls * self.mean


def test_what_forward_assigns_is_told(caplog):
    trace(Counting(), (x48(),))
    assert "forward assigns calls, kept, seen, mean: calls of the compiled model do not" in caplog.text
    caplog.clear()
    trace(Block(), (x48(),))
    assert not caplog.text


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.weight_norm, lambda layer: nn.utils.prune.random_unstructured(layer, "weight", 0.5)],
                         ids=["spectral norm", "weight norm", "prune"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_torch_makes_of_a_parameter_before_every_call_is_not_told(wrap, caplog):
    trace(nn.Sequential(wrap(nn.Linear(8, 8))), (x48(),))
    assert not caplog.text


class Dropping(nn.Module):
    """Drops layers as Python's generator says, and scales as numpy's does."""

    def __init__(self, numpy: bool):
        super().__init__()
        self.layers, self.numpy = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), numpy

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return self.layers[0](x) * (np.random.choice([1.0, 2.0]) if self.numpy else 1.0)


@pytest.mark.parametrize(("numpy", "names"), [(False, "random"), (True, "random and numpy.random")])
def test_what_forward_draws_outside_of_torch_is_told(caplog, numpy, names):
    trace(Dropping(numpy), (x48(),))
    assert f"forward draws from {names}: calls of the compiled model do not" in caplog.text


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_looks_at_no_gradient_of_a_trace():
    with torch.autograd.detect_anomaly():
        graph = trace(Block(), (x48(),)).graph
        assert torch.is_anomaly_enabled()
    assert graph.hash == trace(Block(), (x48(),)).graph.hash


def test_same_graph_for_real_meta_and_fake_weights_and_twice():
    real, example = llama.build("tiny")
    with torch.device("meta"):
        meta, meta_example = llama.build("tiny")
    graphs = [trace(m, e, loss_fn=llama.loss).graph for m, e in ((real, example), (meta, example), (meta, meta_example))]
    with torch._subclasses.FakeTensorMode():
        fake, fake_example = llama.build("tiny")
    graphs += [trace(fake, fake_example, loss_fn=llama.loss).graph, trace(real, example, loss_fn=llama.loss).graph]
    assert len({g.hash for g in graphs}) == 1
    assert trace(real, llama.build("tiny", batch=4)[1], loss_fn=llama.loss).graph.hash != graphs[0].hash


def test_nothing_is_left_behind():
    model, bad = Stack(lambda b, x: checkpoint(b, x, use_reentrant=False), 0.5), Weighted(lambda m, x: x * float(x.sum()))
    rng = torch.get_rng_state()
    trace(model, (torch.ones(4, 8),))
    with pytest.raises(TraceError):
        trace(bad, (torch.ones(4, 8),))
    assert torch.equal(rng, torch.get_rng_state())
    assert type(torch.ones(2) + 1) is torch.Tensor
    assert not torch.compiler.is_compiling() and torch.backends.mkldnn.enabled
    block = Block()
    block(x48()).sum().backward()
    assert type(block.up.weight.grad) is torch.Tensor


# --- precision ---------------------------------------------------------------------------------------

def test_precision_casts_in_the_graph():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x):
            y = self.a(x)
            self.average.mul_(0.5).add_(y.detach().mean(0))
            return self.b(self.norm(y).to(y.dtype))

    torch.set_default_dtype(torch.float32)
    model, x, target = Net(), x48(), x48()
    traced = trace(model, (x, target), loss_fn=F.mse_loss, precision=Precision("bf16", "fp32", "bf16"))
    graph = traced.graph
    casts = [op for op in graph.of_kind("call") if op.target is aten._to_copy.default]
    of_weight = [op for op in casts if op.refs[0].op == "param:a.weight"]
    assert len(of_weight) == 1 and of_weight[0].outputs[0].dtype == torch.bfloat16, "tied: one cast"
    assert not any(op.refs[0].op in ("param:norm.weight", "buffer:norm.running_mean", "input:1") for op in casts)
    grad = graph.op("grad:a.weight")
    assert dict(grad.kwargs) == {"reduce": torch.bfloat16}
    assert graph.meta(grad.args[0]).dtype == torch.float32 and graph.op(grad.args[0].op) in casts
    assert graph.meta(graph.op("mutation:average").args[0]).dtype == torch.float32
    results = run(traced, state_of(model), (x, target))
    assert set(results.grads) == {n for n, _ in model.named_parameters()}
    assert results.grads["a.weight"].dtype == torch.float32
    assert not torch.equal(results.mutations["average"], model.average)


def test_precision_matches_a_bf16_model():
    torch.set_default_dtype(torch.float32)
    model, x = Block(), x48()
    results = run(trace(model, (x,), precision=Precision()), state_of(model), (x,))
    low = Block().bfloat16()
    low.load_state_dict(model.state_dict())
    out = low(x.bfloat16())
    out.sum().backward()
    assert torch.equal(results.users[0], out)
    assert all(torch.equal(results.grads[n], p.grad.float()) for n, p in low.named_parameters())


def test_unknown_precision():
    with pytest.raises(UsageError, match="precision master='int8'"):
        Precision("bf16", "int8")


# --- refusals ----------------------------------------------------------------------------------------

OUTSIDE = torch.randn(8, requires_grad=True)

REFUSED = {
    "branch": (lambda m, x: x * m.w if (x * m.w).sum() > 0 else x, "depends on the data"),
    "item": (lambda m, x: x * m.w * (x * m.w).max().item(), "depends on the data"),
    "boolean index": (lambda m, x: (x * m.w)[x > 0], "depends on the data"),
    "nonzero": (lambda m, x: (x * m.w).nonzero(), "depends on the data"),
    "numpy": (lambda m, x: torch.tensor((x * m.w).detach().numpy()), "numpy"),
    "shape error": (lambda m, x: x @ (x * m.w), "raised RuntimeError"),
    "own error": (lambda m, x: [][1], "raised IndexError"),
    "input written": (lambda m, x: x.mul_(2) * m.w, r"writes into its input x"),
    "foreign weight": (lambda m, x: x * m.w * OUTSIDE, "not a parameter of the model"),
    "generator": (lambda m, x: x * m.w * torch.rand(8, generator=torch.Generator()), "torch.Generator"),
    "odd result": (lambda m, x: (x * m.w, object()), "not a pytree"),
    "nothing to train": (lambda m, x: x * m.w.detach(), "nothing to differentiate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_users_line(case):
    body, message = REFUSED[case]
    with pytest.raises(TraceError, match=message) as error:
        trace(Weighted(body), (x48(),))
    assert error.value.__suppress_context__ or error.value.__context__ is None
    if case not in ("input written", "odd result", "nothing to train"):
        line = body.__code__.co_firstlineno
        assert f"{os.path.relpath(__file__)}:{line}" in str(error.value)


def test_gradient_hooks_are_refused():
    model = Block()
    model.up.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(TraceError, match="'up.weight' has a gradient hook"):
        trace(model, (x48(),))
    assert not trace(model, (x48(),), training=False).graph.training


def test_parameter_reached_from_outside_the_tree():
    class Elsewhere:
        weight = nn.Parameter(torch.randn(8))

    body = Weighted(lambda m, x: x * Elsewhere.weight)
    body.w = Elsewhere.weight
    with pytest.raises(TraceError, match="'w' is used through a reference outside the module tree"):
        trace(body, (x48(),))


@pytest.mark.slow
def test_70b_traces_in_little_memory():
    import resource

    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        model, example = llama.build("70B")
    graph = trace(model, example, loss_fn=llama.loss, precision=Precision()).graph
    assert sum(op.outputs[0].numel for op in graph.of_kind("param")) > 68e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20, "KiB"


def test_checks_of_data_are_part_of_the_graph():
    class Checked(nn.Module):
        def forward(self, x):
            torch._check_tensor_all(x > 0, lambda: "negative")
            return x.relu()

    graph = trace(Checked(), (torch.ones(4),)).graph
    called = [str(op.target) for op in graph.of_kind("call")]
    assert {"aten.gt.Scalar", "aten.relu.default"} < set(called) and called[-1] == "autoshard.checked.default"
    with pytest.raises(RuntimeError):
        torch._check_tensor_all(torch.tensor([False]))


class Strided(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body

    def forward(self, x):
        return self.body(self.linear(x))


def test_as_strided_reads_a_copy_laid_out_as_in_the_model():
    """The value may lie otherwise in memory where ranks have gathered it."""
    model, x = Strided(lambda y: y.t().as_strided((3, 3, 8), (16, 8, 1))), torch.randn(8, 8)
    traced = trace(model, (x,))
    state = {n: p.detach() for n, p in model.named_parameters()}
    got, want = run(traced, state, (x,)), model(x)
    want.sum().backward()
    assert torch.equal(got.users[0], want)
    assert torch.equal(got.grads["linear.weight"], model.linear.weight.grad)
    for op in traced.graph.of_kind("call"):
        if op.target is torch.ops.aten.as_strided.default:
            read = traced.graph.op(op.refs[0].op)
            assert read.target is torch.ops.aten.clone.default and dict(read.kwargs)["memory_format"] is torch.contiguous_format


def test_as_strided_writes_where_the_memory_of_the_model_lies():
    def body(y):
        y = y.view(2, 4, 8).transpose(1, 2) * 2
        y.as_strided((3, 8), (8, 1)).mul_(3)
        return y.sin()

    model, x = Strided(body), torch.randn(8, 8)
    traced = trace(model, (x,))
    got, want = run(traced, {n: p.detach() for n, p in model.named_parameters()}, (x,)), model(x)
    want.sum().backward()
    assert torch.equal(got.users[0], want)
    assert torch.allclose(got.grads["linear.weight"], model.linear.weight.grad)


@pytest.mark.parametrize("part", [lambda y: y[2:6], lambda y: y[:, :2], lambda y: y[0].expand(4, 8)])
def test_as_strided_of_a_part_is_refused(part):
    with pytest.raises(TraceError, match=r"reads memory around it.*\.contiguous\(\)"):
        trace(Strided(lambda y: part(y).as_strided((2, 2), (2, 1))), (torch.randn(8, 8),))


def test_source_lines_follow_the_working_directory(tmp_path, monkeypatch):
    """A path is relative where it lies below the working directory, whatever that was at an earlier trace."""
    def sources():
        return {op.source for op in trace(Block(), (torch.randn(2, 8),)).graph.ops if op.source}

    here = sources()
    monkeypatch.chdir(tmp_path)
    assert all(os.path.isabs(s) for s in sources()) and not any(os.path.isabs(s) for s in here)
    monkeypatch.undo()
    assert sources() == here


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_a_product_of_two_dtypes_is_refused_with_its_module(dtype: torch.dtype) -> None:
    """Kernels refuse it, and what finds shapes does not: a call would be planned and then fail inside."""
    with pytest.raises(TraceError, match=f"(?s)must have one dtype.*{str(dtype)[6:]}.*Linear"):
        trace(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), (torch.ones(4, 6, dtype=dtype),))
