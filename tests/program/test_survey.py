"""What cannot be one graph is listed in full, each place with its line and module."""
import dataclasses
import os
import re

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop

import autoshard
from autoshard.errors import TraceError
from autoshard.program.trace import trace


class Calls(nn.Module):
    """A linear layer and a body given as a function (module, x)."""

    def __init__(self, body):
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body

    def forward(self, x):
        return self.body(self, x)


def branch(m, x):
    return m.linear(x) if x.sum() > 0 else x


def to_numpy(m, x):
    scale = float(x.detach().numpy().max())
    return m.linear(x) * scale


def backward_reads_data(m, x):
    return Weird.apply(m.linear(x))


def drops_rows(m, x):
    return m.linear(x)[x[:, 0] > 0].amax(0)


def only_raises(m, x):
    raise KeyError("missing")


class Weird(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * float(g.sum())


def errors_of(*bodies, **kwargs):
    model = nn.Sequential(*(Calls(body) for body in bodies))
    with pytest.raises(TraceError) as error:
        trace(model, (torch.randn(4, 8),), **kwargs)
    return str(error.value)


def line_of(function, offset=1):
    return f"{os.path.relpath(__file__)}:{function.__code__.co_firstlineno + offset}"


def test_all_places_at_once_with_their_modules_and_lines():
    text = errors_of(branch, to_numpy, branch, backward_reads_data)
    assert "3 places to change" in text, "of two modules of the same code there is one"
    for module, place in (("0, 2", line_of(branch)), ("1", line_of(to_numpy)), ("3", line_of(Weird.backward, 2))):
        assert re.search(rf"in {module}: .*\n.*{re.escape(place)}", text), (module, place, text)
    assert text.count("choose by torch.where") == 3, "a way out for each"
    assert 'let 0, 1, 2, 3 run whole on every rank: fallback="replicate"' in text


def test_one_place_keeps_its_message():
    text = errors_of(branch)
    assert text.startswith("the forward pass depends on the data") and "places" not in text and "let 0 run whole" in text


def test_what_could_not_be_looked_at_is_said():
    text = errors_of(branch, only_raises, to_numpy)
    assert "2 places" in text and "what comes after '1' was not looked at" in text and "numpy" not in text


def test_refused_ops_do_not_hide_each_other():
    model = Calls(lambda m, x: m.linear(x.mul_(2)) * torch.rand(8, generator=torch.Generator()))
    model.linear.weight.register_hook(lambda g: g)
    with pytest.raises(TraceError) as error:
        trace(model, (torch.randn(4, 8),))
    text = str(error.value)
    assert "3 places" in text and "gradient hook" in text and "torch.Generator" in text and "writes into its input" in text


def conditional(m, x):
    return torch.cond(x.sum() > 0, lambda z: m.linear(z), lambda z: m.linear(z) * 2, (x,))


def looped(m, x):
    return while_loop(lambda z: z.sum() < 10, lambda z: (z + 1,), (m.linear(x),))[0]


def item(m, x):
    return m.linear(x) * x.max().item()


def indexed(m, x):
    return m.linear(x)[:, x.argmax()]


def nonzero(m, x):
    return m.linear(x).sum() + x.nonzero().amax(0).sum()


def unique(m, x):
    return m.linear(x) * torch.unique(x).numel()


def counted(m, x):
    return m.linear(x) * torch.bincount(x.long().abs().flatten()).max()


def repeated(m, x):
    return m.linear(x).repeat_interleave(x.long().abs().sum(1), 0)


def compared(m, x):
    return m.linear(x) if torch.equal(x, x + 1) else x


@pytest.mark.parametrize("body, what, way", [
    (conditional, "torch.cond is not supported", "choose by torch.where"), (looped, "while_loop is not supported", "fixed number of steps"),
    (item, r"read out of a tensor \(.item\(\)", "keep it a tensor"), (branch, "`if` or `while` on a tensor", "choose by torch.where"),
    (to_numpy, "read out of a tensor", "keep it a tensor"), (indexed, "an index i without dims", "x[:, i[None]]"), (drops_rows, "boolean mask", "masked_fill"), (nonzero, "torch.nonzero", "torch.topk"),
    (unique, "torch.unique", "scatter_add"), (counted, "torch.bincount", "scatter_add"), (repeated, "repeat_interleave", "output_size"),
    (compared, "torch.equal", "tolerance"),
], ids=lambda v: getattr(v, "__name__", ""))
def test_what_depends_on_data_is_named_with_a_way_out(body, what, way):
    text = errors_of(body)
    assert re.search(what, text) and way in text and line_of(body) in text and "let 0 run whole" in text, text


def test_what_the_way_out_says_works():
    def fixed(m, x):
        h = m.linear(x)
        chosen = torch.where(x > 0, h, 0) + h.masked_fill(x > 1, 0) * h.max()
        return chosen.repeat_interleave(torch.tensor([1, 2, 0, 3]), 0, output_size=6), torch.zeros(8).scatter_add(0, x.argmax(1), x[:, 0])

    assert trace(Calls(fixed), (torch.randn(4, 8),)).graph.of_kind("call")


def test_torch_modules_that_read_data():
    with pytest.raises(TraceError, match=r"(?s)BatchNorm with momentum=None.*momentum=0.1.*let 1 run whole"):
        trace(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), (torch.randn(4, 8),))


def test_results_that_are_no_pytree():
    @dataclasses.dataclass
    class Result:
        values: torch.Tensor

    with pytest.raises(TraceError, match=r"torch.export.register_dataclass\(Result\)"):
        trace(Calls(lambda m, x: Result(m.linear(x))), (torch.randn(4, 8),))


def test_a_loop_on_data_ends():
    def until(m, x):
        while x.norm() > 1:
            x = m.linear(x)
        while x.sum().item() < 10:
            x = x + 1
        return x

    assert "asks for the data of tensors again and again" in errors_of(until)


def test_the_loss_is_looked_at_too():
    model = nn.Sequential(Calls(branch))
    with pytest.raises(TraceError, match="2 places") as error:
        trace(model, (torch.randn(4, 8), torch.randn(4, 8)), loss_fn=lambda out, t: (out - t).abs().max().item() * out.sum())
    assert "fallback" not in str(error.value), "the loss is no submodule"


def test_data_read_below_python_is_told_as_such():
    def body(m, x):
        rows = tuple(x[:2, 0].long().abs() % 4)
        out = m.linear(x).clone()
        out[rows, (0, 1)] = 0.0
        return out

    assert "depends on the data of a tensor" in errors_of(body)


def test_a_wrong_shape_names_the_module_and_its_input():
    for model in (nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())):
        with pytest.raises(autoshard.AutoshardError) as error:
            autoshard.plan(model, "d=2", (torch.zeros(8, 15),), cluster="cpu-gloo")
        text = str(error.value)
        assert "in Linear(in_features=16, out_features=16, bias=True), with input (8, 15) float32" in text
        assert "fallback" not in text, "the module does not run whole either"
