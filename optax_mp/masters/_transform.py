"""mixed_precision: high-precision masters for any optimizer.

One step of it is a `Step`: from masters and gradients to updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from optax_mp._dtypes import (
    at_least_float32,
    bits,
    round_to,
    saturating_cast,
)
from optax_mp._jax._arrays import is_traced
from optax_mp._jax._dataflow import depending_outputs
from optax_mp._jax._jaxpr import TracedCall, is_dynamic
from optax_mp._policy import DeclaredDType, Policy, warn_unmatched_patterns
from optax_mp._random_numbers import rounding_keys
from optax_mp._warnings import warn
from optax_mp.masters._settings import Settings
from optax_mp.masters._storage import (
    FullCopy,
    MixedPrecisionState,
    Storage,
    as_own_arrays,
    check_storable,
    counter_of,
    is_random,
    state_type,
    store,
    warn_unless_stored,
)
from optax_mp.scaling._unscale import is_unmarked, warn_unless_counted
from optax_mp.trees._descriptions import place_like_params
from optax_mp.trees._leaves import ABSENT, Leaves, is_absent
from optax_mp.trees._states import find_states
from optax_mp.trees._tree import copy_shared, describe, is_floating, spell
from optax_mp.wrappers._choose import choose_step, difference
from optax_mp.wrappers._context import Transformation
from optax_mp.wrappers._inner import (
    MatchedArguments,
    as_inner_param,
    as_transformation,
    check_own_state,
    require_params,
)

_CALLER = "mixed_precision"
# So that the random numbers differ from those of `low_bit_state` and of
# `stochastic_rounding`.
_SALT = 2
UpdateDType = DTypeLike | Literal["params"] | None


def mixed_precision(
    inner: optax.GradientTransformation,
    master_dtype: DTypeLike = jnp.float32,
    *,
    param_dtype: DeclaredDType = None,
    update_dtype: UpdateDType = None,
    storage: Storage = FullCopy(),
) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on high-precision masters of low-precision params.

    A bfloat16 weight of 1.0 that receives a thousand updates of -0.001 is still 1.0,
    because each update is less than half a unit in its last place. With this transform
    the updates add up in a float32 master, which the optimizer state holds, and the
    param is the master rounded to the param's dtype. The inner optimizer sees masters,
    gradients and state in `master_dtype`. Its trajectory is bit-identical to float32
    training on the same gradients, cast inside the jitted step.

    - A leaf at least as wide as `master_dtype` is its own master: no copy is made.
      Complex leaves are passed to `inner` unchanged. A Python float is a param, as
      under `jit`. Integers, bools, keys and None are hidden from `inner`. Their updates
      are their gradients, or zeros for an array whose gradient is None or float0.
      Strings, functions and the like are an error at `init`.
    - The update of a leaf is `round(master) - param`. After `optax.apply_updates` the
      param is the rounded master. Finite masters never become infinite; infinite ones,
      as after a step that diverged, stay infinite where the param's dtype has
      infinities.
    - Your loop may edit params between steps: a projection, a pruning mask, adapters
      that are merged and set to zero. After float32 updates each edited element is its
      new master in the next step. After 16-bit updates an edit cannot be told from a
      rounding, and is undone: pass `update_dtype=jnp.float32`, or call `follow_params`.
    - An infinite param, such as the -inf of a mask, stays infinite until its master is
      NaN, and NaN stays NaN. To make such params finite, cast `master_params` again.
      Weight decay makes infinities NaN, as in float32 training: exclude a mask from it.
    - Put this transform last in a chain, or around the chain. A later transform would
      change the rounded difference, and small updates would be lost again.
    - If a loss scale is an earlier link of the same chain, a step that it skips is
      also skipped here entirely. The link marks such a step by handing on float32
      gradients that are negative zero everywhere. The mark is not seen in 16-bit
      gradients, nor under `shard_map` if gradients differ among ranks.

    Args:
        inner: any optax optimizer or chain.
        master_dtype: the floating dtype of masters. float64 needs JAX's 64-bit types,
            turned on before `init`.
        param_dtype: the dtype of params in training, if you pass `init` a float32 tree
            and cast it later. A dtype, a `Policy`, or a function of (path string,
            leaf); by default each leaf's own dtype. Calling `init` before the cast
            keeps all bits of pretrained weights in the masters.
        update_dtype: the dtype of updates. None, the default, is the dtype of the
            incoming gradients, as for every optax optimizer. Updates of 16-bit
            gradients are then rounded, and a param can miss its rounded master by that
            rounding until the next step. `jnp.float32` brings each param exactly to its
            rounded master; `optax.apply_updates` casts the sum back. `"params"` is the
            dtype of the params, for loops that get float32 gradients and do not cast
            back, such as `equinox.apply_updates`.
        storage: how masters are kept: `FullCopy()`; `Split(bits=16)`, lossless for
            bfloat16 params with 2 bytes per weight less; `Split(bits=8)`; or an object
            of your own with the members of `Storage`. With `Split`, updates of leaves
            with a master are always float32.

    Returns:
        The transformation. Extra arguments of `update` are forwarded to `inner`; `grad`
        is cast as the gradients are.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or `storage` lacks a
            member of `Storage`.
        ValueError: if a dtype is not floating; at `init`, if the storage cannot keep
            the masters of a param, or if a dtype is float64 without 64-bit types.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = optax_mp.mixed_precision(optax.sgd(1.0))
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     grads = {"w": jnp.full(2, 0.001, jnp.bfloat16)}
        ...     updates, state = tx.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].dtype.name, round(float(params["w"][0]), 2)
        ('bfloat16', 0.9)

    References:
        Micikevicius et al., Mixed Precision Training, 2018,
        https://arxiv.org/abs/1710.03740
    """
    inner = as_transformation(inner, _CALLER)
    settings = Settings.of(master_dtype, param_dtype, update_dtype, storage)
    make_state = state_type(storage)

    def init_fn(params: optax.Params) -> MixedPrecisionState:
        if isinstance(param_dtype, Policy):
            warn_unmatched_patterns(param_dtype, params, _CALLER)
        leaves = Leaves.of(params, caller=_CALLER)
        stored, inner_params = _init_masters(leaves, settings)
        if settings.is_declared:
            _warn_of_cast(leaves, stored, settings)
        seen_by_inner = leaves.unflatten(inner_params)
        inner_state = place_like_params(inner.init(seen_by_inner), seen_by_inner)
        _warn_of_frozen(inner, leaves, stored, seen_by_inner, inner_state)
        inner_state = copy_shared(inner_state, (leaves.values, stored, inner_params))
        last_exact = None if storage.param_is_part else jnp.array(True)
        count = jnp.zeros((), jnp.int32) if is_random(storage) else None
        return make_state(leaves.unflatten(stored), inner_state, last_exact, count)

    def update_fn(
        updates: Any, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        step = Step.match(updates, state, params, settings)
        warn_unless_counted(extra_args, state.inner_state, _CALLER)
        # A loss scale earlier in a chain marks the gradients of a step that it skips.
        # Then the updates are negative zeros, and the state stays as it was.
        proceed = is_unmarked(updates, extra_args)
        return choose_step(proceed, partial(step.run, inner), state, extra_args)

    return Transformation.of(_CALLER, init_fn, update_fn)


def _init_masters(params: Leaves, settings: Settings) -> tuple[list[Any], list[Any]]:
    """Return what is stored for each param, and the param that `inner` sees for it."""
    settings.check_dtypes()
    master_dtype, storage = settings.master_dtype, settings.storage
    stored, inner_params = [], []
    for path, leaf in zip(params.paths, params.values, strict=True):
        dtype = settings.dtype_in_training(path, leaf)
        if dtype is None or bits(dtype) >= bits(master_dtype):
            param = leaf if dtype is None else leaf.astype(dtype)
            stored.append(optax.MaskedNode())
            inner_params.append(as_inner_param(param))
            continue
        where = f"param {spell(path)}"
        check_storable(storage, f"{where} ({describe(leaf)})", dtype, master_dtype)
        # A copy even where no cast is needed: the state must not alias the params.
        master = jnp.array(leaf, master_dtype, copy=True)
        param = round_to(master, dtype).astype(dtype)
        # Decoded, because a storage may keep less than the whole master: `inner` must
        # see the same master at `init` as at the first update.
        first, decoded = store(storage, master, param, where)
        stored.append(first)
        inner_params.append(decoded)
    warn_unless_stored(storage, params, stored, master_dtype)
    return stored, inner_params


def _warn_of_cast(params: Leaves, stored: list[Any], settings: Settings) -> None:
    """Warn if the params were cast before `init`, although `param_dtype` is given.

    Not under a trace: the state may be a template, into which masters are restored.
    """
    leaves = zip(params.paths, params.values, stored, strict=True)
    given = [(path, x) for path, x, master in leaves if not is_absent(master)]
    is_cast = (settings.dtype_in_training(*x) == jnp.result_type(x[1]) for x in given)
    if given and all(is_cast) and not is_traced(given[0][1]):
        path, param = given[0]
        warn(
            f"mixed_precision: param {spell(path)} is {describe(param)} at `init`, "
            "which `param_dtype` says that it will be cast to: masters begin from "
            "rounded weights. Call `init` with the float32 params, and cast them "
            "after it; or, if you have no others, leave `param_dtype` out."
        )


def _warn_of_frozen(
    inner: Any, params: Leaves, stored: list[Any], seen_by_inner: Any, inner_state: Any
) -> None:
    """Warn if a mask in `inner` leaves out params that have masters.

    By tracing the update, because not every mask does: that of a weight decay does not,
    and some groups have a rule without state. `optax.masked` hands on the gradients of
    what it leaves out, as they are.
    """
    have_master = [i for i, x in enumerate(stored) if not is_absent(x)]
    if not have_master or not find_states(inner_state, optax.MaskedState):
        return

    def update(args: Any) -> list[jax.Array]:
        updates = params.match(inner.update(*args)[0], "the updates of `inner`")
        return [jnp.asarray(updates[i]) for i in have_master]

    try:
        traced = TracedCall.of(update, (seen_by_inner, inner_state, seen_by_inner))
    except Exception:  # of any type: `inner` may be a user's code, or need arguments
        return
    # Only gradients and params: a learning rate may scale zeros.
    count = sum(map(is_dynamic, jax.tree.leaves(seen_by_inner)))
    follows = np.ones(len(traced.arrays), bool)
    follows[count:-count] = False
    is_moved = depending_outputs(traced.closed, follows.tolist())
    passed_on = set(map(id, traced.closed.jaxpr.invars[:count]))
    outputs = zip(have_master, is_moved, traced.closed.jaxpr.outvars, strict=True)
    frozen = [i for i, moves, x in outputs if not moves or id(x) in passed_on]
    if frozen:
        arrays = jax.tree.leaves([stored[i] for i in frozen])
        size = sum(x.size * x.dtype.itemsize for x in arrays)
        warn(
            f"mixed_precision: `inner` does not train {len(frozen)} of the "
            f"{len(stored)} params, the first at {spell(params.paths[frozen[0]])}, and "
            f"their masters take {size:,} bytes. Put `mixed_precision` inside of the "
            'mask: `optax.partition({"train": mixed_precision(inner), "freeze": '
            "optax.set_to_zero()}, labels)` keeps none for them."
        )


@dataclass(frozen=True)
class Step:
    """The arguments of one `update`, matched leaf by leaf and checked.

    Attributes:
        arguments: params and gradients.
        stored: what the state stores for each param.
        settings: the settings of the transformation.
    """

    arguments: MatchedArguments
    stored: Sequence[Any]
    settings: Settings

    @classmethod
    def match(cls, updates: Any, state: Any, params: Any, settings: Settings) -> "Step":
        """Return the step of an `update` with these arguments."""
        require_params(params, _CALLER)
        settings.check_dtypes()
        storage = settings.storage
        check_own_state(state, MixedPrecisionState, _CALLER, storage=storage)
        leaves = Leaves.of(params, caller=_CALLER)
        # Subtrees, because a storage may store several arrays for one master.
        stored = leaves.match_subtrees(state.master_params, "the masters in the state")
        for path, param, x in zip(leaves.paths, leaves.values, stored, strict=True):
            settings.check_param(path, param, x)
        return cls(MatchedArguments.match(updates, params, leaves), stored, settings)

    def _decode(self, last_exact: jax.Array | None) -> list[Any]:
        """Return what `inner` sees: masters, and params that are their own master.

        A param that was edited since the last step is its master.
        """
        storage, masters = self.settings.storage, list(self.stored)
        params = self.arguments.params
        for i, param in enumerate(params.values):
            if isinstance(masters[i], ABSENT):
                masters[i] = as_inner_param(param)
                continue
            master = storage.decode(masters[i], param)
            self.settings.check_master(params.paths[i], master)
            if last_exact is not None:
                master = _follow_if(last_exact, master, jnp.asarray(param))
            masters[i] = master
        return masters

    @property
    def _are_exact(self) -> list[bool | None]:
        """Whether params are exactly their rounded masters after the update.

        If so, a param with another value was edited. A float32 sum of params of 16 or 8
        bits is exact, and so is a float64 sum of float32 params. The exception is a
        weight that a step shrinks to less than 2^-15 (float16: 2^-12) of its value.
        Such a param also becomes its master, which moves it by at most 2^-23 of the old
        weight. None means that the param has no gradient and stays as exact as it was.
        """
        pairs = zip(self.arguments.params.values, self.arguments.grads, strict=True)
        return [
            bits(self._update_dtype(i)) >= max(32, bits(param.dtype) + 1)
            if is_floating(grad)
            else None
            for i, (param, grad) in enumerate(pairs)
            if not isinstance(self.stored[i], ABSENT)
        ]

    def _update_dtype(self, i: int) -> jnp.dtype:
        """Return the dtype of the update of a leaf."""
        wanted = self.settings.update_dtype
        has_master = not isinstance(self.stored[i], ABSENT)
        if has_master and self.settings.storage.param_is_part:
            # The param decodes the master: if it missed its target by a rounding, the
            # stored remainder would decode to another master.
            return jnp.dtype(jnp.float32)
        if has_master and isinstance(wanted, np.dtype):
            return wanted
        # `is` and not `==`, because NumPy takes None for float64.
        param, grad = self.arguments.params.values[i], self.arguments.grads[i]
        like = grad if wanted is None and is_floating(grad) else param
        return jax.dtypes.canonicalize_dtype(like.dtype)

    def run(
        self, inner: Any, state: MixedPrecisionState, extra_args: dict[str, Any]
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        """Return (updates, new state) after an update of `inner`."""
        params, last_exact = self.arguments.params, state.last_exact
        seen_by_inner, stored = self._decode(last_exact), list(self.stored)
        count, keys = counter_of(state, _CALLER), [()] * len(stored)
        if count is not None:
            keys = [(key,) for key in rounding_keys(len(stored), 0, _SALT, count)]
            count = jnp.asarray(optax.safe_increment(count))

        def advance(i: int, change: Any) -> jax.Array:
            if not isinstance(stored[i], ABSENT):
                master = optax.apply_updates(seen_by_inner[i], change)
                stored[i], change = self._advance_leaf(i, master, *keys[i])
            return _cast_update(change, self._update_dtype(i))

        updates, inner_state = self.arguments.run(
            inner, seen_by_inner, state.inner_state, extra_args, advance
        )
        if last_exact is not None:
            # Of the old one, whose type may vary over the ranks of a mesh.
            if False in (exact := self._are_exact):
                last_exact = last_exact & False
            elif None not in exact:
                last_exact = last_exact | True
        masters = params.unflatten(stored)
        new_state = type(state)(masters, inner_state, last_exact, count)
        return params.unflatten(updates), new_state

    def _advance_leaf(
        self, i: int, master: Any, *key: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Return (stored, update) of a leaf whose master moves to `master`.

        A storage that rounds at random also gets a key.
        """
        param, stored = self.arguments.params.values[i], self.stored[i]
        new_stored, target = self.settings.storage.advance(stored, param, master, *key)
        # The difference to the actual param, not to the previous target: an update that
        # is rounded to 16 bits can miss its target, and the next one makes up for it.
        if target.dtype == param.dtype:
            target = target.astype(at_least_float32(target.dtype))
        else:
            target = round_to(target, param.dtype)
        update = difference(target, lax.convert_element_type(param, target.dtype))
        return as_own_arrays(new_stored), update


def _cast_update(update: Any, dtype: jnp.dtype) -> jax.Array:
    """Return `update` in a floating dtype; complex updates stay as they are."""
    update = update if isinstance(update, jax.Array) else jnp.asarray(update)
    if not is_floating(update) or not jnp.issubdtype(dtype, jnp.floating):
        return update
    # The difference of two finite float16 or float8 params may overflow their dtype.
    # bfloat16 has the range of float32: a clamp would only cost time.
    if jnp.finfo(dtype).nexp < jnp.finfo(update.dtype).nexp:
        return saturating_cast(update, dtype)
    return lax.convert_element_type(update, dtype)


# Jitted, so that it is traced once for all leaves of one shape and dtype.
@jax.jit
def _follow_if(follows: jax.Array, master: jax.Array, param: jax.Array) -> jax.Array:
    return lax.select(follows, follow_edits(master, param), master)


def follow_edits(master: jax.Array, param: jax.Array) -> jax.Array:
    """Return `master`, or the param where it differs from the rounded master.

    An infinite or NaN param is no edit: a large weight may have overflowed in the cast,
    and an infinite param stays infinite whatever its master is.
    """
    wide = lax.convert_element_type(param, at_least_float32(master.dtype))
    # As numbers and not as bits: -0.0 is no edit of 0.0.
    is_edited = lax.is_finite(wide) & lax.ne(wide, round_to(master, param.dtype))
    edited = lax.convert_element_type(wide, master.dtype)
    return lax.select(is_edited, edited, master)
