"""What the package promises, in plain NumPy and Python: no JAX, no code of its own."""

import ml_dtypes
import numpy as np


def rounded(master, dtype):
    """Return `master` rounded to `dtype`: nearest, ties to even.

    Finite ones saturate. Infinities do so only if `dtype` has none.
    """
    largest = float(ml_dtypes.finfo(dtype).max)
    infinity = np.float32(np.inf).astype(dtype)
    infinity = infinity if np.isinf(infinity) else np.float32(largest).astype(dtype)
    param = np.clip(np.asarray(master), -largest, largest).astype(dtype)
    return np.where(np.isinf(master), np.copysign(infinity, param), param)


def smallest_landing(param):
    """Return below which size a float32 sum with `param` cannot land exactly."""
    exponent = {"bfloat16": -15, "float16": -12}[param.dtype.name]
    return np.abs(param.astype(np.float64)) * 2.0**exponent


def follow(master, dtype, bits):
    """Return the param that a master with a remainder of `bits` has.

    Nearest. Ties of float16 go towards infinity if half a place does not fit into the
    remainder; those of bfloat16 away from zero, after those of 24 bits with bits = 8.
    """
    if np.dtype(dtype) != ml_dtypes.bfloat16:
        param = rounded(master, dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            above = np.nextafter(param, np.float16(np.inf))
            excess = np.asarray(master, np.float64) - param
        rises = (excess == _last_place(param) / 2) & np.isfinite(above)
        return np.where(rises, above, param)
    pattern = master.view(np.uint32)
    negative, size = (pattern >> 31).astype(np.uint16), pattern & 0x7FFFFFFF
    finest = 2 ** (16 - bits)
    places = (size + finest // 2) // finest
    upper = (places + 2 ** (bits - 1)) // 2**bits
    upper = np.minimum(upper, 0x7F7F).astype(np.uint16)  # the largest finite one
    param = (upper | negative << 15).view(ml_dtypes.bfloat16)
    return np.where(np.isfinite(master), param, master.astype(ml_dtypes.bfloat16))


def remainder(master, param, bits):
    """Return how far `master` is from `param`, away from zero, in `bits`."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if param.dtype == ml_dtypes.bfloat16:
        excess = _position(master) - _position(param.astype(np.float32))
        excess = np.where(np.signbit(param), -excess, excess)
        finest = 2 ** (16 - bits)
        places = (excess + finest // 2) // finest
        # Nothing lies between zero and what is under it.
        places = np.where(param == 0, np.maximum(places, 0), places)
        return np.clip(places, lowest, highest).astype(f"int{bits}")
    excess = master.astype(np.float64) - param.astype(np.float64)
    places = np.rint(excess / _last_place(param) * 2**bits)
    return np.clip(places, lowest, highest).astype(f"int{bits}")


def join(param, stored):
    """Return the float32 master that a finite param and its remainder are."""
    bits = stored.dtype.itemsize * 8
    if param.dtype == ml_dtypes.bfloat16:
        size = np.abs(_position(param.astype(np.float32)))
        size = np.maximum(size + stored.astype(np.int64) * 2 ** (16 - bits), 0)
        negative = np.signbit(param).astype(np.int64) << 31
        return (size | negative).astype(np.uint32).view(np.float32)
    part = stored.astype(np.float64) * _last_place(param) / 2**bits
    return (param.astype(np.float64) + part).astype(np.float32)


def settle(master, before, bits):
    """Return (param, master) after a step, where the param was `before`.

    The param can only go where a float32 sum lands, and takes the master with it.
    """
    target = follow(master, before.dtype, bits).astype(np.float32)
    start = before.astype(np.float32)
    landing = rounded(start + difference(target, start), before.dtype)
    # What is not finite is its own master.
    is_finite = np.isfinite(landing.astype(np.float32))
    with np.errstate(invalid="ignore"):
        own = join(landing, remainder(master, landing, bits))
    settled = np.where(is_finite, own, landing.astype(np.float32))
    return follow(settled, before.dtype, bits), settled


def difference(target, start):
    """Return what to add to `start` for `target`: 0 if it is infinite, unless NaN."""
    is_kept = np.isinf(start) & ~np.isnan(target)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(is_kept, np.zeros_like(target), target - start)


def _position(x):
    """Return where a float32 is on the line of all of them, zeros at 0."""
    pattern = x.view(np.uint32).astype(np.int64)
    size = pattern & 0x7FFFFFFF
    return np.where(pattern >> 31, -size, size)


def _last_place(param):
    """Return the unit in the last place of float16 values."""
    size = np.maximum(np.abs(param.astype(np.float64)), 2.0**-14)
    return np.ldexp(1.0, np.frexp(size)[1] - 11)


def adamw_step(grad, mu, nu, weight, count, lr, b1=0.9, b2=0.999, eps=1e-8, decay=1e-4):
    """Return (mu, nu, weight) after one AdamW step, in float64."""
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * grad**2
    step = (mu / (1 - b1**count)) / (np.sqrt(nu / (1 - b2**count)) + eps)
    return mu, nu, weight - lr * (step + decay * weight)


class LossScaleRule:
    """The dynamic loss scale, one step at a time, in NumPy float32."""

    def __init__(
        self,
        scale,
        growth_interval=2000,
        growth_factor=2.0,
        backoff_factor=0.5,
        min_scale=2.0**-14,
        max_scale=2.0**24,
        hysteresis=1,
    ):
        self.scale = np.float32(scale)
        self.growth_interval = growth_interval
        self.growth_factor = np.float32(growth_factor)
        self.backoff_factor = np.float32(backoff_factor)
        self.min_scale = np.float32(min_scale)
        self.max_scale = np.float32(max_scale)
        self.hysteresis = hysteresis
        self.finite_count = 0
        self.hysteresis_left = hysteresis
        self.skipped_count = 0
        self.total_skipped_count = 0
        # What has happened, for tests to know that they saw everything.
        self.events = dict.fromkeys(("grew", "capped", "held", "shrank", "floored"), 0)

    def step(self, kind):
        """Move on by one step: "." finite, "x" overflow, "n" NaN loss.

        The last leaves the scale as it is.
        """
        self.skipped_count = 0 if kind == "." else self.skipped_count + 1
        self.total_skipped_count += kind in "xn"
        self.finite_count = self.finite_count + 1 if kind == "." else 0
        if kind == ".":
            self._after_finite()
        elif kind == "x":
            self._after_overflow()

    def _after_finite(self):
        if self.finite_count < self.growth_interval:
            return
        self.finite_count = 0
        self.hysteresis_left = self.hysteresis
        with np.errstate(over="ignore"):
            grown = self.scale * self.growth_factor
        if grown > self.max_scale:
            self.events["capped"] += 1
            return
        self.scale = grown
        self.events["grew"] += 1

    def _after_overflow(self):
        self.hysteresis_left = max(self.hysteresis_left - 1, 0)
        if self.hysteresis_left:
            self.events["held"] += 1
            return
        shrunk = self.scale * self.backoff_factor
        self.scale = max(shrunk, self.min_scale)
        if shrunk < self.min_scale:
            self.hysteresis_left = -1
        self.events["shrank" if shrunk >= self.min_scale else "floored"] += 1

    def counters(self):
        """Return every field that moves, in the order of the library's state."""
        return (
            self.scale,
            self.finite_count,
            self.hysteresis_left,
            self.skipped_count,
            self.total_skipped_count,
        )


def scale_trace(rule, kinds):
    """Return the counters of `rule` after each step, one array a field."""
    rows = []
    for kind in kinds:
        rule.step(kind)
        rows.append(rule.counters())
    dtypes = (np.float32, np.int32, np.int32, np.int32, np.int32)
    columns = zip(*rows, strict=True)
    return [np.array(c, d) for c, d in zip(columns, dtypes, strict=True)]


def whole_lines(x, lines):
    """Return an array of the shape of `x`, with the entry of its line for each value.

    Args:
        x: the values.
        lines: an entry for each line: 1 along an axis that lines go along, its length
            along others. Another length is that of groups of 256 neighbours.
    """
    for axis, (length, count) in enumerate(zip(x.shape, lines.shape, strict=True)):
        size = 1 if count == length else length if count == 1 else 256
        lines = np.repeat(lines, size, axis)
        lines = lines[(slice(None),) * axis + (slice(length),)]
    return lines


def line_scales(x, shape):
    """Return bfloat16 scales in this shape, one for each line.

    The largest size in the line, rounded up to bfloat16: at least 2^-62, at most 2^125.
    """
    largest = np.zeros(shape)
    numbers = whole_lines(x, np.arange(largest.size).reshape(shape))
    np.maximum.at(largest.reshape(-1), numbers.ravel(), np.abs(x, dtype=float).ravel())
    largest = np.clip(largest, 2.0**-62, 2.0**125)
    scales = largest.astype(ml_dtypes.bfloat16)
    low = (scales.astype(np.float64) < largest).astype(np.uint16)
    return (scales.view(np.uint16) + low).view(ml_dtypes.bfloat16)


# A code of the largest size is the scale; others are a root of their share of it.
POWERS = {"int8": 4, "uint8": 8, "int16": 2, "uint16": 4}


def code_sizes(x, scales, dtype):
    """Return where values are among the codes, not rounded, in float64."""
    scale = whole_lines(x, scales.astype(np.float64))
    share = np.minimum(np.abs(np.asarray(x, np.float64)) / scale, 1)
    return share ** (1 / POWERS[dtype]) * np.iinfo(dtype).max


def line_codes(x, scales, dtype):
    """Return the nearest codes; of positive values in unsigned codes at least 1."""
    codes = np.rint(code_sizes(x, scales, dtype))
    if dtype.startswith("u"):
        return np.maximum(codes, x > 0).astype(dtype)
    return np.copysign(codes, x).astype(dtype)


def line_values(codes, scales, dtype):
    """Return what codes stand for, in float64. They may be between two integers."""
    codes = np.asarray(codes, np.float64)
    roots = np.abs(codes) / np.iinfo(dtype).max
    scale = whole_lines(codes, scales.astype(np.float64))
    return np.sign(codes) * roots ** POWERS[dtype] * scale
