"""One trace of a model: the forward, or the joint forward + backward, as functional aten ops.

The model runs once, eagerly, on fake tensors, and its backward once through autograd; a recorder below both
writes down every op. There is no other compiler in between, so Python runs as it is, tied weights are one
value because they are one tensor, and `torch.utils.checkpoint` recomputes in backward because it does.

Conventions of the graph
* `device` and `pin_memory` arguments are dropped: where the program runs is the runtime's choice.
  Lowering passes its device to every op whose schema has a `device` argument.
* Op names: "param:NAME", "buffer:NAME", "input:i" (i-th tensor among the flattened (args, kwargs)),
  "tangent:i", "mm_0", "mm_3_recompute"; outputs as in base/roles.py.
* Under a precision policy the output of a gradient has kwargs (("reduce", dtype),), the dtype the sum over ranks
  must be done in. The op it refers to is the `_to_copy` that casts the gradient back to the stored dtype, so the
  sum is that op's output or its input.
* Parameters, buffers, inputs and tangents are contiguous; who runs the program passes contiguous tensors.
* Constant tensors are buffers "_constant_i", with their data in `Calling.constants`.
* Writes to buffers during a recomputation are dropped: they repeat those of the forward pass.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard import _torch
from autoshard._torch import pytree
from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.precision import Precision
from autoshard.base.roles import Output, Role
from autoshard.errors import TraceError
from autoshard.experts.capacity import EXPERT_CAPACITY
from autoshard.program.binding import Binding
from autoshard.program.calling import Calling, TensorLeaf, Traced
from autoshard.program.opaque.opaque_probe import Runner, is_plain
from autoshard.program.reads.data_reads import DataReads
from autoshard.program.reads.known_masks import KnownMasks
from autoshard.program.reads.masked_writes import MaskedWrites
from autoshard.program.reads.selections import Selections, returned
from autoshard.program.taken import check_dense, dense_buffers
from autoshard.program.tracing.any_size import AnySize
from autoshard.program.tracing.functions.assigned_data import AssignedData
from autoshard.program.tracing.functions.embedding_bags import EmbeddingBags
from autoshard.program.tracing.functions.equal_heads import EqualHeads
from autoshard.program.tracing.functions.expert_layers import forward_as_op
from autoshard.program.tracing.functions.losses import Losses
from autoshard.program.tracing.functions.of_constants import OfConstants
from autoshard.program.tracing.functions.recurrent_dropout import RecurrentDropout
from autoshard.program.tracing.functions.rms_norms import RMSNorms
from autoshard.program.tracing.known_values import Constants, small_buffers
from autoshard.program.tracing.lru_caches import kept_clean
from autoshard.program.tracing.no_cache import refuse_cache, without_cache, without_decoding_cache
from autoshard.program.tracing.pythons_own import state_of, tell_of_changes
from autoshard.program.tracing.survey import Answers, Survey, loss_of, user_errors, without_gradient
from autoshard.program.tracing.tape import Tape, meta_of
from autoshard.program.tracing.twin import copy_tree, track
from autoshard.program.tracing.user_collectives import LOCAL_SHAPES, STAND_INS
from autoshard.program.tracing.ways_out import on_data
from autoshard.seeds.marks import annotate, is_user_collective, marks_of


class OneTrace:
    """State of one trace; nothing of it outlives `traced()`. `whole`: paths of submodules that run whole; `survey`: notes what
    goes wrong, and the trace goes on; `answers`: made-up data for a trace of a submodule `alone`, where nothing need be
    differentiable; `mode`: see `_torch.functional_tracing`; `any_size`: a size of inputs that is left open; `without`: paths of submodules
    that are taken out of the lists they are in."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 loss_fn: Callable[..., Any] | None, training: bool, precision: Precision | None,
                 marks: Mapping[str, str], whole: Collection[str] = (), survey: Survey | None = None,
                 answers: Answers | None = None, mode: str = "exporting", hooks_run: bool = False,
                 expert_capacity: float = EXPERT_CAPACITY, any_size: AnySize | None = None, without: Collection[str] = ()) -> None:
        self.model, self.loss_fn, self.training, self.precision = model, loss_fn, training, precision
        self.marks, self.hooks_run, self.expert_capacity = marks, hooks_run, expert_capacity
        self.binding = Binding.of(model, loss_fn)
        self.flat, self.in_spec = pytree.tree_flatten(self.binding.arguments(args, kwargs))  # as `flatten` has it, and checked
        self.whole, self.survey, self.alone, self.mode = whole, survey, answers is not None, mode
        self.tape, self.any_size = Tape(), any_size
        self.recorder = _torch.Recorder(self.tape.on_op, any_size and any_size.begin())
        if any_size is not None:
            any_size.make_symbol(self.recorder)
        if survey is not None:
            self.tape.on_problem = survey.add
            answers = Answers(note=self._note_data)
        self.assigned = AssignedData(self.tape.refuse)
        constants = Constants(self.tape, answers, small_buffers(model), lambda name: not self.assigned.is_written(self.stored[name]))
        self.recorder.answer = constants if any_size is None else None
        self.reads = DataReads(self.tape, constants)
        self.known_masks = nullcontext() if any_size else KnownMasks(constants)  # they are values at one size
        self.selections = nullcontext() if any_size else Selections(constants, training)
        self.recorder.on_check, self.recorder.on_higher_order = self.tape.on_check, self.tape.on_higher_order
        self.runner = Runner(self.tape, self.recorder, _alone, copy_tree)
        self.without = tuple(f"{path}." for path in without)
        self.left_out: frozenset[int] = frozenset()
        self.params = {n: p for n, p in model.named_parameters() if not n.startswith(self.without)}
        self.buffers = {n: b for n, b in dense_buffers(model) if not n.startswith(self.without)}
        self.stored: dict[str, torch.Tensor] = {}   # functional tensors of params and buffers
        self.tape.forbidden = {id(t): n for n, t in (self.params | self.buffers).items()}

    def traced(self) -> Traced:
        enabled = self.training or torch.is_grad_enabled() and not any(p.requires_grad for p in self.params.values())  # forward may ask
        with (kept_clean(self.mode), torch.inference_mode(False), torch.set_grad_enabled(enabled), _on_cpu(),
              torch.autograd.set_detect_anomaly(False),  # it reads every gradient, and those of a trace have no numbers
              _torch.functional_tracing(self.recorder, self.mode), _torch.functional_collectives_run(STAND_INS),
              EqualHeads(), RMSNorms(), EmbeddingBags(), RecurrentDropout(), Losses(self.reads.note), MaskedWrites(),
              OfConstants(self.tape.is_fresh), self.assigned, self.known_masks, self.selections, self.reads):
            self._stored_values()
            inputs = self._inputs()
            twin = self._twin_model()
            self.recorder.recording = True
            self._cast_stored(twin)
            call_args, call_kwargs = pytree.tree_unflatten([self._input_value(v, inputs) for v in self.leaves], self.in_spec)
            before = state_of(twin)
            out = self._forward(twin, call_args, call_kwargs)
            after = state_of(twin)  # backward may run parts again
            users, out_leaves, out_spec, wanted = self._outputs(out)
            self._mutations(twin, inputs)
            if self.training:
                self._backward(users, wanted, inputs)
                self.assigned.refuse_in_backward()
        if self.any_size is not None:
            self.any_size.end()
        if not self.alone:
            tell_of_changes(before, after)
        return self._finish(out_leaves, out_spec)

    # --- placeholders ---

    def _placeholder(self, kind: Any, target: str, t: torch.Tensor, dtype: torch.dtype | None = None, shape: Any = None) -> torch.Tensor:
        fake = self.recorder.empty(t.shape if shape is None else shape, dtype or t.dtype)
        name = target if kind == "input" else f"{kind}:{target}"
        self.tape.add(Op(name, kind, target, outputs=(meta_of(fake),)))
        self.tape.bind(fake, Ref(name))
        return _torch.functional(fake)

    def _stored_values(self) -> None:
        for name, p in self.params.items():
            if self.training and not self.hooks_run and _torch.has_gradient_hook(p):
                self.tape.refuse(f"parameter {name!r} has a gradient hook (register_hook), which the graph would not run; "
                                 "remove it, and register it on the parameters of the compiled model, where hooks run")
            keep = self.precision is None or not p.dtype.is_floating_point
            t = self._placeholder("param", name, p, None if keep else self.precision.stored)
            self.stored[name] = t.requires_grad_(p.requires_grad)  # forward may ask, or take gradients
        for name, b in self.buffers.items():
            self.stored[name] = self._placeholder("buffer", name, b)

    def _inputs(self) -> list[torch.Tensor]:
        out, self.leaves, names = [], [], []
        bound = pytree.tree_unflatten(self.flat, self.in_spec)
        self.targets: set[int] = set()   # tensor inputs that belong to the loss's target
        for (path, value), name in zip(pytree.tree_flatten_with_path(bound)[0], self.binding.names(self.in_spec), strict=True):
            if isinstance(value, torch.Tensor):
                check_dense(value)
                self.leaves.append(TensorLeaf(len(out)))
                shape = self.any_size and self.any_size.shape(len(out), value.shape)
                t = self._placeholder("input", f"input:{len(out)}", value, shape=shape)
                needs_grad = value.requires_grad and value.dtype.is_floating_point
                out.append(t.requires_grad_(needs_grad))
                names.append(name)
                if self.loss_fn is not None and _in_argument(path, len(bound[0]) - 1):
                    self.targets.add(len(out) - 1)
            else:
                refuse_cache(value, name)
                self.leaves.append(value)
        self.names = tuple(names)
        return out

    # --- the model ---

    def _twin_model(self) -> nn.Module:
        """A copy of the module tree that holds the traced tensors; the weights themselves are not copied."""
        memo: dict[int, Any] = {}
        for name, t in (self.params | self.buffers).items():
            memo[id(t)] = self.stored[name]
        for module in self.model.modules():
            for value in (*vars(module).values(), *module._buffers.values()):  # of buffers those left that are not dense
                if isinstance(value, torch.Tensor):
                    memo.setdefault(id(value), value if value.device.type in ("cpu", "meta") else value.cpu())
        for t in (*self.model.parameters(), *self.model.buffers()) if self.without else ():
            memo.setdefault(id(t), t)  # of what is taken out: not worth a copy
        twin = copy_tree(self.model, memo)
        for path in self.without:
            parent, _, name = path[:-1].rpartition(".")
            del twin.get_submodule(parent)._modules[name]
        for name, module in twin.named_modules():
            if name not in self.whole and (as_op := forward_as_op(module, self.expert_capacity)) is not None:
                module.forward = as_op
            if name in self.whole:
                module._forward_hooks.clear(), module._forward_pre_hooks.clear()  # they run inside, with the original
                module.forward = self._runs_whole(name, module)
            elif self.survey is not None and name:
                module.forward = self.survey.watched(name, module.forward, self._runs_whole(name, module))
            for text in marks_of(name, self.marks, self.params):
                module.register_forward_hook(lambda m, args, out, text=text: _mark(out, text))
            track(module, name, self.tape.modules)
        return twin

    def _runs_whole(self, name: str, module: nn.Module) -> Callable[..., Any]:
        return self.runner.forward(name, self.model.get_submodule(name), module)

    def _note_data(self, op: Any, where: str, hint: str) -> None:
        self.survey.add(on_data(self.tape.phase, where, op, hint), self.tape.module)

    def _cast_stored(self, twin: nn.Module) -> None:
        """Replace floating parameters and buffers by their casts to the compute dtype, one cast per tensor."""
        if self.precision is not None:
            self.precision.cast(twin)
        self.placed = {name: twin.get_buffer(name) for name in self.buffers}
        self.assigned.watch_parameters(twin, self.params)

    def _input_value(self, leaf: Any, inputs: list[torch.Tensor]) -> Any:
        """What the model gets: floating inputs in the compute dtype, but not the target of the loss."""
        if not isinstance(leaf, TensorLeaf):
            return leaf
        t = inputs[leaf.index]
        if self.precision is None or not t.dtype.is_floating_point or leaf.index in self.targets:
            return t
        return t.to(self.precision.compute)

    def _forward(self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with user_errors("forward", self._hint), without_decoding_cache(twin):
            out = twin(*args, **kwargs) if self.loss_fn is None else loss_of(self.loss_fn, twin(*args[:-1], **kwargs), args[-1])
            return returned(without_cache(out, kwargs))

    def _hint(self) -> str:
        """What an error may come from."""
        return LOCAL_SHAPES if any(is_user_collective(op) for op in self.tape.ops) else ""

    # --- outputs ---

    def _outputs(self, out: Any) -> tuple[list[torch.Tensor], tuple[Any, ...], Any, list[int]]:
        flat, spec = pytree.tree_flatten(out)
        users: list[torch.Tensor] = []
        leaves: list[Any] = []
        for value in flat:
            if isinstance(value, torch.Tensor):
                leaves.append(TensorLeaf(len(users)))
                users.append(value)
            else:
                leaves.append(self._plain(value))
        for i, value in enumerate(self.reads.guarded(users, self.stored)):
            self._output(Output(Role.USER, i), value)
        wanted = _differentiable(out, users, leaves)
        self.left_out = frozenset(i for i, t in enumerate(users) if t.requires_grad and self.training) - set(wanted)
        return users, tuple(leaves), spec, wanted

    def _plain(self, value: Any) -> Any:
        """A result leaf that is not a tensor is returned as it was when traced, so it must hold no tensors."""
        if not is_plain(value):
            self.tape.refuse(f"the model returns a {type(value).__module__}.{type(value).__name__}, which is not a pytree of tensors and "
                             "plain values; return tensors (of a Hugging Face model leave use_cache=True out of the call), or register it: "
                             f"{_registration(value)}")
        return value

    def _output(self, target: Output, value: torch.Tensor, kwargs: tuple[tuple[str, Any], ...] = ()) -> None:
        ref = self.tape.ref(_torch.unwrap(value))
        self.tape.add(Op(str(target), "output", target, (ref,), kwargs, phase=self.tape.phase))

    def _mutations(self, twin: nn.Module, inputs: list[torch.Tensor]) -> None:
        """Parameters that the model wrote, and buffers that it wrote in place or assigned anew, in their stored dtype."""
        for i, t in enumerate(inputs):
            if self.assigned.is_written(t):
                self.tape.refuse(f"the model writes into its input {self.names[i]} in place; write into a copy (.clone()), or make what is "
                                 "carried from call to call, such as a cache, a buffer of the model")
        for name in self.assigned.parameters(twin, self.stored):
            self._output(Output(Role.MUTATION, name), self.stored[name])
        for name in self.buffers:
            stored, now = self.stored[name], returned(twin.get_buffer(name))
            if now is not self.placed[name] or self.assigned.is_written(now):
                if now.shape != stored.shape:
                    self.tape.refuse(f"the model changes the shape of buffer {name!r} from {tuple(stored.shape)} to "
                                     f"{tuple(now.shape)}; keep its shape")
                if name in self.reads.constants.assumed:
                    self.tape.refuse(f"the model writes buffer {name!r}, whose value decides what it does, so it is not one graph; choose by "
                                     "torch.where, or keep that number outside of tensors", name.rpartition(".")[0])
                if now is not self.placed[name] or self.assigned.has(now):
                    self.assigned.refuse_shared(name, now, self.stored, {n: twin.get_buffer(n) for n in self.buffers})
                with torch.no_grad():
                    self._output(Output(Role.MUTATION, name), now.to(stored.dtype))

    @property
    def _goes_on(self) -> bool:
        """Whether no error is made of a graph without gradients."""
        return self.alone or bool(self.survey and self.survey.problems)

    # --- backward ---

    def _backward(self, users: list[torch.Tensor], wanted: list[int], inputs: list[torch.Tensor]) -> None:
        self.tape.phase = "backward"
        if self.survey is not None:
            self.survey.is_backward = True
        tangents = [self._tangent(i, users[i]) for i in wanted]
        sources = {n: t for n, t in self.stored.items() if t.requires_grad}
        sources |= {f"input:{i}": t for i, t in enumerate(inputs) if t.requires_grad}
        trained = any(n in sources for n in self.params)
        if not wanted or not sources:
            if self._goes_on:
                return
            if sources and not trained:  # an input that requires a gradient gets none, as in eager mode
                self.training = False
                return
            raise TraceError(f"nothing to differentiate: {without_gradient(users, self.loss_fn)}")
        with user_errors("backward"), _torch.no_autocast():
            grads = _torch.gradients([users[i] for i in wanted], list(sources.values()), tangents)
        if all(g is None for g in grads) and trained and not self._goes_on:
            raise TraceError("no trainable parameter receives a gradient; do not detach the loss from the parameters")
        for (name, t), g in zip(sources.items(), grads, strict=True):
            if g is not None:
                self._gradient(name, t, g)

    def _tangent(self, i: int, user: torch.Tensor) -> torch.Tensor:
        fake = self.recorder.empty(user.shape, user.dtype)
        self.tape.add(Op(f"tangent:{i}", "tangent", i, outputs=(meta_of(fake),), phase="backward"))
        self.tape.bind(fake, Ref(f"tangent:{i}"))
        return _torch.functional(fake)

    def _gradient(self, name: str, t: torch.Tensor, g: torch.Tensor) -> None:
        if g.shape != t.shape or g.dtype != t.dtype:
            raise TraceError(f"the gradient of {name!r} is {tuple(g.shape)} {g.dtype} instead of {tuple(t.shape)} {t.dtype}")
        kwargs: tuple[tuple[str, Any], ...] = ()
        if self.precision is not None:
            kwargs = (("reduce", self.precision.reduction),)
            g = self.precision.through_reduction(g)
        self._output(Output(Role.GRADIENT, name), g, kwargs)

    # --- result ---

    def _finish(self, out_leaves: tuple[Any, ...], out_spec: Any) -> Traced:
        ops = self.tape.ops
        used = {r.op for op in ops for r in op.refs} | {f"param:{op.target.name}" for op in ops if op.kind == "output"}  # these lie as it
        drop = {op.name for op in ops if op.kind in ("param", "buffer") and op.name not in used}
        unused = tuple(op.target for op in ops if op.name in drop and op.kind == "param")
        # in_tree and out_tree make the graph's hash cover the calling convention
        graph = Graph(_placeholders_first(op for op in ops if op.name not in drop), self.training,
                      f"{self.in_spec} {[v for v in self.leaves if not isinstance(v, TensorLeaf)]}", str(out_spec),
                      _tied(self.model), unused)
        inputs = tuple(op.outputs[0] for op in graph.of_kind("input"))
        return Traced(graph, Calling(self.binding, self.in_spec, tuple(self.leaves), self.names, inputs, out_spec, out_leaves,
                                     dict(self.tape.constants), self.left_out))


def _alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, variant: int) -> Traced:
    """A trace of a submodule by itself, on made-up data."""
    with torch.random.fork_rng(devices=()):
        return OneTrace(module, args, kwargs, None, training, None, {}, answers=Answers(variant)).traced()


def _placeholders_first(ops: Iterator[Op]) -> tuple[Op, ...]:
    """Parameters, buffers (constants found on the way among them) and inputs, then the rest in order."""
    ops = list(ops)
    first = [replace(op, phase="forward") for op in ops if op.kind in ("param", "buffer", "input")]
    return tuple(first + [op for op in ops if op.kind not in ("param", "buffer", "input")])


def _tied(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(alias, kept name) for every tensor that the model knows under several names."""
    out: list[tuple[str, str]] = []
    for named in (model.named_parameters, model.named_buffers):
        kept: dict[int, str] = {}
        for name, t in named(remove_duplicate=False):
            if kept.setdefault(id(t), name) != name:
                out.append((name, kept[id(t)]))
    return tuple(out)


def _differentiable(out: Any, users: list[torch.Tensor], leaves: list[Any]) -> list[int]:
    """Indices of user outputs that get a tangent. Of a mapping with a scalar "loss" only the loss: a tangent
    for the logits beside it would cost a pass over the largest tensor of the model, for zeros."""
    loss = out.get("loss") if isinstance(out, Mapping) else None
    if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad:
        return [next(i for i, t in enumerate(users) if t is loss)]
    return [i for i, t in enumerate(users) if t.requires_grad]


def _in_argument(path: tuple[Any, ...], index: int) -> bool:
    """Whether a leaf of (args, kwargs) lies in positional argument `index`."""
    return path[0].idx == 0 and path[1].idx == index


def _registration(value: Any) -> str:
    """How a class of results becomes a pytree."""
    if is_dataclass(value):
        return f"torch.export.register_dataclass({type(value).__name__}), once, before the model is compiled"
    return "torch.utils._pytree.register_pytree_node"


def _on_cpu() -> Any:
    """Tensors that the model makes without a device go where the fake weights are."""
    return torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext()


def _mark(out: Any, text: str) -> Any:
    """A module's output, or the first of several, held as a seed says."""
    if isinstance(out, torch.Tensor):
        return annotate(out, text)
    return type(out)((_mark(out[0], text), *out[1:])) if type(out) in (tuple, list) and out else out
