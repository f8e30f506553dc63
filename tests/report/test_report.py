"""What reports compute from a plan, and that they can be drawn at any width."""
from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from sample_plan import LAYERS, sample_plan

from autoshard.base import quantities
from autoshard.base.plan import Collective, Fallback, Plan
from autoshard.cost.cluster import available
from autoshard.report import what
from autoshard.report.collapse import Folded, collapse, ranges
from autoshard.report.commands import clusters
from autoshard.report.text import show


def drawn(plan: Plan, width: int = 100) -> str:
    out = io.StringIO()
    show(plan, Console(file=out, width=width))
    return out.getvalue()


# -- folding of repeated layers -------------------------------------------------------------------

def names(*rows: tuple[str, object]) -> list[tuple[str, int]]:
    return [(f.name, f.copies) for f in collapse(rows)]


def test_equal_layers_fold_to_a_star():
    assert names(*((f"layers.{i}.wq", "A") for i in range(3))) == [("layers.*.wq", 3)]


def test_a_differing_layer_is_listed_by_its_number():
    rows = [(f"layers.{i}.wq", "B" if i == 3 else "A") for i in range(6)]
    assert names(*rows) == [("layers.{0-2,4-5}.wq", 5), ("layers.3.wq", 1)]


def test_nested_repetition_folds_twice():
    rows = [(f"layers.{i}.experts.{e}.w", "A") for i in range(2) for e in range(4)]
    assert names(*rows) == [("layers.*.experts.*.w", 8)]


def test_a_lone_number_stays():
    assert names(("net.0.weight", "A"), ("net.2.bias", "A")) == [("net.0.weight", 1), ("net.2.bias", 1)]


def test_several_rows_of_one_place_count():
    assert names(("h.0", "A"), ("h.0", "A"), ("h.1", "A")) == [("h.*", 3)]


def test_collapse_keeps_the_number_of_rows():
    rows = [(f"a.{i % 4}.b.{i % 3}", i % 2) for i in range(48)]
    assert sum(f.copies for f in collapse(rows)) == len(rows)


def test_ranges():
    assert ranges({5, 0, 1, 2, 9, 8}) == "0-2,5,8-9"


@pytest.mark.parametrize(("name", "section"), [
    ("layers.*.attn.wq.weight", "layers.*"), ("layers.*.(layer)", "layers.*"), ("layers.31.attn.wq.weight", "layers.31"),
    ("net.0.weight", ""), ("{0-1}.(layer)", ""), ("wte.weight", ""), ("*.attn.wq", "*")])
def test_only_layers_with_parts_open_a_section(name, section):
    assert Folded(tuple(name.split(".")), None).section == section


# -- units ----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (2.5, "2.50 s"), (0.00123, "1.23 ms"), (4.2e-5, "42.0 us"), (3e-9, "3.00 ns"), (0.9999, "1.00 s"),
    (float("inf"), "infinite"), (None, "-"), (120.0, "120 s")])
def test_seconds(value, text):
    assert quantities.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (70 * 2**30, "70.0 GiB"), (2**40, "1.00 TiB"), (None, "-")])
def test_size(value, text):
    assert quantities.size(value) == text


# -- rows -----------------------------------------------------------------------------------------

def test_step_time_adds_up():
    plan = sample_plan()
    assert sum(a.value for a in what.step_time(plan) if a.counts) == pytest.approx(plan.predicted["step_s"])


def test_how_much_of_a_step_is_synchronisation():
    predicted = {"step_s": 10.0, "compute_s": 4.0, "blocking_s": 2.0, "exposed_s": 3.0, "optimizer_s": 1.0, "hidden_s": 2.0}
    plan = sample_plan(predicted=predicted)
    assert what.synchronisation(plan) == (0.5, 7 / 12)
    assert "synchronisation of the ranks takes 50 % of the step; 58 % if none of it were hidden" in " ".join(drawn(plan).split())
    alone = sample_plan(predicted={**predicted, "hidden_s": 0.0})
    assert what.synchronisation(alone) == (0.5, 0.5)


def test_step_time_adds_up_with_interference():
    predicted = {**sample_plan().predicted, "step_s": 1.005}
    rows = what.step_time(sample_plan(predicted=predicted))
    assert sum(a.value for a in rows if a.counts) == pytest.approx(1.005)
    assert "slowdown by hidden" in [a.label for a in rows]


def test_memory_adds_up_to_the_total():
    plan = sample_plan()
    assert sum(a.value for a in what.memory(plan)) == pytest.approx(plan.memory["total"])


def test_memory_shows_categories_it_does_not_know():
    plan = sample_plan({"memory": {"parameters": 1.0, "temporaries": 5.0, "total": 6.0, "limit": None}})
    assert ("temporaries", 5.0) in [(a.label, a.value) for a in what.memory(plan)]


def test_layer_groups_fold_equal_layers_and_list_the_other():
    groups = {g.name: g.rows for g in what.layer_groups(sample_plan())}
    assert list(groups) == ["", "layers.*", "layers.{0-2}", "layers.3"]
    wq = groups["layers.*"][0]
    assert (wq.kind, wq.name, wq.placement, wq.copies) == ("weight", "attn.wq.weight", "[tp, -]", LAYERS)
    assert groups["layers.3"][0].placement == "[-, -]"


def test_every_tensor_is_in_some_group():
    plan = sample_plan()
    rows = [row for g in what.layer_groups(plan) for row in g.rows]
    assert sum(row.copies for row in rows) + what.whole_buffers(plan) == len(plan.layouts)


def test_collectives_keep_calls_bytes_and_seconds():
    plan = sample_plan()
    calls, nbytes, seconds = what.communication_totals(what.collectives(plan))
    assert calls == len(plan.collectives)
    assert nbytes == sum(c.nbytes for c in plan.collectives)
    assert seconds == pytest.approx(sum(c.seconds for c in plan.collectives))


def test_collectives_of_different_sizes_stay_apart():
    first = sample_plan().collectives[0]
    rows = what.collectives(sample_plan(collectives=(first, replace(first, nbytes=2 * first.nbytes))))
    assert sorted(r.nbytes for r in rows) == [first.nbytes, 2 * first.nbytes]


def test_json_is_the_plan_with_timings():
    plan = sample_plan()
    data = json.loads(what.to_json(plan))
    wanted = {"objective_s", "bound_s", "gap", "status", "predicted", "stages", "collectives", "placements",
              "timings", "mesh", "model", "cluster", "notes", "fallbacks"}
    assert wanted <= set(data)
    assert data["timings"] == {"trace": 1.5, "search": 0.25}
    assert Plan.from_json(json.dumps(data)) == plan


def test_plan_text_round_trips_and_leaves_timings_out():
    plan = sample_plan()
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.to_json() == plan.to_json()
    assert "timings" not in json.loads(plan.to_json())


# -- text -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(map(len, drawn(sample_plan(), width).splitlines())) <= width


def test_report_says_what_matters():
    text = drawn(sample_plan())
    for words in ("dp=2,tp=4 (8 ranks)", "h100-dgx", "optimal", "[tp, -]", "layers.*", "model.py:41", "70.0 GiB",
                  "the vocabulary is split over tp", "proven lower bound"):
        assert words in text


def test_a_plan_that_is_not_proven_says_so():
    text = drawn(sample_plan(bound_s=0.98, gap=0.02, status="best found within the time limit"))
    assert "best found within the time limit" in text and "within 2 %" in text


def test_a_plan_proven_among_tied_ones_shows_the_bound_of_all_plans():
    text = drawn(sample_plan(status="optimal among tied plans"))
    assert "lower bound of all plans" in text and "equal layers treated alike" in text and "proven" not in text


def test_a_refined_plan_says_which_plans_its_bound_is_about():
    text = " ".join(drawn(sample_plan(status="optimal over decision units, refined op by op")).split())
    assert "no plan over decision units is cheaper" in text and "lower bound over decision units" in text and "proven" not in text
    text = " ".join(drawn(sample_plan(bound_s=0.98, gap=0.02, status="best found within the time limit, refined op by op")).split())
    assert "within 2 % of the best plan over decision units" in text and "best possible" not in text


def test_brackets_in_names_are_not_markup():
    fallback = Fallback("x", "custom[op]", 1e-6, "net[0]", "a.py:1")
    assert "custom[op]" in drawn(sample_plan(fallbacks=(fallback,)))


def test_without_communication_or_fallbacks():
    text = drawn(sample_plan(collectives=(), fallbacks=()))
    assert "none: no rank talks to another" in text


def test_many_collectives_are_cut_but_counted():
    base = Collective("all_gather", "dp", 1, 1e-6, "forward", "v", "o")
    many = tuple(replace(base, nbytes=i + 1, module=f"part_{i}", seconds=1e-6 * (i + 1)) for i in range(60))
    text = drawn(sample_plan(collectives=many))
    assert "smaller rows" in text and " 60 " in text


@pytest.mark.parametrize("name", available())
def test_every_cluster_can_be_shown(name):
    out = io.StringIO()
    clusters.show_one(name, Console(file=out, width=100))
    assert "memory_bandwidth" in out.getvalue()


def test_clusters_are_listed():
    out = io.StringIO()
    clusters.show_all(Console(file=out, width=100))
    assert all(name in out.getvalue() for name in available())
