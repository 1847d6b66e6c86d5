"""Which arrays of a state are quantized, and how.

`low_bit_state` decides this at `init`, by tracing the optimizer's own `init` and
`update`.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._dtypes import floating_dtype
from optax_mp._jax._dataflow import depending_outputs
from optax_mp._jax._jaxpr import TracedCall, is_dynamic
from optax_mp._warnings import warn
from optax_mp.compact._blocks import choose_blocks, choose_group
from optax_mp.compact._full_precision import (
    TracedUpdate,
    Uses,
    check_without_update,
    need_full_precision,
    state_uses,
    trace_update,
)
from optax_mp.compact._signs import nonnegative_states
from optax_mp.trees._quantized import Code
from optax_mp.trees._tree import is_floating
from optax_mp.wrappers._arguments import check_bool


@dataclass(frozen=True)
class CodeFormat:
    """How arrays are quantized; part of the type of a `LowBitState`.

    Attributes:
        bits: the width of codes.
        product_bits: the width of codes of arrays that reach a matrix product.
        block_size: how many values share a scale; None for a 16-bit float.
        has_shifts: whether small columns are shifted.
    """

    bits: int
    product_bits: int
    block_size: int | None
    has_shifts: bool = True

    @classmethod
    def from_settings(
        cls,
        bits: int,
        block_size: int,
        dtype: Any,
        product_bits: int | None,
        has_shifts: bool,
    ) -> "CodeFormat":
        """Check the arguments of `low_bit_state`."""
        has_shifts = check_bool("low_bit_state: `column_scales`", has_shifts)
        if dtype is not None:
            _check_float(dtype, bits, block_size)
            return cls(16, 16, None)
        if product_bits is None:
            product_bits = bits if has_shifts else 16
        for name, value in {"bits": bits, "product_bits": product_bits}.items():
            if not isinstance(value, Integral) or value not in (8, 16):
                raise ValueError(
                    f"low_bit_state: expected `{name}` to be 8 or 16, got {value!r}; "
                    "pass 8 for the smallest state, 16 for the more exact one."
                )
        if (
            not isinstance(block_size, Integral)
            or isinstance(block_size, bool)
            or block_size < 1
            or block_size & (block_size - 1)
        ):
            raise ValueError(
                "low_bit_state: expected `block_size` to be a power of two, got "
                f"{block_size!r}; leave it out for 32."
            )
        bits, product_bits = int(bits), max(int(bits), int(product_bits))
        return cls(bits, product_bits, int(block_size), has_shifts)

    def code(self, shape: tuple[int, ...], uses: Uses, is_unsigned: bool) -> Code:
        """Return how an array is quantized."""
        if self.block_size is None:
            return BFLOAT16
        bits = self.product_bits if uses.in_product else self.bits
        bits = 16 if uses.in_factorization else bits
        dtype = f"uint{bits}" if is_unsigned else f"int{bits}"
        stays_positive = is_unsigned or uses.in_root
        axis, size = choose_blocks(shape, self.block_size)
        group = choose_group(shape, axis) if self.has_shifts else None
        return Code(dtype, axis, size, stays_positive, group)

    def __str__(self) -> str:
        if self.block_size is None:
            return "bfloat16"
        wide = f", {self.product_bits} in products" * (self.bits < self.product_bits)
        plain = ", no column scales" * (not self.has_shifts)
        return f"{self.bits} bits{wide}, blocks of {self.block_size}{plain}"


def _check_float(dtype: Any, bits: Any, block_size: Any) -> None:
    floating = floating_dtype(dtype, "low_bit_state: `dtype`")
    # In float16 the second moment of a gradient of 1e-4 would be zero.
    if floating != jnp.bfloat16 or (bits, block_size) != (8, 32):
        raise ValueError(
            "low_bit_state: expected `dtype` to be bfloat16, without `bits` and "
            f"`block_size`, got {floating} with bits={bits!r} and "
            f"block_size={block_size!r}; leave out `dtype` for codes in blocks."
        )


# An array of the same shape, without scales.
BFLOAT16 = Code("bfloat16")


def choose_codes(
    inner: Any, params: Any, state: Any, code_format: CodeFormat, min_size: int
) -> list[Code | None]:
    """Return how to quantize each leaf of `inner`'s state; None to leave it."""
    init = TracedCall.of(inner.init, params)
    update = trace_update(inner, params, state)
    leaves = jax.tree.leaves(state)
    # Only these are outputs of `init`, and the lists below have an entry for each.
    arrays = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
    large = [_is_large(leaves[i], min_size) for i in arrays]
    # Masters, averages and other arrays that start as the params are not moments.
    chosen = _without(large, depending_outputs(init.closed))
    never_negative = [False] * len(arrays)
    uses = [Uses()] * len(arrays)
    if isinstance(update, TracedUpdate):
        chosen = _without(chosen, need_full_precision(init, update))
        uses = state_uses(update)
        if update.is_exact:  # else signed codes, which can hold any values
            jaxprs = init.closed, update.closed
            never_negative = nonnegative_states(*jaxprs, update.param_count)
    elif any(chosen):
        check_without_update(init, large, state, params, update)
        warn(
            "low_bit_state: the optimizer's update cannot be traced, because "
            f"`inner.update(grads, state, params)` raised {type(update).__name__}: "
            f"{update}. So its state is stored in bfloat16, and not in codes: nobody "
            "knows which arrays must stay positive. Give its other arguments defaults."
        )
        code_format = CodeFormat(16, 16, None)
    codes: list[Code | None] = [None] * len(leaves)
    facts = zip(arrays, chosen, uses, never_negative, strict=True)
    for i, is_chosen, its_uses, is_unsigned in facts:
        if is_chosen:
            codes[i] = code_format.code(leaves[i].shape, its_uses, is_unsigned)
    return codes


def _without(chosen: list[bool], excluded: list[bool]) -> list[bool]:
    return [a and not b for a, b in zip(chosen, excluded, strict=True)]


def _is_large(leaf: Any, min_size: int) -> bool:
    if not is_floating(leaf) or leaf.size < min_size or not leaf.ndim:
        return False
    # Dequantized values are float32, and `inner` may expect the dtype that it made.
    return leaf.dtype == jnp.float32
