"""What a compiled model says when it is asked for something of its original model."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import autoshard
from autoshard.errors import AutoshardError, UsageError


def small() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=1, eos_token_id=1))


def compiled(model: nn.Module) -> nn.Module:
    return autoshard.compile(model, "one=1", cluster="cpu-gloo", cache=False)


@pytest.mark.parametrize(("name", "way"), [
    ("generate", "original model"), ("save_pretrained", "get_model_state_dict"), ("push_to_hub", "push_to_hub=True"),
    ("from_pretrained", "then compile"), ("gradient_checkpointing_enable", "memory_budget"), ("resize_token_embeddings", "before"),
    ("add_adapter", "before"), ("tie_weights", "before"), ("set_input_embeddings", "before")])
def test_a_method_that_cannot_work_names_the_way(name, way):
    model = compiled(small())
    assert not hasattr(model, name)
    with pytest.raises(AutoshardError, match=f"(?s){name}.*{way}"):
        getattr(model, name)()


def test_every_public_method_of_transformers_works_or_is_refused_by_name():
    """A method of a new version of transformers must not run on pieces of parameters unnoticed."""
    from autoshard.runtime.guidance import READS_ONLY
    model, original = compiled(small()), small()
    names = [n for n in dir(PreTrainedModel) if not n.startswith("_") and not hasattr(nn.Module, n) and callable(getattr(PreTrainedModel, n))
             and n not in ("config_class", "generation_config_class")]
    assert len(names) > 40
    for name in names:
        if name in READS_ONLY:
            assert callable(getattr(model, name)), name
        else:
            with pytest.raises(AutoshardError, match=name):
                getattr(model, name)
    assert model.num_parameters() == original.num_parameters()


def test_a_model_of_peft_says_how_its_adapters_are_saved():
    def save_pretrained(self, folder):
        raise AssertionError("it would read the pieces of a rank")

    save_pretrained.__module__ = "peft.peft_model"
    model = compiled(type("PeftModel", (nn.Linear,), {"save_pretrained": save_pretrained})(4, 4))
    with pytest.raises(AutoshardError, match=r"save_pretrained\(\).*get_model_state_dict.*load_state_dict\(weights\)"):
        model.save_pretrained("folder")


def test_attributes_are_those_of_the_model():
    model, original = compiled(small()), small()
    assert model.config.n_embd == 16 and model.main_input_name == "input_ids"
    assert model.device == original.device and model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.transformer.wte.weight
    with pytest.raises(AttributeError, match="no attribute 'nothing'.*GPT2LMHeadModel") as e:
        model.nothing  # noqa: B018
    assert not isinstance(e.value, AutoshardError)


class Own(nn.Module):
    scale = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.calls = 0
        self.register_forward_hook(lambda m, args, out: out + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(self(x), y)

    def decay(self) -> list[str]:
        return [name for name, p in self.named_parameters() if p.ndim > 1]

    def half_way(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_methods_of_the_users_own_model():
    torch.manual_seed(0)
    original = Own()
    model, x, y = compiled(original), torch.randn(3, 4), torch.randn(3, 2)
    assert model.scale == 3.0 and model.decay() == ["linear.weight"]
    loss = model.loss(x, y)  # calls the compiled model once, and its hook once
    torch.testing.assert_close(loss, original.loss(x, y))
    assert model.calls == 1
    loss.backward()
    assert model.linear.weight.grad is not None
    with pytest.raises(UsageError, match="'linear'.*cannot be called"):
        model.half_way(x)


def test_attributes_that_the_models_class_looks_up_itself():
    """As peft's models do, in the model that they wrap."""
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))
            self.inner.zero = lambda: self.inner[0].bias.data.zero_()

        def forward(self, x):
            return self.inner(x)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "inner":
                    raise
                return getattr(self.inner, name)

    compiled = autoshard.compile(Wrapper(), "d=1", cluster="cpu-gloo", cache=False)
    assert callable(compiled.zero)
    with pytest.raises(AttributeError, match="has no attribute 'nothing', and neither has Wrapper"):
        _ = compiled.nothing


def test_hooks_on_the_compiled_model_run():
    model, x, seen = compiled(Own()), torch.randn(3, 4), []
    model.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    model.register_forward_hook(lambda m, args, out: seen.append("forward"))
    model.register_full_backward_hook(lambda m, into, out: seen.append("backward"))
    for _ in range(2):
        model(x).sum().backward()
    assert seen == ["pre", "forward", "backward"] * 2


@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to_bf16", "to_meta"])
def test_another_dtype_or_device_is_refused(change):
    model = compiled(Own())
    changes = {"to_bf16": lambda: model.to(torch.bfloat16), "to_meta": lambda: model.to("meta")}
    with pytest.raises(UsageError, match="before autoshard.compile"):
        changes.get(change, getattr(model, change, None))()
    assert model.linear.weight.dtype is torch.float32


def test_the_same_dtype_and_device_is_nothing_to_do():
    model = compiled(Own())
    weight = model.linear.weight
    assert model.to("cpu") is model and model.float() is model and model.cpu() is model and model.linear.weight is weight


def test_what_wrappers_look_at():
    model = compiled(Own())
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        hasattr(model, "_ddp_params_and_buffers_to_ignore")
    with pytest.raises(UsageError, match="(?s)Accelerate.*Trainer.*inputs=\"local\""):
        hasattr(model, "hf_device_map")  # Trainer, and Accelerate for every module of the tree
    with pytest.raises(UsageError, match="FullyShardedDataParallel"):
        model._is_fsdp_managed_module = True
    with pytest.raises(UsageError, match="DataParallel"):
        model._replicate_for_data_parallel()
