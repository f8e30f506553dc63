"""Blocks of vision, audio and recurrent models: no op without a rule, none whole that has a dim to split, and the numbers of one device.

The blocks are written here, at the ops and dims of the named models, so that nothing else need be installed; the models
themselves are tried too where torchvision is."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import autoshard
from autoshard.base.spec import divides
from autoshard.program.trace import trace
from autoshard.rules import registry

aten = torch.ops.aten


def r(*shape):
    return torch.randn(shape)


def conv(old, new, **options):
    return nn.Conv2d(old, new, 3, padding=1, **options)


class Lambda(nn.Module):
    """`body(module, *inputs)`, with submodules; the mean square of what it gives is the loss."""

    def __init__(self, body, **modules):
        super().__init__()
        self.body = body
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs):
        return self.body(self, *inputs).abs().square().mean()


class MobileNetV3Block(nn.Module):
    """Inverted residual with squeeze and excitation."""

    def __init__(self, width=16, inner=64):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
        self.depth = nn.Sequential(nn.Conv2d(inner, inner, 5, padding=2, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, width, 1), nn.ReLU(), nn.Conv2d(width, inner, 1), nn.Hardsigmoid())
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.depth(self.expand(x))
        return (x + self.project(y * self.squeeze(y))).square().mean()


class ConvNextBlock(nn.Module):
    """Channels last inside; the pooling at the end reads its result through strides."""

    def __init__(self, width=96):
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale, self.head = nn.Parameter(torch.full((width, 1, 1), 0.1)), nn.Linear(width, 10)

    def forward(self, x, target):
        y = self.down(F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        pooled = F.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last) + self.scale * y, 1)
        return F.cross_entropy(self.head(pooled.flatten(1)), target)


class SwinBlock(nn.Module):
    """Shifted windows, each with attention of its own."""

    def __init__(self, width=32, window=4):
        super().__init__()
        self.norm, self.attention, self.window = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True), window

    def forward(self, x):
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-2, -2), (1, 2)).view(n, h // self.window, self.window, w // self.window, self.window, c)
        y = y.transpose(2, 3).reshape(-1, self.window ** 2, c)
        y = self.attention(y, y, y, need_weights=False)[0].view(n, h // self.window, w // self.window, self.window, self.window, c)
        y = x + torch.roll(y.transpose(2, 3).reshape(x.shape), (2, 2), (1, 2))
        return F.adaptive_avg_pool2d(y.permute(0, 3, 1, 2), 1).flatten(1).square().mean()


class UNetUpBlock(nn.Module):
    """A skip connection, nearest upsampling and a convolution; a time embedding from sines."""

    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.norm, self.mix, self.up = nn.GroupNorm(8, 2 * width), conv(2 * width, width), conv(width, width)

    def forward(self, x, skip, step):
        angles = step[:, None] * torch.exp(torch.arange(8) * -0.5)
        y = self.mix(F.silu(self.norm(torch.cat([x, skip], 1)))) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        return self.up(F.interpolate(y, scale_factor=2.0, mode="nearest")).square().mean()


class SegformerHead(nn.Module):
    """Feature maps of several sizes brought to one, between linear layers over their channels."""

    def __init__(self, width=32):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(n, width) for n in (16, 32))
        self.fuse, self.classify = nn.Conv2d(2 * width, width, 1, bias=False), nn.Conv2d(width, 10, 1)

    def forward(self, fine, coarse, labels):
        maps = [linear(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
                for linear, x in zip(self.linears, (fine, coarse), strict=True)]
        maps[1] = F.interpolate(maps[1], size=maps[0].shape[2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(self.classify(F.relu(self.fuse(torch.cat(maps, 1)))), labels)


def _padded(module, x):
    y = module.conv(x)
    return sum(F.pad(y, (1, 2, 1, 0), mode).square().mean() for mode in ("replicate", "reflect", "circular"))


def _pooled(module, x):
    y = module.conv(x)
    return sum(pool(y).square().mean() for pool in (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2)))


def _warped(module, x):
    theta = module.where(x.mean((2, 3))).view(-1, 2, 3)
    return F.grid_sample(module.conv(x), F.affine_grid(theta, (x.shape[0], 16, 6, 4), align_corners=False), align_corners=False)


def _turned(module, x, angle):
    pairs = torch.view_as_complex(module.linear(x).unflatten(-1, (8, 2)))
    return pairs * torch.polar(torch.ones_like(angle), angle) + torch.complex(angle, module.linear(x)[..., :8])


def _orders(module, x):
    y = module.linear(x).flip(1).roll(1, 0).cumsum(1)
    return y.sort(1).values.topk(4, 1).values * y.cumprod(1)[:, :4]


BLOCKS = {
    "mobilenet_v3": lambda: (MobileNetV3Block(), r(4, 16, 8, 8)),
    "convnext": lambda: (ConvNextBlock(), r(4, 96, 6, 6), torch.randint(10, (4,))),
    "swin": lambda: (SwinBlock(), r(4, 8, 8, 32)),
    "unet": lambda: (UNetUpBlock(), r(4, 32, 4, 4), r(4, 32, 4, 4), torch.rand(4)),
    "segformer": lambda: (SegformerHead(), r(4, 16, 8, 8), r(4, 32, 4, 4), torch.randint(10, (4, 8, 8))),
    "glu": lambda: (Lambda(lambda m, x: F.glu(m.linear(x)) + F.glu(m.linear(x), 1).mean(), linear=nn.Linear(8, 16)), r(4, 6, 8)),
    "prelu": lambda: (Lambda(lambda m, x: m.one(m.each(m.linear(x))), linear=nn.Linear(8, 16), each=nn.PReLU(16), one=nn.PReLU()), r(4, 8)),
    "activations": lambda: (Lambda(lambda m, x: sum(f(m.linear(x)) for f in (F.hardswish, F.logsigmoid, F.mish, F.softplus, F.rrelu)),
                                   linear=nn.Linear(8, 16)), r(4, 8)),
    "pixel_shuffle": lambda: (Lambda(lambda m, x: F.pixel_unshuffle(F.pixel_shuffle(m.conv(x), 2), 4), conv=conv(4, 16)), r(4, 4, 8, 8)),
    "one_pixel": lambda: (Lambda(lambda m, x: F.pixel_shuffle(m.conv(x), 4), conv=conv(4, 16)), r(4, 4, 8, 8)),
    "shufflenet": lambda: (Lambda(lambda m, x: F.channel_shuffle(m.conv(x), 4), conv=conv(4, 16)), r(4, 4, 8, 8)),
    "unfold": lambda: (Lambda(lambda m, x: F.fold(F.unfold(m.conv(x), 2, stride=2), 8, 2, stride=2), conv=conv(4, 16)), r(4, 4, 8, 8)),
    "pads": lambda: (Lambda(_padded, conv=conv(4, 16)), r(4, 4, 8, 8)),
    "pools": lambda: (Lambda(_pooled, conv=conv(4, 16)), r(4, 4, 8, 8)),
    "spatial_transformer": lambda: (Lambda(_warped, conv=conv(4, 16), where=nn.Linear(4, 6)), r(4, 4, 8, 8)),
    "weight_norm": lambda: (Lambda(lambda m, x: m.b(F.elu(m.a(x))), a=weight_norm(nn.Linear(8, 16)), b=spectral_norm(nn.Linear(16, 8))), r(4, 8)),
    "bilinear": lambda: (Lambda(lambda m, x, y: m.b(x, y), b=nn.Bilinear(8, 6, 16)), r(4, 8), r(4, 6)),
    "rotary": lambda: (Lambda(_turned, linear=nn.Linear(8, 16)), r(4, 8), r(4, 8)),
    "distances": lambda: (Lambda(lambda m, x, y: sum(torch.cdist(m.linear(x), y, p) for p in (1.0, 2.0)), linear=nn.Linear(8, 16)),
                          r(4, 6, 8), r(4, 10, 16)),
    "gru_cell": lambda: (Lambda(lambda m, x: m.cell(x), cell=nn.GRUCell(8, 16)), r(4, 8)),
    "lstm_cell": lambda: (Lambda(lambda m, x: m.cell(x)[0], cell=nn.LSTMCell(8, 16)), r(4, 8)),
    "gru": lambda: (Lambda(lambda m, x: m.gru(x)[0], gru=nn.GRU(8, 16, batch_first=True)), r(4, 2, 8)),
    "orders": lambda: (Lambda(_orders, linear=nn.Linear(8, 16)), r(4, 8)),
    "strides": lambda: (Lambda(lambda m, x: m.linear(x).as_strided((4, 8, 8), (128, 16, 2)) + m.linear(x).as_strided((4, 8, 8), (128, 1, 8)), linear=nn.Linear(8, 16)), r(4, 8, 8)),
}


def whole(model, inputs, loss_fn=None):
    """Ops without a rule, and those that nothing can split over two ranks though their result has an even dim. Ops that take no
    tensor cost nobody anything."""
    graph = trace(model, inputs, {}, loss_fn=loss_fn, training=True).graph
    return {(op.name, str(op.target)) for op in graph.of_kind("call") if runs_whole(graph.calls[op.name])}


def runs_whole(call):
    even = [row for row in registry.rows(call)[1:] if all(
        m is None or divides(m.logical_shape, (p,), (2,))
        for m, p in zip((*call.inputs, *call.outputs), (*row.inputs, *row.outputs), strict=True))]
    dims = [n for m in call.outputs if m is not None for n in m.logical_shape]
    return registry.origin(call) == "replicate" or (not even and bool(call.inputs) and any(n and n % 2 == 0 for n in dims))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_split_and_agree(name):
    torch.manual_seed(0)
    model, *inputs = BLOCKS[name]()
    assert not whole(model, tuple(inputs))
    report = autoshard.verify(model, "dp=2,tp=2", tuple(inputs), plans=("split", "searched", "random:0"))
    assert report.ok, str(report)


def test_an_op_without_a_rule_is_listed():
    """What `whole` looks for is what the report calls a fallback."""
    model = Lambda(lambda m, x: torch.renorm(m.linear(x), 2, 0, 1.0), linear=nn.Linear(8, 16))
    found = {target for _, target in whole(model, (r(4, 8),))}
    plan = autoshard.plan(model, "dp=2", (r(4, 8),), cluster="cpu-gloo")
    assert found == {f.target for f in plan.fallbacks} != set()


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "convnext_tiny", "swin_t", "efficientnet_b0", "resnet50", "vit_b_16"])
def test_models_of_torchvision_split_everywhere(name):
    models = torchvision_models()
    model = getattr(models, name)(num_classes=10, **({"image_size": 64} if name == "vit_b_16" else {}))
    assert not whole(model, (r(4, 3, 64, 64), torch.randint(10, (4,))), F.cross_entropy)


def test_segformer_of_transformers_splits_everywhere():
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(num_labels=10, depths=[1, 1, 1, 1])
    model = transformers.SegformerForSemanticSegmentation(config)
    assert not whole(Lambda(lambda m, x, y: m.model(pixel_values=x, labels=y).loss, model=model),
                     (r(4, 3, 64, 64), torch.randint(10, (4, 64, 64))))


def test_unet_of_diffusers_splits_everywhere():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(sample_size=16, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
                                  down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    assert not whole(Lambda(lambda m, x, t: m.model(x, t).sample, model=model), (r(4, 3, 16, 16), torch.randint(1000, (4,))))


def torchvision_models():
    """Skips where torchvision is not, or was built for another torch."""
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as e:
        pytest.skip(f"no torchvision: {e}")
    return models
