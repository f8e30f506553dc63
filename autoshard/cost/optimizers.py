"""Optimizers, a row each: what an update moves, what it keeps, and how torch makes one. Nothing here imports torch.

Sources: torch/optim (2.13), compared as it runs in tests/cost/test_optimizers.py; for the 8-bit ones Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022, and bitsandbytes/optim/optimizer.py, 0.44 and later.
"""
from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autoshard.errors import UsageError

BLOCK, SMALLEST = 256, 4096
"""Elements per scale of an 8-bit moment, and of the smallest parameter that has such moments."""


@dataclass(frozen=True)
class Optimizer:
    """One optimizer. Amounts are per parameter, in tensors of its size and dtype.

    state          tensors that are kept between updates
    reads, writes  tensors that one fused update reads and writes; a tensor read twice counts twice
    workspace      temporaries of an update: most at a time for one parameter; how many of those live on while the next one is
                   updated; most of each where all are updated together. (0, 0, 0): it works in place
    scalars        float32 numbers in the state: the count of steps, and the like
    other_state    (local shape, bytes per element) -> bytes of state in another form than whole tensors
    torch          its class in torch.optim; "": another package's
    setting        the argument of that class that makes it this one: SGD with "momentum"
    elementwise    whether the update of an element reads nothing of other elements, so that pieces can be updated alone
    verified_with  arguments with which `autoshard verify` trains; None: it does not
    """

    state: int
    reads: float
    writes: float
    workspace: tuple[int, int, int] = (0, 0, 0)
    scalars: int = 1
    other_state: Callable[[tuple[int, ...], int], int] | None = None
    torch: str = ""
    setting: str = ""
    elementwise: bool = True
    verified_with: Mapping[str, Any] | None = None

    @property
    def moved(self) -> float:
        """Tensors read or written."""
        return self.reads + self.writes

    def state_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of state, without scalars, for a parameter of local `shape`."""
        return self.other_state(shape, itemsize) if self.other_state else prod(shape) * self.state * itemsize


def _factored(shape: tuple[int, ...], itemsize: int) -> int:
    """Sums over the last dim and over the one before; all of a vector."""
    n = prod(shape)
    return itemsize * (n // shape[-1] + n // shape[-2] if len(shape) > 1 else n)


def _in_blocks(shape: tuple[int, ...], itemsize: int) -> int:
    """Two moments of a byte an element and a float32 scale per block; of small parameters in float32."""
    n = prod(shape)
    return 2 * (n + 4 * -(-n // BLOCK) if n >= SMALLEST else 4 * n)


SLOW = {"lr": 1e-3}
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(2, 4, 3, (2, 1, 1), torch="AdamW", verified_with=SLOW),  # reads p, g, m, v; writes p, m, v
    "adam": Optimizer(2, 4, 3, (2, 1, 1), torch="Adam", verified_with=SLOW),
    "sgd": Optimizer(0, 2, 1, scalars=0, torch="SGD", verified_with={"lr": 1e-2}),
    "momentum": Optimizer(1, 3, 2, scalars=0, torch="SGD", setting="momentum", verified_with={"lr": 1e-2, "momentum": 0.9}),
    "nadam": Optimizer(2, 4, 3, (2, 1, 1), scalars=2, torch="NAdam", verified_with=SLOW),
    "radam": Optimizer(2, 4, 3, (5, 0, 1), torch="RAdam", verified_with=SLOW),
    "adamax": Optimizer(2, 4, 3, (1, 0, 1), torch="Adamax", verified_with=SLOW),
    "rmsprop": Optimizer(1, 3, 2, (1, 1, 1), torch="RMSprop", verified_with=SLOW),
    "adagrad": Optimizer(1, 3, 2, (1, 1, 2), torch="Adagrad", verified_with=SLOW),
    "adadelta": Optimizer(2, 4, 3, (2, 1, 2), torch="Adadelta", verified_with={}),
    "asgd": Optimizer(1, 3, 2, (0, 0, 1), scalars=3, torch="ASGD", verified_with={"lr": 1e-2}),
    "adafactor": Optimizer(0, 4, 1, (1, 1, 1), other_state=_factored, torch="Adafactor", elementwise=False),  # reads p and g twice
    "adamw8bit": Optimizer(0, 2.5, 1.5, scalars=0, other_state=_in_blocks, elementwise=False),  # p, g, p; of m and v a byte each
    "adam8bit": Optimizer(0, 2.5, 1.5, scalars=0, other_state=_in_blocks, elementwise=False),
    "none": Optimizer(0, 0, 0, scalars=0),
}
ALSO_ELEMENTWISE = ("Rprop",)
"""Classes of torch.optim without a price, whose update reads nothing of other elements either."""


def optimizer_row(name: str) -> Optimizer:
    """The row of an optimizer. Raises UsageError for an unknown one, with the nearest name."""
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(str(name).lower(), OPTIMIZERS, n=1)
        raise UsageError(f"no cost for optimizer {name!r}{f'; did you mean {near[0]}?' if near else ''} (known: {', '.join(OPTIMIZERS)})")
    return OPTIMIZERS[name]


def optimizer_name(optimizer: Any) -> str:
    """What the table calls an optimizer given as a name, a class, or an object: "adamw" for torch.optim.AdamW; an SGD object with
    momentum is "momentum". What the table does not have keeps its own name."""
    if isinstance(optimizer, str) or optimizer is None:
        return optimizer or "none"
    kind, settings = getattr(optimizer, "__name__", type(optimizer).__name__), getattr(optimizer, "defaults", {})
    fits = [name for name, row in OPTIMIZERS.items() if row.torch == kind and (not row.setting or settings.get(row.setting))]
    return max(fits, key=lambda name: bool(OPTIMIZERS[name].setting), default=kind.lower())


def elementwise_classes() -> tuple[str, ...]:
    """Classes of torch.optim whose update of an element reads nothing of other elements."""
    return tuple(dict.fromkeys((*(row.torch for row in OPTIMIZERS.values() if row.elementwise and row.torch), *ALSO_ELEMENTWISE)))


def verified() -> dict[str, Optimizer]:
    """Those with which `autoshard verify` trains."""
    return {name: row for name, row in OPTIMIZERS.items() if row.verified_with is not None}
