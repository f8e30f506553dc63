"""The only file that uses torch's private names. Small wrappers, each saying what it stands for."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch._decomp import decomposition_table  # noqa: F401  (by op torch's function that does it by others)
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode  # noqa: F401
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.distributed import _functional_collectives, _state_dict_utils
from torch.distributed._composable.contract import STATE_KEY as COMPOSABLE_STATE  # noqa: F401  (where fully_shard() keeps its state)
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding  # noqa: F401  (a call of an op by placements, and what it gives)
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree  # noqa: F401  (others take it from here)
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # noqa: F401  (sees every op that reaches the dispatcher)
from torch.utils._python_dispatch import _detect_infra_mode, _disable_current_modes

from autoshard.errors import TraceError

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
STRIDED_WRITE, CHECKS_RESULT = torch.ops.aten.as_strided_scatter.default, torch.ops.aten._linalg_check_errors.default
AT_ONCE = {torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default, torch.ops.aten._neg_view.default: torch.ops.aten.neg.default}
"""Views that only note on the tensor what a later op has to do. Who looks at memory (`view_as_real`, an op that writes in place) depends on it, and a
graph of shapes and dtypes has no note: so the work is done where the view is made."""

# --- tracing -----------------------------------------------------------------------------------------

class Recorder(FakeTensorMode):
    """Fake tensors that report every functional aten op: `on_op(target, args, kwargs, result)`.

    Sits below functionalization and autograd, so it sees what a device would run and nothing in place. Ops that fake tensors run internally
    to find a shape are not reported. `answer(op, args)` may make up the result of an op that has none without data; `on_check(info)` hears of
    a check that raises unless all of `info` are 0; `on_higher_order(name)` of ops that take functions."""

    def __init__(self, on_op: Callable[..., None], shape_env: Any = None) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=shape_env)
        self.on_op = on_op
        self.recording = False
        self.answer: Callable[[Any, Any], Any] | None = None
        self.on_check: Callable[[torch.Tensor], None] | None = None
        self.on_higher_order: Callable[[str], None] | None = None
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is STRIDED_WRITE and (order := sorted(range((t := args[0]).ndim), key=lambda d: -t.stride(d))) != sorted(order):
            with self:  # written as the memory lies, which has other dims than the result
                return func(t.permute(order), *args[1:], **kwargs or {}).permute([order.index(d) for d in range(len(order))])
        if (laid := MEMORY_MATTERS.get(func)) is not None and self.recording and self._depth == 0:
            args = (laid(self, args[0]), *args[1:])
        if func in AT_ONCE and isinstance(args[0], torch.Tensor):
            func = AT_ONCE[func]
        if func is CHECKS_RESULT:
            return self.on_check(args[0]) if self.recording and self._depth == 0 and self.on_check else None
        self._depth += 1
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DATA_DEPENDENT:
            with self:
                result = NotImplemented if self.answer is None else self.answer(func, args)
            if result is NotImplemented:
                raise
        finally:
            self._depth -= 1
        if result is not NotImplemented and self.recording and self._depth == 0 and func is not torch.ops.prim.device.default:
            self.on_op(func, args, kwargs or {}, result)
        return result

    def _as_in_memory(self, t: torch.Tensor) -> torch.Tensor:
        """A contiguous copy with the dims of `t` in the order of its memory: only such a tensor has equal memory in every run."""
        order = sorted(range(t.ndim), key=lambda d: -t.stride(d))
        with self:
            turned = t if order == sorted(order) else t.permute(order)
            if not turned.is_contiguous() or t.untyped_storage().nbytes() != t.numel() * t.itemsize:
                raise TraceError(f"as_strided of a tensor of shape {tuple(t.shape)} reads memory around it, which a sharded run does not have; "
                                 "use indexing, unfold or expand, or call .contiguous() before")
            return turned.clone(memory_format=torch.contiguous_format)

    def _as_factored(self, matrix: torch.Tensor) -> torch.Tensor:
        """A contiguous matrix of the same determinant and factors: of a contiguous real one torch factors the transposed, else the matrix itself."""
        with self:
            return (matrix if matrix.is_contiguous() or matrix.is_complex() else matrix.mT).clone(memory_format=torch.contiguous_format)

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous fake CPU tensor, not recorded. CPU, because autograd yields no gradients for real meta tensors."""
        recording, self.recording = self.recording, False
        try:
            return from_fun(torch.empty(tuple(shape), dtype=dtype, device="cpu"))
        finally:
            self.recording = recording


MEMORY_MATTERS = {torch.ops.aten.as_strided.default: Recorder._as_in_memory, torch.ops.aten.as_strided_copy.default: Recorder._as_in_memory,
                  STRIDED_WRITE: Recorder._as_in_memory, torch.ops.aten._linalg_det.default: Recorder._as_factored,
                  torch.ops.aten._linalg_slogdet.default: Recorder._as_factored}
"""Ops whose results depend on the strides of their first argument, and what they get instead."""


@contextlib.contextmanager
def functional_tracing(recorder: Recorder, mode: str) -> Iterator[None]:
    """Run under fake tensors and functionalization, with torch's Python dispatcher (which makes dropout one op). All undone on exit.

    `mode`: what library code is told when it asks: "eager", "compiling" or "exporting". It leaves out checks of data in the
    later ones; some models compute something else there than in eager mode."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    one_dnn = torch._C._get_mkldnn_enabled()
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback for every shape error
    silent, log.disabled = log.disabled, True
    torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = mode != "eager", mode == "exporting"
    torch._C._set_mkldnn_enabled(False)  # then an LSTM is matmuls and pointwise ops; its fused op cannot be split
    try:
        # a submodule under torch.compile runs as the Python it wraps
        with (torch.compiler.set_stance("force_eager"), _checks_without_effect(), _higher_order_told(recorder),
              enable_python_dispatcher(), recorder, FunctionalTensorMode()):
            yield
    finally:
        torch._C._set_mkldnn_enabled(one_dnn)
        log.disabled = silent
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags
        torch.clear_autocast_cache()  # it may hold fake casts, keyed by addresses that will be reused


@contextlib.contextmanager
def _checks_without_effect() -> Iterator[None]:
    """Torch threads checks of linalg results through a graph by tokens, which nobody hands out here: the recorder sees them instead."""
    effect = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    kept = effect.effect
    effect.register(None)
    try:
        yield
    finally:
        effect.register(kept)


@contextlib.contextmanager
def _higher_order_told(recorder: Recorder) -> Iterator[None]:
    """Tell `recorder.on_higher_order` of ops that take functions (torch.cond and its like) before they run on traced tensors."""
    kept = HigherOrderOperator.__call__

    def told(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if recorder.on_higher_order is not None and any(map(is_traced, pytree.tree_leaves((args, kwargs)))):
            recorder.on_higher_order(self.name())
        return kept(self, *args, **kwargs)

    HigherOrderOperator.__call__ = told
    try:
        yield
    finally:
        HigherOrderOperator.__call__ = kept


@contextlib.contextmanager
def functional_collectives_run(stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Let torch's functional collectives run the code of `stand_ins`, by name: exchanging the code and not the name reaches models
    that imported the function itself. Their code must import what it uses. Undone on exit."""
    homes = {"shard_dim_alltoall": _collective_utils}
    found = {name: f for name in stand_ins if (f := getattr(homes.get(name, _functional_collectives), name, None)) is not None}
    kept = {name: function.__code__ for name, function in found.items()}
    for name, function in found.items():
        function.__code__ = stand_ins[name].__code__
    try:
        yield
    finally:
        for name, function in found.items():
            function.__code__ = kept[name]


def axis_or_ranks(group: Any) -> str | list[int]:
    """What a functional collective's group is: the name of its mesh axis where it has one, else its ranks. Raises ValueError for what is none."""
    mesh, dim = group if isinstance(group, tuple) else (group, 0)
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        return names[dim] if names else torch.distributed.get_process_group_ranks(mesh.get_group(dim))
    if isinstance(group, str):
        try:
            group = process_group(group)
        except RuntimeError:
            return group
    if isinstance(group, list | torch.distributed.ProcessGroup):
        return group if isinstance(group, list) else torch.distributed.get_process_group_ranks(group)
    raise ValueError(f"{group!r} is no group: give a process group, a DeviceMesh of one axis, (DeviceMesh, dim) or a mesh axis's name")


def is_traced(value: Any) -> bool:
    """Whether a value belongs to a trace that goes on."""
    return isinstance(value, FunctionalTensor)


def is_transformed(t: torch.Tensor) -> bool:
    """Whether `t` is seen inside a transform of functorch (vmap, grad, jvp), or has a tangent of forward-mode AD."""
    dual = torch.autograd.forward_ad
    return torch._C._functorch.is_functorch_wrapped_tensor(t) or dual._current_level >= 0 and dual.unpack_dual(t).tangent is not None


def functional(fake: torch.Tensor) -> torch.Tensor:
    """A fake tensor wrapped for functionalization, inside of `functional_tracing`; as it is inside of an op that is made functional just now."""
    return to_fun(fake) if _detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) else fake


no_modes, unwrap, was_mutated, was_set = _disable_current_modes, from_fun, has_data_mutation, torch._functionalize_was_storage_changed
"""Outside of tracing modes; the fake tensor that holds a functional one's present value (others pass); whether it was written, got other memory."""

def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether `parameter.register_hook` or `register_post_accumulate_grad_hook` was called."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def convert(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """`change` every parameter and buffer of a module in place, as `Module.to` does; it casts complex tensors to real ones."""
    return module._apply(change)


no_autocast, no_dispatch, dispatched_by = torch._C._DisableAutocast, torch._C._DisableTorchDispatch, torch._C._ForceDispatchKeyGuard
KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""Contexts. Backward runs outside the user's autocast; ops of a DTensor are C++'s, by `dispatched_by(*KEYS)` its own (in `torch.tensor([loss])`)."""


def gradients(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """What `torch.autograd.grad` gives, with None for unused inputs. That function is itself announced to torch function modes, and a mode is off
    while it handles a call: what a checkpoint recomputes would run without them."""
    return _engine_run_backward(tuple(outputs), tuple(tangents), False, False, tuple(inputs), True, accumulate_grad=False)


def sequence_number() -> int:
    """Number of the autograd node whose forward is running."""
    return torch.autograd._get_sequence_nr() - 1


def backward_sequence_number() -> int | None:
    """Number of the autograd node whose backward is running, None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


# --- running ------------------------------------------------------------------------------------------

def functional_collective(name: str) -> Any:
    """torch's functional collective of this name. They start and return a tensor that `WAIT` completes."""
    return getattr(torch.ops._c10d_functional, name).default


WAIT = functional_collective("wait_tensor")


def fake_mode() -> Any:
    """Tensors with shapes, strides and dtypes, and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def default_store() -> Any:
    """The key-value store all ranks of the default process group share."""
    return torch.distributed.distributed_c10d._get_default_store()


def dtensor(local: torch.Tensor, device_mesh: Any, placements: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A DTensor of global `shape` over `local`, contiguous, without checks or communication."""
    return DTensor(local, dtensor_spec(device_mesh, placements, shape, dtype), requires_grad=False)


def dtensor_spec(device_mesh: Any, placements: Any, shape: Any, dtype: torch.dtype) -> Any:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    strided = any(isinstance(p, StridedShard) for p in placements)  # they say how parts lie, and no order of mesh axes
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta, use_strided_shard_as_shard_order=False if strided else None)


def dtensor_like(local: torch.Tensor, other: Any) -> torch.Tensor:
    """A DTensor with `other`'s global shape and placements over `local`."""
    return DTensor(local, other._spec, requires_grad=False)


def swap(dtensor: Any, local: torch.Tensor, placements: Any) -> None:
    """Give a DTensor another local tensor and placements in place, so that all who hold it (an optimizer, a tied module) see the change."""
    dtensor._local_tensor, dtensor._spec = local, dtensor_spec(dtensor._spec.mesh, placements, dtensor._spec.shape, local.dtype)


def functions_of_dtensors() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    """By op the functions of (op, args, kwargs) that do it where some argument is a DTensor, and torch's rules of placements are wrong."""
    return DTensor._op_dispatcher._custom_op_handlers


def take_plain_tensors() -> None:
    """Have ops of this thread take plain tensors beside DTensors: as whole ones."""
    torch._C._set_dtensor_allow_implicit_replication(True)


def on_placements(changed: Callable[[Callable[..., Any], Any], Callable[..., Any]]) -> None:
    """Have what an op of DTensors takes and gives be placed by what `changed` makes of torch's function for it and of the object that has it."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    placed = changed(propagator.propagate_op_sharding_non_cached, propagator)
    propagator.propagate_op_sharding_non_cached, propagator.propagate_op_sharding = placed, type(propagator.propagate_op_sharding)(placed)


def on_total_norm(changed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have `torch.nn.utils.clip_grad_norm_` take the norm of all gradients by what `changed` makes of torch's function for it."""
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = changed(clip_grad._get_total_norm)


def on_flat_optimizer_states(asked: Callable[..., Any], grouped: Callable[..., Any]) -> None:
    """Have optimizer states by name (`flatten_optimizer_state_dict`) be asked for, and put into groups, by what these make of torch's functions."""
    states._verify_options, states._unflatten_optim_state_dict = asked(states._verify_options), grouped(states._unflatten_optim_state_dict)


def on_whole_tensors(changed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have state dicts of whole tensors, which the first rank sends, be cut by what `changed` makes of torch's function for it."""
    _state_dict_utils._distribute_tensors = changed(_state_dict_utils._distribute_tensors)


def take_strided_shards_in_turn() -> None:
    """Have DTensors with strided shards that no order of mesh axes means be cut and joined axis by axis; torch joins them wrong."""
    settle = DTensorSpec.__post_init__

    def settled(self: Any) -> None:
        if self.use_strided_shard_as_shard_order is None and any(isinstance(p, StridedShard) for p in self.placements):
            self.use_strided_shard_as_shard_order = self._maybe_convert_StridedShard_to_shard_order(self.placements, self.mesh) is not None
        settle(self)

    DTensorSpec.__post_init__ = settled


kernel, process_group = attrgetter("_op"), cast(Callable[[str], Any], torch._C._distributed_c10d._resolve_process_group)
lazy_copy = torch._lazy_clone
"""The C++ entry of an OpOverload, without the Python method around it; the process group that functional collectives know by a name; a copy whose
memory is made when one of both is written, RuntimeError for memory that not torch alone knows (numpy's, another process's)."""


def transport(group: Any, device_type: str) -> str:
    """What a process group moves tensors of a device type with: "gloo", "nccl", ...; "" where it cannot. Its name may be of several or none."""
    try:
        return group._get_backend(torch.device(device_type)).name()
    except RuntimeError:  # no backend for that device
        return ""


def forget_groups(device_mesh: Any) -> None:
    """Make a mesh let go of its process groups, which ends their threads if nobody else holds them. For destroyed ones."""
    device_mesh._pg_registry.clear()


def timeout(group: Any) -> float:
    """Seconds after which gloo gives a collective of this group up."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def storage_key(t: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones too."""
    return t.untyped_storage()._cdata


# --- sharding rules -----------------------------------------------------------------------------------

def has_sharding_rule(op: Any) -> bool:
    """Whether DTensor knows one-axis rows of an op."""
    return op in DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs


def sharding_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """DTensor's rows for one mesh axis, `[*outputs, *tensor inputs]`, each placement as ("shard", dim), ("replicate", 0) or
    ("sum" | "max" | "min" | "other", 0). Tensors in `args` are meta tensors. Raises what DTensor's functions raise for calls they do not foresee."""
    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorMeta(value.shape, value.stride(), value.dtype)
        return type(value)(map(described, value)) if isinstance(value, (tuple, list)) else value

    info = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs[op]
    return [[_placement_word(p) for p in row] for row in info.func(op, described(args), {k: described(v) for k, v in kwargs.items()})]


def _placement_word(placement: Any) -> tuple[str, int]:
    if isinstance(placement, _ShardingPlaceholder) or type(placement) is Shard:
        return "shard", placement.dim
    if type(placement) is Partial and placement.reduce_op in ("sum", "max", "min"):
        return placement.reduce_op, 0
    return "replicate" if isinstance(placement, Replicate) else "other", 0


def compile_with_inductor(module: torch.fx.GraphModule, arguments: list[Any], own: Mapping[Any, Callable[..., Any]]) -> Callable[[list[Any]], Any]:
    """Compile a local graph for arguments like these; the result takes one list and empties it. The graph is decomposed the way inductor wants
    it, ops of our own as `own` says, and not partitioned again. An argument that comes twice here may be two in later calls."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device) if isinstance(a, torch.Tensor) else a for a in arguments]
        decomposed = make_fx(module, decomposition_table={**select_decomp_table(), **own}, tracing_mode="real")(*fakes)
        compiled = compile_fx_inner(decomposed, fakes, is_inference=True)
    return compiled if getattr(compiled, "_boxed_call", False) else lambda boxed: compiled(boxed)
