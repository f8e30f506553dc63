"""The program that a plan was made for: traced again, since a plan file has decisions and no graph."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.base.plan import Plan
from autoshard.decide.options import planned_under
from autoshard.errors import PlanError, UsageError
from autoshard.pipeline.microbatches import batch
from autoshard.program.calling import Traced
from autoshard.program.load import ModelSpec, load_model
from autoshard.seeds.grammar import seed_text


def traced_for(plan: Plan, model: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None,
               loss_fn: Callable[..., Any] | None, rows: int | None = None) -> Traced:
    """`model` with these inputs, or, without one, the model that the plan names, with `rows` as its batch if given. Raises ModelError, PlanError,
    UsageError."""
    said, training = planned_under(plan), bool(plan.settings.get("training"))
    if model is None:
        if len(args) or kwargs or loss_fn is not None:
            raise UsageError("example inputs or a loss were given without a model; give the model that the plan was made for, too")
        spec = named_by(plan if rows is None else replace(plan, model={**plan.model, "batch": rows}))
        spec.model.train(training)
        model, args, kwargs, loss_fn = spec.model, spec.example_inputs, spec.example_kwargs, spec.loss_fn
    elif rows is not None:
        raise UsageError("batch was given beside a model; give example inputs of that batch instead")
    marks = {key: seed_text(value) for key, value in said["seeds"].items()}
    return batch.traced(model, tuple(args), dict(kwargs or {}), said["pipeline"], plan.mesh, loss_fn=loss_fn, training=training,
                        precision=said["precision"], marks=marks, fallback=said["fallback"], expert_capacity=said["expert_capacity"], pad=said["pad"])


def named_by(plan: Plan) -> ModelSpec:
    """The model with example inputs that the plan file names, on the meta device. Raises PlanError where it names none."""
    known = {name: plan.model.get(name) for name in ("batch", "seq", "dtype", "hf")}
    reference = plan.model.get("reference")
    for name, value in known.items():
        if not isinstance(value, (type(None), int if name in ("batch", "seq") else str)):
            raise PlanError(f"the plan says {name} {value!r:.60}, which is none; plan the model again")
    if not isinstance(reference, str):
        raise PlanError("the plan does not say which model it is for: it was made from a module in Python; simulate it there, with "
                        "autoshard.simulate(plan, model, example_inputs)")
    spec = load_model(None if known["hf"] else reference, **known)
    return spec if plan.settings.get("training") else spec.for_inference

