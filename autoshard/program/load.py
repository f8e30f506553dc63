"""From what a user writes (`llama:8b`, `package.module:factory`, a Hugging Face config) to a model to plan.

Planning needs shapes, never values, so models are built on torch's meta device unless `fake=False`:
70 billion parameters then take no memory. Tracing turns the meta tensors into what it needs.
"""
from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoshard._torch import pytree
from autoshard.errors import AutoshardError, ModelError, UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model with what one step needs.

    example_inputs  positional; with `loss_fn` the last is the target and the others go to the model
    loss_fn         `loss_fn(output, target)` -> scalar; None where the model returns its loss or has none
    reference       canonical name, e.g. "llama:8B"
    settings        batch, seq, dtype and hf as the user gave them (None where not given)
    """

    model: nn.Module
    example_inputs: tuple[Any, ...]
    example_kwargs: Mapping[str, Any]
    loss_fn: Callable[..., torch.Tensor] | None
    reference: str
    settings: Mapping[str, Any]

    @property
    def for_inference(self) -> "ModelSpec":
        """The same without loss, target and labels."""
        kept = self.example_inputs[:-1] if self.loss_fn else self.example_inputs
        kwargs = {k: v for k, v in self.example_kwargs.items() if k not in LABELS}
        return replace(self, example_inputs=kept, example_kwargs=kwargs, loss_fn=None)


LABELS = ("labels", "start_positions", "end_positions")


@dataclass(frozen=True)
class _Source:
    """A factory to call, and the loss that belongs to it."""

    factory: Callable[..., Any]
    loss_fn: Callable[..., torch.Tensor] | None
    reference: str


def load_model(reference: str | None, *, batch: int | None = None, seq: int | None = None, dtype: str | None = None,
               hf: str | Path | None = None, fake: bool = True) -> ModelSpec:
    """Build the model that `reference` names, with example inputs.

    reference  `name` or `name:size` (any case): NAME.py in the `models/` folder of the current directory or
               beside the package (what such a file has: models/__init__.py). Or `package.module:factory`,
               where `factory()` returns (model, example_inputs): a tuple, one tensor, or a dict of keyword
               arguments. With a function `loss(output, target)` in the same module the last input is the
               target; without one the model returns the loss itself. None with `hf`.
    batch, seq passed to the factory where given; dtype "bf16", "fp16", "fp32" or "fp64" casts what floats.
    hf         path of a Hugging Face config JSON; the class is the first of its `architectures`. The
               example inputs have labels, so that the model's output has the loss.
    fake       build on the meta device: shapes without memory. False makes real weights.

    Raises ModelError for a model that cannot be found or built, UsageError for other bad arguments.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give at least 1")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    source = _find(reference, hf)
    with torch.device("meta") if fake else nullcontext():
        model, args, kwargs = _build(source, batch, seq, fake)
    if dtype is not None:
        model = model.to(DTYPES[dtype])
        args, kwargs = pytree.tree_map(lambda leaf: _cast(leaf, DTYPES[dtype]), (args, kwargs))
    if source.loss_fn is not None and not args:
        raise ModelError(f"{source.reference} has a loss(output, target) beside it, so its example inputs must be "
                         f"positional and end with the target")
    settings = {"batch": batch, "seq": seq, "dtype": dtype, "hf": None if hf is None else str(hf)}
    return ModelSpec(model, args, kwargs, source.loss_fn, source.reference, settings)


def decoder_factory(reference: str) -> tuple[Callable[..., Any], str]:
    """What `reference` has for inference with caches, and its canonical name: `decoder` of a model of `models/`, or package.module:factory.
    With batch= and context= it returns (model with caches as buffers, inputs), where inputs(new, start) are those of `new` tokens after `start`
    others. Raises ModelError."""
    name, _, size = reference.partition(":")
    path = _models().get(name.lower())
    if path is None:
        source = _find(reference, None)
        return source.factory, source.reference
    source = _named(name.lower(), path, size)
    build = getattr(_load_file(path), "decoder", None)
    if build is None:
        raise ModelError(f"{source.reference} has no form with caches (`decoder` in {path.name}); those that have: "
                         f"{', '.join(n for n, p in sorted(_models().items()) if hasattr(_load_file(p), 'decoder'))}. A Hugging Face config "
                         "works too: --hf config.json")
    return partial(build, source.reference.partition(":")[2]), source.reference


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _find(reference: str | None, hf: str | Path | None) -> _Source:
    if hf is not None:
        if reference:
            raise UsageError(f"both a model ({reference!r}) and a Hugging Face config ({hf}) were given; give one")
        from autoshard.program.load_hf import config_factory
        return _Source(config_factory(hf), None, f"hf:{Path(hf).name}")
    if not reference:
        raise UsageError("no model was given; write for example gpt:tiny, package.module:factory or --hf config.json")
    name, _, rest = reference.partition(":")
    path = _models().get(name.lower())
    if path is not None:
        return _named(name.lower(), path, rest)
    if reference.endswith(".json"):
        raise ModelError(f"{reference} is no model. A saved plan is shown by `autoshard report {reference}`, and checked by `autoshard verify MODEL "
                         f"--plan {reference}`; a Hugging Face config goes as --hf {reference}")
    if name.endswith(".py") or name.startswith(".") or "/" in name or os.sep in name:
        raise _path_given(name, rest)
    if rest:
        return _imported(name, rest)
    raise _unknown_model(name)


# -- models/ of a checkout ------------------------------------------------------------------------

def _models() -> dict[str, Path]:
    """Model files by name; the current directory comes before the package's."""
    folders = (Path(__file__).resolve().parents[2] / "models", Path.cwd() / "models")
    return {p.stem.lower(): p for folder in folders for p in sorted(folder.glob("*.py")) if p.stem != "__init__"}


def sizes_of(name: str) -> tuple[str, ...]:
    """Sizes of a model of `models/`, the default first; () for any other name. Raises ModelError for a broken file."""
    path = _models().get(name.lower())
    return () if path is None else tuple(getattr(_load_file(path), "SIZES", ()))


def _path_given(name: str, factory: str) -> ModelError:
    """Nothing is imported: `lm.py` is also the module `py` of a package `lm`, and to look for it would run the script lm.py."""
    path = Path(name)
    if not path.is_file():
        return ModelError(f"there is no file {name} here ({Path.cwd()}), and models go by module and function: package.module:factory")
    inside = path.resolve().is_relative_to(Path.cwd())
    parts = (path.resolve().relative_to(Path.cwd()) if inside else Path(path.name)).with_suffix("").parts
    where = "" if inside else f", from the folder {path.resolve().parent}"
    return ModelError(f"{name} is a file, and models go by module and function: write {'.'.join(parts)}:{factory or 'factory'}{where}. "
                      "The module is imported, so a script needs `if __name__ == \"__main__\":` around what it runs")


def _unknown_model(name: str) -> ModelError:
    known = sorted(_models())
    near = get_close_matches(name.lower(), known, n=1)
    module, _, factory = name.rpartition(".")
    if module and (Path.cwd() / f"{module.replace('.', os.sep)}.py").is_file():
        near = [f"{module}:{factory}"]
    hint = f"did you mean {near[0]}? " if near else ""
    listed = f"the models are {', '.join(known)}" if known else "there is no models/ folder here"
    return ModelError(f"unknown model {name!r}: {hint}{listed}; your own go as package.module:factory")


def _named(name: str, path: Path, size: str) -> _Source:
    module = _load_file(path)
    build, sizes = getattr(module, "build", None), getattr(module, "SIZES", None)
    if build is None or not sizes:
        raise ModelError(f"{path} has no `build` and `SIZES`, which a model file needs; see models/__init__.py")
    by_lower = {s.lower(): s for s in sizes}
    if size and size.lower() not in by_lower:
        near = get_close_matches(size.lower(), by_lower, n=1)
        hint = f"did you mean {by_lower[near[0]]}? " if near else ""
        raise ModelError(f"{name} has no size {size!r}: {hint}its sizes are {', '.join(sizes)}")
    chosen = by_lower[size.lower()] if size else next(iter(sizes))
    return _Source(partial(build, chosen), getattr(module, "loss", None), f"{name}:{chosen}")


def _load_file(path: Path) -> ModuleType:
    """Import one file under a name of its own: a user's package may be called `models` too."""
    name = f"autoshard_models.{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ModelError(f"cannot load {path}: {describe(error)}") from error
    return module


# -- package.module:factory -----------------------------------------------------------------------

def _imported(module_name: str, factory_name: str) -> _Source:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # something that it imports is missing
            raise ModelError(f"cannot import {module_name!r}: {describe(error)}") from error
        if "." not in module_name:
            raise _unknown_model(module_name) from None
        raise ModelError(f"there is no module {module_name!r} (looked in {Path.cwd()} and the Python path)") from None
    except Exception as error:
        raise ModelError(f"cannot import {module_name!r}: {describe(error)}") from error
    factory = getattr(module, factory_name, None)
    if isinstance(factory, nn.Module) or (isinstance(factory, type) and issubclass(factory, nn.Module)):
        what, made = ("a class of models", f"{factory_name}(...)") if isinstance(factory, type) else ("a model", factory_name)
        raise ModelError(f"{module_name}:{factory_name} is {what}, and its example inputs are not known; write a function that returns "
                         f"(model, example_inputs) and name it: def factory(): return {made}, (inputs, ...)")
    if not callable(factory):
        near = get_close_matches(factory_name, [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        there = f", {factory_name} there is of type {type(factory).__name__}" if hasattr(module, factory_name) else ""
        raise ModelError(f"module {module_name!r} has no function {factory_name!r}{there}{hint}")
    return _Source(factory, getattr(module, "loss", None), f"{module_name}:{factory_name}")


# -- calling the factory --------------------------------------------------------------------------

def _build(source: _Source, batch: int | None, seq: int | None, fake: bool) -> tuple[nn.Module, tuple, dict]:
    options = {k: v for k, v in (("batch", batch), ("seq", seq)) if v is not None}
    parameters = inspect.signature(source.factory).parameters
    for name in options:
        # `**overrides` of a model file are its Config's fields, not batch or seq: it must name them
        if name not in parameters:
            own = "" if isinstance(source.factory, partial) else f", or give the function a parameter {name!r}"
            raise ModelError(f"{source.reference} takes no {name}; leave --{name} out{own}")
    try:
        made = source.factory(**options)
    except AutoshardError:
        raise
    except Exception as error:
        raise _build_error(source, error, fake) from error
    return _check(made, source.reference)


def _build_error(source: _Source, error: Exception, fake: bool) -> ModelError:
    said = describe(error)
    if fake and ("meta" in str(error).lower() or isinstance(error, NotImplementedError)):
        return ModelError(f"{source.reference} cannot be built on the meta device, which planning uses to need no "
                          f"memory: {said}. Let the constructor not read values of tensors (.item(), .numpy(), "
                          f"copies to a device)")
    return ModelError(f"building {source.reference} failed: {said}")


def _check(made: Any, reference: str) -> tuple[nn.Module, tuple, dict]:
    """(model, inputs) with inputs a tuple or list, one tensor, or a dict of keyword arguments."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ModelError(f"{reference} must return (model, example_inputs), but returned {type(made).__name__}")
    model, inputs = made
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}


def describe(error: Exception) -> str:
    """One line: the exception and the innermost line outside torch and the import machinery."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if "/torch/" not in f.filename and "importlib" not in f.filename and f.filename != __file__]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}{place}"
