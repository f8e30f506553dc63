"""What the programs on the pages must have computed: the same as plain torch on one device. Called at the end of a page's program, on
every rank, with the program's names."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def whole(named: Any) -> dict[str, torch.Tensor]:
    return {name: t.detach().full_tensor().clone() for name, t in dict(named).items()}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, t in want.items():
        torch.testing.assert_close(got[name], t.detach(), msg=lambda m, name=name: f"{name}: {m}", **CLOSE)


def global_batches(page: dict[str, Any], loader: Any, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What both ranks load together, in the order of ranks."""
    size, n, orders = loader.batch_size, 2, []
    for rank in range(n):
        sampler = DistributedSampler(loader.dataset, n, rank, shuffle=loader.sampler.shuffle)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    tensors = loader.dataset.tensors
    picked = [[i for order in orders for i in order[at:at + size]] for at in range(0, len(orders[0]), size)]
    return [tuple(t[p] for t in tensors) for p in picked]


def training_loop(page: dict[str, Any]) -> None:
    """The whole page again, on one device: accumulated gradients, two epochs, their average, accuracies; and the resumed run."""
    train, loss_fn = page["train_loader"], page["loss_fn"]
    reference: nn.Module = page["build"]()
    batches = global_batches(page, train, 0)
    assert [len(x) for x, _ in batches] == [64] * 6 + [16]
    for x, y in batches[:2]:
        (loss_fn(reference(x), y)["loss"] / 2).backward()
    same(page["accumulated"], {name: p.grad for name, p in reference.named_parameters()})
    first = loss_fn(page["build"]()(batches[0][0]), batches[0][1])["loss"].item()
    assert abs(page["bf16_loss"].item() - first) < 0.02 * first and page["bf16_loss"].item() != first
    x, y = next(iter(page["same"].__class__(page["train_set"], 64, shuffle=True, generator=torch.Generator().manual_seed(0))))
    torch.testing.assert_close(page["global_loss"], loss_fn(page["build"]()(x), y)["loss"], **CLOSE)

    reference.zero_grad()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(train))
    ema = {name: p.detach().clone() for name, p in reference.named_parameters()}
    losses = []
    for epoch in range(2):
        for x, y in global_batches(page, train, epoch):
            loss = loss_fn(reference(x), y)["loss"]
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            for name, p in reference.named_parameters():
                ema[name].lerp_(p.detach(), 0.1)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(page["norm"], norm.item(), **CLOSE)
    same(whole(page["model"].named_parameters()), dict(reference.named_parameters()))
    same(whole(page["ema"]), ema)
    test = page["test_set"]
    for key, weights in (("accuracy", dict(reference.named_parameters())), ("ema_accuracy", ema)):
        logits = torch.func.functional_call(reference, weights, (test.tensors[0],))
        assert abs(page[key] - (logits.argmax(1) == test.tensors[1]).float().mean().item()) <= 0.011, key
    trained = [s for i, s in enumerate(page["seen"]) if i % 11 < 7]  # 7 batches to train, then 2 to test, twice
    assert len(page["seen"]) == 2 * 11 and len(page["gradients"]) == 2 * 7 * 4
    torch.testing.assert_close(trained, losses, **CLOSE)
    _resumed(page)


def hugging_face(page: dict[str, Any]) -> None:
    """Training and evaluation on one device, and what was saved."""
    torch.manual_seed(0)
    reference = type(page["original"])(page["config"])
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    samplers = [DistributedSampler(page["data"], 2, rank) for rank in range(2)]
    picked = [[i for s in samplers for i in list(s)[at:at + 8]] for at in range(0, 32, 8)]
    batches = [{k: torch.stack([page["data"][i][k] for i in p]) for k in page["batch"]} for p in picked]
    assert not all((b["labels"][:8] >= 0).sum() == (b["labels"][8:] >= 0).sum() for b in batches)  # a mean of means would be off
    losses = []
    for batch in batches:
        loss = reference(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(page["losses"], losses, **CLOSE)
    same(whole(page["model"].named_parameters()), dict(reference.named_parameters()))
    with torch.no_grad():
        evaluated = sum(reference(**batch).loss.item() for batch in batches) / len(batches)
    torch.testing.assert_close(page["evaluated"], evaluated, **CLOSE)
    assert page["original"].tp_plan.keys() <= page["theirs"].tp_plan.keys() and page["mine"].mesh.names == ("tp",)
    assert page["original"].config.use_cache is True and "past_key_values" not in page["out"]
    assert "DistributedDataParallel" in page["refusal"]
    if torch.distributed.get_rank() == 0:
        for kept in (page["trained"], page["sampler_model"]):
            for name, p in reference.named_parameters():
                torch.testing.assert_close(kept.get_parameter(name), p, **CLOSE)
        prompt = page["batch"]["input_ids"][:1, :4]
        assert page["tokens"].tolist() == page["trained"].generate(prompt, max_new_tokens=8, do_sample=False).tolist()


def _resumed(page: dict[str, Any]) -> None:
    """From the checkpoint the third epoch gives the same, to the bit, as going on did."""
    def third() -> tuple[dict[str, torch.Tensor], list[float]]:
        for _ in page["train_epoch"](2):
            page["update_ema"]()
        return whole(page["model"].named_parameters()) | {f"ema {k}": v for k, v in whole(page["ema"]).items()}, page["scheduler"].get_last_lr()

    went_on, rate = third()
    assert page["load"]("checkpoint") == 2
    resumed, same_rate = third()
    assert rate == same_rate and all(torch.equal(resumed[name], t) for name, t in went_on.items())
