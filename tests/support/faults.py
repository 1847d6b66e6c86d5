"""A whole training system in plain NumPy, and the gradients that are to break it.

The rules here have powers of two for coefficients, and gradients few enough bits that
their squares are exact. So only sums, quotients and roots are rounded, it does not
matter what XLA contracts to one operation, and what the package computes can be
compared bit for bit, in any program. On CPUs, XLA takes float32 values under 2^-126 for
zero and makes none: so does the reference.
"""

import dataclasses
from typing import Any

import numpy as np
from reference import LossScaleRule, join, rounded, settle

ONE = np.float32(1)
SMALLEST = np.finfo(np.float32).smallest_normal
# What finite gradients may do to float32 moments is the rule's affair; these clip.
LIMIT = np.float32(2.0**60)

# Of a loss scale with which much happens in few steps.
LIVELY = {
    "growth_interval": 7,
    "min_scale": 2.0**-6,
    "max_scale": 2.0**13,
    "hysteresis": 2,
}

# What comes in the place of a scaled gradient.
NONFINITE = np.array([np.nan, np.inf, -np.inf], np.float32)
EXTREME = np.array(
    # denormal in float32, the smallest normal, denormal in float16, its largest, what
    # overflows it, and what overflows float32 where the scale is under 1
    [1e-40, -1e-42, 1.2e-38, 6e-8, -1e-7, 65504, -65520, 7e4, 1e30, -1e38],
    np.float32,
)
ZEROS = np.array([0.0, -0.0], np.float32)


def flushed(x):
    """Return `x` as a CPU has it that knows no denormal numbers."""
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


class Momentum:
    """optax.trace and decayed weights, in powers of two."""

    def __init__(self, size):
        self.state = {"trace": np.zeros(size, np.float32)}

    def update(self, grad, weight, state):
        """Return (the update, the state after it)."""
        trace = np.clip(grad, -LIMIT, LIMIT) + state["trace"] * np.float32(0.5)
        step = trace + weight * np.float32(0.25)
        return step * np.float32(-(2.0**-4)), {"trace": trace}


class AdamW:
    """optax.adamw with b1 = b2 = 1/2, so late that the bias correction is 1.

    (XLA may multiply by the inverse of the correction instead of dividing by it.)
    """

    START = np.int32(1000)

    def __init__(self, size):
        zeros = np.zeros(size, np.float32)
        self.state = {"count": self.START, "mu": zeros, "nu": zeros}

    def update(self, grad, weight, state):
        """Return (the update, the state after it)."""
        half, grad = np.float32(0.5), np.clip(grad, -LIMIT, LIMIT)
        mu = half * grad + half * state["mu"]
        nu = flushed(half * flushed(grad * grad)) + flushed(half * state["nu"])
        count = state["count"] + np.int32(1)
        size = np.sqrt(nu) + np.float32(2.0**-20)
        step = mu / size + weight * np.float32(2.0**-4)
        after = {"count": count, "mu": mu, "nu": nu}
        return step * np.float32(-(2.0**-4)), after


@dataclasses.dataclass
class System:
    """Params, masters, rule and loss scale, moved on by one step after the other.

    Attributes:
        weights: float32 values of params in `dtype`, then the masters of these; and
            after them, from place `low_count` on, the params that are float32.
        low_count: how many params have a master.
        dtype: of these.
        rule: the optimizer.
        scaling: the loss scale.
        grad_dtype: of the gradients.
        split_bits: of the remainders, where masters are kept so.
        is_link: whether the loss scale stands in a chain before the masters, which then
            take negative zeros everywhere for a skipped step.
    """

    weights: Any
    low_count: int
    dtype: Any
    rule: Any
    scaling: LossScaleRule
    grad_dtype: Any = np.float32
    split_bits: int | None = None
    is_link: bool = False

    def __post_init__(self):
        self.dtype = np.dtype(self.dtype)
        self.state = self.rule.state
        self.low = rounded(self.weights[: self.low_count], self.dtype)
        # Masters start from the params, which were cast before.
        start = self.low.astype(np.float32)
        if self.split_bits:
            start = join(self.low, np.zeros(self.low_count, f"int{self.split_bits}"))
        self.weights = np.concatenate([start, self.weights[self.low_count :]])

    def step(self, raw, is_fault, fault):
        """Move on by a step with true gradients `raw`, and faults in scaled ones."""
        with np.errstate(all="ignore"):
            scale = self.scaling.scale
            scaled = np.where(is_fault, fault, raw * scale).astype(self.grad_dtype)
            unscaled = flushed(scaled.astype(np.float32)) * (ONE / scale)
            finite = bool(np.isfinite(unscaled).all())
            self.scaling.step("." if finite else "x")
            unscaled = flushed(unscaled)
            is_marked = (unscaled.view(np.uint32) == 0x80000000).all()
            if finite and not (self.is_link and is_marked):
                self._move(unscaled)
        return finite

    def _move(self, grad):
        change, self.state = self.rule.update(grad, self.weights, self.state)
        weights = self.weights + change
        masters = weights[: self.low_count]
        if self.split_bits:
            self.low, masters = settle(masters, self.low, self.split_bits)
            weights = np.concatenate([masters, weights[self.low_count :]])
        else:
            before = self.low.astype(np.float32)
            update = rounded(masters, self.dtype).astype(np.float32) - before
            self.low = (before + update).astype(self.dtype)
        self.weights = weights

    def counters(self):
        """Return the counters of the loss scale as one row of numbers."""
        return np.array(self.scaling.counters(), np.float64)


def make_faults(seed, steps, count):
    """Return (true gradients, where a fault is, what it is), each of (steps, count).

    About one step in 12 has a non-finite gradient, most in one element; some stretches
    have them in every step, so that the scale falls to its floor, and most have none
    for long, so that it grows to its cap.
    """
    rng = np.random.default_rng(seed)
    size = rng.uniform(-6, 1, (steps, 1))
    raw = rng.standard_normal((steps, count)) * 10.0**size
    fault = np.zeros((steps, count), np.float32)
    is_fault = np.zeros((steps, count), bool)

    def inject(where, kinds, share_of_leaf):
        chosen = rng.random((steps, count)) < share_of_leaf
        # At least one element, wherever it is.
        chosen[np.arange(steps), rng.integers(count, size=steps)] = True
        chosen &= where[:, None]
        values = rng.choice(kinds, (steps, count))
        np.copyto(fault, values, where=chosen)
        np.logical_or(is_fault, chosen, out=is_fault)

    inject(rng.random(steps) < 0.05, ZEROS, 0.5)
    inject(rng.random(steps) < 0.01, ZEROS[:1], 1.0)
    inject(rng.random(steps) < 0.01, ZEROS[1:], 1.0)
    inject(rng.random(steps) < 0.10, EXTREME, 0.3)
    inject(rng.random(steps) < 0.03, NONFINITE, 0.1)
    is_stretch = np.repeat(rng.random(-(-steps // 50)) < 0.04, 50)[:steps]
    inject(is_stretch, NONFINITE, 0.1)
    return short(raw), is_fault, short(fault)


def short(x):
    """Return `x` with 12 significant bits, so that its square is exact."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFF000)).view(
        np.float32
    )
