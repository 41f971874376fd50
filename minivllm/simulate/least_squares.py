"""Least squares in which nothing costs less than nothing."""

from __future__ import annotations

import numpy as np


def non_negative_least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(F,) coefficients, none below 0, with the least squares of `x @ coefficients - y`: x (M, F), y (M,).

    Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23: those that are to be above 0 are found one by
    one, the one that helps most first. Where plain least squares of them go below 0, some are given up again.
    """
    scale = np.linalg.norm(x, axis=0)
    scale[scale == 0] = 1.0
    unit = x / scale
    # On one thread: so small a product would wait for BLAS's other ones where neighbours have the cores.
    gram, target = np.einsum("mi,mj->ij", unit, unit), np.einsum("mi,m->i", unit, y)
    found, above = np.zeros(x.shape[1]), np.zeros(x.shape[1], dtype=bool)
    smallest = 1e-12 * np.abs(target).max(initial=0.0)
    for _ in range(10 * x.shape[1]):
        slope = np.where(above, 0.0, target - gram @ found)
        if slope.max(initial=0.0) <= smallest:
            break
        above[slope.argmax()] = True
        while True:
            best = np.zeros_like(found)
            best[above] = np.linalg.lstsq(gram[np.ix_(above, above)], target[above], rcond=1e-14)[0]
            below = above & (best <= 0)
            if not below.any():
                break
            # As far towards it as nobody goes below 0; who is there then is given up.
            steps = found[below] / np.maximum(found[below] - best[below], 1e-300)
            found = found + steps.min() * (best - found)
            above &= found > 1e-15 * found.max(initial=0.0)
            found[~above] = 0
        found = best
    return found / scale
