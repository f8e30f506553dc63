"""Models that use what few tests have, against the model on one device: one line per model, several plans each."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import _torch
from autoshard.errors import LoweringError
from autoshard.lower.passes import in_place

KINDS = ("split", "fully_sharded", "random:0", "random:1")


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


torch.export.register_dataclass(Pair)


class Body(nn.Module):
    """A linear layer `l`, a weight `w`, an empty parameter `e`, frozen statistics `b`, and a body given as a function (module, x)."""

    def __init__(self, body):
        super().__init__()
        self.body, self.l = body, nn.Linear(12, 12)
        self.w = nn.Parameter(torch.eye(12) + 0.1 * torch.randn(12, 12))
        self.e = nn.Parameter(torch.zeros(0, 4))
        self.b = nn.BatchNorm1d(12).eval()
        self.drops = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3))
        self.mixed = nn.Sequential(Sigmoid(), nn.Dropout(0.3), nn.Linear(12, 12))
        self.residual = nn.Sequential(Residual(), Residual())

    def forward(self, x):
        return self.body(self, x)

    def nested(self, x):
        return self.l(checkpoint(self.drops, x, use_reentrant=False)).sin()


class Residual(nn.Module):
    """Checkpoints a method of its own: the sums between its modules run in no module when backward repeats them."""

    def __init__(self):
        super().__init__()
        self.drops, self.mixed = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3)), nn.Sequential(Sigmoid(), nn.Linear(12, 12), nn.Dropout(0.3))

    def forward(self, x):
        return again(self.inner, x)

    def inner(self, x):
        x = x + self.drops(x)
        return x + self.mixed(x)


class Sigmoid(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * x


def again(f, x):
    return checkpoint(f, x, use_reentrant=False)


def complexes(m, x):
    return torch.polar(x.abs() + 1, m.l(x))


def definite(m):
    return m.w @ m.w.T + torch.eye(12, dtype=m.w.dtype)


X = (8, 12)
TURN = torch.polar(torch.ones(12), torch.arange(12.0))
EMPTY = {
    "parameter": (lambda m, x: m.l(x) + m.e.sum(), X),
    "parameter in cat": (lambda m, x: torch.cat([m.l(x).flatten(), m.e.flatten()]), X),
    "slice": (lambda m, x: torch.cat([m.l(x[:, :0]), m.l(x)], 1), (8, 5, 12)),
    "slice of features": (lambda m, x: m.l(x) + x[:, :0].sum() + (x[:, :0] @ m.w[:0]), X),
    "batch": (lambda m, x: F.relu(m.l(x)) @ m.w, (0, 12)),
    "batch, summed": (lambda m, x: F.relu(m.l(x)).sum() + m.w.sum(), (0, 12)),
    "sequence, normalised": (lambda m, x: F.layer_norm(m.l(x), (12,), m.w[0], m.w[1]).softmax(-1).sum(1), (8, 0, 12)),
    "sequence, attention": (lambda m, x: F.scaled_dot_product_attention(*(m.l(x).view(8, 0, 2, 6).transpose(1, 2),) * 3).sum((1, 2)), (8, 0, 12)),
    "loss of no rows": (lambda m, x: F.cross_entropy(m.l(x), torch.zeros(0, dtype=torch.int64), reduction="sum") + m.w.sum(), (0, 12)),
    "rows looked up": (lambda m, x: F.embedding(torch.zeros(4, 0, dtype=torch.int64), m.w).sum() + m.l(x), X),
    "frozen batch norm": (lambda m, x: m.b(m.l(x)) @ m.w, X),
}
CONJUGATES = {
    "real": (lambda m, x: complexes(m, x).conj().real, X),
    "imag": (lambda m, x: complexes(m, x).conj().imag * 2, X),
    "resolved": (lambda m, x: torch.view_as_real(complexes(m, x).conj().resolve_conj()), X),
    "times a constant": (lambda m, x: torch.view_as_real(complexes(m, x) * TURN), X),
    "times": (lambda m, x: torch.view_as_real(complexes(m, x).conj() * complexes(m, x + 1)), X),
    "matmul": (lambda m, x: (complexes(m, x) @ complexes(m, x).mH).abs(), X),
    "written in place": (lambda m, x: torch.view_as_real((complexes(m, x) + 1).conj().mul_(2j).add_(1).resolve_conj()), X),
    "spectrum": (lambda m, x: torch.fft.irfft(torch.fft.rfft(m.l(x)).conj() * 2, n=12), X),
}
PAIRS = {
    "after a transposition": (lambda m, x: torch.view_as_complex(m.l(x).view(8, 6, 2, 6).transpose(-1, -2).contiguous()).abs(), (8, 6, 12)),
    "rotary": (lambda m, x: torch.view_as_real(torch.view_as_complex(m.l(x).view(8, 6, 3, 2, 2).transpose(1, 2)) * 1j).flatten(-2).cumsum(2), (8, 6, 12)),
}
CHECKPOINTS = {
    "dropout in torch's modules": (lambda m, x: x + again(m.drops, x), X),
    "own module before": (lambda m, x: x + again(m.mixed, x), X),
    "one input twice": (lambda m, x: sum(k * again(m.drops, x) for k in (1, 2, 3)) @ m.w, X),
    "beside the same without": (lambda m, x: m.drops(x) * again(m.drops, x), X),
    "nested": (lambda m, x: again(m.nested, x) * x, X),
    "a module's own method": (lambda m, x: m.residual(x) @ m.w, X),
    "one method twice": (lambda m, x: m.residual[0](x) * m.residual[0](x + 1), X),
    "a module's own method, nested": (lambda m, x: again(m.residual, x) * x, X),
}
LINALG = {
    "inv": (lambda m, x: x @ torch.linalg.inv(m.w), X),
    "solve": (lambda m, x: torch.linalg.solve(m.w, m.l(x).T), X),
    "solve vectors": (lambda m, x: torch.linalg.solve(definite(m).expand(8, 12, 12), m.l(x)), X),
    "solve left": (lambda m, x: torch.linalg.solve(m.w, m.l(x), left=False), X),
    "cholesky": (lambda m, x: m.l(x) @ torch.linalg.cholesky(definite(m)), X),
    "cholesky_solve": (lambda m, x: torch.cholesky_solve(m.l(x).T, torch.linalg.cholesky(definite(m))), X),
    "pinv": (lambda m, x: m.l(x) @ torch.linalg.pinv(m.w), X),
    "svdvals": (lambda m, x: torch.linalg.svdvals(m.l(x).view(-1, 3, 4)), X),
    "eigvalsh": (lambda m, x: m.l(x) * torch.linalg.eigvalsh(definite(m)), X),
    "qr": (lambda m, x: torch.linalg.qr(m.l(x).view(8, 4, 3)).R.abs(), X),
    "det": (lambda m, x: m.l(x) * torch.linalg.det(m.w) + torch.linalg.slogdet(m.w).logabsdet, X),
    "det of transposed": (lambda m, x: torch.linalg.det(m.l(x).mT) + torch.linalg.slogdet(m.l(x + 1).mT).logabsdet, (8, 12, 12)),
    "batch of inv": (lambda m, x: torch.linalg.inv(m.l(x).view(8, 2, 6)[:, :, :2] + 3 * torch.eye(2)), X),
}
ORDERS = {  # gradients come transposed to an op whose other input is not
    name: (lambda m, x, f=f: torch.cumsum(f(m.l(x)).transpose(1, 2), 2) @ m.w[:5], (8, 5, 12))
    for name, f in {"softplus": F.softplus, "elu": F.elu, "relu6": F.relu6, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
                    "dropout": lambda x: F.dropout(x, 0.3), "logsigmoid": F.logsigmoid, "copysign": lambda x: torch.copysign(x, x.detach())}.items()
}
FLOAT8 = {
    "there and back": (lambda m, x: m.l(x).to(torch.float8_e4m3fn).to(x.dtype) @ m.w, X),
    "of products": (lambda m, x: (m.l(x) @ m.w).detach().to(torch.float8_e5m2).to(x.dtype) + m.l(x), X),
}
RESULTS = {
    "dataclass": (lambda m, x: Pair(m.l(x), x @ m.w), X),
}
ALL = {f"{family}: {name}": case for family, table in (("empty", EMPTY), ("conj", CONJUGATES), ("pairs", PAIRS), ("checkpoint", CHECKPOINTS), ("linalg", LINALG),
                                                        ("order", ORDERS), ("float8", FLOAT8), ("result", RESULTS)) for name, case in table.items()}


@pytest.mark.parametrize("case", ALL, ids=str)
def test_same_numbers(case):
    body, shape = ALL[case]
    torch.manual_seed(0)
    report = autoshard.verify(Body(body), "dp=2,tp=2", (torch.randn(*shape),), plans=KINDS)
    assert report.ok, str(report)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_compiled_on_one_device(case):
    """What only the running form has: arguments, memory that is used again, autograd."""
    body, shape = ALL[case]
    torch.manual_seed(0)
    model, x = Body(body).double(), torch.randn(*shape).double()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        want = [t for t in torch.utils._pytree.tree_leaves(model(x)) if t.requires_grad]
        sum(t.sum() for t in want).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    torch.manual_seed(1)
    got = [t for t in torch.utils._pytree.tree_leaves(compiled(x)) if t.requires_grad]
    sum(t.sum() for t in got).backward()
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))
    assert {n for n, p in compiled.named_parameters() if p.grad is not None} == set(grads)
    assert all(torch.allclose(p.grad, grads[n], atol=1e-9) for n, p in compiled.named_parameters() if n in grads)


@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z.conj()[:, :6]], ids=["conjugate", "negative", "slice"])
def test_inputs_and_buffers_that_are_notes_on_others(make):
    class Reads(nn.Module):
        def __init__(self, b):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 1))
            self.register_buffer("b", b)

        def forward(self, x):
            parts = [torch.view_as_real(t).sum(-1) if t.is_complex() else t for t in (x, self.b)]
            return parts[0] * self.w + parts[1]

    given = make(torch.randn(8, 12, dtype=torch.complex128))
    assert given.is_conj() or given.is_neg()
    model = Reads(given)
    plain = given.resolve_conj().resolve_neg()
    want = Reads(plain.clone())
    want.w = model.w
    compiled = autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    assert torch.equal(compiled(given), want(plain))
    assert autoshard.verify(want, "d=2", (given,), plans=("split",)).ok


def test_rows_of_grouped_matmuls_stay_whole_units():
    class Experts(nn.Module):
        def __init__(self, wide):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(4, wide, 48)), nn.Parameter(torch.randn(4, 48, wide))

        def forward(self, x):
            offs = torch.arange(1, 5, dtype=torch.int32) * 8
            h = torch._grouped_mm(x.bfloat16(), self.w.bfloat16().transpose(-2, -1), offs=offs)
            return torch._grouped_mm(h.relu(), self.v.bfloat16().transpose(-2, -1), offs=offs).float()

    for wide in (32, 40):  # cut in 4, 40 are 10: 20 bytes
        report = autoshard.verify(Experts(wide), "tp=4", (torch.randn(32, 48),), plans=(*KINDS, "tensor_parallel"))
        assert report.ok, str(report)


def test_dropout_whose_mask_nobody_keeps():
    model = Body(lambda m, x: m.drops(x))
    assert autoshard.verify(model, "d=2", (torch.randn(*X),), plans=("split", "random:0"), training=False).ok


@pytest.mark.parametrize("pad", ["weights", "all"])
def test_dropout_of_a_padded_dim(pad):
    """16 features on three ranks are computed as 18, five rows as six: torch's generator would give other numbers than it gives the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.Linear(16, 12), nn.Dropout1d(0.2))
    report = autoshard.verify(model, "d=3", (torch.randn(5, 12),), plans=("split", "random:0"), pad=pad)
    assert report.ok, str(report)


@pytest.mark.parametrize("make", [
    lambda: nn.LSTM(12, 6, 2, dropout=0.3), lambda: nn.LSTM(12, 6, 3, dropout=0.3, bidirectional=True, batch_first=True, proj_size=4, bias=False),
    lambda: nn.GRU(12, 6, 2, dropout=0.3, bidirectional=True), lambda: nn.RNN(12, 6, 2, dropout=1.0),
    lambda: nn.RNN(12, 6, 2, dropout=0.3, nonlinearity="relu", batch_first=True)], ids=["lstm", "projected", "gru", "all dropped", "relu"])
def test_dropout_between_recurrent_layers(make):
    """torch's decomposition of these drops nothing; verify compares with the model under the same numbers of torch's generator."""
    torch.manual_seed(0)
    report = autoshard.verify(make(), "d=2", (torch.randn(5, 4, 12),), plans=("split", "random:0"))
    assert report.ok, str(report)


def test_dropout_between_recurrent_layers_of_one_sequence():
    report = autoshard.verify(nn.LSTM(12, 6, 2, dropout=0.3), "d=2", (torch.randn(5, 12), (torch.randn(2, 6), torch.randn(2, 6))), plans=("split",))
    assert report.ok, str(report)


def salience(m, x):
    """How much each hidden number matters for the largest output: a gradient inside of forward, in evaluation too."""
    with torch.enable_grad():
        h = m.l(x)
        out = h.sin() @ m.w
        return out, torch.autograd.grad(out.amax(1).sum(), h, retain_graph=True)[0].abs()


def asks(m, x):
    return m.l(x) * (2 if m.w.requires_grad and all(p.requires_grad for p in m.l.parameters()) else 1)


def asks_mode(m, x):
    return m.l(x) * (2 if torch.is_grad_enabled() else 1) * (3 if x.requires_grad else 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("body", [salience, asks, asks_mode])
def test_forward_that_depends_on_what_is_trained(body, frozen):
    """Weights and inputs require gradients under `torch.no_grad()`, too, and a frozen model runs with gradients enabled."""
    torch.manual_seed(0)
    model = Body(body).double().eval().requires_grad_(not frozen)
    compiled, x = autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False), torch.randn(*X).double()
    for trained, enabled in ((False, False), (False, True), (True, False), (True, True)):
        if frozen and body is salience and not trained:
            continue  # nothing to differentiate
        with torch.set_grad_enabled(enabled):
            given = x.clone().requires_grad_(trained)
            torch.testing.assert_close(compiled(given), model(given))


# --- verify runs what the runtime runs

def test_an_op_that_overwrites_what_is_read_later_is_seen(monkeypatch):
    """The pass that reuses memory belongs to what is verified."""
    monkeypatch.setattr(in_place._Memory, "may_take", lambda self, node, k, at: True)
    report = autoshard.verify(Body(lambda m, x: (m.l(x) + 1) * m.l(x) @ m.w), "d=2", (torch.randn(*X),), plans=("split", "random:0"))
    assert not report.ok


def test_a_conjugate_that_is_a_note_is_seen(monkeypatch):
    """As it was before conjugates were made at once: in-place products inherited the note."""
    monkeypatch.setattr(_torch, "AT_ONCE", {})
    with pytest.raises(LoweringError, match=r"view_as_real.* cannot (run on the tensors of a rank|lower)|cannot lower .*view_as_real"):
        autoshard.verify(Body(CONJUGATES["real"][0]), "d=1", (torch.randn(*X),), plans=("searched",))


def test_a_singular_matrix_raises_as_on_one_device():
    model = Body(lambda m, x: m.l(x) @ torch.linalg.inv(x.T @ x)).double()
    compiled = autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    compiled(torch.randn(16, 12).double())
    for net in (model, compiled):
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            net(torch.zeros(16, 12).double())


def test_statistics_of_a_batch_norm_that_runs_whole():
    """Its kernel writes buffers that torch does not count as written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12, momentum=None))
    report = autoshard.verify(model, "d=2", (torch.randn(*X),), plans=("split",), fallback="replicate", steps=3)
    assert report.ok, str(report)
