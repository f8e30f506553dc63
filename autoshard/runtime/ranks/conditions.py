"""What measured prices depend on besides the machine: what carries collectives between ranks, and how float32 products are computed.

A calibrated profile keeps both (`Cluster.conditions`), and a plan its profile. Prices of shared memory make a poor plan for messages, and a device
whose products take half as long wants another plan."""
from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from autoshard.runtime.carriers.shared_memory import SWITCH, Shared
from autoshard.runtime.ranks.place import Place

COLLECTIVES, PRODUCTS = "collectives", "float32_products"
SHARED, MESSAGES = "shared memory", "messages"
log = logging.getLogger("autoshard")


def conditions_of(place: Place) -> dict[str, str]:
    """Of these ranks, as they run now. Collectives of ranks that are not on CPUs have one carrier, and no word here. All ranks call it."""
    carriers = place.carriers().values()
    carried = {COLLECTIVES: SHARED if all(isinstance(c, Shared) for c in carriers) else MESSAGES} if carriers else {}
    return {**carried, PRODUCTS: float32_products(place.device)}


def float32_products(device: torch.device) -> str:
    """How torch multiplies float32 matrices there: "ieee", or "tf32", "bf16" where `torch.set_float32_matmul_precision` lets it use kernels that may
    round more."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    chosen = backend.matmul.fp32_precision
    return "ieee" if chosen == "none" else str(chosen)


def otherwise(priced: Mapping[str, str], here: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What was otherwise where prices were measured, and what to do about it. What either side does not say is left out."""
    for name in sorted(priced.keys() & here.keys()):
        if priced[name] != here[name]:
            yield f"{name.replace('_', ' ')}: {priced[name]} in the profile, {here[name]} here", ADVICE[name]


ADVICE = {
    COLLECTIVES: f"{SWITCH}=0 in the environment of all ranks makes them messages; calibrate again for what is to be used",
    PRODUCTS: "torch.set_float32_matmul_precision chooses, before anything is compiled; `autoshard calibrate --float32-matmul` measures a choice",
}


def warn_of_other_conditions(profile: Mapping[str, object], place: Place) -> None:
    """`profile`: the snapshot in a plan. All ranks call it, one logs."""
    priced = profile.get("conditions")
    if not isinstance(priced, Mapping):
        return
    for what, advice in otherwise(priced, conditions_of(place)):
        if place.is_leader:
            log.warning("the profile %s was measured otherwise (%s): the plan may be a poor one; %s", profile.get("name"), what, advice)
