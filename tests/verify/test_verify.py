"""`verify` passes what is right, and names the op of what is wrong."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.errors import UsageError
from autoshard.graph import Call, Slot, TensorMeta
from autoshard.rules import oracle
from autoshard.rules.types import Row
from autoshard.spec import R
from autoshard.verify import collectives
from autoshard.verify.check import verify

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


def test_dropout_is_compared_under_the_numbers_that_the_ranks_drew():
    report = verify(Net(0.3), "d=4", batch(), loss_fn=loss, plans=SPLITTING, steps=2)
    assert report.ok and all(p.random for p in report.plans), str(report)
    assert {"random", "output", "gradient", "buffer", "weight"} == {c.kind for c in report.plans[0].checks}


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
    right = collectives._KINDS["all_gather"]
    monkeypatch.setitem(collectives._KINDS, "all_gather", lambda pieces, arguments: right(pieces[::-1], arguments))
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


def test_a_model_that_keeps_tensors_of_an_earlier_call():
    model = nn.Linear(4, 4)
    model.last = model(torch.randn(2, 4))
    with pytest.raises(UsageError, match="keeps tensors of an earlier call"):
        verify(model, "d=2", (torch.randn(2, 4),), plans=("split",))
