"""Plans, simulated: against the objective where nothing hides, and against counts of what a plan says."""
from __future__ import annotations

import gzip
import importlib
import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import fused_models
import pytest
import torch
from steering import MODELS, formulation_of, traced

import autoshard
from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.collectives import wire_bytes
from autoshard.cost.cluster import Cluster, OwnHost, load_cluster
from autoshard.decide.make_plan import make_plan
from autoshard.decide.walks.baselines import baseline
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import schemes
from autoshard.errors import PlanError, UsageError
from autoshard.program.calling import Traced
from autoshard.program.trace import trace
from autoshard.recompute.rewrite import with_recompute
from autoshard.rules.registry import rule_of
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.simulation.flops import executed_seconds, model_seconds
from autoshard.simulation.replay import replay
from autoshard.simulation.scale import inner_collectives
from autoshard.simulation.simulate import program_for
from autoshard.simulation.source import traced_for

FEW = ("dlrm", "moe", "gpt")


@cache
def program(name: str, **shape) -> Traced:
    """A model of models/, or a decoder with fused projections."""
    if name != "fused":
        return traced(name, **shape)
    with torch.device("meta"):
        ids = torch.zeros(4, fused_models.SEQ, dtype=torch.long)
        return trace(fused_models.Fused(), (ids, ids), loss_fn=fused_models.loss, training=True)


def by_hand(name: str, mesh: str, cluster: str, **shape) -> dict[str, Plan]:
    formulation, out = formulation_of(program(name, **shape), mesh, cluster=cluster), {}
    wiring = Wiring(formulation)
    for scheme in (s for s in schemes(parse_mesh(mesh)) if not s.late and not s.obstacle(formulation.table.graph, formulation.table.mesh)):
        choice = baseline(wiring, scheme)
        cost = evaluate(formulation.problem, choice)
        out[scheme.name] = make_plan(formulation, Solution(choice, cost, 0.0, Status.GAP, 0.0), model={}, settings={"optimizer": "adamw"}, seeds={})
    return out


def step_of(name: str, plan: Plan, executed: bool = False, graph=None) -> float:
    cluster = Cluster.from_snapshot(plan.cluster)
    return replay(program_for(with_recompute(graph or program(name).graph, plan.recompute), plan, cluster, executed), cluster).step_s


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in (*MODELS, "fused")])
def test_where_nothing_hides_the_step_is_the_objective(name: str) -> None:
    assert load_cluster("cpu-gloo").overlap.eta == 0.0
    plans = by_hand(name, "dp=2,tp=2", "cpu-gloo")
    assert len(plans) >= 6
    for scheme, plan in plans.items():
        assert step_of(name, plan) == pytest.approx(plan.objective_s, rel=1e-9), scheme
        assert step_of(name, plan, executed=True) == pytest.approx(plan.predicted["bucketed_s"], rel=1e-9), scheme


def test_python_takes_time_in_what_is_executed_where_the_device_is_its_own_host() -> None:
    plan = by_hand("gpt", "dp=2,tp=2", "cpu-gloo")["DDP"]
    cluster = Cluster.from_snapshot(plan.cluster)
    slow = replace(cluster, device=replace(cluster.device, own_host=OwnHost(1e-3, 1.0, 1e-2)))
    graph = with_recompute(program("gpt").graph, plan.recompute)
    steps = {executed: [replay(program_for(graph, plan, c, executed), c).step_s for c in (cluster, slow)] for executed in (False, True)}
    views = sum(rule_of(call.target).family.free for call in graph.calls.values())
    parameters = len(set(plan.ops) & {op.name for op in graph.of_kind("param")})
    assert steps[False][0] == steps[False][1], "the objective knows nothing of it"
    assert views > 20 and steps[True][1] - steps[True][0] == pytest.approx(views * 1e-3 + 1.0 + 1e-2 * parameters)


def test_where_something_hides_the_step_is_no_longer_than_the_sum_and_no_shorter_than_the_work() -> None:
    for scheme, plan in by_hand("gpt", "dp=4,tp=2", "h100-dgx").items():
        step, p = step_of("gpt", plan), plan.predicted
        work = p["compute_s"] + p["optimizer_s"]
        assert work < step <= (work + p["blocking_s"] + p["hideable_s"]) * (1 + 1e-9), scheme


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A plan that communicates, of a model that its file names."""
    module = importlib.import_module("models.gpt")
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=8)
    plan = autoshard.plan(model, "dp=2,tp=2", inputs, loss_fn=module.loss, cluster="h100-dgx",
                          seeds={"input:0": "dp,-", "h.*.mlp.c_fc.weight": "tp,-"},
                          model_info={"reference": "gpt:tiny", "batch": 8, "seq": None, "dtype": None, "hf": None})
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


def test_transfers_are_those_of_the_plan(file: Path) -> None:
    """Sizes by kind, axis and window as the plan lists them; bytes on the links are what rings send, where no other algorithm is cheaper."""
    plan, found = Plan.load(file), autoshard.simulate(file)
    calls, nbytes = Counter(), Counter()
    for c in plan.collectives:
        key = (c.kind, c.axis, c.phase, 1 << (c.nbytes.bit_length() - 1))
        calls[key] += 1
        nbytes[key] += c.nbytes
    assert {(s.kind, s.axis, s.window, s.least): (s.calls, s.nbytes) for s in found.sizes} == {k: (n, nbytes[k]) for k, n in calls.items()} and calls
    assert all(0 < use.utilisation < 1 for use in found.links)
    over_time = {t.link: t for t in found.traffic}
    assert over_time.keys() == {use.link for use in found.links}
    for use in found.links:
        time = over_time[use.link]
        assert sum(time.nbytes) == pytest.approx(use.nbytes) and sum(time.utilisation) * time.part_s == pytest.approx(use.busy_s)
        assert len(time.nbytes) * time.part_s == pytest.approx(found.step_s) and min(time.nbytes) == 0.0 < max(time.utilisation)


def test_the_page_and_the_trace_show_links_over_time(file: Path, tmp_path: Path, run) -> None:
    code, _, err = run("simulate", file, "--html", tmp_path / "s.html", "--trace", tmp_path / "t.json")
    assert code == 0 and "Report saved to" in err
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', (tmp_path / "s.html").read_text(), re.S).group(1))
    found = autoshard.simulate(file)
    assert data["simulation"]["step"] == found.step_s and [t["link"] for t in data["simulation"]["traffic"]] == [t.link for t in found.traffic]
    (name, work), *streams = data["simulation"]["tracks"][0]["streams"]
    assert name == "compute" and streams and sum(row[4] for row in work) == len(program_for(
        traced_for(found.plan, None, (), None, None, None).graph, found.plan, Cluster.from_snapshot(found.plan.cluster)).works)
    assert data["tables"]["sizes"]["rows"] and data["tables"]["links"]["rows"] == [
        [u.link, u.nbytes, u.busy_s, f"{100 * u.utilisation:.1f} %"] for u in found.links]
    counted = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "C" and e["name"] == "nvlink, bytes/s"]
    assert counted[-1]["args"]["sent"] == 0.0 and sum(e["args"]["sent"] for e in counted) * found.traffic[0].part_s == pytest.approx(sum(found.traffic[0].nbytes))
    assert run("simulate", file, "--html", "/nowhere/s.html")[0] == 2


def test_bytes_on_a_link_where_all_is_a_ring() -> None:
    """An A100's switch does not reduce, and large buffers take the ring."""
    plan = by_hand("gpt", "dp=4", "a100-dgx")["DDP"]
    calls = program_for(traced("gpt").graph, plan, Cluster.from_snapshot(plan.cluster)).calls
    large = [c for c in calls if c.phases and c.nbytes > 1 << 16]
    for c in large:
        ring = wire_bytes(c.kind, c.nbytes, 4)
        assert sum(p.wire for g in c.phases for p in g) == pytest.approx(ring) or c.kind == "all_reduce"  # a tree sends a little more


def test_memory_over_time_has_the_plan_s_peak(file: Path) -> None:
    plan, found = Plan.load(file), autoshard.simulate(file)
    assert max(s.total for s in found.memory) == plan.stages[0].peak.total
    seconds = [s.seconds for s in found.memory]
    assert seconds == sorted(seconds) and 0 < seconds[-1] <= found.step_s
    assert found.memory[-1].of == "optimizer" and seconds[-1] > seconds[-2]
    peak = next(s for s in found.memory if s.total == plan.stages[0].peak.total)
    assert 0 < peak.seconds < found.step_s


def test_utilisation_of_the_device(file: Path) -> None:
    """One rank: FLOP of the model over the step at peak. Where ranks repeat work, only HFU counts it."""
    found = autoshard.simulate(file)
    assert 0 < found.mfu <= found.hfu < 1
    one = by_hand("gpt", "d=1", "h100-dgx")["DDP"]
    graph, device = traced("gpt").graph, load_cluster("h100-dgx").device
    assert model_seconds(graph, one, device) == pytest.approx(executed_seconds(graph, one, device))


def test_a_trace_is_complete_and_nothing_overlaps_on_a_track(file: Path, tmp_path: Path, run) -> None:
    assert run("simulate", file, "-q", "--trace", tmp_path / "t.json", "--slow-rank", "1=1.5") == (0, "", "")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    found = autoshard.simulate(file, slow_ranks={1: 1.5})
    spans: dict[tuple[int, int], list] = {}
    for e in (e for e in events if e["ph"] == "X"):
        spans.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"], e))
    assert len({pid for pid, _ in spans}) == len(found.tracks) > 1
    for track in spans.values():
        track.sort(key=lambda s: s[:2])
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(track, track[1:])), "one after the other"
    for t in found.tracks:
        busy = sum(b - a for a, b, e in spans[t.rank, 0] if e["cat"] != "idle")
        idle = sum(b - a for a, b, e in spans[t.rank, 0] if e["cat"] == "idle")
        end = max(b for _, b, _ in spans[t.rank, 0])
        assert busy + idle == pytest.approx(end, rel=1e-9) and end <= 1e6 * found.step_s * (1 + 1e-9)
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"compute", "dp", "tp"} <= names
    memory = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["name"] == "memory"]
    assert max(memory) == Plan.load(file).stages[0].peak.total
    assert sum(t.alike for t in found.tracks) == 4, "every rank is shown, or is like one that is"
    assert run("simulate", file, "-q", "--trace", tmp_path / "t.json.gz", "--rank", 3)[0] == 0
    shown = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    assert {e["pid"] for e in shown} == {3}


def test_the_command_says_where_time_goes(file: Path, run) -> None:
    code, out, err = run("simulate", file)
    assert code == 0, err
    for words in ("Simulated step", "Critical path", "h.*", "exposed", "Sizes of transfers", "nvlink", "the machine is as its profile says", "MFU"):
        assert words in out, words
    code, out, _ = run("simulate", file, "--json", "-q", "--slow-link", "nvlink=0.5", "--jitter", "0.05", "--seed", "3")
    data = json.loads(out)
    assert code == 0 and data["step_s"] != autoshard.simulate(file).step_s
    assert data["work_s"] + sum(row["mean_s"] for row in data["idle"]) == pytest.approx(data["step_s"])
    assert sum(row["seconds"] for row in data["critical"]) == pytest.approx(data["step_s"])
    assert data["conditions"] == ["nvlink has 50 % of its bandwidth", "work varies by 5 % per rank and stretch, seed 3"]
    again = run("simulate", file, "--json", "-q", "--slow-link", "nvlink=0.5", "--jitter", "0.05", "--seed", "3")[1]
    assert again == out, "equal seeds, equal bytes"
    varied = json.loads(run("simulate", file, "--json", "-q", "--varied", "0.02", "--seed", "3")[1])
    assert varied["conditions"] == ["ranks differ in speed by 2 %, seed 3"] and varied["step_s"] != autoshard.simulate(file).step_s


@pytest.mark.parametrize(("arguments", "words"), [
    (["--slow-rank", "4=1.5"], "there is no rank 4: mesh dp=2,tp=2 has ranks 0 to 3"),
    (["--slow-rank", "x=1.5"], "write for example --slow-rank 5=1.3"),
    (["--slow-rank", "1"], "write for example --slow-rank 5=1.3"),
    (["--slow-rank", "1=2", "--slow-rank", "1=3"], "--slow-rank names 1 twice"),
    (["--slow-link", "ethernet=0.5"], "has no link 'ethernet'; its links are nvlink, infiniband"),
    (["--slow-link", "nvlink=0"], "0 is no share of its bandwidth"),
    (["--rank", "9"], "there is no rank 9"),
    (["--mesh", "dp=3,tp=2"], "the plan's placements do not fit mesh dp=3,tp=2"),
    (["--mesh", "dp=4"], "the plan has the axes dp, tp"),
    (["--batch", "0"], "--batch is 0"),
    (["--jitter", "-1"], "jitter -1"),
    (["--varied", "-1"], "varied -1"),
    (["--cluster", "h100-dgxx"], "h100-dgx"),
    (["--cluster", "/nowhere/my.toml"], "/nowhere/my.toml"),
    (["--cluster", "h100-dgx", "--slow-link", "loopback=0.5"], "has no link 'loopback'"),
    (["--trace", "/nowhere/t.json"], "cannot write /nowhere/t.json"),
    (["--expert-load", "1=1.5"], "this plan splits no experts over ranks"),
    (["--expert-load", "one=1.5"], "--expert-load"),
])
def test_bad_requests_are_named(file: Path, run, arguments: list[str], words: str) -> None:
    code, out, err = run("simulate", file, *arguments)
    assert code == 2 and out == "" and words in err and "Traceback" not in err, err


def test_a_plan_of_another_model_is_refused(file: Path, tmp_path: Path, run) -> None:
    data = json.loads(file.read_text())
    for change, words in [({"batch": 16}, "the plan is for another program"),
                          ({"reference": "mlp", "batch": None}, "the plan is for another program"),
                          ({"reference": "gtp:tiny"}, "unknown model 'gtp'"), ({"reference": None}, "does not say which model"),
                          ({"batch": "many"}, "the plan says batch 'many'")]:
        path = tmp_path / "other.json"
        path.write_text(json.dumps({**data, "model": {**data["model"], **change}}))
        code, out, err = run("simulate", path)
        assert code == 2 and out == "" and words in err and "Traceback" not in err, err
    assert run("simulate", tmp_path / "none.json")[0] == 2


def test_a_plan_of_another_cluster_is_refused(file: Path, tmp_path: Path, run) -> None:
    """One that has too few devices for its mesh, by name and in the plan itself, and one whose numbers are none."""
    data = json.loads(file.read_text())
    small = {**data["cluster"], "links": [{**data["cluster"]["links"][0], "devices": 2.0}]}
    for cluster, words in [(small, "mesh dp=2,tp=2 needs 4 devices, cluster h100-dgx has 2"), ({**data["cluster"], "links": []}, "links"),
                           ({"name": "h100-dgx"}, "h100-dgx")]:
        path = tmp_path / "other.json"
        path.write_text(json.dumps({**data, "cluster": cluster}))
        code, out, err = run("simulate", path)
        assert code == 2 and out == "" and words in err and "Traceback" not in err, err


def test_the_same_plan_on_another_machine_and_with_shared_links(file: Path, run) -> None:
    found, slower, shared = (autoshard.simulate(file, executed=True, **how) for how in ({}, {"cluster": "a100-dgx"}, {"shared_links": True}))
    assert slower.step_s > found.step_s and slower.plan.cluster["name"] == "a100-dgx" and slower.objective_s == 0.0
    assert shared.step_s >= found.step_s and shared.work_s + sum(row.mean_s for row in shared.idle) == pytest.approx(shared.step_s)
    code, out, err = run("simulate", file, "--cluster", "a100-dgx", "--shared-links")
    assert code == 0 and "a100-dgx" in out and "collectives share the links that they use at the same time" in out and "another mesh, batch or cluster" in out, err


def test_collectives_inside_ops_are_counted_as_the_plan_counted_them() -> None:
    """From the rules' rows, for all plans by hand of models that have such collectives."""
    seen = 0
    for name in ("gpt", "resnet"):
        for plan in by_hand(name, "dp=2,tp=2", "h100-dgx").values():
            graph = traced(name).graph
            want = [(c.kind, c.axis, c.nbytes, c.op) for c in plan.collectives if c.inner]
            assert [(c.kind, c.axis, c.nbytes, c.op) for c in inner_collectives(plan, graph)] == want
            seen += len(want)
    assert seen


def test_a_plan_at_another_scale_is_the_plan_that_would_have_been_made_there() -> None:
    """FSDP by hand for dp=2, batch 8, at dp=4, batch 16: as FSDP by hand of that model on that mesh."""
    small, large = by_hand("gpt", "dp=2", "cpu-gloo"), by_hand("gpt", "dp=4", "cpu-gloo", batch=16)
    module = importlib.import_module("models.gpt")
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=16)
    for scheme in ("FSDP (ZeRO-3)", "DDP"):
        plan = replace(small[scheme], settings={"optimizer": "adamw", "training": True})
        found = autoshard.simulate(plan, model, inputs, loss_fn=module.loss, mesh="dp=4")
        assert found.step_s == pytest.approx(large[scheme].objective_s, rel=1e-9) and found.objective_s == 0.0
        with pytest.raises(UsageError, match="do not fit mesh dp=3: .* does not split a tensor of shape"):
            autoshard.simulate(plan, model, inputs, loss_fn=module.loss, mesh="dp=3")
    with pytest.raises(UsageError, match="the plan has the axes dp; give sizes for these, such as dp=2"):
        autoshard.simulate(plan, model, inputs, loss_fn=module.loss, mesh="tp=4")
    with pytest.raises(UsageError, match="give example inputs of that batch"):
        autoshard.simulate(plan, model, inputs, loss_fn=module.loss, batch=32)


def test_a_model_in_python(file: Path) -> None:
    module, plan = importlib.import_module("models.gpt"), Plan.load(file)
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=8)
    assert autoshard.simulate(replace(plan, model={}), model, inputs, loss_fn=module.loss).step_s == autoshard.simulate(plan).step_s
    with pytest.raises(PlanError, match="which model it is for"):
        autoshard.simulate(replace(plan, model={}))
    with pytest.raises(UsageError, match="without a model"):
        autoshard.simulate(plan, None, inputs)
    with pytest.raises(PlanError, match="another program"):
        autoshard.simulate(plan, model, tuple(t[:4] for t in inputs), loss_fn=module.loss)


def test_micro_batches_run_one_after_the_other() -> None:
    module = importlib.import_module("models.gpt")
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=8)
    plan = autoshard.plan(model, "dp=2", inputs, loss_fn=module.loss, cluster="cpu-gloo", pipeline=Pipeline(microbatches=4),
                          seeds={"input:0": "dp,-"})
    found = autoshard.simulate(plan, model, inputs, loss_fn=module.loss)
    assert found.step_s == pytest.approx(plan.objective_s, rel=1e-9)
    assert autoshard.simulate(plan, model, inputs, loss_fn=module.loss, executed=True).step_s == pytest.approx(plan.predicted["bucketed_s"], rel=1e-9)


def test_inference_and_recomputation() -> None:
    module = importlib.import_module("models.gpt")
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=8)
    plan = autoshard.plan(model.eval(), "tp=2", inputs[:1], training=False, cluster="cpu-gloo")
    assert autoshard.simulate(plan, model, inputs[:1]).step_s == pytest.approx(plan.objective_s, rel=1e-9)
    ample = autoshard.plan(model, "tp=2", inputs, loss_fn=module.loss, training=True, cluster="cpu-gloo")
    tight = autoshard.plan(model, "tp=2", inputs, loss_fn=module.loss, training=True, cluster="cpu-gloo", memory_budget=0.6 * ample.memory["total"],
                           time_limit=15.0)
    found = autoshard.simulate(tight, model, inputs, loss_fn=module.loss)
    assert tight.recompute and found.step_s == pytest.approx(tight.objective_s, rel=1e-9)
    assert found.hfu > found.mfu
