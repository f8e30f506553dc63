"""Passes over bound graphs: memory reused in place, small gradients in buckets, straight-line code."""
from __future__ import annotations

import torch
from torch.fx import Graph

from autoshard import _torch
from autoshard.collectives import RUN
from autoshard.lower.emit import Part
from autoshard.lower.passes.bucket import SMALL, bucket_gradients
from autoshard.lower.passes.in_place import overwrite
from autoshard.runtime.execute.eager import straight

aten = torch.ops.aten
REDUCE = RUN["all_reduce"].target
SCATTER = RUN["reduce_scatter"].target


class Writer:
    """Builds a graph with fake values, as lowering does."""

    def __init__(self) -> None:
        self.graph, self.fake = Graph(), _torch.fake_mode()

    def take(self, *shape: int):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.fake:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target, *args, part: Part | None = None):
        node = self.graph.call_function(target, args)
        with self.fake:
            node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        node.meta["part"] = part
        return node

    def reduced(self, x, target, *args):
        """A gradient's reduction, its wait left to the caller."""
        part = Part("redistribute", x.name, "backward", True)
        return self.call(target, x, *args, part=part), part


def targets(graph: Graph) -> list:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def test_overwrites_what_dies_and_nothing_else() -> None:
    w = Writer()
    x, y = w.take(4), w.take(4)
    a = w.call(aten.mul.Tensor, x, y)  # arguments stay
    b = w.call(aten.add.Tensor, a, y)  # a dies here
    c = w.call(aten.relu.default, b)  # b is read again below
    d = w.call(aten.sub.Tensor, b, c)  # the second argument of a difference cannot take the result, the first can
    w.graph.output((d, c))
    assert overwrite(w.graph) == 2
    assert targets(w.graph) == [aten.mul.Tensor, aten.add_.Tensor, aten.relu.default, aten.sub_.Tensor]
    run = straight(w.graph, "test")
    one, two = torch.randn(4), torch.randn(4)
    before = one.clone(), two.clone()
    got = run([one, two])
    want = one * two + two
    assert torch.equal(got[1], want.relu()) and torch.equal(got[0], want - want.relu())
    assert torch.equal(one, before[0]) and torch.equal(two, before[1])


def test_views_keep_memory_alive() -> None:
    w = Writer()
    x = w.take(2, 2)
    a = w.call(aten.mul.Tensor, x, x)
    v = w.call(aten.view.default, a, [4])
    b = w.call(aten.relu.default, a)  # a's memory is still read through v
    w.graph.output((b, w.call(aten.neg.default, v)))
    assert overwrite(w.graph) == 0


def test_the_other_operand_takes_the_result_where_only_it_dies() -> None:
    w = Writer()
    x, y = w.take(3), w.take(3)
    a = w.call(aten.mul.Tensor, x, y)
    w.graph.output((w.call(aten.add.Tensor, x, a),))
    assert overwrite(w.graph) == 1
    assert torch.equal(straight(w.graph, "test")([torch.ones(3), torch.full((3,), 2.0)])[0], torch.full((3,), 3.0))


def test_what_a_collective_still_sends_is_not_overwritten() -> None:
    w = Writer()
    x = w.take(4)
    a = w.call(aten.neg.default, x)
    sent = w.call(RUN["all_gather"].target, a, 2, "0")
    b = w.call(aten.relu.default, a)  # a dies here, but it is on its way
    got = w.call(_torch.WAIT, sent)
    w.graph.output((got, b))
    assert overwrite(w.graph) == 0


def test_straight_code_empties_its_list_and_drops_defaults() -> None:
    w = Writer()
    x, unused = w.take(2, 3), w.take(1)
    total = w.graph.call_function(aten.sum.dim_IntList, (x, [1], False), {"dtype": None})
    w.graph.output((total, w.graph.call_function(aten.to.dtype, (total, torch.float64))))
    values = [torch.ones(2, 3), torch.zeros(1)]
    got = straight(w.graph, "test")(values)
    assert values == [] and got[1].dtype == torch.float64 and torch.equal(got[0], torch.full((2,), 3.0))
    assert unused.name in [n.name for n in w.graph.nodes]


def test_small_gradients_share_a_call() -> None:
    w = Writer()
    inputs = [w.take(3), w.take(2, 2), w.take(SMALL)]  # the last is too large: 4 bytes an element
    starts = [w.reduced(x, REDUCE, "sum", "0") for x in inputs]
    w.graph.output(tuple(w.call(_torch.WAIT, s, part=part) for s, part in starts))
    bucket_gradients(w.graph)
    w.graph.lint()
    calls = [n for n in w.graph.nodes if n.target is REDUCE]
    assert [n.meta.get("bucket") for n in calls] == [(12, 16), None] or [n.meta.get("bucket") for n in calls] == [None, (12, 16)]
    for node in calls:  # on one rank a sum over ranks is the value itself
        node.target = aten.clone.default
        node.args = node.args[:1]
    for node in [n for n in w.graph.nodes if n.target is _torch.WAIT]:
        node.target = aten.alias.default
    values = [torch.randn(3), torch.randn(2, 2), torch.randn(SMALL)]
    for got, want in zip(straight(w.graph, "test")(list(values)), values, strict=True):
        assert torch.equal(got, want)


def test_scattered_gradients_share_a_call_row_by_row() -> None:
    w = Writer()
    inputs = [w.take(2, 3), w.take(2, 2, 2)]
    starts = [w.reduced(x, SCATTER, "sum", 2, "0") for x in inputs]
    w.graph.output(tuple(w.call(_torch.WAIT, s, part=part) for s, part in starts))
    bucket_gradients(w.graph)
    (call,) = [n for n in w.graph.nodes if n.target is SCATTER]
    assert call.meta["bucket"] == (24, 32) and tuple(call.args[0].meta["val"].shape) == (2, 7)
    call.target, call.args = aten.slice.Tensor, (call.args[0], 0, 1, 2)  # what the second of two ranks gets, the others' parts being 0
    (wait,) = [n for n in w.graph.nodes if n.target is _torch.WAIT]
    wait.target = aten.clone.default
    values = [torch.randn(2, 3), torch.randn(2, 2, 2)]
    for got, want in zip(straight(w.graph, "test")(list(values)), values, strict=True):
        assert torch.equal(got, want[1:])


def test_a_wait_in_between_ends_a_bucket() -> None:
    w = Writer()
    x, y = w.take(3), w.take(3)
    first, part = w.reduced(x, REDUCE, "sum", "0")
    done = w.call(_torch.WAIT, first, part=part)
    second, other = w.reduced(y, REDUCE, "sum", "0")
    w.graph.output((done, w.call(_torch.WAIT, second, part=other)))
    bucket_gradients(w.graph)
    assert targets(w.graph).count(REDUCE) == 2
