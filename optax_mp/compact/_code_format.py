"""The settings of `low_bit_state`: how wide the codes are, and how large the blocks."""

from dataclasses import dataclass
from numbers import Integral

import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path
from jax.typing import DTypeLike

from optax_mp._dtypes import floating_dtype
from optax_mp._tree import PyTree, describe, spell
from optax_mp.compact._blocks import Quantized, is_quantized, scales_shape


@dataclass(frozen=True)
class CodeFormat:
    """What arrays are quantized to.

    Attributes:
        signed: dtype of the codes.
        unsigned: dtype of the codes of arrays that are never negative.
        block_size: how many values share a scale; None for a 16-bit float.
        signed_in_products: dtype of the codes of arrays that reach a matrix product.
        unsigned_in_products: of these, if they are never negative.
    """

    signed: jnp.dtype
    unsigned: jnp.dtype
    block_size: int | None
    signed_in_products: jnp.dtype
    unsigned_in_products: jnp.dtype

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
            return cls(floating, floating, None, floating, floating)
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
        wide = max(bits, product_bits)
        return cls(
            jnp.dtype(f"int{bits}"),
            jnp.dtype(f"uint{bits}"),
            block_size,
            jnp.dtype(f"int{wide}"),
            jnp.dtype(f"uint{wide}"),
        )

    def codes(self, *, is_unsigned: bool, is_in_product: bool) -> jnp.dtype:
        """Return the dtype of the codes of an array."""
        if is_in_product:
            return self.unsigned_in_products if is_unsigned else self.signed_in_products
        return self.unsigned if is_unsigned else self.signed

    def __str__(self) -> str:
        if self.block_size is None:
            return f"{self.signed} without scales"
        dtypes = " or ".join(map(str, self._dtypes))
        return f"{dtypes} in blocks of {self.block_size}"

    @property
    def _dtypes(self) -> list[jnp.dtype]:
        return list(
            dict.fromkeys(
                [
                    self.signed,
                    self.unsigned,
                    self.signed_in_products,
                    self.unsigned_in_products,
                ]
            )
        )

    def check(self, inner_state: PyTree) -> None:
        """Raise unless every quantized array of a state has this format.

        Of 16 bits where 8 would do, nothing is lost: which arrays reach products only
        `init` finds out.
        """
        for path, leaf in tree_flatten_with_path(inner_state, is_quantized)[0]:
            if not is_quantized(leaf) or self._fits(leaf):
                continue
            scales = "" if leaf.scales is None else f" and {describe(leaf.scales)}"
            raise ValueError(
                f"low_bit_state: the state holds {describe(leaf.codes)}{scales} at "
                f"{spell(path)}, expected codes of {self}; the state was made with "
                "other settings: convert it with `optax_mp.convert_opt_state`."
            )

    def _fits(self, leaf: Quantized) -> bool:
        if leaf.codes.dtype not in self._dtypes:
            return False
        if leaf.scales is None or self.block_size is None:
            return leaf.scales is None and self.block_size is None
        has_shape = leaf.scales.shape == scales_shape(leaf.codes.shape, self.block_size)
        return has_shape and leaf.scales.dtype == jnp.bfloat16
