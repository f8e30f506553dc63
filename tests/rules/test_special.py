"""Every row of the special rules against the numeric oracle, and what it says about its collectives."""

import pytest
import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import PSUM, R, divides, local_shape
from autoshard.collectives import KIND_OF
from autoshard.lower.context import Context
from autoshard.lower.emit import Emitter
from autoshard.rules import registry
from autoshard.rules.check import oracle
from autoshard.rules.check.oracle import wrong_rows
from autoshard.rules.check.samples import Fixed, T, build, sample
from autoshard.rules.check.samples_special import SPECIAL, batch_norms

aten = torch.ops.aten


@pytest.mark.parametrize("s", SPECIAL, ids=[f"{i}-{s.op}" for i, s in enumerate(SPECIAL)])
def test_rows_are_true(s):
    call, tensors = build(s)
    assert registry.origin(call) == "own", f"{call.target} has no own rule for this sample"
    wrong = wrong_rows(call, tensors, values=s.values)
    assert not wrong, "\n".join(map(str, wrong))


def declared(call, rows, mesh):
    """The collectives that the rows promise on a mesh: (axis, kind, reduce op, bytes)."""
    out = []
    for axis, row in enumerate(rows):
        for c in row.inner:
            metas, specs = (call.inputs, "inputs") if c.tensor.startswith("in") else (call.outputs, "outputs")
            i = int(c.tensor.lstrip("inout"))
            spec = tuple(getattr(r, specs)[i] for r in rows)
            shape = local_shape(metas[i].logical_shape, spec, mesh.sizes)
            n = torch.Size(m // 2 if d in c.halved else m for d, m in enumerate(shape) if d not in c.drop).numel()
            out.append((axis, c.kind, c.reduce_op, c.copies * n * (c.dtype or metas[i].dtype).itemsize))
    return sorted(out)


COMMUNICATING = [s for s in SPECIAL if any(row.inner for row in registry.rows(build(s)[0]))]


@pytest.mark.parametrize("s", COMMUNICATING, ids=[f"{i}-{s.op}" for i, s in enumerate(COMMUNICATING)])
def test_inner_collectives_are_those_declared(s, monkeypatch):
    call, tensors = build(s)
    rows, seen = registry.rows(call), []

    def recording(kind):
        original = getattr(oracle._Exchange, kind)

        def record(self, rank, x, *how):
            if rank == 0:
                seen.append((how[-1], kind, how[0] if how[1:] else "sum", x.numel() * x.itemsize))
            return original(self, rank, x, *how)

        return record

    for kind in ("all_reduce", "mirror"):
        monkeypatch.setattr(oracle._Exchange, kind, recording(kind))
    mesh, checked = Mesh(("a", "b"), (2, 2)), 0
    for pair in [(a, b) for a in rows for b in rows if a.inner or b.inner]:
        seen.clear()
        assert oracle.check_rows(call, tensors, pair, mesh.sizes) is None
        if seen:
            checked += 1
            assert sorted(seen) == declared(call, pair, mesh), pair
    assert checked, "no pair of rows with collectives divides on 2 x 2: enlarge the sample"


def rows_of(op, *args, **kwargs):
    return {(row.inputs, row.outputs) for row in registry.rows(build(sample(op, *args, **kwargs))[0])}


def test_classic_rows_are_there():
    """What data parallel, tensor parallel and vocabulary parallel plans need."""
    ids = Fixed(torch.zeros(4, 2, dtype=torch.int64))
    assert ((0, R), (PSUM,)) in rows_of(aten.embedding.default, T(8, 6), ids)
    assert ((R, R), (0,)) in rows_of(aten.embedding_dense_backward.default, T(4, 2, 6), ids, 8, -1, False)
    assert ((1,), (1,)) in rows_of(aten._log_softmax.default, T(4, 6), 1, False)
    target = Fixed(torch.zeros(4, dtype=torch.int64))
    assert {((1, R), (PSUM, R)), ((0, 0), (PSUM, R))} <= rows_of(aten.nll_loss_forward.default, T(4, 6), target, None,
                                                                 1, -100)
    tail = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    assert {((0, R, R), (0,)), ((R, 0, 0), (1,)), ((1, 1, R), (PSUM,))} <= rows_of(
        aten.convolution.default, T(2, 4, 6, 6), T(8, 4, 3, 3), T(8), *tail)
    norm = (T(4, 6, 2, 2), T(6), T(6), T(6), Fixed(torch.ones(6, dtype=torch.float64)), True, 0.1, 1e-5)
    assert {((0, R, R, R, R), (0, R, R, R, R)), ((1, 0, 0, 0, 0), (1, 0, 0, 0, 0))} <= rows_of(
        aten._native_batch_norm_legit_functional.default, *norm)
    heads = (T(2, 4, 6, 8), T(2, 2, 6, 8), T(2, 2, 6, 8), 0.0, True)
    assert {((0, 0, 0), (0, 0)), ((1, 1, 1), (1, 1))} <= rows_of(
        aten._scaled_dot_product_flash_attention_for_cpu.default, *heads)
    assert ((R, 0, R), (PSUM,)) in rows_of(aten._grouped_mm.default, T(8, 16, dtype=torch.float32),
                                           T(4, 16, 32, dtype=torch.float32),
                                           Fixed(torch.tensor([2, 4, 6, 8], dtype=torch.int32)))


def on_meta(op, *args, **kwargs):
    """Rows of an op that runs only on other devices: outputs are computed on meta tensors."""
    tensors, leaves = [], []

    def slot(a):
        if not isinstance(a, torch.Tensor):
            return tuple(a) if isinstance(a, list) else a
        tensors.append(a)
        leaves.append(TensorMeta(tuple(a.shape), a.dtype))
        return Slot(len(leaves) - 1)

    slots = tuple(slot(a) for a in args)
    outs = op(*args, **kwargs)
    metas = tuple(TensorMeta(tuple(o.shape), o.dtype) if isinstance(o, torch.Tensor) else None for o in outs)
    call = Call(op, slots, tuple(kwargs.items()), tuple(leaves), metas)
    return registry.origin(call), {(row.inputs, row.outputs) for row in registry.rows(call)}, len(outs)


def _meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("op, extra", [
    (aten._scaled_dot_product_flash_attention.default, ()),
    (aten._scaled_dot_product_efficient_attention.default, (None, True)),
    (aten._scaled_dot_product_cudnn_attention.default, (None, True)),
    (aten._scaled_dot_product_fused_attention_overrideable.default, ()),
])
def test_gpu_attention_splits_batch_and_heads(op, extra):
    q = _meta(2, 4, 128, 64)
    origin, rows, n = on_meta(op, q, _meta(2, 4, 128, 64), _meta(2, 4, 128, 64), *extra)
    assert origin == "own"
    for dim in (0, 1):
        assert ((dim,) * 3, (dim, dim, *(R,) * (n - 2))) in rows
    origin, rows, _ = on_meta(op, q, _meta(2, 4, 128, 64), _meta(2, 4, 128, 64), *extra, dropout_p=0.1)
    assert rows == {((R,) * 3, (R,) * n)}, "dropout inside the kernel knows no shards"


def test_gpu_attention_backward_splits_batch_and_heads():
    x, lse, seed = _meta(2, 4, 128, 64), _meta(2, 4, 128, dtype=torch.float32), _meta(2, dtype=torch.uint64)
    op = aten._scaled_dot_product_flash_attention_backward.default
    origin, rows, _ = on_meta(op, x, x, x, x, x, lse, None, None, 128, 128, 0.0, True, seed, seed)
    assert origin == "own"
    assert {((d,) * 6 + (R, R), (d,) * 3) for d in (0, 1)} <= rows
    op = aten._scaled_dot_product_efficient_attention_backward.default
    bias = _meta(1, 4, 128, 128)
    origin, rows, _ = on_meta(op, x, x, x, x, bias, x, lse, seed, seed, 0.0, [True] * 4)
    assert ((1,) * 7 + (R, R), (1,) * 4) in rows
    assert ((0, 0, 0, 0, R, 0, 0, R, R), (0, 0, 0, PSUM)) in rows, "the gradient of a shared bias is a sum over shards"


def test_attention_flops_are_those_of_two_products():
    """batch 2, heads 4, 128 x 256 positions, 64 wide: 2 * 2*4*128*256 * (64+64) = 67.1 MFLOP; causal half."""
    metas = tuple(TensorMeta(s, torch.float32) for s in ((2, 4, 128, 64), (2, 4, 256, 64), (2, 4, 256, 64)))
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    for causal, wanted in ((False, 67_108_864), (True, 33_554_432)):
        call = Call(op, (Slot(0), Slot(1), Slot(2), 0.0, causal), (), metas, (metas[0], None))
        assert registry.rule_of(op).flops(call, [m.shape for m in metas], []) == wanted


def test_convolution_flops():
    """ResNet's stem, one image: 64 x 112 x 112 outputs x 3 x 7 x 7 weights x 2 = 236 MFLOP."""
    x, w, y = (TensorMeta(s, torch.float32) for s in ((1, 3, 224, 224), (64, 3, 7, 7), (1, 64, 112, 112)))
    tail = ((2, 2), (3, 3), (1, 1), False, (0, 0), 1)
    call = Call(aten.convolution.default, (Slot(0), Slot(1), None, *tail), (), (x, w), (y,))
    assert registry.rule_of(call.target).flops(call, [x.shape, w.shape], [y.shape]) == 236_027_904
    back = Call(aten.convolution_backward.default,
                (Slot(0), Slot(1), Slot(2), None, *tail, (False, True, False)), (), (y, x, w), (None, w, None))
    assert registry.rule_of(back.target).flops(back, [y.shape, x.shape, w.shape], []) == 236_027_904


def test_grouped_matmul_of_transformers():
    moe = pytest.importorskip("transformers.integrations.moe")
    assert moe
    op = torch.ops.transformers
    x, w, ends = T(8, 6), T(4, 6, 10), Fixed(torch.tensor([3, 4, 4, 8], dtype=torch.int32))
    for s in (sample(op.grouped_mm_fallback.default, x, w, ends),
              sample(op.grouped_mm_fallback_backward.default, x, w, ends, T(8, 10))):
        call, tensors = build(s)
        assert registry.origin(call) == "own"
        assert any(row.inputs[1] == 0 for row in registry.rows(call)), "experts should split"
        assert not wrong_rows(call, tensors)


_bf16 = torch.bfloat16
ENDS = Fixed(torch.tensor([3, 4, 4, 8], dtype=torch.int32))
LOWERED = [  # half precision too, which is too coarse for the oracle
    *(s for s in SPECIAL if s.op is not aten._grouped_mm.default),
    sample(aten._grouped_mm.default, T(8, 16, dtype=_bf16), T(4, 16, 32, dtype=_bf16), ENDS),
    sample(aten._grouped_mm.default, T(16, 8, dtype=_bf16), T(8, 32, dtype=_bf16), ENDS),
    sample(aten._log_softmax.default, T(4, 6, dtype=_bf16), 1, False),
    sample(aten._softmax.default, T(4, 6, dtype=_bf16), 1, False),
    sample(aten._log_softmax_backward_data.default, T(4, 6, dtype=_bf16), T(4, 6, dtype=_bf16), 1, _bf16),
    sample(aten._softmax_backward_data.default, T(4, 6, dtype=_bf16), T(4, 6, dtype=_bf16), 1, _bf16),
    sample(aten.nll_loss_forward.default, T(4, 6, dtype=_bf16), Fixed(torch.tensor([0, 5, 2, 3])), None, 1, -100),
    *(sample(aten.native_batch_norm_backward.default, T(4, 6, 2, dtype=_bf16), T(4, 6, 2, dtype=_bf16),
             *(T(6, dtype=dtype),) * 2, Fixed(torch.ones(6, dtype=dtype)), T(6, dtype=dtype),
             Fixed(torch.ones(6, dtype=dtype)), True, 1e-5, (True,) * 3) for dtype in (_bf16, torch.float32)),
]


def lowered(call, inputs, outputs, mesh):
    emit = Emitter(mesh)
    context = Context(call, inputs, outputs, mesh, emit, "an op")
    proxies = [emit.placeholder(f"in{i}", context.local_in(i), m.dtype) for i, m in enumerate(call.inputs)]
    args, kwargs = oracle._arguments(call, proxies)
    return emit, context, emit.value(registry.run_local(context, *args, **kwargs))


@pytest.mark.parametrize("s", LOWERED, ids=[f"{i}-{s.op}" for i, s in enumerate(LOWERED)])
def test_local_implementations_lower_to_nodes(s):
    """The same functions on FX proxies: they may not look at values, nor at the rank."""
    call, _ = build(s)
    mesh = Mesh(("a", "b"), (2, 1))
    for row in registry.rows(call):
        inputs, outputs = tuple((p, R) for p in row.inputs), tuple((p, p if p < R else R) for p in row.outputs)
        pairs = zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
        if any(m and not divides(m.logical_shape, spec, mesh.sizes) for m, spec in pairs):
            continue
        emit, context, got = lowered(call, inputs, outputs, mesh)
        for i, (value, meta) in enumerate(zip(got if isinstance(got, tuple) else (got,), call.outputs, strict=True)):
            if meta is not None:
                assert (tuple(value.shape), value.dtype) == (context.local_out(i), meta.dtype), (row, i)
        sent = [n.args[0].meta["val"].nbytes for n in emit.graph.nodes if n.target in KIND_OF]
        assert sorted(sent) == sorted(d[-1] for d in declared(call, (row, registry.rows(call)[0]), mesh)), row


@pytest.mark.parametrize("s", batch_norms(4, 6, 8, dtype=torch.float32), ids=str)
def test_small_kernels_of_batch_norms_are_those_that_are_priced(s):
    """Beside those that read the whole input."""
    call, _ = build(s)
    mesh, rule, large = Mesh(("a",), (2,)), registry.rule_of(call.target), torch.Size(call.inputs[0].shape).numel() // 2
    for row in registry.rows(call):
        inputs, outputs = tuple((p,) for p in row.inputs), tuple((p,) for p in row.outputs)
        emit, _, _ = lowered(call, inputs, outputs, mesh)
        ran = [n for n in emit.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten" and not n.target.is_view]
        small = [n for n in ran if all(v.meta["val"].numel() < large for v in n.all_input_nodes if isinstance(v.meta["val"], torch.Tensor))]
        shapes = [local_shape(m.logical_shape, spec, mesh.sizes) for m, spec in zip(call.inputs, inputs, strict=True)]
        assert int(rule.kernels(call, shapes, [])) == len(small), (row, small)
        assert rule.moved is None or (rule.moved(call, shapes, []) > 0) == bool(small)


@pytest.mark.parametrize("s", batch_norms(4, 6, 8, dtype=_bf16), ids=str)
def test_batch_norms_of_bf16_models_run(s):
    """Kernels refuse statistics of another type than they want, which fake tensors do not."""
    call, tensors = build(s)
    assert not wrong_rows(call, tensors)
