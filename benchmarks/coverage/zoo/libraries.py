"""Small models of timm, torchvision and diffusers, a builder each: name -> (model, positional inputs)."""
from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]
CLASSES = 6
"""Classes of an image model: a number that not every mesh divides."""
SMALL = ("atto", "femto", "pico", "nano", "xxs", "xxt", "tiny", "_xs", "_t", "mini", "_s", "small", "18", "b0", "11")
"""Parts of names of small models, the smallest first."""


def libraries() -> dict[str, Callable[[], Mapping[str, Callable[[], Built]]]]:
    return {"timm": timm_models, "torchvision": torchvision_models, "diffusers": diffusers_models}


def smallest(names: list[str]) -> str:
    """By what the name says."""
    return min(names, key=lambda n: (next((i for i, part in enumerate(SMALL) if part in n), len(SMALL)), len(n), n))


# ---- timm: a model for each of its modules

def timm_models() -> dict[str, Callable[[], Built]]:
    _torchvision()
    import timm

    by_module = {m: timm.list_models(module=m) for m in timm.list_modules()}
    return {smallest(names): partial(_timm, smallest(names)) for names in by_module.values() if names}


def _timm(name: str) -> Built:
    """With images of 64 pixels where the model takes them, else of its own size."""
    import timm

    size = timm.create_model(name, num_classes=CLASSES).default_cfg["input_size"]
    for options, pixels in (({"img_size": 64}, 64), ({}, 64), ({}, size[-1])):
        try:
            model = timm.create_model(name, num_classes=CLASSES, **options)
            image = torch.randn(4, size[0], pixels, pixels)
            model.eval()(image)
        except (TypeError, AssertionError, RuntimeError, ValueError):
            continue  # the next size; the last one is the model's own
        return model.train(), (image,)
    raise ValueError(f"{name} does not run on images of {size[-1]} pixels")


# ---- torchvision: the two smallest models of each module: classifiers, and segmentation, video, optical flow

def torchvision_models() -> dict[str, Callable[[], Built]]:
    models = _torchvision()
    groups = defaultdict(list)
    for name in models.list_models():
        if "detection" not in (module := inspect.getmodule(models.get_model_builder(name)).__name__) and "quantized" not in name:
            groups[module].append(name)
    chosen = [name for names in groups.values() for name in sorted(names, key=lambda n: (_parameters(n), n))[:2]]
    return {name: partial(_torchvision_model, name) for name in chosen}


def _parameters(name: str) -> int:
    """How many a model has, as its published weights say."""
    return min(w.meta["num_params"] for w in _torchvision().get_model_weights(name))


def _torchvision() -> Any:
    """torchvision.models; its compiled ops, which no model here calls, are for builds of torch with CUDA. The other libraries import it, too."""
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    from torchvision import models

    return models


def _torchvision_model(name: str) -> Built:
    models = _torchvision()
    builder = models.get_model_builder(name)
    module = inspect.getmodule(builder).__name__
    if "optical_flow" in module:
        return models.get_model(name, weights=None), (torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128), 2)
    kwargs: dict[str, Any] = {"weights": None, "num_classes": CLASSES}
    if "segmentation" in module:
        kwargs["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        kwargs |= {"aux_logits": False, "init_weights": False}
    if "vision_transformer" in module:
        kwargs["image_size"] = 64
    frames = 16 if "mvit" in name or name == "s3d" else 4
    larger = {"maxvit": 224, "inception_v3": 96, "mvit": 224, "s3d": 224}
    pixels = next((size for part, size in larger.items() if part in name), 64)
    shape = (2, 3, frames, pixels, pixels) if "video" in module else (4, 3, pixels, pixels)
    return models.get_model(name, **kwargs), (torch.randn(shape),)


# ---- diffusers: denoisers and autoencoders at small sizes

def diffusers_models() -> dict[str, Callable[[], Built]]:
    _torchvision()
    import diffusers as d

    blocks = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
    steps, text = torch.tensor([3, 5]), torch.randn(2, 6, 32)
    attention = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
    return {
        "UNet2DModel": lambda: (d.UNet2DModel(sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                              up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, **blocks),
                                (torch.randn(2, 3, 16, 16), steps)),
        "UNet2DConditionModel": lambda: (d.UNet2DConditionModel(
            sample_size=16, cross_attention_dim=32, attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **blocks), (torch.randn(2, 4, 16, 16), steps, text)),
        "UNet1DModel": lambda: (d.UNet1DModel(sample_size=32, in_channels=8, out_channels=8, block_out_channels=(32, 64), extra_in_channels=64,
                                              down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"),
                                              up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip")), (torch.randn(2, 8, 32), steps)),
        "AutoencoderKL": lambda: (d.AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **blocks),
                                  (torch.randn(2, 3, 16, 16),)),
        "VQModel": lambda: (d.VQModel(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                                      latent_channels=3, num_vq_embeddings=32, **blocks), (torch.randn(2, 3, 16, 16),)),
        "DiTTransformer2DModel": lambda: (d.DiTTransformer2DModel(sample_size=8, in_channels=4, num_embeds_ada_norm=12, **attention),
                                          (torch.randn(2, 4, 8, 8), steps, torch.tensor([1, 2]))),
        "Transformer2DModel": lambda: (d.Transformer2DModel(in_channels=32, cross_attention_dim=32, norm_num_groups=8, **attention),
                                       (torch.randn(2, 32, 8, 8), text)),
        "PixArtTransformer2DModel": lambda: (d.PixArtTransformer2DModel(
            sample_size=8, cross_attention_dim=32, caption_channels=32, use_additional_conditions=False, **attention),
            (torch.randn(2, 4, 8, 8), text, steps, {"resolution": None, "aspect_ratio": None})),
        "SD3Transformer2DModel": lambda: (d.SD3Transformer2DModel(sample_size=8, in_channels=4, joint_attention_dim=32, caption_projection_dim=32,
                                                                  pooled_projection_dim=16, pos_embed_max_size=8, **attention),
                                          (torch.randn(2, 4, 8, 8), text, torch.randn(2, 16), steps)),
        "PriorTransformer": lambda: (d.PriorTransformer(embedding_dim=32, num_embeddings=7, additional_embeddings=4, **attention),
                                     (torch.randn(2, 32), steps, torch.randn(2, 32), torch.randn(2, 7, 32))),
    }
