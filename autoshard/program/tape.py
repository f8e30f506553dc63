"""Write down the aten ops of one run over fake tensors as frozen `Op`s (used by trace.py only)."""
from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.utils.checkpoint

from autoshard import _torch
from autoshard.errors import TraceError
from autoshard.base.graph import Op, Phase, Ref, TensorMeta

TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
CHECKPOINT_FILE = torch.utils.checkpoint.__file__
RECORDING_FILES = ("_torch.py", "program/tape.py", "seeds/seeds.py", "program/user_collectives.py", "program/survey.py", "program/opaque.py",
                   "program/opaque_probe.py", "program/known_values.py")
COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem")
ONLY_TAKEN = ("of collectives all_reduce, all_gather_tensor, reduce_scatter_tensor and broadcast of torch.distributed._functional_collectives, "
              "and shard_dim_alltoall of torch.distributed.tensor, are taken, over a mesh axis: use those, or take it out and fix layouts with autoshard.annotate or seeds")
STDLIB = os.path.dirname(os.__file__) + os.sep

# The device is the runtime's choice, so it is no part of the program: lowering adds `device` to factories.
DEVICE_KWARGS = frozenset({"device", "pin_memory"})


def meta_of(t: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(t.shape), t.dtype)


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
        self.on_problem: Callable[[str], None] | None = None
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []
        self._counts: dict[str, int] = {}
        self._origin: dict[int, tuple[str, str, str]] = {}
        self._twins: dict[Any, list[Op]] = {}
        self._seen: dict[Any, int] = {}
        self._canonical: dict[str, str] = {}

    @property
    def module(self) -> str:
        """Path of the module that runs now, or whose gradient is being computed."""
        if self.modules or self.phase == "forward":
            return self.modules[-1] if self.modules else ""
        return self._origin.get(_torch.backward_sequence_number(), ("", "", ""))[0]

    def refuse(self, text: str) -> None:
        """What keeps the model from being one graph. Raises TraceError, but for a survey, which notes it and goes on."""
        if self.on_problem is None:
            raise TraceError(text)
        self.on_problem(text)

    # --- values ---

    def bind(self, fake: torch.Tensor, ref: Ref) -> None:
        self._refs[id(fake)] = ref
        self._alive.append(fake)

    def find(self, t: Any) -> Ref | None:
        """The value of a tensor that is known already."""
        return self._refs.get(id(t))

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
                        f"used{self._at()}; register it as an nn.Parameter, or detach it")
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = t.detach()
        self.add(Op(f"buffer:{name}", "buffer", name, outputs=(meta_of(t),), phase=self.phase))
        self.bind(t, Ref(f"buffer:{name}"))
        return Ref(f"buffer:{name}")

    def _at(self) -> str:
        return user_line()

    def add(self, op: Op) -> None:
        self.ops.append(op)

    # --- ops ---

    def on_op(self, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        if target.namespace in COLLECTIVES:
            self.refuse(f"the model calls the collective {target} itself{self._at()}\n  {ONLY_TAKEN}")
        if target._schema.is_mutable:
            self.refuse(f"{target} writes in place where torch does not make it functional{self._at()}; "
                        "use the out-of-place form")
        kwargs = {k: v for k, v in kwargs.items() if k not in DEVICE_KWARGS and v is not torch.strided}
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.record(target, target._schema.name.split("::")[-1], args, kwargs, results)

    def record(self, target: Any, base: str, args: Any, kwargs: Mapping[str, Any], results: Sequence[Any]) -> bool:
        """Write an op down, named after `base`; whether it repeats one of the forward pass."""
        args = self._freeze(args)
        kwargs = tuple((k, self._freeze(v)) for k, v in kwargs.items())
        module, source, code, recompute = self._origin_of()
        key = (target, self._canon(args), self._canon(kwargs), module, source)
        twin = self._twin(key, recompute)
        if twin is not None and is_random(target):
            self._bind_all(results, twin.name)
            return recompute
        name = self._name(base, "_recompute" if recompute else "")
        # a number among the outputs is fixed by the shapes; where it is used it is in the args already
        outputs = tuple(meta_of(r) if isinstance(r, torch.Tensor) else None for r in results)
        op = Op(name, "call", target, args, kwargs, outputs, self.phase, module, source, code)
        self.add(op)
        self._bind_all(results, name)
        if self.phase == "forward":
            self._twins.setdefault(key, []).append(op)
        elif twin is not None:
            self._canonical[name] = twin.name
        return recompute

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
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TraceError(f"a symbolic size is used{self._at()}; shapes must be fixed")
        if isinstance(value, torch.Generator):
            self.refuse(f"an op draws from its own torch.Generator{self._at()}; use the default generator")
        return value

    # --- recomputation (torch.utils.checkpoint) ---

    def _canon(self, value: Any) -> Any:
        """Arguments with recomputed values replaced by the forward values they repeat."""
        if isinstance(value, Ref):
            return Ref(self._canonical.get(value.op, value.op), value.index)
        return tuple(self._canon(v) for v in value) if isinstance(value, tuple) else value

    def _twin(self, key: Any, recompute: bool) -> Op | None:
        """The forward op that a recomputed op repeats. Random ops must not be drawn again, so they are
        matched by equal arguments, and by order among several with equal arguments."""
        if not recompute:
            return None
        twins = self._twins.get(key)
        if not twins:
            if is_random(key[0]):
                raise TraceError(f"a random op in a checkpointed region has no counterpart in the forward pass{self._at()}; "
                                 "leave the random op out of torch.utils.checkpoint")
            return None
        n = self._seen[key] = self._seen.get(key, -1) + 1
        return twins[n % len(twins)]

    # --- where an op comes from ---

    def _origin_of(self) -> tuple[str, str, str, bool]:
        """(module, source, code, is a recomputation) of the op that runs now. A backward op takes them from
        the forward op of its autograd node, which shares a sequence number with it."""
        frames = user_frames(sys._getframe(3))
        frame = next(frames, None)
        place = ("", "") if frame is None else place_of(frame.f_code, frame.f_lineno)
        if self.phase == "forward":
            origin = (self.module, *place)
            self._origin.setdefault(_torch.sequence_number(), origin)
            return *origin, False
        module, source, code = self._origin.get(_torch.backward_sequence_number(), ("", "", ""))
        if frame is None:
            return module, source, code, False
        return (self.module or module), *place, _below_checkpoint(frame)


def _below_checkpoint(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.endswith("autoshard/program/trace.py"):
        if frame.f_code.co_filename == CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


def is_user_file(filename: str) -> bool:
    if filename.startswith((TORCH_DIR, HERE, "<")):
        return False
    return "-packages" in filename or not filename.startswith(STDLIB)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames of user code, innermost first, down to the call of trace()."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HERE) and not name.endswith(RECORDING_FILES):
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


@lru_cache(maxsize=None)
def place_of(code: CodeType, line: int) -> tuple[str, str]:
    """("file.py:12", text of that line); the path is relative when it lies below the working directory."""
    path = code.co_filename
    below = os.path.abspath(path).startswith(os.getcwd() + os.sep)
    return f"{os.path.relpath(path) if below else path}:{line}", linecache.getline(path, line).strip()


def describe(code: CodeType, line: int) -> str:
    source, text = place_of(code, line)
    return f"{source}: {text}" if text else source
