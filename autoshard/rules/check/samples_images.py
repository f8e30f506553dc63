"""Small calls of the rules for images, grids, distances and memory read by strides."""
from __future__ import annotations

import torch

from autoshard.rules.check.samples import Fixed, Sample, T, sample

aten = torch.ops.aten

SHUFFLES = (
    sample(aten.pixel_shuffle.default, T(2, 16, 4, 6), 2),
    sample(aten.pixel_shuffle.default, T((2, 4), 16, 2, 6), 2),
    sample(aten.pixel_shuffle.default, T(16, 4, 6), 2),
    sample(aten.pixel_shuffle.default, T(2, 4, 2, 6), 2),
    sample(aten.pixel_shuffle.default, T(2, 4, 1, 6), 2),
    sample(aten.pixel_unshuffle.default, T(2, 4, 8, 12), 2),
    sample(aten.pixel_unshuffle.default, T(2, 1, 8, 12), 2),
    sample(aten.pixel_unshuffle.default, T(2, 4, 2, 12), 2),
    sample(aten.channel_shuffle.default, T(2, 8, 4, 6), 4),
    sample(aten.channel_shuffle.default, T((2, 4), 8, 6), 2),
    sample(aten.im2col.default, T(2, 4, 6, 6), (2, 2), (1, 1), (0, 0), (2, 2)),
    sample(aten.im2col.default, T(4, 6, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    sample(aten.im2col.default, T((2, 4), 2, 4, 4), (1, 1), (1, 1), (0, 0), (1, 1)),
    sample(aten.im2col.default, T(2, 1, 4, 4), (2, 2), (1, 1), (0, 0), (2, 2)),
    sample(aten.col2im.default, T(2, 4, 9), (6, 6), (2, 2), (1, 1), (0, 0), (2, 2)),
    sample(aten.col2im.default, T(2, 16, 9), (6, 6), (2, 2), (1, 1), (0, 0), (2, 2)),
    sample(aten.col2im.default, T(36, 16), (4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
)

BORDERS = (
    sample(aten.replication_pad1d.default, T(2, 4, 6), (1, 2)),
    sample(aten.replication_pad1d_backward.default, T(2, 4, 9), T(2, 4, 6), (1, 2)),
    sample(aten.replication_pad2d.default, T((2, 4), 4, 6, 8), (1, 2, 0, 1)),
    sample(aten.replication_pad2d.default, T(4, 6, 8), (1, 2, 0, 1)),
    sample(aten.replication_pad2d_backward.default, T(2, 4, 7, 11), T(2, 4, 6, 8), (1, 2, 0, 1)),
    sample(aten.replication_pad3d.default, T(2, 4, 2, 4, 6), (1, 1, 0, 1, 2, 0)),
    sample(aten.replication_pad3d_backward.default, T(2, 4, 4, 5, 8), T(2, 4, 2, 4, 6), (1, 1, 0, 1, 2, 0)),
    sample(aten.reflection_pad1d.default, T(2, 4, 6), (1, 2)),
    sample(aten.reflection_pad1d_backward.default, T(2, 4, 9), T(2, 4, 6), (1, 2)),
    sample(aten.reflection_pad2d.default, T(2, 4, 6, 8), (1, 2, 0, 1)),
    sample(aten.reflection_pad2d_backward.default, T(2, 4, 7, 11), T(2, 4, 6, 8), (1, 2, 0, 1)),
    sample(aten.reflection_pad3d.default, T(2, 4, 2, 4, 6), (1, 1, 0, 1, 1, 0)),
    sample(aten.reflection_pad3d_backward.default, T(2, 4, 3, 5, 8), T(2, 4, 2, 4, 6), (1, 1, 0, 1, 1, 0)),
)

_grid2, _grid3 = T(2, 4, 6, 2), T(2, 4, 6, 2, 3)
SAMPLED = (
    sample(aten.grid_sampler_2d.default, T(2, 4, 6, 8), _grid2, 0, 0, False),
    sample(aten.grid_sampler_2d.default, T(2, 4, 6, 8), _grid2, 1, 1, True),
    sample(aten.grid_sampler_2d.default, T(2, 4, 6, 8), _grid2, 2, 2, False),
    sample(aten.grid_sampler_2d_backward.default, T(2, 4, 4, 6), T(2, 4, 6, 8), _grid2, 0, 0, False, (True, True)),
    sample(aten.grid_sampler_2d_backward.default, T(2, 4, 4, 6), T(2, 4, 6, 8), _grid2, 2, 1, False, (False, True)),
    sample(aten.grid_sampler_3d.default, T(2, 4, 4, 6, 8), _grid3, 0, 0, False),
    sample(aten.grid_sampler_3d_backward.default, T(2, 4, 4, 6, 2), T(2, 4, 4, 6, 8), _grid3, 0, 0, False, (True, True)),
    sample(aten.affine_grid_generator.default, T(4, 2, 3), (4, 8, 6, 2), False),
    sample(aten.affine_grid_generator.default, T(4, 3, 4), (4, 8, 6, 2, 4), True),
    sample(aten._unsafe_index.Tensor, T(2, 4, 6, 8), (None, None, T(4, 1, high=6), T(6, high=8))),
    sample(aten._unsafe_index.Tensor, T((2, 4), 4, 6), (None, None, T(12, high=6))),
    sample(aten.avg_pool2d.default, T(2, 4, 6, 8), (2, 2), (2, 2)),
    sample(aten._adaptive_avg_pool2d.default, T(2, 4, 6, 8), (3, 3)),
    sample(aten.adaptive_max_pool3d.default, T(2, 4, 4, 6, 8), (2, 3, 2)),
    sample(aten.adaptive_max_pool3d_backward.default, T(2, 4, 2, 2, 2), T(2, 4, 4, 6, 8),
           Fixed(torch.arange(2 * 4 * 8).reshape(2, 4, 2, 2, 2) % 192)),
    sample(aten.upsample_bicubic2d.default, T(2, 4, 6, 8), (12, 4), False),
    sample(aten.upsample_bilinear2d_backward.default, T(2, 4, 12, 4), (12, 4), (2, 4, 6, 8), False),
    sample(aten.upsample_nearest2d_backward.default, T(2, 4, 12, 4), (12, 4), (2, 4, 6, 8)),
)

DISTANCES = (
    sample(aten._cdist_forward.default, T(4, 6), T(8, 6), 2.0, None),
    sample(aten._cdist_forward.default, T(2, 4, 6), T(2, 8, 6), 2.0, 1),
    sample(aten._cdist_forward.default, T(2, 4, 6), T(8, 6), 1.0, None),
    sample(aten._cdist_forward.default, T(28, 6), T(8, 6), 2.0, None),
    sample(aten._cdist_forward.default, T(4, 6), T(8, 6), float("inf"), None),
    *(sample(aten._cdist_backward.default, T(2, 4, 8), T(2, 4, 6), T(2, 8, 6), p,
             Fixed(torch.rand(2, 4, 8, dtype=torch.float64) + 4)) for p in (1.0, 2.0, 3.0)),
)

OTHER = (
    sample(aten.rrelu_with_noise_backward.default, T(4, 6), T(4, 6), T(4, 6), 0.1, 0.3, True, False),
)

STRIDED = (
    sample(aten.as_strided.default, T(4, 6, 1, 1), (4, 6, 1, 1), (6, 1, 6, 6)),
    sample(aten.as_strided.default, T(24), (4, 6), (6, 1), 0),
    sample(aten.as_strided.default, T(4, 8), (4, 3, 4), (8, 2, 1)),
    sample(aten.as_strided.default, T((2, 4), 8), (8, 3, 2), (8, 2, 1), 2),
    sample(aten.as_strided.default, T(4, 8), (3, 3, 8), (8, 4, 1)),
    sample(aten.as_strided.default, T(4, 8), (4, 8), (0, 1)),
    sample(aten.as_strided.default, T(48), (4, 3, 2), (12, 2, 1), 2),
    sample(aten.as_strided.default, T(48), (3, 3, 2), (12, 5, 2), 1),
    sample(aten.as_strided.default, T(6, 8), (4, 6), (12, 2)),
    sample(aten.as_strided.default, T(1, 8), (4, 2), (2, 1)),
    sample(aten.as_strided.default, T(8), (), (), 3),
    sample(aten.as_strided_scatter.default, T(48), T(4, 6), (4, 6), (12, 2), 0),
    sample(aten.as_strided_copy.default, T(2, 4, 8), (2, 4, 3, 4), (32, 8, 2, 1)),
    sample(aten.as_strided_scatter.default, T(4, 8), T(4, 4), (4, 4), (8, 2)),
    sample(aten.as_strided_scatter.default, T(4, 8), T(2, 8), (2, 8), (16, 1), 8),
)

SEARCHED: tuple[Sample, ...] = SHUFFLES
"""Of these missing rows are looked for too. The other kernels read beside their tensors where a row is wrong, or read only the
shape of some tensor, which therefore may be in any layout; strided views could split inner dims that they step through evenly."""
IMAGES: tuple[Sample, ...] = SEARCHED + BORDERS + SAMPLED + DISTANCES + OTHER + STRIDED
