"""Seeds: every way to write one means the same, they hold, and every mistake names the seed and the fix."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import ShardingSpec, format_spec
from autoshard.cli.read import parse_seeds
from autoshard.errors import SeedError, UsageError
from autoshard.program.trace import trace
from autoshard.seeds.grammar import Seed, seed_text
from autoshard.seeds.seeds import resolve_seeds
from autoshard.seeds.yaml_file import load_seeds


class MLP(nn.Module):
    """With `mark`, the hidden activation is annotated."""

    def __init__(self, mark=None) -> None:
        super().__init__()
        self.up, self.down, self.mark = nn.Linear(64, 256), nn.Linear(256, 64), mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.mark is not None:
            h = autoshard.annotate(h, self.mark)
        return self.down(torch.relu(h))


class Two(nn.Module):
    def __init__(self, mark=None) -> None:
        super().__init__()
        self.a, self.b = MLP(mark), MLP(mark)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x) + self.b(x)).sum()


X = torch.randn(32, 64)


def plan(model: nn.Module, mesh: str = "dp=2,tp=2", **options):
    return autoshard.plan(model, mesh, (X,), cluster="h100-dgx", time_limit=120, **options)


def propagated(model: nn.Module, **options):
    """What seeds alone decide: no search, so that plans of many forms are made in no time."""
    return plan(model, search="propagate", **options)


def same(*plans) -> None:
    first = plans[0]
    for other in plans[1:]:
        assert other.objective_s == first.objective_s
        assert other.placements == first.placements
        assert [(c.kind, c.axis, c.nbytes, c.phase) for c in other.collectives] == [
            (c.kind, c.axis, c.nbytes, c.phase) for c in first.collectives]


def test_four_ways_to_seed_parameters(tmp_path):
    path = tmp_path / "seeds.yaml"
    path.write_text("# columns, rows\n'*.up.weight': tp,-\n'*.down.weight': [null, tp]\ninput:0: dp,...\n")
    values = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp"), "input:0": ("dp", ...)}
    from_cli = parse_seeds(["*.up.weight=tp,-", "*.down.weight=-,tp", "input:0=dp,?"])
    placed = {"*.up.weight": (Replicate(), Shard(0)), "*.down.weight": (Replicate(), Shard(1)), "input:0": ("dp", ...)}
    spec = {**values, "*.up.weight": ShardingSpec((("tp",), ()))}
    plans = [propagated(Two(), seeds=s) for s in (values, load_seeds(str(path)), from_cli, placed, spec)]
    same(*plans)
    plans = [plan(Two(), seeds=s) for s in (placed, from_cli)]
    same(*plans)
    assert plans[0].placements["a.up.weight"] == (-1, 0) and plans[0].placements["b.down.weight"] == (-1, 1)
    assert {x.spec for x in plans[0].layouts if x.name == "input:0"} <= {(0, -1), (0, 0), (0, 1)}


def test_an_activation_in_the_model_or_by_path_in_any_form(tmp_path):
    path = tmp_path / "seeds.yaml"
    path.write_text('"*.up": "dp,tp"\n')
    seeds = ({"*.up": ("dp", "tp")}, load_seeds(str(path)), parse_seeds(["*.up=dp,tp"]), {"*.up": (Shard(0), Shard(1))})
    for plan_of, some in ((propagated, slice(None)), (plan, slice(2, 3))):
        by_path = [plan_of(Two(), seeds=s) for s in seeds[some]]
        inside = [plan_of(Two(mark)) for mark in (("dp", "tp"), "dp,tp", (Shard(0), Shard(1)))[some]]
        same(*inside, *by_path)
    marked = [p for n, p in inside[0].ops.items() if n.startswith("annotate")]
    assert len(marked) == 4 and {p.outputs for p in marked} == {((0, 1),)}, "two activations and their gradients"


def test_annotate_is_the_identity_without_autoshard():
    model = Two("dp,tp")
    marked, plain = model(X), None
    for part in (model.a, model.b):
        part.mark = None
    plain = model(X)
    assert torch.equal(marked, plain)
    assert autoshard.annotate(X, "dp,-") is X


def test_annotated_models_compute_the_same():
    """On one rank: the mark changes no number, forward or backward."""
    torch.manual_seed(0)
    model = Two("d,-")
    wanted = model(X)
    wanted.backward()
    gradient = model.a.up.weight.grad.clone()
    model.zero_grad()
    compiled = autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    got = compiled(X)
    got.backward()
    assert torch.allclose(got, wanted)
    assert torch.allclose(dict(compiled.named_parameters())["a.up.weight"].grad, gradient, atol=1e-6)


def test_dp_is_fixed_and_tp_searched_in_one_line():
    found = plan(Two(), seeds={"input:*": "dp,..."})
    assert all(x.spec[0] == 0 for x in found.layouts if x.kind == "input")


def test_reports_count_matches_and_speak_like_the_command_line():
    found = propagated(Two(), seeds={"*.up.weight": ("tp", None), "input:0": ("dp", ...)})
    assert found.seeds == {"*.up.weight": "tp,-", "input:0": "dp,..."}
    assert "seed *.up.weight holds for 2 tensors" in found.notes and "seed input:0 holds for 1 tensor" in found.notes


@pytest.mark.parametrize(("value", "text"), [
    (("tp", None), "tp,-"), ((("dp", "tp"), ...), "dp*tp,..."), (["dp", "?"], "dp,?"), ("[dp, -]", "dp,-"),
    ((Shard(0), Replicate()), "S(0),R"), (ShardingSpec((("dp", "tp"), ())), "dp*tp,-"), (Seed("tp,-", "x:1"), "tp,-")])
def test_one_text_form(value, text):
    assert seed_text(value) == text


def test_a_parameter_nests_its_axes_as_the_seed_says():
    """tp's pieces first, each cut by dp: gathering dp leaves what tp splits. The plan file and the report say it in the same words."""
    found = plan(Two(), seeds={"*.up.weight": "tp*dp,-", "*.down.weight": "dp*tp,-", "input:0": "dp,-"})
    assert format_spec(found.placements["a.up.weight"]) == "I0,S0" and format_spec(found.placements["a.down.weight"]) == "S0,S0"
    again = Plan.from_json(found.to_json())
    assert again.placements == found.placements and again.ops == found.ops
    assert "[(tp*dp), -]" in {str(ShardingSpec.from_spec(x.spec, len(x.shape), found.mesh)) for x in again.layouts}


@pytest.mark.parametrize(("mesh", "spec"), [("dp=2,tp=1", "S0,R"), ("dp=1,tp=2", "R,S0"), ("dp=1,tp=1", "R,R")])
def test_axes_of_one_rank_do_not_nest(mesh, spec):
    found = resolve_seeds(trace(Two(), (X,)).graph, parse_mesh(mesh), {"a.up.weight": "tp*dp,-"})
    assert [list(map(format_spec, specs)) for specs in found.specs.values()] == [[spec]]


# -- mistakes -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("seeds", "words"), [
    ({"a.upp.weight": "tp,-"}, ("'a.upp.weight' = 'tp,-'", "matches nothing", "a.up.weight")),
    ({"a.upp": "tp,-"}, ("matches nothing", "a.up")),
    ({"input:7": "dp,-"}, ("matches nothing", "input:0")),
    ({"a.up.weight": "tpp,-"}, ("'tpp'", "did you mean tp?")),
    ({"a.up.weight": "tp"}, ("1 dims for a tensor with 2", "end it with ...")),
    ({"a.up.weight": "tp,tp"}, ("'tp'", "two dims")),
    ({"input:0": "tp*dp,-"}, ("nests axes out of the order of the mesh (dp=2,tp=2)", "is no parameter")),
    ({"a.up": "tp*dp,-"}, ("nests axes out of the order of the mesh", "is no parameter")),
    ({"addmm_0": "tp*dp,-"}, ("nests axes out of the order of the mesh", "is no parameter")),
    ({"a.up.weight": 3}, ("has value 3", "('tp', None)")),
    ({"a.up.weight": "S(5),R"}, ("dims below 2",)),
    ({"a.up.weight": "S(0)"}, ("one Shard or Replicate per mesh axis",)),
    ({"a.up.weight": ("tp", 3)}, ("has the entry 3", "a tuple of axes")),
    ({"a.up.weight": (Partial(), Shard(0))}, ("Partial cannot be a seed",)),
    ({"a.up.weight": "tp*dp*x,-"}, ("'x'", "the mesh has dp=2,tp=2")),
    ({"*.up": "dp,-", "a.up": "-,dp"}, ("'*.up' = 'dp,-'", "'a.up' = '-,dp'", "a.up and disagree")),
    ({"output:0": "dp"}, ("1 dims for a tensor with 0",)),
    ({"addmm_0": "tp,-", "a.up": "-,tp"}, ("'addmm_0' = 'tp,-'", "'a.up' = '-,tp'", "without a strategy", "take one away")),
    ({"*.up.weight": "tp,-", "a.up.weight": "-,tp"}, ("'*.up.weight' = 'tp,-'", "'a.up.weight' = '-,tp'", "a.up.weight and disagree")),
])
def test_bad_seeds(seeds, words):
    with pytest.raises(SeedError) as e:
        plan(Two(), seeds=seeds)
    for word in words:
        assert word in str(e.value)


def test_uneven_shards_are_refused():
    with pytest.raises(SeedError, match=r"splits a.up.weight of shape \(256, 64\) unevenly.*dim 0 is padded to 258"):
        plan(Two(), "dp=5,tp=3", seeds={"a.up.weight": "dp*tp,-"})


def test_an_op_that_a_seed_splits_unevenly_is_named_with_its_line():
    """A sequence shorter than the ranks, say."""
    with pytest.raises(SeedError, match=r"splits addmm_0 \(aten.addmm.default\) in a.up at .*test_seeds.py:\d+ of shape \(\d+, 256\) unevenly"):
        plan(Two(), "dp=64,tp=3", seeds={"addmm_0": "dp,-"})


def test_uneven_placements_are_refused():
    with pytest.raises(SeedError, match=r"splits a tensor of shape \(256, 64\) unevenly \(S0,R on mesh dp=5,tp=3\).*padded to 258, for an axis"):
        plan(Two(), "dp=5,tp=3", seeds={"a.up.weight": "S(0),R"})


def test_a_padded_dim_follows_its_axis():
    assert plan(Two(), "dp=5,tp=3", seeds={"a.up.weight": "tp,-"}).placements["a.up.weight"] == (-1, 0)


def test_a_seed_that_an_op_cannot_follow_is_named():
    """A running sum reads its dim whole."""
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x @ self.w, -1)

    with pytest.raises(SeedError, match=r"seed 'mm_0' = '-,d': .* leaves cumsum_0 .*test_seeds.py:\d+ without a strategy.*open with \?"):
        plan(Running(), "d=2", seeds={"mm_0": "-,d"})


def test_a_seed_on_a_dtensor_that_says_otherwise_names_both():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model, mesh = MLP(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(1)]))
        with pytest.raises(SeedError, match=r"'up.weight' = 'tp,-' is on parameter up.weight, which is a DTensor already, as 'S\(1\)'; leave"):
            plan(model, "tp=2", seeds={"up.weight": "tp,-"})
        with pytest.raises(SeedError, match=r"'up.weight' = 'S\(1\)' \(parameter up.weight, which is a DTensor already\) and 'up.\*' = 'tp,...'"):
            plan(model, "tp=2", seeds={"up.*": "tp,..."})
    finally:
        dist.destroy_process_group()


def test_a_conflict_names_file_and_line_and_the_mark_its_source(tmp_path):
    path = tmp_path / "seeds.yaml"
    path.write_text("\n'*.up.weight': tp,-\n'a.*.weight': -,tp\n")
    with pytest.raises(SeedError) as e:
        plan(Two(), seeds=load_seeds(str(path)))
    assert f"{path}:2" in str(e.value) and f"{path}:3" in str(e.value)
    with pytest.raises(SeedError, match=r"annotate\(..., 'dp,zz'\) at .*test_seeds.py:\d+ names mesh axis 'zz'"):
        plan(Two("dp,zz"))


@pytest.mark.parametrize(("text", "words"), [
    ("a: tp\na: tp\n", ("given twice", ":1", ":2")), ("- a\n", ("no mapping of seeds",)), ("a: [\n", ("is not YAML",)),
    ("a: 3\n", (":1", "has value 3")), ("a: !!python/object/apply:os.getcwd []\n", ("is not YAML",))])
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "seeds.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as e:
        load_seeds(str(path))
    for word in ("seeds.yaml", *words):
        assert word in str(e.value)


def test_a_missing_file_and_a_seed_in_two_places(tmp_path):
    with pytest.raises(UsageError, match="cannot read seeds"):
        load_seeds(str(tmp_path / "none.yaml"))
    path = tmp_path / "seeds.yaml"
    path.write_text("a.up.weight: tp,-\n")
    with pytest.raises(UsageError, match=r"given twice, at .*seeds.yaml:1 and on the command line"):
        parse_seeds(["a.up.weight=-,tp"], path)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert load_seeds(str(empty)) == {}


# -- buffers, and tensors that lie alike --------------------------------------------------------------

class Stateful(nn.Module):
    """A step of something recurrent: (x, state) -> (y, new state), with a table and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.register_buffer("table", torch.randn(64, 64))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.tanh(self.mix(x) + state @ self.table)
        return self.norm(new), new


def stateful(seeds, mesh: str = "dp=2,tp=2", **options):
    return autoshard.plan(Stateful(), mesh, (X, torch.randn(32, 64)), cluster="h100-dgx", time_limit=20, seeds=seeds, **options)


def layout(found, name: str):
    return next(x.spec for x in found.layouts if x.name == name)


def test_buffers_can_be_seeded_and_are_written_back_as_they_were():
    found = stateful({"table": "tp,-", "norm.running_*": "tp"})
    assert found.placements["table"] == (-1, 0) and found.placements["norm.running_mean"] == (-1, 0)
    assert {"seed table holds for 1 tensor", "seed norm.running_* holds for 2 tensors"} <= set(found.notes)
    assert found.ops["mutation:norm.running_mean"].inputs == ((-1, 0),)


def test_numbers_with_split_buffers_are_those_of_one_device():
    found = autoshard.verify(Stateful(), "tp=2", (X, torch.randn(32, 64)), seeds={"table": "tp,-", "norm.running_*": "tp"}, plans=("searched",))
    assert found.ok, str(found)


@pytest.mark.parametrize("seeds", [{"output:1": "input:1", "input:1": "dp,-"}, {"input:1": "dp,-", "output:1": "input:1"},
                                   {"input:1": "output:1", "output:1": "dp,-"}, {"input:1": "dp,?", "output:1": "input:1"}])
@pytest.mark.parametrize("search", ["auto", "propagate"])
def test_a_state_goes_out_as_it_comes_in(seeds, search):
    found = stateful(seeds, outputs="dtensor", search=search)
    assert layout(found, "input:1") == layout(found, "user:1")
    assert layout(found, "input:1")[0] == 0


def test_ties_on_the_command_line_and_in_a_file(tmp_path):
    path = tmp_path / "seeds.yaml"
    path.write_text("input:1: dp,...\noutput:1: input:1\n")
    by_file, by_text = load_seeds(str(path)), parse_seeds(["input:1=dp,...", "output:1=input:1"])
    plans = [stateful(s, outputs="dtensor") for s in (by_file, by_text)]
    assert {layout(p, "user:1") for p in plans} == {layout(plans[0], "input:1")}


@pytest.mark.parametrize(("seeds", "words"), [
    ({"output:1": "input:7"}, ("'output:1' = 'input:7'", "names 0 tensors")),
    ({"output:1": "input:*"}, ("names 2 tensors, and one is needed",)),
    ({"output:1": "norm.running_mean"}, ("of shape [32, 64] to norm.running_mean of shape [64]", "tensors of one shape")),
    ({"output:1": "input:1", "input:1": "dp,-", "output:*": "-,-"}, ("'output:*' = '-,-'", "disagree")),
    ({"tabel": "tp,-"}, ("matches nothing", "table")),
])
def test_bad_ties_and_buffers(seeds, words):
    with pytest.raises(SeedError) as e:
        stateful(seeds, outputs="dtensor")
    for word in words:
        assert word in str(e.value)


class WithAuxiliaryHead(nn.Module):
    """In training a second head reads the hidden activation, and the loss takes targets."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.body(x)
        return self.head(h) if y is None else ((self.head(h) + self.aux(h) - y) ** 2).sum()


@pytest.mark.parametrize("evaluated_first", [False, True])
def test_seeds_may_be_about_what_another_form_of_the_call_has(evaluated_first: bool, caplog) -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    seeds = {"aux.weight": ("d", None), "aux": ("d", None)} | ({} if evaluated_first else {"input:1": ("d", None)})
    model = autoshard.compile(WithAuxiliaryHead(), "d=1", seeds=seeds, cache=False)
    for training in (False, True) if evaluated_first else (True, False):
        with torch.set_grad_enabled(training):
            model.train(training)
            model(*((x, y) if training else (x,)))
    told = [r for r in caplog.records if "left aside: aux" in r.getMessage()]
    assert bool(told) == evaluated_first and all(r.levelname == "WARNING" for r in told), "a first form does not obey them: that is told"
    with pytest.raises(SeedError, match="'ax.weight' = 'd,-' matches nothing"):
        autoshard.compile(WithAuxiliaryHead(), "d=1", (x, y), seeds={"ax.weight": ("d", None)}, cache=False)
