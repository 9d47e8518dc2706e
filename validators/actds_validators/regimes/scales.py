"""Scales of intervals: what is never negative has no interval that is, and no share one beyond 1.

On the linear scale the interval of a small distance reaches below 0, and that of a skewed one is
too short above. A logarithm, or the logit of a share, has no such end.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from actds_validators.arrays import Floats

Scale = Literal["linear", "log", "logit"]


def to_scale(value: Floats | float, scale: Scale) -> Floats:
    """Return values on a scale; those at an end of it are infinite."""
    function = {"linear": np.asarray, "log": np.log, "logit": special.logit}[scale]
    return np.asarray(function(np.asarray(value, np.float64)))


def ends(value: Floats, error: Floats, quantile: float, scale: Scale) -> tuple[Floats, Floats]:
    """Return lower and upper end of intervals ``(...)``, symmetric on a scale.

    The error there is the first term of the delta method: ``error / value`` of a logarithm and
    ``error / (value (1 - value))`` of a logit. Where nothing varies both ends are the value. A
    value at an end of the scale, or so near that there is no number for the other end, has the
    linear interval, as far as there are such values.
    """
    back = {"linear": np.asarray, "log": np.exp, "logit": special.expit}[scale]
    least, most = {"linear": (-np.inf, np.inf), "log": (0, np.inf), "logit": (0, 1)}[scale]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        half = quantile * error * slope(value, scale)
        at = to_scale(value, scale)
        low, high = (np.where(error > 0, back(at + step), value) for step in (-half, half))
    fine = np.isfinite(low) & np.isfinite(high)
    step = np.where(error > 0, quantile * error, 0.0)
    linear = (np.clip(value + by, least, most) for by in (-step, step))
    low, high = (np.where(fine, own, by) for own, by in zip((low, high), linear, strict=True))
    return low, high


def slope(value: Floats | float, scale: Scale) -> Floats:
    """Return the derivative of a scale."""
    if scale == "linear":
        return np.ones(np.shape(value))
    return np.asarray(1 / value if scale == "log" else 1 / (value * (1 - value)))
