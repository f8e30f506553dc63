"""`CompiledModule`: the user's model, planned and sharded, as an ordinary nn.Module."""
from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from autoshard import _torch
from autoshard._torch import pytree
from autoshard.base.plan import Plan
from autoshard.base.random import mix
from autoshard.decide.kept import KEPT, Known
from autoshard.errors import AutoshardError, UsageError
from autoshard.pipeline.microbatches import batch
from autoshard.program.binding import Binding, leaf_key
from autoshard.program.calling import Traced
from autoshard.runtime.between.variants import Variants
from autoshard.runtime.compile import Settings, Variant
from autoshard.runtime.guidance import HOOKS, Guidance, attribute, guard, not_taken_apart
from autoshard.runtime.inputs import as_global, spec_given, wrap_output
from autoshard.runtime.kept_gradients import KeptGradients
from autoshard.runtime.microbatches import check_pieces
from autoshard.runtime.outside import Outside
from autoshard.runtime.params.module_shells import Seen, has_attribute, has_own, shell
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.params.update import watch_steps
from autoshard.runtime.ranks.agree import alone, share
from autoshard.runtime.ranks.agreement_facts import call_facts, in_words, inputs_in_words
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.ranks.same_inputs import compare_inputs, is_due
from autoshard.runtime.step import Backend, Function, Step

log = logging.getLogger("autoshard")
MOST_SEARCHED = 16
"""Plans that new shapes may keep; more are only there where a model is called with very different ones."""


class CompiledModule(Guidance, nn.Module):
    """Same parameter and buffer names as the model; parameters are DTensors (plain on one process). Each variant of a call (shapes, modes, numbers
    that code reads) is traced, planned and lowered at its first call; the first one decides the stored placements. See docs/runtime.md."""

    def __init__(self, model: nn.Module, place: Place, settings: Settings) -> None:
        super().__init__()
        self.place, self.settings, self.options, self.passing = place, settings, settings.options, settings.options.passing
        watch_steps()
        self._binding = Binding.of(model, settings.loss_fn)
        self._hold(Stored(model, self._stores_at, settings.options.precision), model.training)

    def _hold(self, stored: Stored, training: bool) -> None:
        """Begin with these tensors and no variant."""
        self._stored = stored
        self._visible = {"root": shell(self._stored.module)}  # in a dict, so that it is no submodule
        root = self._visible["root"]
        guard(self, root)
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = root.__dict__[table]
        self.training = training
        self._parts = tuple(self.modules())  # walking the tree at every call would cost as much as a small layer
        self._seen, self._outside = Seen(root), Outside(root, self._stored.module, self.settings.loss_fn)
        self._trainable = tuple(self._stored.params.values())
        self._steps: dict[Any, Step] = {}
        self._latest: tuple[Any, Step] | None = None
        self._current: Step | None = None
        self._told = self.place.pulse.told if self.place.mesh.size > 1 else [0]
        self._recipes: dict[Any, list[Any]] = {}
        self._searched: tuple[Known, ...] = ()
        self._lowered = Variants(self.place, self.settings)
        self._wraps = self.place.device_mesh is not None
        self._accumulating = self._agreed = False
        self._kept = KeptGradients()
        self._seed: int | None = None
        self._calls = 0

    # --- what a pipeline has otherwise ---

    @property
    def _stores_at(self) -> Place:
        """The ranks that parameters lie on."""
        return self.place

    @property
    def _program(self) -> nn.Module:
        """What is traced."""
        return self._stored.module

    def is_first_holder(self, name: str) -> bool:
        """Whether this rank counts the parameter where every one is to count once: of those that several stages have, the first's."""
        return True

    def _variant(self, traced: Traced, fixed: Mapping[str, Any], replan: bool) -> Variant:
        known = tuple(k for k in self._searched if k.graph.training == traced.graph.training)
        return Variant(traced, self.place, self._stored, self.settings, fixed, self._seed, replan, known)

    # --- calls ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return not_taken_apart(self, args, kwargs)
        key, flat, tensors = alone(self.place, lambda: self._key(args, kwargs))
        step = self._steps.get(key)
        if self._agreed and step is not None and step is not self._current:
            self._current = self._again(key)
        if step is None or step is not self._current:
            step = self._enter(key, flat, tensors=tensors)
        elif self.place.mesh.size > 1 and is_due(step.calls, self.options.running.check_inputs):
            with self.place.pulse.together(in_words(self._facts(key))):
                self._compare_inputs(key, tensors)
        else:
            self._told[0] += 1
        self._calls, step.calls = self._calls + 1, step.calls + 1
        try:
            with self._without_autocast() if key[0][1] else nullcontext():
                outs = step.run(tensors, key[-1], mix(self._seed, self._calls), self)
        except (AutoshardError, RuntimeError) as e:
            self.name_who_left(e)
            raise
        if self._wraps and step.wraps:
            how = zip(outs, step.user_specs, step.user_metas, step.modes, strict=True)
            outs = tuple(wrap_output(t, s, m, mode, self._stores_at) for t, s, m, mode in how)
        return step.calling.unflatten(outs)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Calls inside change between variants that are there without asking the other ranks, which takes milliseconds. For callers that
        have made sure that all ranks make the same calls."""
        before, self._agreed = self._agreed, True
        try:
            yield
        finally:
            self._agreed = before

    def prepare(self, *args: Any, **kwargs: Any) -> "CompiledModule":
        """Trace, plan and lower for these inputs now, without running."""
        key, flat, _ = alone(self.place, lambda: self._key(args, kwargs))
        if key not in self._steps:
            self._enter(key, flat)
        return self

    @contextmanager
    def run_by(self, backend: Backend) -> Iterator[None]:
        """Inside, the variants that are there by now are run by another backend; those that come up inside are not. Raises UsageError for a
        pipeline and for a model that has not been called or prepared yet."""
        if not self._steps or not all(isinstance(step, Step) for step in self._steps.values()):
            raise UsageError("there is no variant of the model to run" + (" by other means: it has pipeline stages" if self._steps else
                             "; call it, or prepare(...), before"))
        before = self._steps, self._current
        changed = {step: step.run_by(backend) for step in self._steps.values()}
        self._steps, self._current = {key: changed[step] for key, step in self._steps.items()}, changed.get(self._current)
        try:
            yield
        finally:
            self._steps, self._current = before

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Any], list[torch.Tensor]]:
        """What a variant depends on (the last part: how each tensor comes in), the leaves of the bound call, and the tensors
        among them."""
        self._seen.check_modules()
        self._stored.check_unchanged()
        flat, tree = self._binding.flatten(args, kwargs)
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        given, grad = tuple(spec_given(self.passing, t, self.place) for t in tensors), torch.is_grad_enabled()
        shapes = tuple((tuple(v.shape), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else leaf_key(v) for v in flat)
        device = self.place.device.type
        modes = (grad, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
                 tuple([m.training for m in self._parts]),
                 tuple([p.requires_grad for p in self._trainable]),
                 attributes := self._seen.state(), self._outside.state(attributes))
        return (modes, tree, shapes, given), flat, tensors

    def _enter(self, key: Any, flat: list[Any], replan: bool = False, tensors: list[torch.Tensor] | None = None) -> Step:
        """Change to another variant, which all ranks do in the same call: a rank alone would wait in a collective. `tensors`: the
        inputs of the call that is to run in it."""
        if self.place.mesh.size == 1:
            self._seed = torch.initial_seed() if self._seed is None else self._seed
            self._current = self._build(key, flat, replan) if replan or key not in self._steps else self._again(key)
            return self._current
        facts = self._facts(key)
        with self.place.pulse.together(in_words(facts)):
            seed = share(self.place, facts, lambda: str(torch.initial_seed()), self.options.running.timeout)
            self._seed = int(seed) if self._seed is None else self._seed
            known = None if replan else self._steps.get(key)
            if tensors is not None and is_due(known.calls if known else 0, self.options.running.check_inputs):
                self._compare_inputs(key, tensors)
            self._current = self._again(key) if known else self._build(key, flat, replan)
        return self._current

    def _again(self, key: Any) -> Step:
        """A variant that is there, which is used last from now on."""
        self._steps[key], self._recipes[key] = self._steps.pop(key), self._recipes.pop(key)
        return self._steps[key]

    def _remember(self, key: Any, step: Step, stand_ins: list[Any], took: tuple[float, float]) -> Step:
        """Keep a new variant, and forget those used longest ago where there are too many. `took`: seconds to trace, and for the rest."""
        self._steps[key], self._recipes[key], self._latest = step, stand_ins, (key, step)
        if step.status != KEPT and all(known.graph is not step.graph for known in self._searched):
            self._searched = (*self._searched, Known(step.plan, step.graph))[-MOST_SEARCHED:]
        for oldest in list(self._steps)[:-self.options.running.variants]:
            del self._steps[oldest], self._recipes[oldest]
        log.info("variant %d of at most %d for inputs %s: traced in %.2f s; planned (%s), lowered and bound in %.2f s", len(self._steps),
                 self.options.running.variants, inputs_in_words(key), took[0], step.status, took[1])
        self._lowered.add(key, stand_ins, step)
        return step

    def _build(self, key: Any, flat: list[Any], replan: bool = False) -> Step:
        """A new variant. Tensors made here outlive an inference mode around the call, and autograd takes none made inside of one."""
        with torch.inference_mode(False), torch.set_grad_enabled(key[0][0]):
            return self._built(key, flat, replan)

    def _built(self, key: Any, flat: list[Any], replan: bool) -> Step:
        alone(self.place, lambda: self._refuse_autocast(key[0][1]))
        if self._steps and not replan:
            log.info("new variant of the model (%s): tracing and planning it with the placements of the others",
                     "training" if torch.is_grad_enabled() else "inference")
        given = iter(key[-1])
        stand_ins = flat if replan else [as_global(v, next(given), self.place) if isinstance(v, torch.Tensor) else v for v in flat]
        self._sync_modes()
        begin = time.perf_counter()
        if not replan and (step := self._lowered.between(key, stand_ins, self._searched, self._traced)) is not None:
            return self._remember(key, step, stand_ins, (0.0, time.perf_counter() - begin))
        traced = alone(self.place, lambda: self._traced(key[1], stand_ins, stored={} if replan else self._stored.metas))
        alone(self.place, lambda: check_pieces(traced.graph, [v for v in flat if isinstance(v, torch.Tensor)]))
        fixed = {f"input:{i}": spec for i, spec in enumerate(key[-1]) if spec is not None}
        there = time.perf_counter()
        step = self.settings.build(self._variant(traced, fixed, replan))
        self._outside.traced()
        return self._remember(key, step, stand_ins, (there - begin, time.perf_counter() - there))

    def _traced(self, tree: Any, leaves: Sequence[Any], **more: Any) -> Traced:
        how = {**self.settings.tracing, "stored": self._stored.metas, **more}
        return batch.traced(self._program, *pytree.tree_unflatten(leaves, tree), self.options.pipeline, self.place.mesh, **how)

    def _facts(self, key: Any) -> dict[str, str]:
        which = str(list(self._steps).index(key)) if key in self._steps else "a new one"
        return call_facts(self._program, self.settings, key, self._told[0] + 1, not self._steps, which, self._outside.in_words())

    def name_who_left(self, e: Exception) -> None:
        """Where a collective fails (with `e`) because a rank does not come: raises AutoshardError, which says which one and why, if
        that rank told, or its process is known to be gone."""
        if self.place.mesh.size > 1:
            self.place.pulse.blame(e)

    def _compare_inputs(self, key: Any, tensors: list[torch.Tensor]) -> None:
        names = [n for n, leaf in zip(self._binding.names(key[1]), key[2], strict=True) if isinstance(leaf[0], tuple)]
        compare_inputs(self.place, tensors, key[-1], names, self.passing.inputs, self.options.running.timeout)

    def _refuse_autocast(self, dtype: Any) -> None:
        """A trace sees CPU tensors, which another device's autocast leaves alone; that of CPUs casts other ops."""
        device = self.place.device.type
        if dtype and device != "cpu":
            raise UsageError(f"torch.autocast({device!r}) around the call does not reach the trace, which is made with CPU tensors; "
                             "compile with precision=autoshard.Precision(\"bf16\") instead")

    def _sync_modes(self) -> None:
        """train(), eval() and attributes (a dropout's p) reach the modules the user sees; tracing runs their twins."""
        self._visible["root"].__dict__["training"] = self.training
        for twin, seen in zip(self._program.modules(), self._visible["root"].modules(), strict=True):
            twin.training = seen.training
        self._seen.hand_on(self._program)

    def _without_autocast(self) -> Any:
        """Casts are part of the graph already."""
        return torch.autocast(self.place.device.type, enabled=False)

    # --- gradients ---

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave gradients unreduced, kept aside; the next outside adds them in and reduces once, and `.grad` is complete."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._kept.clear()

    @property
    def _deferring(self) -> bool:
        return self._accumulating or bool(self._kept)

    def gradient_function(self, step: Step) -> Function:
        """The backward to run now."""
        return step.deferred[0] if self._deferring else step.backward

    def keeps_apart(self) -> bool:
        """Whether autograd must not know of the parameters in this call: their hooks would run with None where gradients are kept
        for later."""
        return self._accumulating and any(map(_torch.has_gradient_hook, self._trainable))

    def finish_gradients(self, step: Step, grads: Sequence[torch.Tensor], apart: bool = False,
                         missing: frozenset[int] = frozenset()) -> Sequence[torch.Tensor | None]:
        """Gradients to hand to autograd, in the order of `step.grad_names`; None for those kept for later, and for parameters
        that are kept `apart`, whose gradients go to them here. `missing`: results to which no gradient came; what depends on these alone has none."""
        without, params, named = step.behind_only(missing), self._stored.params, tuple(zip(step.grad_names, grads, strict=True))
        if not self._deferring and not apart:
            return [None if n in without else g for n, g in named]
        if self.keeps_apart() and not apart:
            raise UsageError("a parameter has a gradient hook, and no_sync() was entered after the model was called; call the model inside "
                             "no_sync() as well")
        if not self._deferring:
            step.deliver({n: g for n, g in named if n in params and n not in without})
            return [None if n in params or n in without else g for n, g in named]
        self._kept.add(step, [g for n, g in named if n in params], without)
        done = {} if self._accumulating else self._kept.reduced()
        step.deliver({n: g for n, g in done.items() if apart or n not in step.grad_names})
        return [(None if apart else done.get(n)) if n in params else None if n in without else g for n, g in named]

    # --- plans ---

    @property
    def plan(self) -> Plan | None:
        """The plan of the variant built last; None before the first call."""
        return self._latest[1].plan if self._latest else None

    def replan(self, optimizer: torch.optim.Optimizer | None = None) -> Plan:
        """Search again for the latest variant with no placement fixed, and move parameters, gradients and the
        optimizer's state there. Other variants are planned anew at their next call."""
        if self._latest is None:
            raise UsageError("replan() needs a variant to plan for; call the model once before")
        key = self._latest[0]
        stand_ins = self._recipes[key]  # whole already: pieces must not be made whole twice
        with torch.set_grad_enabled(key[0][0]):
            step = self._enter(key, stand_ins, replan=True)
        self._stored.move(step.plan.placements, optimizer, step.graph)
        self._steps, self._recipes, self._searched = {key: step}, {key: stand_ins}, (Known(step.plan, step.graph),)
        self._lowered = Variants(self.place, self.settings)
        return step.plan

    # --- random numbers ---

    def get_rng_state(self) -> dict[str, int]:
        """What the draws of the next call depend on (dropout): part of a checkpoint from which training goes on exactly. Equal on
        every rank. Raises UsageError before the first call or `prepare`."""
        if self._seed is None:
            raise UsageError("a compiled model takes its seed at its first call; call it, or prepare(...), before get_rng_state()")
        return {"seed": self._seed, "calls": self._calls}

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """Go on drawing where `get_rng_state` was called. Raises UsageError for something else."""
        if set(state) != {"seed", "calls"} or not all(type(n) is int for n in state.values()):
            raise UsageError(f"set_rng_state takes what get_rng_state gave, {{'seed': int, 'calls': int}}, not {dict(state)!r:.100}")
        self._seed, self._calls = state["seed"], state["calls"]

    # --- module protocol ---

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As usual; whole tensors are cut to this rank's placement."""
        if assign:
            raise UsageError("load_state_dict(assign=True) would replace the sharded parameters; load without assign")
        if not self._stored.specs and self._stored.is_virtual:
            raise UsageError("the model was built on the meta device and has no memory yet; call it once (or pass example_inputs) before loading")
        mine = dict((*self.named_buffers(remove_duplicate=False), *self.named_parameters(remove_duplicate=False)))
        return super().load_state_dict(self._stored.all_as_held(mine, state_dict), strict)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            visible = self.__dict__.get("_visible", {}).get("root")
            if visible is None or name.startswith("__"):
                raise
        return attribute(self, visible, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the model itself has an attribute or a property for is the model's."""
        root = self.__dict__.get("_visible", {}).get("root")
        if root is None or not (has_own(root, name) or name not in self.__dict__ and not hasattr(type(self), name) and has_attribute(root, name)):
            super().__setattr__(name, value)
        else:
            setattr(root, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledModule":
        """With tensors of its own and this one's variants and plans, for `swa_utils.AveragedModel`. Parameters' hooks stay behind, as torch's do."""
        twin = object.__new__(type(self))
        nn.Module.__init__(twin)
        twin.__dict__.update({name: getattr(self, name) for name in ("place", "settings", "options", "passing", "_binding")})
        self._sync_modes()  # what is copied is what the user sees by now
        twin._hold(self._stored.copied(memo), self.training)
        twin._seen.follow(self._seen)
        twin._outside.follow(self._outside)
        twin.__dict__.update({table: copy.copy(self.__dict__[table]) for table in HOOKS})
        memo[id(self)] = twin
        twin._seed, twin._calls, twin._searched = self._seed, self._calls, self._searched
        twin._steps, twin._recipes = {key: step.on(twin._stored) for key, step in self._steps.items()}, dict(self._recipes)
        twin._latest = self._latest and (self._latest[0], twin._steps[self._latest[0]])
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a compiled model cannot be pickled; save state_dict() with torch.distributed.checkpoint, and model.plan "
                         "with plan.save(path)")


