"""Which layers of experts a trace takes as one op."""
import pytest
import torch

import autoshard
from autoshard.base.graph import Ref
from autoshard.experts.ops import EXPERTS, EXPERTS_BACKWARD
from autoshard.program.trace import trace
from autoshard.program.tracing.functions.expert_layers import forward_as_op
from tests.support.experts import MODELS, build

pytest.importorskip("transformers")


def layers(graph, target=EXPERTS):
    return [op for op in graph.of_kind("call") if op.target is target]


def traced(model, ids):
    return trace(model, (), {"input_ids": ids, "labels": ids}).graph


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layers_of_transformers_are_one_op_each(name):
    model, (ids,) = build(name)
    graph = traced(model, ids)
    found = layers(graph)
    assert len(found) == (1 if name == "deepseek_v3" else 2) == len(layers(graph, EXPERTS_BACKWARD))
    up = graph.meta(found[0].refs[3])
    assert up.factors[1] == (2, up.shape[1] // 2) and up.part_dims == (1,), "gate and up in one are two parts"
    assert all(m.factors[0][:2] == (4, 8) for m in (found[0].outputs[0], found[0].outputs[3])), "tokens are batch and sequence"
    assert "experts" in found[0].module and ("test_" in found[0].source or "experts.py" in found[0].source or "modeling_" in found[0].source)
    read = {r for op in layers(graph, EXPERTS_BACKWARD) for r in op.refs}
    assert all(Ref(op.name, i) in read for op in found for i in (1, 2, 3))


def test_frozen_experts_have_the_parts_in_the_gradient_that_nobody_reads():
    """Without them a share of the hidden dim, which is split so, was cut out of another dim there, and such a plan could not be lowered."""
    model, (ids,) = build("exact")
    model.experts.requires_grad_(False)
    graph = traced(model, ids)
    for op in layers(graph, EXPERTS_BACKWARD):
        up, gradient = graph.meta(op.refs[4]), op.outputs[2]
        assert (gradient.factors, gradient.part_dims) == (up.factors, up.part_dims) != ((), ())


def test_the_loop_over_experts_can_be_traced_as_the_op():
    model, (ids,) = build("exact")
    for layer in model.experts:
        layer.config._experts_implementation = "eager"
    assert len(layers(traced(model, ids))) == 2


@pytest.mark.parametrize("name, value", [("act_fn", torch.nn.Mish()), ("act_fn", torch.nn.Softmax(0)), ("act_fn", torch.nn.PReLU()), ("has_bias", True),
                                         ("is_transposed", True), ("is_concatenated", False), ("_is_expert_parallel", True)])
def test_other_layers_are_left_as_they_are(name, value):
    layer = build("exact")[0].experts[0]
    assert forward_as_op(layer, 2.0) is not None
    setattr(layer, name, value)
    assert forward_as_op(layer, 2.0) is None


def test_a_gate_of_its_own_is_left_as_it_is():
    layer = build("exact")[0].experts[0]
    layer.__class__ = type("Other", (type(layer),), {"_apply_gate": lambda self, x: x})
    assert forward_as_op(layer, 2.0) is None


def test_a_room_below_an_even_load_is_refused():
    model, (ids,) = build("exact")
    with pytest.raises(autoshard.AutoshardError, match="expert_capacity=0.5: give the rows of tokens"):
        autoshard.plan(model, "ep=2", (), {"input_ids": ids, "labels": ids}, expert_capacity=0.5)


@pytest.mark.parametrize("name", ["exact", "mixtral"])
def test_micro_batches_pass_layers_of_experts(name):
    model, (ids,) = build(name)
    report = autoshard.verify(model, "dp=2", (), {"input_ids": ids, "labels": ids}, plans=("searched", "data_parallel"), steps=2,
                              pipeline=autoshard.Pipeline(microbatches=2))
    assert report.ok and [p.name for p in report.plans] == ["searched", "data_parallel"], report
