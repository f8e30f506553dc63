"""What forward saves reaches backward as it lies in memory, and views are taken of what kernels can view."""
import torch
from torch import nn

import autoshard
from autoshard.base.mesh import Mesh, parse_mesh
from autoshard.lower.emit import Emitter, Part
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.program.trace import trace
from autoshard.runtime.route import route_of
from autoshard.verification.check import verify

aten = torch.ops.aten


class Net(nn.Module):
    """Channels are whole before the norm and split in it, so each rank saves a slice with gaps."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.GroupNorm(4, 16), nn.Parameter(torch.ones(16, 1, 1))

    def forward(self, x):
        return self.norm(autoshard.annotate((x * self.scale).cumsum(1), "-,d,-,-"))


SEEDS = {"norm": "-,d,-,-"}


def test_saved_values_keep_their_strides():
    model, x = Net(), torch.randn(4, 16, 2, 2)
    plan = autoshard.plan(model, "d=2", (x,), seeds=SEEDS, outputs="dtensor")
    traced = trace(model, (x,), marks=SEEDS)
    lowered = lower(traced.graph, plan, parse_mesh("d=2"), schedule(traced.graph, plan, parse_mesh("d=2"), route_of(plan)))
    (results,) = next(n for n in lowered.forward.graph.nodes if n.op == "output").args
    saved = {p.name: n.meta["val"] for p, n in zip(lowered.forward.gives, results, strict=True) if p.kind == "saved"}
    taken = [n.meta["val"] for n in lowered.backward.graph.nodes if n.op == "placeholder"]
    assert any(not t.is_contiguous() for t in saved.values()), "the case tests nothing"
    for port, t in zip((p for p in lowered.backward.takes), taken, strict=True):
        if port.kind == "saved":
            assert t.stride() == saved[port.name].stride(), port.name


def test_a_norm_over_saved_slices_is_right():
    report = verify(Net(), "d=2", (torch.randn(4, 16, 2, 2),), plans=("searched", "split"), seeds=SEEDS)
    assert report.ok, str(report)


def test_no_view_across_a_gap_beside_a_dim_of_size_one():
    emit = Emitter(Mesh(("d",), (2,)))
    x = emit.placeholder("x", (4, 1, 6, 4), torch.float32, (48, 24, 4, 1))
    with emit.part(Part("compute", "view", "forward")):
        gap, none = aten.view.default(x, [24, 4]), aten.view.default(x, [4, 24])
    assert gap.node.target is aten.reshape.default and none.node.target is aten.view.default
