"""`verify` passes what is right, and names the op of what is wrong."""
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.precision import Precision
from autoshard.base.spec import R
from autoshard.collectives.exchange import Exchange
from autoshard.errors import UsageError
from autoshard.formulate.problem_of import formulate
from autoshard.rules.check import oracle
from autoshard.rules.types import Row
from autoshard.space.decision_units import singletons
from autoshard.verification import plans, run
from autoshard.verification.check import verify

aten = torch.ops.aten
SPLITTING = ("split", "data_parallel", "fully_sharded", "tensor_parallel", "random:0", "random:1")


class Net(nn.Module):
    """Batch norm, dropout, a tied weight, a frozen parameter, an embedding."""

    def __init__(self, p=0.0):
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.drop, self.head = nn.BatchNorm1d(16), nn.Dropout(p), nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight
        self.down.bias.requires_grad_(False)

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.down(self.drop(F.gelu(self.up(x))))
        return self.head(self.norm(x.flatten(0, 1)))


def loss(out, target):
    return F.cross_entropy(out, target.flatten())


def batch():
    torch.manual_seed(1)
    return torch.randint(32, (8, 4)), torch.randint(32, (8, 4))


def test_right_plans_pass_on_two_axes_over_three_steps():
    torch.manual_seed(0)
    report = verify(Net(), "dp=2,tp=2", batch(), loss_fn=loss, plans=SPLITTING, steps=3)
    assert report.ok and report.dtype == "float64" and report.tolerance == 1e-9, str(report)
    assert all(p.split > 20 for p in report.plans), str(report)
    kinds = {c.kind for c in report.plans[0].checks}
    assert kinds == {"output", "gradient", "buffer", "weight"}
    named = {(c.kind, c.name) for c in report.plans[0].checks}
    assert ("buffer", "norm.running_mean") in named and ("gradient", "down.bias") not in named
    assert max(c.error for p in report.plans for c in p.checks) > 0, "a comparison of a thing with itself"


def test_layouts_may_change_at_every_op(monkeypatch):
    """Refined plans change them inside decision units too."""
    torch.manual_seed(0)
    monkeypatch.setattr(plans, "formulate", lambda table: formulate(table, units=singletons(table)))
    report = verify(Net(), "dp=2,tp=2", batch(), loss_fn=loss, plans=("tensor_parallel", "random:0", "random:1", "random:2"))
    assert report.ok and all(p.split > 20 for p in report.plans), str(report)


def test_dropout_is_compared_under_the_numbers_that_the_ranks_drew():
    report = verify(Net(0.3), "d=4", batch(), loss_fn=loss, plans=SPLITTING, steps=2)
    assert report.ok and all(p.random for p in report.plans), str(report)
    assert {"output", "gradient", "buffer", "weight"} == {c.kind for c in report.plans[0].checks}
    assert {"trace", "sharded"} == {c.run for c in report.plans[0].checks}


def test_inference_and_the_model_stays_as_it_was():
    model = Net().eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = verify(model, "tp=2", batch()[:1], plans=("split",), training=False)
    assert report.ok and {c.kind for c in report.plans[0].checks} == {"output"}
    assert all(torch.equal(before[n], t) and t.dtype == before[n].dtype for n, t in model.state_dict().items())
    assert torch.get_default_dtype() is torch.float32


BROKEN_MM = Row((1, 0), (R,))  # the sum over ranks is forgotten


def test_a_broken_rule_is_named_with_its_line(broken_rule):
    with broken_rule(aten.mm.default, BROKEN_MM):
        report = verify(Net(), "tp=2", batch(), loss_fn=loss, plans=("split",))
    assert not report.ok
    wrong = report.plans[0].first_wrong
    assert (wrong.kind, wrong.target, wrong.rule) == ("op", "aten.mm.default", "own"), str(wrong)
    assert wrong.inputs == ("S1", "S0") and wrong.outputs == ("R",)
    assert "test_verify.py:" in wrong.where and "first wrong op: mm" in str(report)


def test_the_oracle_catches_the_same_rule(broken_rule):
    meta = TensorMeta((8, 8), torch.float64)
    call = Call(aten.mm.default, (Slot(0), Slot(1)), (), (meta, meta), (meta,))
    tensors = [torch.randn(8, 8, dtype=torch.float64) for _ in range(2)]
    assert oracle.wrong_rows(call, tensors) == []
    with broken_rule(aten.mm.default, BROKEN_MM):
        assert any(BROKEN_MM in wrong.rows for wrong in oracle.wrong_rows(call, tensors))


def test_a_wrong_redistribution_is_named_as_one(monkeypatch):
    right = Exchange.reference
    monkeypatch.setattr(Exchange, "reference", lambda self, pieces, op: right(self, pieces[::-1] if self is Exchange.GATHER else pieces, op))
    report = verify(Net(), "tp=2", batch(), loss_fn=loss, plans=("fully_sharded",))
    wrong = report.plans[0].first_wrong
    assert not report.ok and wrong.kind == "redistribution", str(report)
    assert wrong.outputs == ("R",) and "redistribution S" in str(wrong)


def test_local_inputs_memory_and_another_optimizer():
    report = verify(Net(), "dp=2,tp=2", batch(), loss_fn=loss, plans=("split", "random:0"), steps=2, inputs="local", optimizer="sgd",
                    memory_budget="1MiB")
    assert report.ok, str(report)
    assert all(p.plan.ops[f"input:{i}"].outputs == ((0, R),) for p in report.plans for i in (0, 1))
    assert report.plans[0].plan.memory["limit"] == 2**20
    with pytest.raises(UsageError, match="input:0 of shape .* does not split along dim 0 over dp=3"):
        verify(Net(), "dp=3", batch(), loss_fn=loss, plans=("split",), inputs="local")


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.a(x) + 0 * self.b(x) if x.sum() > 0 else self.b(x) + 0 * self.a(x)


def test_a_submodule_that_runs_whole():
    model = nn.Sequential(nn.Linear(16, 16), Gate(), nn.Linear(16, 16))
    report = verify(model, "d=2", (torch.randn(8, 16),), plans=SPLITTING, fallback="replicate")
    assert report.ok and any("whole_forward" in f.target for f in report.plans[0].plan.fallbacks), str(report)


class Keeps(nn.Module):
    """Starts anew at position 0, and keeps its last state."""

    def __init__(self):
        super().__init__()
        self.linear, self.last, self.lock = nn.Linear(4, 4), None, None

    def forward(self, x):
        state = torch.zeros(4, dtype=x.dtype) if self.last is None else 0.5 * self.last.detach()
        self.last = self.linear(x).mean(0)
        return self.linear(x) + state


def test_a_model_that_keeps_tensors_of_an_earlier_call():
    model = Keeps()
    model(torch.randn(2, 4))
    assert model.last.grad_fn is not None
    report = verify(model, "d=2", (torch.randn(2, 4),), plans=("split",))
    assert report.ok, str(report)
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be copied .*lock.*keep objects"):
        verify(model, "d=2", (torch.randn(2, 4),), plans=("split",))


class Rms(nn.Module):
    """A norm that computes in float32 whatever comes in, as many do."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def forms(case):
    """A verification of one kind of program with floats of less than 64 bits."""
    given = {"loss_fn": loss, "plans": ("fully_sharded", "random:1"), "steps": 2}
    if case == "float32 inside":
        return verify(nn.Sequential(Net(), Rms(), nn.Linear(32, 32)), "d=2", batch(), **given)
    if case == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return verify(Net(0.3), "d=2", batch(), **given)
    return verify(Net(0.3), "d=2" if case == "fp32" else "dp=2,tp=2", batch(), **given, precision=Precision(reduce=case))


@pytest.mark.parametrize(("case", "runs"), [("float32 inside", {"trace", "sharded"}), ("autocast", {"trace", "sharded", "rounded"}),
                                            ("fp32", {"trace", "sharded", "rounded"}), ("bf16", {"trace", "sharded", "rounded"})])
def test_floats_that_round_are_compared_in_float64_and_then_as_they_are(case, runs):
    torch.manual_seed(0)
    report = forms(case)
    assert report.ok and not report.notes, str(report)
    assert all({c.run for c in p.checks} == runs and p.split > 20 for p in report.plans)
    sharp = [c for p in report.plans for c in p.checks if c.run == "sharded"]
    assert 0 < max(c.error / c.size for c in sharp) < 1e-12 and all(c.limit <= 1e-9 * c.size for c in sharp)
    rounded = [c for p in report.plans for c in p.checks if c.run == "rounded"]
    assert not rounded or max(c.error for c in rounded) > 0 and max(c.badness for c in rounded) > 0.01, "a limit that nothing can reach"


def test_a_broken_rule_is_named_under_a_policy(broken_rule):
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))
    with broken_rule(aten.mm.default, BROKEN_MM):
        report = verify(model, "tp=2", (torch.randn(8, 16),), plans=("split",), precision=Precision())
    wrong = report.plans[0].first_wrong
    assert not report.ok and wrong.target == "aten.mm.default", str(report)
    assert {c.run for c in report.plans[0].checks if not c.ok} == {"sharded", "rounded"}


class Compiled(nn.Module):
    """Another model while it is exported, and only there one graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if torch.compiler.is_exporting():
            return self.linear(x) * 1.05
        return self.linear(x) * (1.0 if x.sum() > -1e9 else 2.0)


def test_a_gradient_that_nobody_wants_in_low_precision():
    """Backward of a norm right behind the input makes no gradient of its first argument."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    report = verify(model, "dp=2", (torch.randn(8, 16),), plans=("split",), precision=Precision())
    assert report.ok, str(report)


@pytest.mark.parametrize(("stored", "precision"), [
    (torch.float32, Precision("bf16", "bf16", "bf16")), (torch.float32, Precision("fp64", "fp32")), (torch.bfloat16, Precision()),
    (torch.float32, Precision("fp32", "bf16"))])
def test_batch_norms_take_parameters_and_statistics_in_one_dtype(stored, precision):
    """torch takes no others; statistics that are cast are written back, though torch's op does not tell that it wrote them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)).to(stored)
    report = verify(model, "dp=2", (torch.randn(8, 16, dtype=stored),), plans=("split",), precision=precision, steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("precision", [None, Precision()])
def test_a_trace_that_is_another_model_is_told(precision):
    report = verify(Compiled(), "tp=2", (torch.randn(8, 16),), plans=("split",), precision=precision)
    assert not report.ok and report.plans[0].first_wrong.kind == "trace", str(report)


class Cancels(nn.Module):
    """The gradient of a bias before a batch norm is zero, and what is left of it is rounding of much larger numbers."""

    def __init__(self, scale):
        super().__init__()
        self.up, self.norm, self.down, self.scale = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False), scale

    def forward(self, x):
        up = self.up(x)
        return self.down(self.norm(up) * self.scale).square().mean() + 0 * up.sum()


def test_the_rest_of_what_cancels_is_not_taken_for_an_error(monkeypatch):
    """With nothing measured against the norm of all gradients."""
    monkeypatch.setattr(run, "TINY", 0.0)
    torch.manual_seed(0)
    report = verify(Cancels(1e4), "d=2", (torch.randn(8, 16),), plans=("split", "random:0"))
    assert report.ok, str(report)
    excused = [c for p in report.plans for c in p.checks if c.limit > 1.01e-9 * c.size]
    assert "up.bias" in {c.name for c in excused}


class OnASphere(nn.Module):
    """Every gradient is zero but for rounding: the loss of vectors of length 1 is a constant. The cast keeps float32 in the graph."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        out = self.down(self.up(x).tanh())
        return (out / out.norm(dim=-1, keepdim=True)).float().square().mean()


def test_gradients_that_are_rounding_alone_are_not_taken_for_an_error():
    torch.manual_seed(0)
    report = verify(OnASphere(), "d=4", (torch.randn(8, 16),), plans=("split", "random:0"))
    assert report.ok, str(report)
    assert any(c.run == "sharded" and c.limit > 1.01e-9 * c.size for p in report.plans for c in p.checks), "some were excused"


@pytest.mark.parametrize("plans, text", [((object(),), r"plans= takes names \(searched, .*not object; pass a plan as plan="), (("serched",), "did you mean searched"),
                                         ((), "no plans to verify")])
def test_plans_are_named(plans, text):
    with pytest.raises(UsageError, match=text):
        verify(torch.nn.Linear(4, 4), "d=2", (torch.randn(4, 4),), plans=plans)
