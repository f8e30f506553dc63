"""Modules and tensors that no program is made of end with a sentence: scripted and lazy modules, sparse and nested tensors, shared memory."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import TraceError, UsageError

X = torch.randn(8, 12)
LINKS = torch.eye(8).to_sparse()
ROWS = torch.nested.nested_tensor([X, X[:3]], layout=torch.jagged)


class Graph(nn.Module):
    """One layer of messages along links, by a function (module, x, ...)."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.body, self.own = body, nn.Linear(12, 12)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def looked_up(module: nn.Module) -> Graph:
    return Graph(lambda m, ids: m.own(m.words(ids)), words=module)


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    model[1].weight.data = model[0].weight.data
    return model


ANY = {  # what plan, compile and verify refuse alike
    "scripted": (lambda: nn.Sequential(nn.Linear(12, 4), torch.jit.script(nn.Linear(4, 4))), (X,), UsageError, "1 is a scripted module"),
    "synchronised": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))), (X,), UsageError,
                     "1 is a SyncBatchNorm.*leave out convert_sync_batchnorm"),
    "lazy": (lambda: nn.LazyLinear(4), (X,), UsageError, "weight has no shape yet.*call the model once"),
    "buffer": (lambda: Graph(lambda m, x: torch.sparse.mm(m.links, m.own(x)), links=nn.Buffer(LINKS)), (X,), TraceError,
               r"sparse tensor of shape \(8, 8\) .*test_taken.py:\d+"),
    "weight": (lambda: Graph(lambda m, x: m.own(x), links=nn.Parameter(LINKS)), (X,), UsageError, r"links is no dense tensor"),
    "input": (lambda: Graph(lambda m, x, links: torch.sparse.mm(links, m.own(x))), (X, LINKS), UsageError, r"an input is no dense.*to_dense"),
    "nested": (lambda: Graph(lambda m, x: m.own(x)), (ROWS,), UsageError, r"an input is no dense tensor \(torch.jagged\)"),
    "constant": (lambda: Graph(lambda m, x: torch.sparse.mm(LINKS, m.own(x))), (X,), TraceError, r"sparse tensor of shape \(8, 8\) .*test_taken.py:\d+"),
    "made": (lambda: Graph(lambda m, x: m.own(x).to_sparse().to_dense()), (X,), TraceError, r"_to_sparse.* in the forward pass at .*test_taken.py:\d+"),
    "gradient": (lambda: looked_up(nn.Embedding(9, 12, sparse=True)), (torch.arange(8),), TraceError, "backward pass at .*leave sparse=True out"),
    "bags": (lambda: looked_up(nn.EmbeddingBag(9, 12, sparse=True, mode="sum")), (torch.arange(8).view(4, 2),), TraceError, "leave sparse=True out"),
}


@pytest.mark.parametrize("case", ANY)
def test_what_no_program_is_made_of(case: str) -> None:
    make, args, kind, text = ANY[case]
    for run in (lambda model: autoshard.plan(model, "d=2", args, cluster="cpu-gloo"),
                lambda model: autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)(*args)):
        with pytest.raises(kind, match=text):
            run(make())


def test_what_is_sparse_inside_of_a_submodule_may_run_whole() -> None:
    model = nn.Sequential(nn.Linear(12, 12), Graph(lambda m, x: torch.sparse.mm(LINKS.to(x.dtype), m.own(x))), nn.Linear(12, 3))
    assert autoshard.verify(model, "d=2", (X,), plans=("split",), fallback="replicate").ok


def test_a_sparse_buffer_that_the_forward_pass_does_not_use_stays_as_it_is() -> None:
    """Such a model was refused. Whisper has one: the heads to align words by, for its own decoding."""
    model = nn.Sequential(nn.Linear(12, 12), Graph(lambda m, x: m.own(x).relu(), links=nn.Buffer(LINKS.clone())), nn.BatchNorm1d(12))
    assert autoshard.verify(model, "d=2", (X,), plans=("split",)).ok
    assert autoshard.verify(model, "d=2", (X,), plans=("split",), precision=autoshard.Precision("bf16")).ok
    compiled = autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    torch.testing.assert_close(compiled(X), model(X))
    assert torch.equal(compiled.get_buffer("1.links").to_dense(), LINKS.to_dense())
    compiled.load_state_dict(model.state_dict())
    assert torch.equal(copy.deepcopy(compiled).get_buffer("1.links").to_dense(), LINKS.to_dense())


def test_a_submodule_with_a_sparse_buffer_may_run_whole() -> None:
    model = nn.Sequential(nn.Linear(12, 12), Graph(lambda m, x: torch.sparse.mm(m.links.to(x.dtype), m.own(x)), links=nn.Buffer(LINKS)))
    assert autoshard.verify(model, "d=2", (X,), plans=("split",), fallback="replicate").ok


@pytest.mark.parametrize("other", [lambda w: nn.Buffer(w.detach()), lambda w: nn.Parameter(w.detach()[3:])], ids=["buffer", "rows"])
def test_two_tensors_in_one_memory_are_refused(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each was held by itself, so one did not follow when the other was trained."""
    with pytest.raises(UsageError, match=r"0.weight and 1.weight are two tensors in the same memory.*1.weight = 0.weight"):
        autoshard.compile(tied_by_data(), "d=1", cluster="cpu-gloo", cache=False)
    model = nn.Linear(12, 12)
    model.other = other(model.weight)
    with pytest.raises(UsageError, match="weight and other are two tensors in the same memory"):
        autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    autoshard.compile(model.eval(), "d=1", cluster="cpu-gloo", cache=False)  # nothing is trained


def test_tensors_beside_each_other_in_one_memory_are_taken() -> None:
    model, memory = nn.Linear(12, 12), torch.randn(4, 24)
    model.a, model.b = nn.Parameter(memory[:2]), nn.Parameter(memory[2:])
    model.left, model.right = nn.Parameter(memory.T[:12]), nn.Parameter(memory.T[12:])
    with pytest.raises(UsageError, match="a and left"):
        autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    del model.a, model.b
    autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
