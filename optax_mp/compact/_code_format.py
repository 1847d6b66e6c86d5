"""The settings of `low_bit_state`: how wide the codes are, and how large the blocks."""

from dataclasses import dataclass
from numbers import Integral

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp._dtypes import floating_dtype
from optax_mp._quantized import Code
from optax_mp.compact._blocks import choose_axis


@dataclass(frozen=True)
class CodeFormat:
    """What arrays are quantized to; part of the type of a `LowBitState`.

    Attributes:
        bits: the width of codes.
        product_bits: the width of codes of arrays that reach a matrix product.
        block_size: how many values share a scale; None for a 16-bit float.
    """

    bits: int
    product_bits: int
    block_size: int | None

    @classmethod
    def from_settings(
        cls, bits: int, block_size: int, dtype: DTypeLike | None, product_bits: int
    ) -> "CodeFormat":
        """Check the arguments of `low_bit_state`."""
        if dtype is not None:
            floating = floating_dtype(dtype, "low_bit_state: `dtype`")
            # In float16 the second moment of a gradient of 1e-4 would be zero.
            if floating != jnp.bfloat16 or (bits, block_size) != (8, 32):
                raise ValueError(
                    f"low_bit_state: `dtype` is {floating} with bits={bits!r} and "
                    f"block_size={block_size!r}, expected bfloat16 and neither of the "
                    "others; for codes in blocks, leave out `dtype`."
                )
            return cls(16, 16, None)
        for name, value in {"bits": bits, "product_bits": product_bits}.items():
            if not isinstance(value, Integral) or value not in (8, 16):
                raise ValueError(
                    f"low_bit_state: `{name}` is {value!r}, expected 8 or 16."
                )
        is_positive = isinstance(block_size, Integral) and block_size > 0
        if not is_positive or block_size & (block_size - 1) != 0:
            raise ValueError(
                f"low_bit_state: `block_size` is {block_size!r}, expected a power of "
                "two such as 32."
            )
        return cls(int(bits), max(int(bits), int(product_bits)), int(block_size))

    def code(
        self, shape: tuple[int, ...], *, is_unsigned: bool, is_in_product: bool
    ) -> Code:
        """Return how an array is quantized."""
        if self.block_size is None:
            return BFLOAT16
        bits = self.product_bits if is_in_product else self.bits
        dtype = f"uint{bits}" if is_unsigned else f"int{bits}"
        return Code(dtype, choose_axis(shape, self.block_size), self.block_size)

    def __str__(self) -> str:
        if self.block_size is None:
            return "bfloat16"
        wide = f", {self.product_bits} in products" * (self.bits < self.product_bits)
        return f"{self.bits} bits{wide}, blocks of {self.block_size}"


# An array of the same shape, without scales.
BFLOAT16 = Code("bfloat16")
