"""What stands in for CPU attention on other devices: the numbers of the matmul form, and of all forms the shapes, dtypes and
memory layouts, against the CPU op. Kernels of a GPU are checked by their shape functions only."""
from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.errors import LoweringError
from autoshard.rules import attention_kernels
from autoshard.rules.attention_kernels import ELSEWHERE, attention, attention_backward, kernel_of
from autoshard.rules.ops import causal_rows

aten = torch.ops.aten
ON_CPU, BACKWARD_ON_CPU, ROWS_ON_CPU, ROWS_BACKWARD_ON_CPU = ELSEWHERE
META = torch.device("meta")
CASES = {
    "plain": ((2, 4, 8, 16), (2, 4, 8, 16), {}),
    "causal": ((2, 4, 8, 16), (2, 4, 8, 16), {"is_causal": True}),
    "few keys, causal": ((2, 4, 8, 16), (2, 4, 5, 16), {"is_causal": True}),
    "grouped": ((2, 4, 8, 16), (2, 2, 8, 16), {"is_causal": True}),
    "mask": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": (7, 9)}),
    "mask per batch, grouped": ((2, 4, 7, 8), (2, 2, 9, 8), {"attn_mask": (2, 1, 7, 9)}),
    "padding": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": (2, 1, 1, 9), "scale": 0.3}),
    "odd heads": ((2, 3, 8, 5), (2, 3, 8, 5), {}),
}


def arguments(case: str, dtype: torch.dtype, tokens_first: bool = False) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Query, key, value, gradient of the output; and the rest."""
    query, key, rest = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        if tokens_first and len(shape) == 4:
            b, h, s, d = shape
            return torch.randn(b, s, h, d, generator=generator).to(dtype).transpose(1, 2)
        return torch.randn(shape, generator=generator).to(dtype)

    mask = {"attn_mask": new(*rest["attn_mask"]).masked_fill(new(*rest["attn_mask"]) > 0.8, float("-inf"))} if "attn_mask" in rest else {}
    return [new(*query), new(*key), new(*key), new(*query)], {**rest, **mask}


def both(forward: Any, backward: Any, tensors: list[torch.Tensor], rest: dict[str, Any]) -> list[torch.Tensor]:
    """Output, log-sum-exp and the three gradients."""
    query, key, value, grad = tensors
    rest = dict(rest)
    causal = rest.pop("is_causal", False)
    out, lse = forward(query, key, value, 0.0, causal, **rest)
    return [out, lse, *backward(grad, query, key, value, out, lse, 0.0, causal, **rest)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_matmul_form_gives_the_numbers_of_the_cpu_kernel(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "kernel_of", lambda *args: "math")
    tensors, rest = arguments(case, dtype)
    want = both(ON_CPU, BACKWARD_ON_CPU, tensors, rest)
    for got, expected in zip(both(attention, attention_backward, tensors, rest), want, strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype and got.stride() == expected.stride()
        error = (got - expected).norm() / expected.norm()
        assert error < (1e-13 if dtype is torch.float64 else 1e-5), error


def test_a_row_without_keys_is_as_on_cpu() -> None:
    tensors, rest = arguments("mask", torch.float64)
    rest["attn_mask"][2] = float("-inf")
    want = both(ON_CPU, BACKWARD_ON_CPU, tensors, rest)
    got = both(attention, attention_backward, tensors, rest)
    assert torch.equal(want[0][:, :, 2], got[0][:, :, 2]), (want[0][0, 0, 2], got[0][0, 0, 2])


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_shapes_dtypes_and_layouts_are_those_that_were_planned(case: str, dtype: torch.dtype, tokens_first: bool) -> None:
    """The lowered graph's views were settled for the CPU op's strides."""
    tensors, rest = arguments(case, dtype, tokens_first)
    tensors = [t.to(META) for t in tensors]
    rest = {k: v.to(META) if isinstance(v, torch.Tensor) else v for k, v in rest.items()}
    want = both(ON_CPU, BACKWARD_ON_CPU, tensors, rest)
    for got, expected in zip(both(attention, attention_backward, tensors, rest), want, strict=True):
        assert (got.shape, got.dtype, got.stride(), got.device) == (expected.shape, expected.dtype, expected.stride(), META)


@pytest.mark.parametrize(("case", "dtype", "kernel"), [
    ("causal", torch.bfloat16, "flash"), ("grouped", torch.float16, "flash"), ("causal", torch.float32, "efficient"),
    ("mask", torch.bfloat16, "efficient"), ("few keys, causal", torch.bfloat16, "efficient"),
    ("causal", torch.float64, "math"), ("odd heads", torch.bfloat16, "math")])
def test_which_kernel(case: str, dtype: torch.dtype, kernel: str) -> None:
    (query, key, _, _), rest = arguments(case, dtype)
    assert kernel_of(query, key, rest.get("is_causal", False), rest.get("attn_mask")) == kernel


def test_bias_is_aligned_and_right() -> None:
    (query, key, _, _), rest = arguments("padding", torch.float32)
    bias = attention_kernels._bias(rest["attn_mask"], query, key)
    assert torch.equal(bias, rest["attn_mask"].expand(2, 4, 7, 9)) and bias.stride(-1) == 1
    assert all(s % attention_kernels.BIAS_STEP == 0 for s in bias.stride()[:-1])


def test_dropout_is_refused() -> None:
    (query, key, value, _), _ = arguments("plain", torch.float32)
    with pytest.raises(LoweringError, match="dropout_p=0.1"):
        attention(query, key, value, 0.1)


@pytest.mark.parametrize("begins", [[0], [6], [2, 5]], ids=str)
def test_rows_of_a_causal_attention_are_those_of_the_whole(begins: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU and in the matmul form of other devices; keys serve two heads each."""
    monkeypatch.setattr(attention_kernels, "kernel_of", lambda *args: "math")
    (query, key, value, grad), _ = arguments("grouped", torch.float64)
    out, lse = ON_CPU(query, key, value, 0.0, True)
    lengths = causal_rows.lengths(2 if begins == [6] else 3, len(begins))
    here = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
    alone = torch.zeros_like(grad).index_copy(2, here, grad[:, :, here])
    wanted = BACKWARD_ON_CPU(alone, query, key, value, out, lse, 0.0, True)
    for forward, backward in ((ROWS_ON_CPU, ROWS_BACKWARD_ON_CPU), (ELSEWHERE[ROWS_ON_CPU], ELSEWHERE[ROWS_BACKWARD_ON_CPU])):
        mine, logs = forward(query[:, :, here], key, value, begins)
        gradients = backward(grad[:, :, here], query[:, :, here], key, value, mine, logs, begins)
        want = (out[:, :, here], lse[:, :, here], wanted[0][:, :, here], *wanted[1:])
        for got, expected in zip((mine, logs, *gradients), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
            assert got.stride() == torch.empty_like(expected.transpose(1, 2).contiguous()).transpose(1, 2).stride()
