"""How far grouping ops into units shrinks the search problem.

    python benchmarks/units.py [MODEL] [--mesh dp=8,tp=8] [--batch 16] [--seq 8192]
"""
from __future__ import annotations

import argparse

from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import load_cluster
from autoshard.formulate.problem_of import formulate
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import Training, build_cost_table
from autoshard.space.decision_units import find_units, singletons
from autoshard.space.strategies import enumerate_strategies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama:1b")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--cluster", default="h100-dgx")
    args = parser.parse_args()
    spec = load_model(args.model, batch=args.batch, seq=args.seq, dtype="bf16")
    traced = trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn)
    graph, mesh = traced.graph, parse_mesh(args.mesh)
    strategies = enumerate_strategies(graph, mesh, Seeds())
    table = build_cost_table(graph, mesh, load_cluster(args.cluster), strategies, Training())
    print(f"{args.model} on {mesh}: {len(graph.ops)} ops")
    for name, units in (("every op by itself", singletons(table)), ("units", find_units(table))):
        problem = formulate(table, units=units).problem
        print(f"{name:20} {len(units.units):7} deciders  {problem.n:7} nodes with copies  {len(problem.edges):7} edges  "
              f"{sum(map(len, problem.node_costs)):8} choices")


if __name__ == "__main__":
    main()
