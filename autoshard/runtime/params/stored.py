"""Parameters and buffers on the ranks: DTensors from the start, given their placements in place later.

Values stay where they are until a plan says where they belong. Those of a real model are whole on every rank
and are sliced; those of a meta model are made one module at a time by the module's own initialiser, with the
same seed on all ranks, sliced and freed, so that no rank ever holds the model.
"""
from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import _torch
from autoshard.base.graph import Graph, TensorMeta
from autoshard.base.pads import shorter
from autoshard.base.precision import Precision
from autoshard.base.random import mix
from autoshard.base.spec import Spec, format_spec, local_shape, replicated
from autoshard.errors import ModelError, PlanError, UsageError
from autoshard.program.taken import dense_buffers
from autoshard.program.tracing.twin import copy_tree, kept_results
from autoshard.runtime.params import anomalies  # noqa: F401  (tells DTensor of an op)
from autoshard.runtime.params.dtensor_ops import mend_dtensors
from autoshard.runtime.params.originals import Then, as_copied, remember, warn_of_changes
from autoshard.runtime.params.rooms import Rooms, apart, is_all_of_its_memory
from autoshard.runtime.params.strided import cut, placements
from autoshard.runtime.ranks.agree import alone, share
from autoshard.runtime.ranks.place import Place


class Stored:
    """`module` is a copy of the user's module tree that holds these tensors; tied names share one.

    params / buffers   by name, the first of tied names
    specs              placements by name, empty until `settle`
    metas              of parameters by name: the dims that their specs are about"""

    def __init__(self, model: nn.Module, place: Place, precision: Precision | None = None) -> None:
        self.place, self.precision = place, precision
        self.specs: dict[str, Spec] = {}
        self.metas: dict[str, TensorMeta] = {}
        self.rooms = Rooms()
        if place.device_mesh is not None:
            mend_dtensors()
        self._meta: set[str] = set()
        self._shared: set[str] = set()
        memo: dict[int, Any] = {key: t.clone() for key, t in kept_results(model).items()}
        for name, t in (*model.named_parameters(), *dense_buffers(model)):
            memo[id(t)] = self._first(name, t)
        remember(dict(model.named_parameters()), memo)
        self._then: Then = tuple(copied for copied in as_copied(model) if copied[0] not in self._shared)
        self._take(copy_tree(model, memo))

    def _take(self, module: nn.Module) -> None:
        """Find the tensors of a module tree."""
        self.module = module
        self.params = dict(self.module.named_parameters())
        self.buffers = dict(dense_buffers(self.module))
        self._find_tables()

    def _find_tables(self) -> None:
        """Where modules hold tensors: tables, keys there, and names, of parameters and then of buffers; buffers by name, too."""
        self._tables: list[tuple[tuple[Any, ...], ...]] = []
        for kind, held in (("_parameters", self.params), ("_buffers", self.buffers)):
            names = {id(t): name for name, t in held.items()}
            found = [(table, key, names[id(t)]) for m in self.module.modules() for table in (getattr(m, kind),)
                     for key, t in table.items() if t is not None and id(t) in names]
            self._tables.append(tuple(zip(*found, strict=True)) or ((), (), ()))
        self._holders: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in self.buffers}
        for table, key, name in zip(*self._tables[1], strict=True):
            self._holders[name].append((table, key))

    def check_unchanged(self) -> None:
        """Raises UsageError where a module has another tensor by now than programs read. Looks at every tensor in every call, so without a loop."""
        for (tables, keys, names), held in zip(self._tables, (self.params, self.buffers), strict=True):
            if not all(map(is_, map(dict.get, tables, keys), map(held.get, names))):
                name = next(n for table, key, n in zip(tables, keys, names, strict=True) if table.get(key) is not held[n])
                raise UsageError(f"{name} of the compiled model was replaced (by an assignment, or torch.func.functional_call), and its programs "
                                 f"read the tensor that was there: change its values instead, as load_state_dict({{{name!r}: value}}, strict=False) "
                                 "does; for another shape or dtype, compile the changed model")

    def _first(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """A tensor's stand-in before there is a plan. That of a meta tensor takes no memory, yet has a device."""
        is_param = isinstance(t, nn.Parameter)
        dtype = self.precision.stored if self.precision and is_param and t.dtype.is_floating_point else t.dtype
        if t.is_meta:
            self._meta.add(name)
            value = torch.zeros((), dtype=dtype, device=self.place.device).expand(t.shape)
        else:
            whole = t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()  # its layout is a seed of the plan
            value = whole.to(self.place.device, dtype)
            if value is whole and (value := apart(whole)) is None:
                value = whole
                self._shared.add(name)
        if self.place.device_mesh is not None:
            whole = placements(replicated(self.place.mesh), self.place.mesh.sizes)
            value = _torch.dtensor(value, self.place.device_mesh, whole, t.shape, dtype)
        return nn.Parameter(value, requires_grad=t.requires_grad) if is_param else value

    def copied(self, known: dict[int, Any]) -> "Stored":
        """The same with memory of its own. `known`: the memo of `copy.deepcopy`, so that an optimizer copied with the model has the copies of its
        parameters. Raises UsageError where a tensor has none yet."""
        if self._meta:
            raise UsageError("a model built on the meta device has no memory to copy yet; call it once, or prepare(...), before")
        out = copy.copy(self)
        out.specs, out.rooms, out._meta, out._shared = dict(self.specs), Rooms(), set(), set()
        for _, t in self._named():
            if id(t) not in known:
                value = t.detach().clone()
                known[id(t)] = nn.Parameter(value, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else value
        out._take(copy_tree(self.module, {id(t): known[id(t)] for _, t in self._named()}))
        return out

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all others: they are of other stages of a pipeline. Modules lose them too."""
        gone = {id(t) for name, t in self._named() if name not in names}
        for module in self.module.modules():
            for table in (module._parameters, module._buffers):
                for key in [key for key, t in table.items() if t is not None and id(t) in gone]:
                    del table[key]
        self.params = {name: t for name, t in self.params.items() if name in names}
        self.buffers = {name: t for name, t in self.buffers.items() if name in names}
        self._meta &= set(names)
        self._find_tables()

    def local(self, name: str) -> torch.Tensor:
        """What this rank has of it, as programs take it: with its pad."""
        held, meta = self._held(name), self.metas.get(name)
        if meta is None or not meta.unpadded:
            return held
        return self.rooms.padded(name, held, _padded_shape(meta, self.specs[name], self.place))

    def _held(self, name: str) -> torch.Tensor:
        t = self.params[name] if name in self.params else self.buffers[name]
        return t if self.place.device_mesh is None else t._local_tensor

    @property
    def is_virtual(self) -> bool:
        """Whether some tensor has no memory yet."""
        return bool(self._meta)

    def as_dtensor(self, like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor, cut as `like` lies on the ranks."""
        return _torch.dtensor_like(self._piece(whole.to(self.place.device), like.placements), like)

    def all_as_held(self, mine: Mapping[str, torch.Tensor], state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """`as_held` of all tensors of a state dict, with the versions of modules that it says. They are about to be written."""
        self._leave_original()
        held = copy.copy(state_dict) if isinstance(state_dict, dict) else dict(state_dict)
        held.update({name: self.as_held(name, mine.get(name), value) for name, value in state_dict.items()})
        return held

    def _leave_original(self) -> None:
        """Before the first call tensors may lie in memory of the original model which torch cannot copy when it is written: files, that a rank should
        not hold whole unless it must."""
        for name in self._shared & (self.params.keys() | self.buffers.keys()):
            self._put(name, self._held(name).detach().clone(), replicated(self.place.mesh))
        self._shared.clear()

    def as_held(self, name: str, mine: torch.Tensor | None, value: Any) -> Any:
        """A value of a state dict for the tensor `mine`: a whole one is cut. Raises UsageError for another rank's piece."""
        if isinstance(mine, DTensor) and isinstance(value, DTensor):
            check_own_piece(name, value, mine)
        if not isinstance(mine, DTensor) or isinstance(value, DTensor) or value.shape != mine.shape:
            return value
        return self.as_dtensor(mine, value)

    def check_checkpoint(self, folder: str | None) -> None:
        """Raises ModelError when the checkpoint cannot be read, or lacks a tensor of the model or has another shape for it."""
        if folder is None:
            return
        try:
            found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as e:
            raise ModelError(f"checkpoint={folder!r} cannot be read ({type(e).__name__}: {e}); give a folder that "
                             "torch.distributed.checkpoint.save wrote") from e
        wanted = {name: t for name, t in self.module.state_dict().items() if isinstance(t, torch.Tensor)}
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ModelError(f"checkpoint {folder} lacks {len(missing)} of the model's {len(wanted)} tensors ({_some(missing)}; it "
                             f"has {_some(list(found))}); save the state_dict() of the same model, without a prefix")
        for name, t in wanted.items():
            size = getattr(found[name], "size", None)
            if size != t.shape:
                raise ModelError(f"checkpoint {folder} holds {name} as {tuple(size or ())}, the model has {tuple(t.shape)}; "
                                 "build the model with the checkpoint's configuration")

    def settle(self, chosen: Mapping[str, Spec], seed: int, checkpoint: str | None = None, *, graph: Graph) -> None:
        """Give every tensor its placement for the first time, as parameters of `graph`; names that `chosen` lacks stay whole. Meta tensors
        come from the checkpoint (which has passed `check_checkpoint`), or from their modules' initialisers under
        `seed`: without a checkpoint all, with one those that a state dict leaves out (non-persistent buffers).
        Raises ModelError for meta tensors that nothing initialises."""
        warn_of_changes(self._then)
        self._then = ()
        self._shared.clear()
        specs = {name: chosen.get(name, replicated(self.place.mesh)) for name, _ in self._named()}
        self.metas = _metas(graph)
        loaded = set(self.module.state_dict()) if checkpoint is not None else set()
        alone(self.place, lambda: self._initialise_meta(seed, self._meta - loaded, specs))
        share(self.place, "initialised", lambda: "")  # what follows are collectives: no rank may be missing
        for name, t in self._named():
            if name not in self._meta:
                self._put(name, self._own_copy(name, self._agreed(self._held(name)), specs[name]), specs[name])
            elif name in loaded:
                self._put(name, self._empty(name, t, specs[name]), specs[name])
        if checkpoint is not None:
            dcp.load(self.module.state_dict(), checkpoint_id=checkpoint)
        self.specs = specs  # last: a model that could not be filled stays unsettled
        self._meta.clear()

    def _initialise_meta(self, seed: int, wanted: set[str], specs: Mapping[str, Spec]) -> None:
        for name, whole in self._initialised(seed, wanted):
            self._put(name, self._own_copy(name, whole, specs[name]), specs[name])

    def check(self, chosen: Mapping[str, Spec]) -> None:
        """Raises PlanError where a plan wants another placement than the stored one."""
        for name, spec in chosen.items():
            if name in self.specs and self.specs[name] != spec:
                raise PlanError(f"the plan stores {name} as {format_spec(spec)}, but it lies as {format_spec(self.specs[name])}; "
                                "call replan() to move parameters")

    def move(self, chosen: Mapping[str, Spec], optimizer: torch.optim.Optimizer | None, graph: Graph) -> None:
        """Redistribute to other placements, those of parameters of `graph`, with the optimizer's state."""
        before, self.metas = self.metas, self.metas | _metas(graph)
        for name, spec in chosen.items():
            t = self.params.get(name, self.buffers.get(name))
            if t is None or self.specs[name] == spec and before.get(name) == self.metas.get(name):
                continue
            state = optimizer.state.get(t, {}) if optimizer is not None else {}
            for moved in (t, t.grad, *state.values()) if self.place.device_mesh is not None else ():
                if isinstance(moved, type(t.data)) and hasattr(moved, "_spec") and moved.shape == t.shape:
                    here = _torch.dtensor_like(moved.to_local().detach().to(self.place.device), moved)  # it may lie on the host
                    local = self._moved(here, self._placements(name, spec))
                    _torch.swap(moved, self._with_room(name, local, spec) if moved is t else local, self._placements(name, spec))
            self.specs[name] = spec

    def write_state(self, name: str, value: torch.Tensor) -> None:
        """The new local value of a state, into the memory that it has: a program that writes in place has put it there already."""
        held = self.local(name)
        if held.data_ptr() != value.data_ptr():
            held.copy_(value)

    def write(self, name: str, value: torch.Tensor) -> None:
        """A new local value of a buffer, or of a parameter with its pad. The old tensor is left alone: backward may still read it."""
        if name in self.params:
            value = shorter(value, self._held(name).shape)
        if value.is_inference() or not is_all_of_its_memory(value):  # no later call with gradients could take it, or a whole tensor would be kept
            with torch.inference_mode(False):
                value = value.clone(memory_format=torch.contiguous_format)
        if name in self.params:
            return self._put(name, value, self.specs[name])
        if self.place.device_mesh is not None:
            self.buffers[name]._local_tensor = value
            return
        for table, key in self._holders[name]:
            table[key] = value
        self.buffers[name] = value

    def renew(self, name: str) -> None:
        """Give a parameter other memory with the same numbers: who holds the old local tensor keeps it as it is."""
        self._put(name, self._held(name).detach().clone(), self.specs[name])

    def _moved(self, here: DTensor, placed: Sequence[Any]) -> torch.Tensor:
        """The local tensor under other placements; where one of them is strided, by way of the whole."""
        if all(isinstance(p, (Shard, Replicate)) for p in (*here.placements, *placed)):
            return here.redistribute(placements=placed).to_local()
        return self._piece(here.full_tensor(), placed)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.params.items()
        yield from self.buffers.items()

    def _put(self, name: str, local: torch.Tensor, spec: Spec) -> None:
        t = self.params[name] if name in self.params else self.buffers[name]
        if self.place.device_mesh is not None:
            _torch.swap(t, self._with_room(name, local, spec), self._placements(name, spec))
        elif name in self.params:
            t.data = local
        else:
            self.write(name, local)

    def _with_room(self, name: str, local: torch.Tensor, spec: Spec) -> torch.Tensor:
        meta = self.metas.get(name)
        return local if meta is None or not meta.unpadded else self.rooms.lay(name, local, _padded_shape(meta, spec, self.place))

    def _empty(self, name: str, t: torch.Tensor, spec: Spec) -> torch.Tensor:
        shape = cut(torch.empty(t.shape, device="meta"), self._placements(name, spec), self.place.mesh.sizes, self.place.coordinates).shape
        return torch.empty(shape, dtype=t.dtype, device=self.place.device)

    def _own_copy(self, name: str, whole: torch.Tensor, spec: Spec) -> torch.Tensor:
        return self._piece(whole, self._placements(name, spec))

    def _placements(self, name: str, spec: Spec) -> tuple[Any, ...]:
        return placements(spec, self.place.mesh.sizes, self.metas.get(name))

    def _piece(self, whole: torch.Tensor, placed: Sequence[Any]) -> torch.Tensor:
        """A copy of this rank's piece."""
        return cut(whole, placed, self.place.mesh.sizes, self.place.coordinates).clone(memory_format=torch.contiguous_format)

    def _agreed(self, whole: torch.Tensor) -> torch.Tensor:
        """The leader's values: ranks may have initialised the model differently."""
        if self.place.mesh.size == 1:
            return whole
        whole = whole.detach().clone(memory_format=torch.contiguous_format)
        sent = whole.view(-1).view(torch.uint8)  # gloo knows few dtypes
        for axis in self.place.mesh.names:
            dist.broadcast(sent, group=self.place.device_mesh.get_group(axis), group_src=0)
        return whole

    # --- meta models ---

    def _initialised(self, seed: int, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole value) of meta tensors, one module's at a time."""
        left = set(wanted)
        names = {id(t): name for name, t in self._named()}
        for path, module in self.module.named_modules():
            own = {k: t for table in (module._parameters, module._buffers) for k, t in table.items()
                   if t is not None and names.get(id(t)) in left}
            if own:
                for key, value in self._initialise(path, module, own, seed).items():
                    left.discard(names[id(own[key])])
                    yield names[id(own[key])], value

    def _initialise(self, path: str, module: nn.Module, own: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
        twin = copy.copy(module)
        twin.__dict__["_parameters"] = {k: None if t is None else nn.Parameter(self._blank(t), t.requires_grad)
                                        for k, t in module._parameters.items()}
        twin.__dict__["_buffers"] = {k: None if t is None else self._blank(t) for k, t in module._buffers.items()}
        initialise = _initialiser(self.module, twin)
        where = f"{type(module).__name__} {path or '(the model itself)'}"
        if initialise is None:
            raise ModelError(f"{where} is on the meta device and has no reset_parameters(); add one that fills "
                             f"{', '.join(own)}, or pass checkpoint= (which fills what state_dict() lists)")
        devices = [self.place.device] if self.place.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(mix(seed, crc32(path.encode())))
            initialise()
        out = {k: (twin._parameters.get(k) if k in twin._parameters else twin._buffers[k]).detach() for k in own}
        for key, value in out.items():
            if value.dtype.is_floating_point and bool(torch.isnan(value).any()):
                raise ModelError(f"the initialiser of {where} leaves {key!r} unset; fill it in reset_parameters(), or create "
                                 "the model with this tensor off the meta device")
        return out

    def _blank(self, t: torch.Tensor) -> torch.Tensor:
        """Memory of the global shape, NaN so that a tensor which is never filled is noticed."""
        out = torch.empty(t.shape, dtype=t.dtype, device=self.place.device)
        return out.fill_(float("nan")) if t.dtype.is_floating_point else out.zero_()


def _padded_shape(meta: TensorMeta, spec: Spec, place: Place) -> tuple[int, ...]:
    return meta.unflatten(local_shape(meta.logical_shape, spec, place.mesh.sizes))


def _metas(graph: Graph) -> dict[str, TensorMeta]:
    return {op.target: meta for op in graph.of_kind("param") for meta in op.outputs if meta is not None}


def _initialiser(root: nn.Module, module: nn.Module) -> Any:
    """How a module sets its own tensors: the model-wide rule where a library has one, else the module's."""
    if hasattr(root, "_init_weights"):
        return lambda: root._init_weights(module)
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def check_own_piece(name: str, value: DTensor, mine: DTensor) -> None:
    """Raises UsageError for a DTensor that `torch.save` wrote on another rank of the mesh: its numbers are that rank's piece."""
    theirs, ours = value.device_mesh, mine.device_mesh
    if theirs == ours and theirs.get_coordinate() != ours.get_coordinate() and any(not p.is_replicate() for p in value.placements):
        raise UsageError(f"the state dict has the piece of {name} that another rank holds: torch.save on one rank writes that rank's piece "
                         "alone. Save with torch.distributed.checkpoint, or save whole tensors: "
                         "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), on all ranks")
