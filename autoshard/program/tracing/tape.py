"""Records the aten ops of one run over fake tensors as frozen `Op`s."""
from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.utils.checkpoint

from autoshard import _torch
from autoshard.base.graph import Op, Phase, Ref, TensorMeta
from autoshard.errors import TraceError
from autoshard.program.taken import DENSE
from autoshard.program.tracing.any_size import plain
from autoshard.program.tracing.ways_out import on_higher_order

TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
CHECKPOINT_FILE = torch.utils.checkpoint.__file__
RECORDING_FILES = frozenset(f"{HERE}{room}{name}.py" for room, names in (
    ("", "_torch"), ("seeds/", "marks"),
    ("program/opaque/", "opaque opaque_probe"),
    ("program/reads/", "data_reads known_masks masked_writes places rows selections"),
    ("runtime/params/", "assigned_data"),
    ("program/tracing/", "tape survey known_values user_collectives ways_out"),
    ("program/tracing/functions/", "assigned_data embedding_bags equal_heads expert_layers losses of_constants recurrent_dropout rms_norms"),
) for name in names.split())
"""Files of autoshard that run between the user's code and the tape."""
TRACER = HERE + "program/tracing/one_trace.py"
"""Calls the model: what called it is no part of a trace."""
COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem")
OF_A_LOSS = "A loss module with parameters or buffers of its own: make it a submodule of the model, and call it in forward"
ONLY_TAKEN = ("of collectives all_reduce, all_gather_tensor, reduce_scatter_tensor and broadcast of torch.distributed._functional_collectives, "
              "and shard_dim_alltoall of torch.distributed.tensor, are taken, over a mesh axis: use those, or take it out and fix layouts "
              "with autoshard.annotate or seeds")
STDLIB = os.path.dirname(os.__file__) + os.sep

aten = torch.ops.aten
SAME_VALUE = (aten.detach.default, aten.alias.default)
ONE_DTYPE = frozenset(op.default for op in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot))
"""Products that take one dtype. Their kernels refuse several, and what finds shapes does not."""

# The device is the runtime's choice, so it is no part of the program: lowering adds `device` to factories.
DEVICE_KWARGS = frozenset({"device", "pin_memory"})


def meta_of(t: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(map(plain, t.shape)), t.dtype)


@dataclass(frozen=True)
class Checkpointed:
    """Where inside of torch.utils.checkpoint an op runs: in which call of it (-1: not known), and on which line of the user's code in
    there ("" where torch's own modules run alone)."""

    call: int
    line: str


def is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class Tape:
    """Collects ops. Values are known by the identity of their fake tensors, which are kept alive."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.phase: Phase = "forward"
        self.modules: list[str] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.forbidden: dict[int, str] = {}
        self.on_problem: Callable[[str, str], None] | None = None
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []
        self._counts: dict[str, int] = {}
        self._origin: dict[int, tuple[str, str, str]] = {}
        self._traced_at: dict[int | None, int] = {}  # by the number of the autograd node
        self._checkpoint_of: dict[int, int] = {}
        self._checkpoints: dict[FrameType, int] = {}
        self._twins: dict[Any, dict[str, list[Op]]] = {}
        self._seen: dict[Any, int] = {}
        self._canonical: dict[Ref, Ref] = {}

    @property
    def module(self) -> str:
        """Path of the module that runs now, or whose gradient is being computed."""
        if self.modules or self.phase == "forward":
            return self.modules[-1] if self.modules else ""
        return self._origin.get(_torch.backward_sequence_number(), ("", "", ""))[0]

    def refuse(self, text: str, module: str | None = None) -> None:
        """What keeps the model from being one graph, done by the module that runs now or by the one given. Raises TraceError, but for a survey, which
        notes it and goes on."""
        if self.on_problem is None:
            raise TraceError(text)
        self.on_problem(text, self.module if module is None else module)

    # --- values ---

    def bind(self, fake: torch.Tensor, ref: Ref) -> None:
        self._refs[id(fake)] = ref
        self._alive.append(fake)

    def find(self, t: Any) -> Ref | None:
        """The value of a tensor that is known already."""
        return self._refs.get(id(t))

    def is_fresh(self, fake: torch.Tensor) -> bool:
        """Whether a call made it, or what it is a view of, in memory of its own."""
        ref = self.find(fake)
        while ref is not None:
            op = next((op for op in reversed(self.ops) if op.name == ref.op), None)
            if op is None or op.kind != "call":
                return False
            if all(r.alias_info is None for r in op.target._schema.returns):
                return True
            ref = next(iter(op.refs), None)
        return False

    def ref(self, t: torch.Tensor) -> Ref:
        """The value of a tensor argument. A tensor that is not fake is a constant of the program."""
        found = self.find(t)
        if found is not None:
            return found
        if isinstance(t, _torch.FakeTensor):
            self.refuse(f"a tensor of shape {tuple(t.shape)} comes from outside the trace{self._at()}; "
                        "do not keep tensors of an earlier call in the model")
            self.bind(t, Ref("outside"))
            return Ref("outside")
        return self._constant(t)

    def _constant(self, t: torch.Tensor) -> Ref:
        if id(t) in self.forbidden:
            self.refuse(f"parameter or buffer {self.forbidden[id(t)]!r} is used through a reference outside the module "
                        f"tree{self._at()}; reach it as an attribute of a submodule")
        elif t.requires_grad:
            self.refuse(f"a trainable tensor of shape {tuple(t.shape)} that is not a parameter of the model is "
                        f"used{self._at()}; register it as an nn.Parameter of the model, or detach it. {OF_A_LOSS}")
        elif t.layout is not torch.strided:
            self.refuse(f"a sparse tensor of shape {tuple(t.shape)} is used{self._at()}; {DENSE}")
        name = f"_constant_{len(self.constants)}"
        with _torch.no_modes():  # an op of this package is recorded where modes are on, which would make a fake tensor of it
            self.constants[name] = t.detach()
        self.add(Op(f"buffer:{name}", "buffer", name, outputs=(meta_of(t),), phase=self.phase))
        self.bind(t, Ref(f"buffer:{name}"))
        return Ref(f"buffer:{name}")

    def _at(self) -> str:
        return user_line()

    def _forward_line(self) -> str:
        """" at file:line: text" of what a gradient is of."""
        _, source, code = self._origin.get(_torch.backward_sequence_number(), ("", "", ""))
        return f" at {source}: {code}" if source else ""

    def add(self, op: Op) -> None:
        self.ops.append(op)

    # --- ops ---

    def on_op(self, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        if target.namespace in COLLECTIVES:
            self.refuse(f"the model calls the collective {target} itself{self._at()}\n  {ONLY_TAKEN}")
        if target._schema.is_mutable:
            self.refuse(f"{target} writes in place where torch does not make it functional{self._at()}; "
                        "use the out-of-place form, or, where it writes into what the model does not have, make that a buffer of the model. "
                        f"{OF_A_LOSS}")
        if target in ONE_DTYPE and len(dtypes := {str(a.dtype).removeprefix("torch."): a for a in args if isinstance(a, torch.Tensor)}) > 1:
            raise RuntimeError(f"the tensors of a product must have one dtype, and these have {' and '.join(dtypes)}")
        kwargs = {k: v for k, v in kwargs.items() if k not in DEVICE_KWARGS and v is not torch.strided}
        results = result if isinstance(result, (tuple, list)) else (result,)
        if any(isinstance(r, torch.Tensor) and r.layout is not torch.strided for r in results):
            self.refuse(f"{target} makes a sparse tensor in the {self.phase} pass{self._at() or self._forward_line()}; tensors of a compiled "
                        "model are dense: leave sparse=True out, or call .to_dense() before the model is called")
        self.record(target, target._schema.name.split("::")[-1], args, kwargs, results)

    def on_higher_order(self, name: str) -> None:
        """An op that takes functions runs. Raises TraceError where a trace cannot go through it, in a survey too: nothing is known of
        its result."""
        frame = next(user_frames(sys._getframe()), None)
        text = on_higher_order(name, describe(frame.f_code, frame.f_lineno) if frame else "")
        if text:
            raise TraceError(text)

    def on_check(self, info: torch.Tensor) -> None:
        """The model has torch check what `info` says of a result: the op that makes it does so itself from now on."""
        ref = self.find(info)
        at = next((i for i in reversed(range(len(self.ops))) if ref is not None and self.ops[i].name == ref.op), None)
        if at is None or self.ops[at].kind != "call" or all(a.name != "check_errors" for a in self.ops[at].target._schema.arguments):
            return self.refuse(f"a result of torch.linalg is checked by an op that is not known{self._at()}; use the form that ends in _ex")
        op = self.ops[at]
        self.ops[at] = replace(op, kwargs=(*((k, v) for k, v in op.kwargs if k != "check_errors"), ("check_errors", True)))

    def record(self, target: Any, base: str, args: Any, kwargs: Mapping[str, Any], results: Sequence[Any]) -> bool:
        """Write an op down, named after `base`; whether it repeats one of the forward pass."""
        args = self._freeze(args)
        kwargs = tuple((k, self._freeze(v)) for k, v in kwargs.items())
        module, source, code, within = self._origin_of()
        key = (target, self._canon(args), self._canon(kwargs), within and within.line)
        recompute = within is not None and self.phase == "backward"
        twin = self._twin(within.call, key, module) if recompute else None
        module = module if twin is None else twin.module
        if twin is not None and is_random(target):
            self._bind_all(results, twin.name)
            if target is aten.native_dropout.default and args[2]:
                self.bind(results[0], self._dropped(twin, args, meta_of(results[0]), (module, source, code)))
            return recompute
        name = self._name(base, "_recompute" if recompute else "")
        # a number among the outputs is fixed by the shapes; where it is used it is in the args already
        outputs = tuple(meta_of(r) if isinstance(r, torch.Tensor) else None for r in results)
        op = Op(name, "call", target, args, kwargs, outputs, self.phase, module, source, code, self._number(recompute, twin))
        self.add(op)
        self._bind_all(results, name)
        if within is not None and self.phase == "forward":
            self._twins.setdefault((within.call, key), {}).setdefault(module, []).append(op)
        elif twin is not None:
            self._canonical.update((Ref(name, i), Ref(twin.name, i)) for i in range(len(outputs)))
        if target in SAME_VALUE:  # nested calls of checkpoint hand each other such copies
            self._canonical[Ref(name)] = self._canon(args[0])
        return recompute

    def _dropped(self, twin: Op, args: Any, meta: TensorMeta, origin: tuple[str, str, str]) -> Ref:
        """What a dropout of a checkpoint gives, again from its mask, which alone is kept."""
        value, p = args[0], args[1]
        for factor in (Ref(twin.name, 1), 0.0 if p == 1 else 1.0 / (1.0 - p)):
            name = self._name("mul", "_recompute")
            self.add(Op(name, "call", aten.mul.Tensor, (value, factor), (), (meta,), self.phase, *origin, self._number(True, twin)))
            value = Ref(name)
        self._canonical[value] = Ref(twin.name)
        return value

    def _number(self, recompute: bool, twin: Op | None) -> int:
        """See `Op.traced_at`. A recomputed op has the number of the op that it repeats, and so have the gradients through it."""
        if self.phase == "forward":
            self._traced_at.setdefault(_torch.sequence_number(), len(self.ops))
            return len(self.ops)
        if recompute:
            return self._traced_at.setdefault(_torch.sequence_number(), -1 if twin is None else twin.traced_at)
        return self._traced_at.get(_torch.backward_sequence_number(), -1)

    def _bind_all(self, results: Any, name: str) -> None:
        for i, r in enumerate(results):
            if isinstance(r, torch.Tensor):
                self.bind(r, Ref(name, i))

    def _name(self, base: str, suffix: str) -> str:
        n = self._counts[base] = self._counts.get(base, -1) + 1
        return f"{base}_{n}{suffix}"

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.ref(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._freeze(v) for v in value)
        if isinstance(value, torch.SymInt):
            return plain(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise TraceError(f"a symbolic size is used{self._at()}; shapes must be fixed")
        if isinstance(value, torch.Generator):
            self.refuse(f"an op draws from its own torch.Generator{self._at()}; use the default generator")
        return value

    # --- recomputation (torch.utils.checkpoint) ---

    def _canon(self, value: Any) -> Any:
        """Arguments with recomputed values replaced by the forward values they repeat."""
        if isinstance(value, Ref):
            return self._canonical.get(value, value)
        return tuple(self._canon(v) for v in value) if isinstance(value, tuple) else value

    def _twin(self, call: int, key: Any, module: str) -> Op | None:
        """The forward op that an op recomputed by checkpoint repeats. Random numbers must not be drawn twice, so random ops are
        matched by equal arguments, and by order among several with equal arguments in a module. What runs in no module in backward (the function
        that was given to checkpoint is no module itself) ran in the one that called checkpoint: the one that has such an op."""
        by_module = self._twins.get((call, key), {})
        if not self.modules and len(by_module) == 1:
            (module,) = by_module
        twins = by_module.get(module)
        if not twins:
            if is_random(key[0]):
                raise TraceError(f"a random op in a checkpointed region has no counterpart in the forward pass{self._at()}; "
                                 "leave the random op out of torch.utils.checkpoint")
            return None
        n = self._seen[call, key, module] = self._seen.get((call, key, module), -1) + 1
        return twins[n % len(twins)]

    # --- where an op comes from ---

    def _origin_of(self) -> tuple[str, str, str, Checkpointed | None]:
        """(module, source, code, where in a checkpoint) of the op that runs now. A backward op takes them from
        the forward op of its autograd node, which shares a sequence number with it."""
        frames = user_frames(sys._getframe(3))
        frame = next(frames, None)
        place = ("", "") if frame is None else place_of(frame.f_code, frame.f_lineno)
        checkpoint, line = checkpoint_around(sys._getframe(3))
        if self.phase == "forward":
            origin, number = (self.module, *place), _torch.sequence_number()
            self._origin.setdefault(number, origin)
            if checkpoint is None:
                return *origin, None
            call = self._checkpoints.setdefault(checkpoint, len(self._checkpoints))
            self._checkpoint_of.setdefault(number, call)
            return *origin, Checkpointed(call, line)
        node = _torch.backward_sequence_number()
        module, source, code = self._origin.get(node, ("", "", ""))
        within = None if checkpoint is None else Checkpointed(self._checkpoint_of.get(node, -1), line)
        if within is not None:
            module = self.module or module
        return (module, source, code, within) if frame is None else ((self.module or module), *place, within)


def checkpoint_around(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """The outermost call of torch.utils.checkpoint that runs now, and the line of the user's code in the innermost."""
    outermost, line, seen = None, "", ""
    while frame is not None and frame.f_code.co_filename != TRACER:
        name = frame.f_code.co_filename
        if name == CHECKPOINT_FILE:
            outermost, line = frame, line if outermost else seen
        elif not seen and is_user_file(name) and not name.startswith(HERE):
            seen = place_of(frame.f_code, frame.f_lineno)[0]
        frame = frame.f_back
    return outermost, line


def is_user_file(filename: str) -> bool:
    if filename.startswith((TORCH_DIR, HERE, "<")):
        return False
    return "-packages" in filename or not filename.startswith(STDLIB)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames of user code, innermost first, down to the call of trace()."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HERE) and name not in RECORDING_FILES:
            return
        if is_user_file(name):
            yield frame
        frame = frame.f_back


def user_line() -> str:
    """" at file:line: text" of the user's code that runs now, for messages; "" where there is none."""
    frame = next(user_frames(sys._getframe()), None)
    return "" if frame is None else f" at {describe(frame.f_code, frame.f_lineno)}"


def innermost_user_line(tb: TracebackType | None) -> str:
    """"file:line" and source text of the innermost user frame of a traceback; "" when there is none."""
    found = ""
    while tb is not None:
        if is_user_file(tb.tb_frame.f_code.co_filename):
            found = describe(tb.tb_frame.f_code, tb.tb_lineno)
        tb = tb.tb_next
    return found


def place_of(code: CodeType, line: int) -> tuple[str, str]:
    """("file.py:12", text of that line); the path is relative when it lies below the working directory."""
    return _place(code, line, os.getcwd())


@cache
def _place(code: CodeType, line: int, folder: str) -> tuple[str, str]:
    path = code.co_filename
    below = os.path.abspath(path).startswith(folder + os.sep)
    return f"{os.path.relpath(path) if below else path}:{line}", linecache.getline(path, line).strip()


def describe(code: CodeType, line: int) -> str:
    source, text = place_of(code, line)
    return f"{source}: {text}" if text else source
