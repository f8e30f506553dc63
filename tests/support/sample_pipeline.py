"""A plan of two stages written by hand: stage 1 takes twice as long."""
from __future__ import annotations

from dataclasses import replace

from sample_plan import sample_plan

from autoshard.base.mesh import Mesh
from autoshard.base.plan import PlacedTensor, Plan, StagePlan
from autoshard.base.spec import R
from autoshard.decide.pipeline_options import Pipeline
from autoshard.pipeline.playback import played, table_of

SUBMESH = Mesh(("dp",), (2,))
STEP, WIRE = 0.1, 0.01
WINDOWS = ({"forward": 1.0, "backward": 2.0}, {"forward": 2.0, "backward": 4.0})


def sample_pipeline(schedule: str = "1f1b", microbatches: int = 4) -> Plan:
    options = Pipeline(microbatches, schedule, ["layers.2"], 1)
    windows = [{"forward": w["forward"], "backward": w["backward"] / 2, "weight": w["backward"] / 2} if schedule == "zb1p" else w for w in WINDOWS]
    whole = sample_plan()
    stages = tuple(StagePlan(s, s, first, last, SUBMESH, windows[s], STEP, 2 - s, {**whole.memory, "total": (1 + s) * 2.0**30}, ops=10, parameters=1000)
                   for s, (first, last) in enumerate((("embed", "layers.1"), ("layers.2", "layers.3"))))
    transfers = [{"value": "x@1", "from": 0, "to": 1, "window": "forward", "nbytes": 1024, "seconds": WIRE},
                 {"value": "dx@0", "from": 1, "to": 0, "window": "backward", "nbytes": 2048, "seconds": WIRE}]
    playback = played(table_of(options, 2, microbatches, True), stages, transfers)
    step = playback.makespan + STEP
    predicted = {"step_s": step, "compute_s": microbatches * 6.0, "blocking_s": 0.0, "hideable_s": 0.0, "hidden_s": 0.0, "exposed_s": 0.0,
                 "optimizer_s": STEP, "idle_s": step - microbatches * 6.0 - STEP}
    layouts = (PlacedTensor("weight", "embed.weight", "embed", (512, 64), "bfloat16", (R,)),
               PlacedTensor("activation", "layers.2", "layers.2", (8, 64, 64), "bfloat16", (0,)))
    return replace(
        whole, mesh=Mesh(("pp", "dp"), (2, 2)), stages=stages, predicted=predicted, objective_s=step, layouts=layouts, collectives=(), copies=(), ops={},
        fallbacks=(), settings={"training": True, "optimizer": "adamw", "pipeline": options.as_data()},
        pipeline={"options": options.as_data(), "schedule": schedule, "microbatches": microbatches, "makespan_s": playback.makespan,
                  "bubble": playback.bubble, "busy": playback.busy.tolist(), "idle": playback.idle.tolist(), "transfers": transfers})
