"""Passes over bound graphs: memory reused in place, straight-line code."""
from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.fx import Graph

from autoshard import _torch
from autoshard.collectives import RUN
from autoshard.lower.passes.in_place import overwrite
from autoshard.lower.passes.linear import join_linears, join_sums
from autoshard.runtime.carriers.choose import carry, start
from autoshard.runtime.execute.eager import straight

aten = torch.ops.aten


class Writer:
    """Builds a graph with fake values, as lowering does."""

    def __init__(self) -> None:
        self.graph, self.fake = Graph(), _torch.fake_mode()

    def take(self, *shape: int):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.fake:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target, *args):
        node = self.graph.call_function(target, args)
        with self.fake:
            node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node


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


def test_a_matmul_by_a_weight_is_one_call_with_the_same_numbers() -> None:
    w = Writer()
    x, query, key = w.take(2, 3, 4), w.take(5, 4), w.take(7, 4)
    rows = w.call(aten.reshape.default, x, [6, 4])  # read by two matmuls
    first = w.call(aten.reshape.default, w.call(aten.mm.default, rows, w.call(aten.t.default, query)), [2, 3, 5])
    second = w.call(aten.mm.default, rows, w.call(aten.t.default, key))  # its rows stay joined
    w.graph.output((first, second))
    given = [torch.randn(n.meta["val"].shape) for n in (x, query, key)]
    want = straight(w.graph, "apart")(list(given))
    assert join_linears(w.graph) == 2
    assert targets(w.graph) == [aten.reshape.default, aten.linear.default, aten.linear.default]
    assert all(map(torch.equal, straight(w.graph, "joined")(list(given)), want))


def test_a_matmul_stays_where_its_rows_would_be_copied_or_the_turned_weight_is_read_again() -> None:
    w = Writer()
    x, weight = w.take(4, 3, 2), w.take(5, 4)
    turned = w.call(aten.t.default, weight)
    rows = w.call(aten.reshape.default, w.call(aten.permute.default, x, [1, 2, 0]), [6, 4])
    out = w.call(aten.reshape.default, w.call(aten.mm.default, rows, turned), [3, 2, 5])
    w.graph.output((out, turned))
    assert join_linears(w.graph) == 0
    w = Writer()
    x, weight = w.take(4, 3, 2), w.take(5, 4)
    rows = w.call(aten.reshape.default, w.call(aten.permute.default, x, [1, 2, 0]), [6, 4])
    w.graph.output((w.call(aten.reshape.default, w.call(aten.mm.default, rows, w.call(aten.t.default, weight)), [3, 2, 5]),))
    assert join_linears(w.graph) == 1
    assert targets(w.graph)[1:] == [aten.reshape.default, aten.linear.default, aten.reshape.default]


def test_a_bias_is_added_in_the_same_call_where_it_is_a_vector() -> None:
    w = Writer()
    x, weight, bias, number = w.take(2, 3, 4), w.take(5, 4), w.take(5), w.take(1)
    rows = w.call(aten.reshape.default, x, [6, 4])
    adds = [w.graph.call_function(aten.addmm.default, (term, rows, w.call(aten.t.default, weight)), {"beta": 1, "alpha": alpha})
            for term, alpha in ((bias, 1), (bias, 2), (number, 1))]
    for add in adds:
        add.meta["val"] = torch.empty(6, 5, device="meta")
    w.graph.output((w.call(aten.reshape.default, adds[0], [2, 3, 5]), *adds[1:]))
    given = [torch.randn(n.meta["val"].shape) for n in (x, weight, bias, number)]
    want = straight(w.graph, "apart")(list(given))
    assert join_linears(w.graph) == 1
    left = targets(w.graph)
    assert left.count(aten.linear.default) == 1 and left.count(aten.addmm.default) == left.count(aten.t.default) == 2
    assert all(map(torch.equal, straight(w.graph, "joined")(list(given)), want))


def test_a_sum_and_what_drops_its_dims_are_one_call() -> None:
    w = Writer()
    x = w.take(2, 3, 4)
    summed = w.call(aten.sum.dim_IntList, x, [0, -2], True)
    kept = w.call(aten.sum.dim_IntList, x, [1], True)  # its dims are dropped for one of two readers
    other = w.call(aten.sum.dim_IntList, x, [2], True)  # its dims are dropped and others are joined
    outs = (w.call(aten.view.default, summed, [4]), kept, w.call(aten.view.default, kept, [2, 4]), w.call(aten.reshape.default, other, [6]))
    w.graph.output(outs)
    given = [torch.randn(2, 3, 4)]
    want = straight(w.graph, "apart")(list(given))
    assert join_sums(w.graph) == 1
    assert targets(w.graph)[0] == targets(w.graph)[1] == aten.sum.dim_IntList and len(targets(w.graph)) == 5
    got = straight(w.graph, "joined")(list(given))
    assert all(map(torch.equal, got, want)) and [t.shape for t in got] == [t.shape for t in want]


def test_a_sum_with_ops_before_its_wait_is_carried_as_a_late_one() -> None:
    """Messages between two ranks take less time where the wait comes at once, gloo's own call less of the step where it does not."""
    graph, group = Graph(), SimpleNamespace(name="g")
    x, y = graph.placeholder("x"), graph.placeholder("y")
    kind, calls = RUN["all_reduce"], []
    for late in (False, True):
        calls.append(graph.call_function(kind.in_place, (x, "sum", "g")))
        if late:
            y = graph.call_function(aten.relu.default, (y,))
        graph.call_function(_torch.WAIT, (calls[-1],))
    graph.output((x, y))
    carry(graph, {"g": group})
    assert [n.target for n in calls] == [start(kind, group, in_place=True), start(kind, group, in_place=True, late=True)]
    assert calls[0].target is not calls[1].target and calls[1].args == (x, "sum", group)
