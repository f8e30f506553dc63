"""Attributes of the original model on a compiled module, and errors for methods and wrappers that do not apply to it.

Parameters, buffers and attributes of the instance (`config`) are the model's own. What the model's class has besides works on the module
tree that the user sees: properties (`device`, `dtype`) and the user's own methods. A method that cannot work says what to do instead.

Wrappers are noticed by what each looks at before it changes anything: DistributedDataParallel at a list of parameters to ignore,
Accelerate and transformers' Trainer at a map of devices, `fully_shard` and `replicate` at their state, FSDP1 at a mark that it sets.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch
from torch import nn

from autoshard import _torch
from autoshard.errors import NotCarriedOver, UsageError
from autoshard.program.taken import Compiled

if TYPE_CHECKING:
    from autoshard.runtime.module import CompiledModule

INSTEAD = ("its gradients are reduced by the plan already; train the compiled model itself, and pass inputs=\"local\" to "
           "autoshard.compile where every rank loads its own batch")
WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": f"DistributedDataParallel cannot wrap a compiled model, and need not: {INSTEAD}",
    "hf_device_map": "Accelerate's prepare() and transformers' Trainer cannot take a compiled model: they wrap it in "
                     f"DistributedDataParallel, and {INSTEAD}. With Accelerate, prepare the DataLoader and leave the model out; with "
                     "Trainer, take the subclass of examples/hf_trainer.py (docs/hugging-face.md)",
}
"""Attribute that a wrapper reads -> what to do instead."""
SHARDED = ("on a compiled model: its plan has placed every parameter already; train the compiled model itself. For more sharding than "
           "the plan has, plan with a smaller memory_budget or with seeds")

SAVE = ("keep the original model, gather the weights with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
        "StateDictOptions(full_state_dict=True, cpu_offload=True)), and let rank 0 call original.save_pretrained(..., state_dict=weights{}); "
        "see docs/hugging-face.md")
BEFORE = "call it on the original model, and before autoshard.compile where it changes the model"
LIBRARIES = ("transformers", "diffusers", "huggingface_hub")
METHODS = {
    "generate": "it was compiled for calls without caches; use autoshard.generator (docs/inference.md), or load the weights into the "
                "original model and generate with that",
    "save_pretrained": SAVE.format(""),
    "push_to_hub": SAVE.format(", push_to_hub=True"),
    "from_pretrained": "load the original model, then compile it",
    "gradient_checkpointing_enable": "call it on the original model before autoshard.compile; or give autoshard.compile a memory_budget, "
                                     "and the search decides what backward recomputes",
    "resize_token_embeddings": "the sizes of parameters are part of the plan; call it on the original model before autoshard.compile",
}
"""Methods of these libraries -> what to do instead. Of the others most change the model, or run a part of it: see BEFORE."""
OF_PEFT = {
    "save_pretrained": "keep the original model, gather the weights with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
                       "StateDictOptions(full_state_dict=True, cpu_offload=True)), and on rank 0 load them into it "
                       "(original.load_state_dict(weights)) and call original.save_pretrained(...)",
    "generate": METHODS["generate"],
}
"""The same for a model of peft, whose other methods work."""
READS_ONLY = frozenset("""can_generate get_decoder get_encoder get_input_embeddings get_memory_footprint get_output_embeddings
    get_parameter_or_buffer get_position_embeddings named_non_persistent_buffers num_parameters
    warn_if_padding_and_no_attention_mask""".split())
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
         "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
"""Tables of the model's own hooks."""


@torch.compiler.disable
def not_taken_apart(model: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call from a program of torch.compile, which would trace planning, and collectives between processes, in pieces. The program breaks here."""
    return model.forward(*args, **kwargs)


class Guidance(Compiled):
    """What `CompiledModule` inherits: the marks at which FSDP1 and DataParallel are noticed, and what changes dtypes and devices."""

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        raise UsageError(f"FullyShardedDataParallel {SHARDED}")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `to()`, `half()`, `cuda()` and the like go through: nothing to do, or refused."""
        for t in {(t.dtype, t.device): t for t in (*self.parameters(), *self.buffers())}.values():
            before = torch.empty(0, dtype=t.dtype, device=t.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise UsageError(f"a compiled model stays {before.dtype} on {before.device}, as its plan has it, and cannot become {after.dtype} "
                                 f"on {after.device}; call to() on the original model before autoshard.compile, or pass "
                                 "device= or precision=autoshard.Precision(\"bf16\") to it")
        return self

    def train(self, mode: bool = True) -> Any:
        """As the model's class has it, which may keep modules in evaluation (frozen batch norms) or change weights (merged adapters)."""
        root = self.__dict__["_visible"]["root"]
        root.train(mode)
        self.training = root.training
        return self

    def eval(self) -> Any:
        root = self.__dict__["_visible"]["root"]
        root.eval()
        self.training = root.training
        return self

    def __getitem__(self, at: Any) -> Any:
        """A layer of a model that has its layers by number or key (`nn.Sequential`)."""
        return self.__dict__["_visible"]["root"][at]

    def __len__(self) -> int:
        return len(self.__dict__["_visible"]["root"])

    def __bool__(self) -> bool:
        return True

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise UsageError(f"DataParallel cannot wrap a compiled model, and need not: {INSTEAD}")


def guard(compiled: CompiledModule, visible: nn.Module) -> None:
    """Make the visible tree refuse `fully_shard` and the like, and let its root's methods call the compiled model."""
    for module in (compiled, *visible.modules()):
        module.__dict__[_torch.COMPOSABLE_STATE] = _NoSharding()
    visible.__dict__["forward"] = _CallsCompiled(ref(compiled))  # no cycle from here: the model should go with its last name
    visible.__dict__.update({table: {} for table in HOOKS if table in visible.__dict__})  # those of the model are in its graph


def attribute(compiled: CompiledModule, visible: nn.Module, name: str) -> Any:
    """An attribute that the compiled module itself lacks. Raises NotCarriedOver (an AttributeError) for a method that cannot work,
    UsageError where a wrapper asks, AttributeError for what the model has not either."""
    if name in WRAPPERS:
        raise UsageError(WRAPPERS[name])
    if name in visible.__dict__:
        return visible.__dict__[name]
    kind = type(visible)
    try:
        found = inspect.getattr_static(kind, name) if kind.__getattr__ is nn.Module.__getattr__ else getattr(visible, name)
    except AttributeError:
        raise AttributeError(f"{type(compiled).__name__!r} object has no attribute {name!r}, and neither has {kind.__name__}") from None
    method = getattr(found, "__func__", found)
    library = method.__module__.split(".")[0] if inspect.isfunction(method) else None
    if library in LIBRARIES and name not in READS_ONLY or library == "peft" and name in OF_PEFT:
        raise NotCarriedOver(f"a compiled model has no {name}(): {(OF_PEFT if library == 'peft' else METHODS).get(name, BEFORE)}")
    return getattr(visible, name)


class _CallsCompiled:
    """What `self(...)` runs in a method of the original model."""

    def __init__(self, compiled: ref[CompiledModule]) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.compiled()
        if model is None:
            raise UsageError("a method of a compiled model was called after the model itself was deleted; keep the model")
        return model(*args, **kwargs)


class _NoSharding(dict):
    """Where torch's composable APIs (`fully_shard`, `replicate`) look whether they were applied before."""

    def __contains__(self, api: object) -> bool:
        raise UsageError(f"{getattr(api, '__name__', api)}() {SHARDED}")
