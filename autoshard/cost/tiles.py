"""How well the shape of a matrix product fills a device that computes it tile by tile.

A product of B batches of [M, K] and [K, N] is cut into t = ceil(M / m) x ceil(N / n) x B tiles, and each of them into s pieces along K where
there are few. The device works on as many at once as it has multiprocessors, P, so

    filled = max over kernels (m, n, e) and s of   e x M N K B / (m n x P x ceil(t s / P) x k)        k = K for s = 1, else max(K / s, 256)

is the share of its rate that the shape can use: tiles that stick out over the edges and a last round that leaves multiprocessors
empty take the rest. e is what a kernel of that tile reaches relative to the largest one. Time, work / filled, never falls as M, N, K or B grow:
no kernel does less work for more. Source: NVIDIA, Matrix Multiplication Background User's Guide, sections on tile and wave quantization
(256 x 128 is the most efficient tile of cuBLAS, 64 x 64 the least; it gives no numbers). e is taken from a tile's FLOP per byte read,
I = m n / (m + n): I / (I + 10), over that of 256 x 128, which is an estimate.
"""
from __future__ import annotations

from typing import Any

import numpy as np

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)
SHALLOWEST = 256.0
"""Elements along K that a piece takes the time of at least: shorter ones spend it on the way in and out."""
HALF = 10.0


def filled(rows: Any, columns: Any, depth: Any, batches: Any, multiprocessors: int) -> Any:
    """The share of a device's rate that products [batches, rows, depth] x [batches, depth, columns] can use; arguments may be arrays.

    >>> filled(4096, 4096, 4096, 1, 132)                # 512 tiles of 256 x 128 in 4 rounds of 132
    0.969...
    >>> filled(1024, 384, 1024, 1, 108)                 # 24 tiles of 128 x 128, each cut into four pieces of 256: 96 of 108
    0.804...
    """
    rows, columns, depth, batches = (np.maximum(np.asarray(x, np.float64), 1.0) for x in (rows, columns, depth, batches))
    work, least = rows * columns * depth * batches / multiprocessors, np.asarray(np.inf)
    for m, n in TILES:
        tiles = np.ceil(rows / m) * np.ceil(columns / n) * batches
        for s in SPLITS:
            piece = depth if s == 1 else np.maximum(depth / s, SHALLOWEST)
            least = np.minimum(least, m * n * np.ceil(tiles * s / multiprocessors) * piece / _speed(m, n))
    return work / least


def _speed(m: int, n: int) -> float:
    """Of a kernel with tiles of m x n, relative to 256 x 128."""
    intensity, most = m * n / (m + n), 256 * 128 / (256 + 128)
    return intensity / (intensity + HALF) * (most + HALF) / most


def filled_by(output: tuple[Any, ...], flops: Any, multiprocessors: int) -> Any:
    """Of an op that multiplies matrices: [.., M, N] is what it makes, and K follows from its FLOP."""
    rows, columns = (output[-2], output[-1]) if len(output) > 1 else (output[0] if output else 1, 1)
    batches = np.prod(np.broadcast_arrays(*output[:-2]), axis=0) if len(output) > 2 else 1
    made = np.maximum(np.asarray(rows, np.float64) * columns * batches, 1.0)
    return filled(rows, columns, np.asarray(flops, np.float64) / 2 / made, batches, multiprocessors)
