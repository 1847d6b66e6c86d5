"""low_bit_state: the large arrays of any optimizer's state in 8 or 16 bits."""

from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_flatten_with_path
from jax.typing import DTypeLike

from optax_mp._dtypes import floating_dtype
from optax_mp._inner import as_transformation, without_aliases
from optax_mp._jax._jaxpr import depending_outputs
from optax_mp._jax._placement import place_like_params
from optax_mp._jax._traced import Traced, is_dynamic
from optax_mp._tree import PyTree, describe, is_floating, place
from optax_mp.compact._blocks import Quantized, blank, dequantized, quantized
from optax_mp.compact._dither import chance_keys, check_seed
from optax_mp.compact._signs import nonnegative_outputs

# States, by name, whose arrays are no averages that later steps repair, but say where
# the params are to be, or the curvature: differences of params (L-BFGS), and sums over
# the whole run of which the params are read off (MADGRAD, COCOB).
_KEPT_WHOLE = {"ScaleByLBFGSState", "MadgradState", "COCOBState"}
# Tells the chances from those of `stochastic_rounding` around with the same seed.
_SALT = 1


class LowBitState(NamedTuple):
    """State of `low_bit_state`.

    Its structure, shapes and dtypes never change.

    Attributes:
        step: int32 scalar, how many updates were made; the chance of rounding hangs on
            it.
        inner_state: the state of the inner optimizer, with `Quantized` in the place of
            each large array.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((256, 256)), "norm": jnp.ones(256)}
        >>> state = optax_mp.low_bit_state(optax.adam(1e-3)).init(params)
        >>> nu = state.inner_state[0].nu
        >>> type(nu["w"]).__name__, nu["norm"].dtype.name
        ('Quantized', 'float32')
    """

    step: jax.Array
    inner_state: optax.OptState


def low_bit_state(
    inner: optax.GradientTransformation,
    *,
    bits: int = 8,
    block_size: int = 32,
    dtype: DTypeLike | None = None,
    min_size: int = 4096,
    seed: int | None = 0,
) -> optax.GradientTransformationExtraArgs:
    """Keep the large float arrays of `inner`'s state in few bits.

    Moments, traces and accumulators are decoded before the inner update and encoded
    after it, so that `inner` may be any optimizer, and runs in float32. Values are kept
    as the root of their share of the largest one in a block of `block_size` neighbours;
    what is never negative, such as a second moment, has codes without a sign, and stays
    positive. Which arrays those are is read off the optimizer's own update.

    Rounding goes up or down by chance, right on average: an average over a thousand
    steps moves by a thousandth a step, less than any code, and rounded to nearest would
    stand still. The chance is a hash of the place, the step and `seed`: the same in
    every run, and under `jit` on any number of devices (under `shard_map` each rank
    counts the places of its own part). Where a moment is infinite or NaN, its block is
    NaN: put a loss scale around, which skips what would make it so.

    Left as they are: arrays under `min_size` elements, so norms, biases and factored
    moments of small matrices; all that is not float32, so counts, but also the moments
    of 16-bit params outside of `mixed_precision`; what starts
    from the params, as masters, averages or anchors of them do; and the states of
    L-BFGS, MADGRAD and COCOB, which say where the params are to be.

    Args:
        inner: any optax optimizer or chain.
        bits: 8 or 16.
        block_size: how many values share a scale, which takes 2 bytes; a power of two.
        dtype: bfloat16, to keep arrays in that instead of in blocks.
        min_size: the least number of elements of an array that is kept so.
        seed: of the chance by which values are rounded; None rounds to nearest.

    Returns:
        The transformation, for use within `mixed_precision` or by itself.

    Raises:
        TypeError: if `inner` is not a gradient transformation.
        ValueError: if a setting is none of those.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> adamw = optax_mp.low_bit_state(optax.adamw(1e-3))
        >>> tx = optax_mp.mixed_precision(adamw, storage=optax_mp.Split(bits=8))
        >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
        >>> report = optax_mp.memory_report(tx.init(params), params)
        >>> round(report.bytes_per_weight, 3)
        5.125

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022,
        https://arxiv.org/abs/2110.02861
    """
    inner = as_transformation(inner, "low_bit_state")
    form = _Form.checked(bits, block_size, dtype)
    check_seed(seed, "low_bit_state")
    if not isinstance(min_size, Integral):
        raise TypeError(
            f"low_bit_state: `min_size` is {min_size!r}, expected a number of elements."
        )

    def init_fn(params: optax.Params) -> LowBitState:
        state = place_like_params(inner.init(params), params)
        wanted = _wanted_codes(inner, params, state, form, min_size)
        leaves, treedef = jax.tree.flatten(state)
        for i, codes in enumerate(wanted):
            if codes is not None:
                like = blank(leaves[i], codes, form.block)
                # Else XLA computes all those blocks of zeros while it compiles a jitted
                # `init`: seconds for a million values.
                leaf, like = jax.lax.optimization_barrier((leaves[i], like))
                leaves[i] = _quantized_at_start(leaf, like)
        leaves = without_aliases(leaves, params)
        return LowBitState(jnp.zeros((), jnp.int32), treedef.unflatten(leaves))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowBitState]:
        if not isinstance(state, LowBitState):
            raise TypeError(
                f"low_bit_state: `state` is a {type(state).__name__}, expected the "
                "LowBitState that `init` of this transform returns; convert a state "
                "of the bare optimizer with `optax_mp.convert_opt_state`."
            )
        form.check(state.inner_state)
        kept, kept_def = tree_flatten_with_path(state.inner_state, _is_quantized)
        kept = [leaf for _, leaf in kept]
        before = kept_def.unflatten(
            dequantized(x) if _is_quantized(x) else x for x in kept
        )
        updates, after = inner.update(updates, before, params, **extra_args)
        leaves = jax.tree.structure(before).flatten_up_to(after)
        places = [i for i, like in enumerate(kept) if _is_quantized(like)]
        keys = chance_keys(len(places), seed or 0, _SALT, state.step)
        for i, key in zip(places, keys, strict=True):
            leaves[i] = quantized(leaves[i], kept[i], None if seed is None else key)
        step = jnp.asarray(optax.safe_increment(state.step))
        return updates, LowBitState(step, kept_def.unflatten(leaves))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Form(NamedTuple):
    """What arrays are kept as: codes of some width, with or without blocks."""

    signed: jnp.dtype
    unsigned: jnp.dtype
    block: int | None

    @classmethod
    def checked(cls, bits: int, block_size: int, dtype: DTypeLike | None) -> "_Form":
        if dtype is not None:
            kept = floating_dtype(dtype, "low_bit_state: `dtype`")
            # In float16 the second moment of a gradient of 1e-4 would be zero.
            if kept != jnp.bfloat16 or (bits, block_size) != (8, 32):
                raise ValueError(
                    f"low_bit_state: `dtype` is {kept} with bits={bits!r} and "
                    f"block_size={block_size!r}, expected bfloat16 and neither of the "
                    "others, or no `dtype`, for codes in blocks."
                )
            return cls(kept, kept, None)
        if not isinstance(bits, Integral) or bits not in (8, 16):
            raise ValueError(f"low_bit_state: `bits` is {bits!r}, expected 8 or 16.")
        is_power = isinstance(block_size, Integral) and block_size > 0
        if not (is_power and block_size & (block_size - 1) == 0):
            raise ValueError(
                f"low_bit_state: `block_size` is {block_size!r}, expected a power of "
                "two such as 32."
            )
        return cls(jnp.dtype(f"int{bits}"), jnp.dtype(f"uint{bits}"), block_size)

    def check(self, inner_state: PyTree) -> None:
        """Raise unless all that is quantised in a state has this form."""
        leaves = tree_flatten_with_path(inner_state, _is_quantized)[0]
        for path, leaf in leaves:
            if not _is_quantized(leaf):
                continue
            like = blank(leaf.codes, leaf.codes.dtype, self.block)
            has_form = leaf.codes.dtype in (self.signed, self.unsigned)
            has_form = has_form and describe(leaf.scales) == describe(like.scales)
            if not has_form:
                kept = "" if leaf.scales is None else f" and {describe(leaf.scales)}"
                raise ValueError(
                    f"low_bit_state: the state holds {describe(leaf.codes)}{kept} at "
                    f"{place(path)}, expected codes of {self.signed} or "
                    f"{self.unsigned}, {self.block or 'not'} in a block: it was made "
                    "with other settings; convert it with `optax_mp.convert_opt_state`."
                )


def _wanted_codes(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    form: _Form,
    min_size: int,
) -> list[jnp.dtype | None]:
    """Return the dtype of codes for each leaf of `inner`'s state; None to keep it."""
    start = Traced.of(inner.init, params)
    from_params = iter(depending_outputs(start.closed))
    positive = iter(_never_negative(inner, params, state, start))
    wanted: list[jnp.dtype | None] = []
    for leaf, is_whole in zip(jax.tree.leaves(state), _whole(state), strict=True):
        keeps = is_whole or not _is_large(leaf, min_size)
        codes = None
        if is_dynamic(leaf):
            keeps = next(from_params) or keeps
            codes = form.unsigned if next(positive) else form.signed
        wanted.append(None if keeps else codes)
    return wanted


def _is_large(leaf: Any, min_size: int) -> bool:
    if not is_floating(leaf) or leaf.size < min_size or not leaf.ndim:
        return False
    # Decoded values are float32: in another dtype `inner` might not know its state.
    return leaf.dtype == jnp.float32


def _whole(state: optax.OptState) -> list[bool]:
    """Return for each leaf whether it belongs to a state that is kept whole."""

    def is_kept(node: Any) -> bool:
        return type(node).__name__ in _KEPT_WHOLE

    def spread(node: Any) -> Any:
        return jax.tree.map(lambda _: is_kept(node), node)

    return jax.tree.leaves(jax.tree.map(spread, state, is_leaf=is_kept))


def _never_negative(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    start: Traced,
) -> list[bool]:
    """Return for each array of `inner`'s state whether it never is negative."""
    holds = nonnegative_outputs(start.closed, [False] * len(start.arrays))

    def new_state(given: Any) -> Any:
        gradients, state, params = given
        return inner.update(gradients, state, params)[1]

    try:
        step = Traced.of(new_state, (params, state, params))
    except Exception:
        # It wants more than gradients, such as the loss. Signed codes serve as well.
        return [False] * len(holds)
    others = [False] * len(start.arrays)
    while True:
        inputs = [*others, *holds, *others]
        if len(inputs) != len(step.arrays):
            return [False] * len(holds)
        after = nonnegative_outputs(step.closed, inputs)
        kept = [a and b for a, b in zip(holds, after, strict=True)]
        if kept == holds:
            return holds
        holds = kept


# Compiled: eagerly each of its operations is compiled for each shape.
@jax.jit
def _quantized_at_start(leaf: jax.Array, like: Quantized) -> Quantized:
    return quantized(leaf, like, None)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)
