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

    Nearest; for bfloat16 ties go away from zero, after those of 24 bits with bits = 8.
    """
    if np.dtype(dtype) != ml_dtypes.bfloat16:
        return rounded(master, dtype)
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
    return np.clip(places, -highest, highest).astype(f"int{bits}")


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
        """Move on by one step: "." finite, "x" overflow, "d" some dropped, "n" NaN loss.

        The last two leave the scale as it is.
        """
        self.skipped_count = 0 if kind in ".d" else self.skipped_count + 1
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


def block_layout(shape, block_size):
    """Return the axis along which an array is cut into blocks, and their size.

    The last axis that fills 4 blocks; else the longest, and of equals the last. Of an
    eighth, fourth or half of it, as far as these are whole, a multiple: at least a
    fourth of `block_size`, and a power of two, or else the nearest.
    """
    filled = [i for i, length in enumerate(shape) if length >= 4 * block_size]
    longest = max(range(len(shape)), key=lambda i: (shape[i], i))
    axis = filled[-1] if filled else longest
    length = shape[axis]
    if length % 2:
        return axis, min(length, block_size)
    part = next(length // n for n in (8, 4, 2) if length % n == 0)
    for size in (block_size, block_size // 2, block_size // 4):
        if size and part % size == 0:
            return axis, size
    sizes = [n for n in range(1, part + 1) if part % n == 0 and 8 * n >= block_size]
    ratios = [max(n / block_size, block_size / n) for n in sizes]
    return axis, sizes[np.argmin(ratios)] if sizes else part


def shift_layout(shape, block_size):
    """Return the axis along which rows share shifts, and how many; None for no shifts.

    The last axis that is not that of the blocks. Groups divide what 8, 4 or 2 devices
    have: 128, 64, 32 or 16 rows, or else the most eights of rows from 16 on, or else the
    most rows from 8 on. Otherwise all rows, or 128 and a short last group.
    """
    others = [i for i in range(len(shape)) if i != block_layout(shape, block_size)[0]]
    if not others or (length := shape[others[-1]]) == 1:
        return None
    part = next((length // n for n in (8, 4, 2) if length % n == 0), 0)
    sizes = [
        n
        for n in (128, 64, 32, 16, *range(128, 15, -8), *range(128, 7, -1))
        if part % n == 0
    ]
    return others[-1], sizes[0] if part and sizes else min(length, 128)


def column_shifts(x, block_size):
    """Return (uint8 shifts, the shift of each value).

    A value's share is a power of two, by the exponents of it and of the largest in its
    block. A column with shares of at most 2^-n, n > 1, is shifted by n + 1.
    """
    (axis, size), (along, rows) = (
        f(x.shape, block_size) for f in (block_layout, shift_layout)
    )
    x = np.moveaxis(np.abs(np.asarray(x, np.float64)), (along, axis), (-2, -1))
    each, made = np.zeros(x.shape, int), []
    for top in range(0, x.shape[-2], rows):
        group = x[..., top : top + rows, :]
        share = np.zeros(group.shape)
        for left in range(0, x.shape[-1], size):
            block = group[..., left : left + size]
            largest = block.max(-1, keepdims=True)
            shares = np.frexp(block)[1] - np.frexp(largest)[1]
            share[..., left : left + size] = np.where(block > 0, 2.0**shares, 0)
        share = share.max(-2)
        with np.errstate(divide="ignore"):
            shift = np.where((share > 0) & (share <= 0.25), 1 - np.log2(share), 0)
        made.append(np.minimum(shift, 120).astype(np.uint8))
        each[..., top : top + rows, :] = made[-1][..., None, :]
    return tuple(
        np.moveaxis(y, (-2, -1), (along, axis)) for y in (np.stack(made, -2), each)
    )


def block_scales(x, block_size):
    """Return (bfloat16 scales, the scale of each value in float64).

    The largest size in each block, rounded up to bfloat16; none under 2^-126, where CPUs
    see zero, and none over 2^126.
    """
    axis, block_size = block_layout(x.shape, block_size)
    size = np.moveaxis(np.abs(np.asarray(x, np.float64)), axis, -1)
    length = size.shape[-1]
    starts = range(0, length, block_size)
    largest = np.stack([size[..., i : i + block_size].max(-1) for i in starts], -1)
    largest = np.where(largest < 2.0**-126, 0, np.minimum(largest, 2.0**126))
    scales = largest.astype(ml_dtypes.bfloat16)
    low = scales.astype(np.float64) < largest
    scales = (scales.view(np.uint16) + low.astype(np.uint16)).view(ml_dtypes.bfloat16)
    each = np.repeat(scales.astype(np.float64), block_size, -1)[..., :length]
    return np.moveaxis(scales, -1, axis), np.moveaxis(each, -1, axis)


def block_share(x, scale):
    """Return the sizes of finite values as shares of the scales of their blocks."""
    share = np.abs(np.asarray(x, np.float64)) / np.where(scale == 0, 1, scale)
    return np.where(scale == 0, 0, np.minimum(share, 1))


def block_codes(x, scale, dtype):
    """Return the nearest codes: the root of the share, with the sign of the value."""
    top = np.iinfo(dtype).max
    codes = np.rint(np.sqrt(block_share(x, scale)) * top)
    if np.issubdtype(dtype, np.signedinteger):
        return np.copysign(codes, x).astype(dtype)
    return np.maximum(codes, np.asarray(x) > 0).astype(dtype)


def block_values(codes, scale):
    """Return what codes stand for, in float64."""
    roots = codes.astype(np.float64) / np.iinfo(codes.dtype).max
    return roots * np.abs(roots) * scale
