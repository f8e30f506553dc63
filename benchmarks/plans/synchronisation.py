"""How much of a data parallel step is synchronisation, over speeds of the link: as priced, for one H100 per rank.

    python -m benchmarks.plans.synchronisation

DDP of GPT 124M and llama 1B (bf16, AdamW) on 8 ranks that one link joins, from 1 Gb/s Ethernet to NVLink. Published for data parallelism
in general: up to 90 % of the time. `waits` is what the step waits for; `nothing hidden` what it would be if no reduction
ran beside compute. No process is started and nothing is measured: these are the prices plans are made from.
"""
from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

import torch

import autoshard
from autoshard.base import quantities
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.make_plan import make_plan
from autoshard.decide.options import Options
from autoshard.decide.walks.baselines import baseline
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import schemes
from autoshard.formulate.problem_of import formulate
from autoshard.planner.one_stage import prices
from autoshard.program.trace import trace
from autoshard.report import what
from autoshard.search.problem import Solution, Status, evaluate
from benchmarks.shared.about import about, line, markdown

SPEEDS = (("1 Gb/s Ethernet", 0.125e9), ("10 Gb/s Ethernet", 1.25e9), ("25 Gb/s", 3.125e9), ("100 Gb/s", 12.5e9), ("400 Gb/s", 50e9),
          ("NVLink, 450 GB/s", 450e9))
MODELS = (("gpt", "124M", {"batch": 64, "seq": 1024}), ("llama", "1B", {"batch": 16, "seq": 2048}))
RANKS = 8


def profile(folder: Path, bandwidth: float) -> str:
    """A file: the device and overlap of h100-dgx, and one link that joins all."""
    text = (Path(autoshard.__file__).parent / "cost" / "clusters" / "h100-dgx.toml").read_text()
    device, links = text.split("[[links]]", 1)
    path = folder / f"link-{bandwidth:.3g}.toml"
    link = "\n".join(f'{key} = {{ value = {value!r}, source = "Choice of this benchmark" }}'
                     for key, value in (("latency", 4e-6), ("overhead", 6e-5), ("bandwidth", bandwidth), ("efficiency", 0.9)))
    path.write_text(f'{device}[[links]]\nname = "link"\n{link}\n\n[overlap]{links.split("[overlap]")[1]}')
    return str(path)


def data_parallel(name: str, size: str, shape: dict, cluster: str) -> Plan:
    """DDP, priced like any plan."""
    module, options = importlib.import_module(f"models.{name}"), Options(cluster=cluster, memory_budget=1e15)
    with torch.device("meta"):
        model, inputs = module.build(size, **shape)
    inputs = tuple(t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs)
    traced = trace(model.to(torch.bfloat16), inputs, loss_fn=module.loss, training=True)
    formulation = formulate(prices(traced, parse_mesh(f"dp={RANKS}"), options))
    settings = options.settings(True, True)
    choice = baseline(Wiring(formulation), schemes(parse_mesh(f"dp={RANKS}"))[0])
    found = Solution(choice, evaluate(formulation.problem, choice), 0.0, Status.GAP, 0.0)
    return make_plan(formulation, found, model={}, settings=settings, seeds={})


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, size, shape in MODELS:
            for label, bandwidth in SPEEDS:
                plan = data_parallel(name, size, shape, profile(Path(folder), bandwidth))
                waits, shown = what.synchronisation(plan)
                rows.append((f"{name} {size}, batch {shape['batch']} x {shape['seq']}", label, quantities.seconds(plan.predicted["step_s"]),
                             f"{waits:.0%}", f"{shown:.0%}"))
    print(f"{line(about(), f'DDP on {RANKS} H100, as priced')}\n")
    print(markdown(("model", "link", "step", "waits", "nothing hidden"), rows))


if __name__ == "__main__":
    main()
