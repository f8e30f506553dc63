"""The plan file: what is written is read back, what does not fit is named by its place, and format 1 is read as one stage."""
from __future__ import annotations

import json
import os
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest
from sample_plan import MESH, sample_plan

from autoshard.base.files import check_writable, write_atomically
from autoshard.base.mesh import Mesh
from autoshard.base.plan import FORMAT, Plan, StagePlan
from autoshard.errors import PlanError
from autoshard.report import what
from autoshard.report.page.html import document
from autoshard.report.stages import stage_rows
from autoshard.report.text import parts
from autoshard.study.diff import diff

FORMAT_1 = Path(__file__).parent / "plan_format_1.json"  # autoshard plan mlp:tiny --mesh a=2 --cluster cpu-gloo, before there were stages


def two_stages() -> Plan:
    """The sample plan, cut in the middle; specs are about the mesh of the stages."""
    sample = sample_plan()
    whole = sample.stages[0]
    own = Mesh(("tp",), (4,))
    first = replace(whole, last="layers.1", submesh=own, windows={"forward": 1e-3, "backward": 2e-3}, in_flight=2)
    last = StagePlan(1, 1, "layers.2", "", own, {"forward": 2e-3, "backward": 4e-3}, 1e-4, 1, {**whole.memory, "total": 2.0**40})
    collectives = tuple(replace(c, stage=int(c.module.startswith("layers.2"))) for c in sample.collectives)
    options = {"microbatches": 4, "schedule": "1f1b", "cuts": ["layers.2"], "axis": "dp"}
    return sample_plan(stages=(first, last), collectives=collectives, layouts=tuple(replace(x, spec=x.spec[-1:]) for x in sample.layouts),
                       placements={name: spec[-1:] for name, spec in sample.placements.items()},
                       pipeline={"options": options, "microbatches": 4, "schedule": "1f1b", "transfers": []})


@pytest.mark.parametrize("plan", [sample_plan(), two_stages()])
def test_what_is_written_is_read_back(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text and json.loads(text)["format"] == FORMAT
    assert Plan.from_json(text).mesh == MESH and all(isinstance(s, tuple) for s in Plan.from_json(text).placements.values())


def test_equal_plans_give_equal_bytes_whatever_the_file_left_out():
    data = json.loads(sample_plan().to_json())
    bare = {**data, "stages": [{k: v for k, v in data["stages"][0].items() if k == "memory"}],
            "collectives": [{k: v for k, v in c.items() if v not in ("", False, 0)} for c in data["collectives"]]}
    shuffled = dict(reversed(bare.items()))
    assert len(json.dumps(shuffled)) < len(json.dumps(data))
    assert Plan.from_json(json.dumps(shuffled)).to_json() == sample_plan().to_json()


def test_a_plan_of_format_1_is_one_stage():
    old, plan = json.loads(FORMAT_1.read_text()), Plan.load(FORMAT_1)
    assert old["format"] == 1 and plan.format == FORMAT and len(plan.stages) == 1 and plan.pipeline is plan.worth is None
    (stage,) = plan.stages
    assert plan.memory == stage.memory == old["memory"] and stage.windows == {}, "format 1 does not say how long windows take"
    assert [vars(a) for a in stage.largest] == old["largest"] and len(stage.timeline) == len(old["timeline"]) > 10
    assert plan.ops["mm_0"].inputs == ((-1,), (-1,)) and len(plan.ops) == len(old["ops"])
    kept = {f.name for f in fields(Plan)} - {"stages", "pipeline", "shapes", "worth", "finer", "format", "timings", "ops", "collectives", "copies"}
    assert {k: json.loads(plan.to_json())[k] for k in kept} == {k: old[k] for k in kept}
    assert Plan.from_json(plan.to_json()) == plan, "and it is written as any other"
    assert diff(plan, plan).equal and len(list(parts(plan))) >= 6, "it is shown as any other"


def test_memory_is_that_of_the_fullest_stage():
    plan = two_stages()
    assert plan.fullest is plan.stages[1] and plan.memory["total"] == 2.0**40
    assert {a.label: a.value for a in what.memory(plan)}["parameters"] == 2.0 * 2**30


def test_a_pipeline_is_reported_stage_by_stage_and_one_stage_as_ever():
    assert stage_rows(sample_plan()) == () and document(sample_plan())["tables"]["stages"]["rows"] == []
    first, last = stage_rows(two_stages())
    assert (first.blocks, first.rank, first.ordered) == ("inputs to layers.1", 0, (("forward", 1e-3), ("backward", 2e-3)))
    assert (last.blocks, last.rank, last.ordered, last.once_s, last.in_flight, last.nbytes) == (
        "layers.2 to outputs", 1, (("forward", 2e-3), ("backward", 4e-3)), 1e-4, 1, 2.0**40)
    assert [row[:3] for row in document(two_stages())["tables"]["stages"]["rows"]] == [[0, 0, first.blocks], [1, 1, last.blocks]]
    assert len(list(parts(two_stages()))) == len(list(parts(sample_plan()))) + 2, "stages, and their schedule"


@pytest.mark.parametrize("pipeline", [{}, {"options": 3}, {"options": {"axis": "no"}, "microbatches": 4, "transfers": []}, {"transfers": [{"from": 9}]},
                                      {"options": {"microbatches": 4, "axis": "dp"}, "microbatches": "4x", "transfers": [{"from": "0"}]}])
def test_a_pipeline_that_is_none_is_shown_without_its_schedule(pipeline):
    plan = replace(two_stages(), pipeline=pipeline)
    assert len(list(parts(plan))) == len(list(parts(two_stages()))) - 1 and document(plan)["schedule"] is None


def test_diff_names_another_cut():
    changes = {c.name: (c.before, c.after) for c in diff(sample_plan(), two_stages()).settings}
    assert changes["stages"] == ("inputs to outputs (1 in flight)", "inputs to layers.1 (2 in flight), layers.2 to outputs (1 in flight)") and "pipeline" in changes
    slower = replace(two_stages(), stages=(replace(two_stages().stages[0], windows={"forward": 5e-3, "backward": 2e-3}), two_stages().stages[1]))
    assert [(c.kind, c.name, c.before, c.after) for c in diff(two_stages(), slower).numbers] == [("predicted", "stage 0, forward", 1e-3, 5e-3)]


def changed(data, path, value):
    """A copy of JSON data with another value at a path; `del`: without it."""
    data = json.loads(json.dumps(data))
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is del_:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


del_ = object()
WRONG = [
    (("mesh",), 3, "mesh is 3; text is needed"),
    (("mesh",), "dp", "mesh is 'dp'; cannot read mesh 'dp'"),
    (("ops", "wq", "inputs", 0), "S9x", r"ops.wq.inputs\[0\] is 'S9x'; cannot read placement 'S9x'"),
    (("placements", "embed.weight"), None, r"placements\['embed.weight'\] is None; text is needed"),
    (("copies", 0, "source"), "mad", r"copies\[0\].source is 'mad'; 'made' or 'kept' is needed"),
    (("copies", 0, "value"), del_, r"copies\[0\].value is missing"),
    (("copies", 0, "valeu"), "x", r"copies\[0\].valeu is not a key; did you mean value\?"),
    (("collectives", 2, "nbytes"), 1.5, r"collectives\[2\].nbytes is 1.5; a whole number is needed"),
    (("collectives", 2, "hideable"), 1, r"collectives\[2\].hideable is 1; true or false is needed"),
    (("stages", 0, "memory", "total"), "all", r"stages\[0\].memory.total is 'all'; a finite number is needed"),
    (("stages", 0, "memori"), {}, r"stages\[0\].memori is not a key; did you mean memory\?"),
    (("stages", 0, "submesh"), "tp", r"stages\[0\].submesh is 'tp'; cannot read mesh"),
    (("stages",), [], "it has no stages"),
    (("stages",), del_, "stages is missing"),
    (("notes",), del_, "notes is missing"),
    (("objective_s",), True, "objective_s is True; a finite number is needed"),
    (("seedz",), {}, r"seedz is not a key; did you mean seeds\?"),
    (("wholly_unknown",), {}, "wholly_unknown is not a key; remove it"),
    (("format",), 3, "its format is 3; 2 is needed"),
    (("cluster", "device"), [], r"cluster\['device'\] is \[\]"),
]


@pytest.mark.parametrize("path, value, message", WRONG, ids=[m for *_, m in WRONG])
def test_what_does_not_fit_is_named_with_its_place(path, value, message, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed(json.loads(sample_plan().to_json()), path, value)))
    with pytest.raises(PlanError, match=f"plan.json is not a valid plan: {message}.*plan the model again"):
        Plan.load(file)


@pytest.mark.parametrize("path, value, message", [
    (("memory",), 3, r"stages\[0\].memory is 3; a table is needed"), (("ops", "mm_0"), 3, "ops.mm_0 is 3; a table is needed"),
    (("ops", "mm_0", "in"), del_, "ops.mm_0.inputs is missing"), (("ops",), del_, "ops is missing"), (("ops",), [], "ops is \\[\\]; a table is needed"),
    (("offload",), "x", "offload is 'x'; a list is needed")])
def test_a_damaged_plan_of_format_1_is_refused(path, value, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(changed(json.loads(FORMAT_1.read_text()), path, value)))


def test_a_collective_over_an_axis_that_is_not_there_is_named():
    data = json.loads(sample_plan().to_json())
    data["collectives"][0]["axis"] = "dp+dq"
    with pytest.raises(PlanError, match=r"mine.json is not a valid plan: collectives\[0\] runs over 'dp\+dq', and the axes are dp, tp"):
        Plan.from_json(json.dumps(data), "mine.json")


def test_a_plan_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read plan .*plan.json: No such file or directory; autoshard plan MODEL --mesh ... -o .*plan.json makes one"):
        Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="it is not text"):
        Plan.load(tmp_path / "plan.json")


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    """As /dev/stdout and /dev/null: a file must not be put in their place."""
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    check_writable(pipe)
    write_atomically(pipe, "plan")
    reader.join(timeout=20)
    assert got == ["plan"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(tmp_path):
    link, plan = tmp_path / "link.json", tmp_path / "plan.json"
    link.symlink_to(plan)
    write_atomically(link, "first")
    write_atomically(link, "second")
    assert link.is_symlink() and plan.read_text() == "second"
