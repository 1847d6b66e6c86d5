"""mixed_precision: high-precision masters for any optimizer.

One step of it is a `MasterStep`: from masters and gradients to updates.
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

from optax_mp.core import _dtypes, _policy
from optax_mp.core._random_numbers import rounding_keys
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.masters import _storage
from optax_mp.core.masters._edits import follow_edits_if
from optax_mp.core.masters._settings import CALLER, Settings
from optax_mp.core.trees import _leaves, _tree
from optax_mp.core.trees._descriptions import place_like_params
from optax_mp.core.wrappers import _arguments
from optax_mp.core.wrappers._choose import choose_step, is_unmarked
from optax_mp.core.wrappers._protocol import Transformation, as_transformation
from optax_mp.core.wrappers._updates import difference

# So that the random numbers differ from those of `low_bit_state` and of
# `stochastic_rounding`.
_SALT = 2
UpdateDType = DTypeLike | Literal["params"] | None


def mixed_precision(
    inner: optax.GradientTransformation,
    master_dtype: DTypeLike = jnp.float32,
    *,
    param_dtype: _policy.DeclaredDType = None,
    update_dtype: UpdateDType = None,
    storage: _storage.Storage = _storage.FullCopy(),
) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on high-precision masters of low-precision params.

    A bfloat16 param of 1.0 that receives a thousand updates of -0.001 is still 1.0,
    because each update is less than half a unit in its last place. With this transform
    the updates add up in a float32 master, which the optimizer state holds, and the
    param is the master rounded to the param's dtype. The inner optimizer sees masters,
    gradients and state in `master_dtype`. Its trajectory is bit-identical to float32
    training on the same gradients, if these are cast to float32 inside the jitted step.

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
    - Give each param one optimizer. Two optimizers over the same 16-bit params undo
      each other's steps. The guide to masters shows what to do instead.
    - An infinite param, such as the -inf of a mask, stays infinite until its master is
      NaN, and NaN stays NaN. To make such params finite, cast `master_params` again.
      Weight decay makes infinities NaN, as in float32 training: exclude a mask from it.
    - Put this transform last in a chain, or around the chain. A later transform would
      change the rounded difference, and small updates would be lost again.
    - If a loss scale is an earlier link of the same chain, a step that it skips is
      also skipped here entirely. The link marks such a step by handing on float32
      gradients that are negative zero everywhere. The mark works only in float32
      gradients and, under `shard_map`, only if they are equal on all ranks.

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
            bfloat16 params with 2 bytes per weight less; or `Split(bits=8)`. With
            `Split`, updates of leaves with a master are always float32.

    Returns:
        The transformation. Extra arguments of `update` are forwarded to `inner`; `grad`
        is cast as the gradients are.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or `storage` is not
            `FullCopy()` or `Split()`.
        ValueError: if a dtype is not floating; at `init`, if the storage cannot keep
            the masters of a param, if a dtype is float64 without 64-bit types, or if no
            16-bit param has a master because `master_dtype` is not wider.

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
    inner = as_transformation(inner, CALLER)
    settings = Settings.of(master_dtype, param_dtype, update_dtype, storage)
    make_state = _storage.state_type(storage)

    def init_fn(params: optax.Params) -> _storage.MixedPrecisionState:
        if isinstance(param_dtype, _policy.Policy):
            _policy.warn_unmatched_patterns(param_dtype, params, CALLER)
        leaves = _leaves.Leaves.of(params, caller=CALLER)
        stored, inner_params = _init_masters(leaves, settings)
        if settings.is_declared:
            _warn_of_cast(leaves, stored, settings)
        seen_by_inner = leaves.unflatten(inner_params)
        inner_state = place_like_params(inner.init(seen_by_inner), seen_by_inner)
        inner_state = _tree.copy_shared(
            inner_state, (leaves.values, stored, inner_params)
        )
        last_exact = None if storage.param_is_part else jnp.array(True)
        count = jnp.zeros((), jnp.int32) if storage.is_random else None
        return make_state(leaves.unflatten(stored), inner_state, last_exact, count)

    def update_fn(
        updates: Any, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, _storage.MixedPrecisionState]:
        step = MasterStep.match(updates, state, params, settings)
        # A loss scale earlier in a chain marks the gradients of a step that it skips.
        # Then the updates are negative zeros, and the state stays as it was.
        proceed = is_unmarked(updates, extra_args)
        return choose_step(proceed, partial(step.run, inner), state, extra_args)

    return Transformation.of(CALLER, init_fn, update_fn)


def _init_masters(
    params: _leaves.Leaves, settings: Settings
) -> tuple[list[Any], list[Any]]:
    """Return what is stored for each param, and the param that `inner` sees for it."""
    settings.check_dtypes()
    master_dtype, storage = settings.master_dtype, settings.storage
    stored, inner_params = [], []
    for path, leaf in zip(params.paths, params.values, strict=True):
        dtype = settings.dtype_in_training(path, leaf)
        if dtype is None or _dtypes.bits(dtype) >= _dtypes.bits(master_dtype):
            param = leaf if dtype is None else leaf.astype(dtype)
            stored.append(optax.MaskedNode())
            inner_params.append(_arguments.as_inner_param(param))
            continue
        where = f"param {_tree.spell(path)}"
        _storage.check_storable(
            storage, f"{where} ({_arrays.describe(leaf)})", dtype, master_dtype
        )
        # A copy even where no cast is needed: the state must not alias the params.
        master = jnp.array(leaf, master_dtype, copy=True)
        param = _dtypes.round_to(master, dtype).astype(dtype)
        stored.append(storage.encode(master, param))
        # Decoded, because a storage may keep less than the whole master: `inner` must
        # see the same master at `init` as at the first update.
        inner_params.append(storage.decode(stored[-1], param))
    settings.check_masters(params, stored)
    _storage.warn_unless_stored(storage, params, stored)
    return stored, inner_params


def _warn_of_cast(
    params: _leaves.Leaves, stored: list[Any], settings: Settings
) -> None:
    """Warn if the params were cast before `init`, although `param_dtype` is given.

    There is no warning under a trace: the state may be a template, into which masters
    are restored.
    """
    leaves = zip(params.paths, params.values, stored, strict=True)
    given = [(path, x) for path, x, master in leaves if not _leaves.is_absent(master)]
    is_cast = (settings.dtype_in_training(*x) == jnp.result_type(x[1]) for x in given)
    if given and all(is_cast) and not _arrays.is_traced(given[0][1]):
        path, param = given[0]
        warn(
            f"mixed_precision: param {_tree.spell(path)} is {_arrays.describe(param)} "
            "at `init`, which is its `param_dtype`: masters begin from rounded "
            "weights; call `init` with the float32 params, or leave out `param_dtype`."
        )


@dataclass(frozen=True)
class MasterStep:
    """The arguments of one `update`, matched leaf by leaf and checked.

    Attributes:
        arguments: params and gradients.
        stored: what the state stores for each param, `[...]`, or `MaskedNode()`.
        settings: the settings of the transformation.
    """

    arguments: _arguments.MatchedArguments
    stored: Sequence[Any]
    settings: Settings

    @classmethod
    def match(
        cls, updates: Any, state: Any, params: Any, settings: Settings
    ) -> "MasterStep":
        """Return the step of an `update` with these arguments."""
        _arguments.require_params(params, CALLER)
        settings.check_dtypes()
        storage = settings.storage
        _arguments.check_own_state(
            state, _storage.MixedPrecisionState, CALLER, storage=storage
        )
        leaves = _leaves.Leaves.of(params, caller=CALLER)
        stored = leaves.match(state.master_params, "the masters in the state")
        for path, param, x in zip(leaves.paths, leaves.values, stored, strict=True):
            settings.check_param(path, param, x)
        settings.check_masters(leaves, stored)
        return cls(
            _arguments.MatchedArguments.match(updates, params, leaves), stored, settings
        )

    def _decode(self, last_exact: jax.Array | None) -> list[Any]:
        """Return what `inner` sees: masters, and params that are their own master.

        A param that was edited since the last step is its master.
        """
        storage, masters = self.settings.storage, list(self.stored)
        params = self.arguments.params
        for i, param in enumerate(params.values):
            if isinstance(masters[i], _leaves.ABSENT):
                masters[i] = _arguments.as_inner_param(param)
                continue
            master = storage.decode(masters[i], param)
            self.settings.check_master(params.paths[i], master)
            if last_exact is not None:
                master = follow_edits_if(last_exact, master, jnp.asarray(param))
            masters[i] = master
        return masters

    @property
    def _are_exact(self) -> list[bool | None]:
        """Whether params are exactly their rounded masters after the update.

        If so, a param with another value was edited. A float32 sum of params of 16 or 8
        bits is exact, and so is a float64 sum of float32 params. The exception is a
        weight that a step shrinks to less than 2^-15 (float16: 2^-12) of its value.
        Such a param counts as edited and becomes its master, which moves by at most
        2^-23 of the old weight. None means that the param has no gradient and stays as
        exact as it was.
        """
        pairs = zip(self.arguments.params.values, self.arguments.grads, strict=True)
        return [
            _dtypes.bits(self._update_dtype(i))
            >= max(32, _dtypes.bits(param.dtype) + 1)
            if _dtypes.is_floating(grad)
            else None
            for i, (param, grad) in enumerate(pairs)
            if not isinstance(self.stored[i], _leaves.ABSENT)
        ]

    def _update_dtype(self, i: int) -> jnp.dtype:
        """Return the dtype of the update of a leaf."""
        wanted = self.settings.update_dtype
        has_master = not isinstance(self.stored[i], _leaves.ABSENT)
        if has_master and self.settings.storage.param_is_part:
            # The param decodes the master: if it missed its target by a rounding, the
            # stored remainder would decode to another master.
            return jnp.dtype(jnp.float32)
        if has_master and isinstance(wanted, np.dtype):
            return wanted
        # `is` and not `==`, because NumPy takes None for float64.
        param, grad = self.arguments.params.values[i], self.arguments.grads[i]
        like = grad if wanted is None and _dtypes.is_floating(grad) else param
        return jax.dtypes.canonicalize_dtype(like.dtype)

    def run(
        self,
        inner: Any,
        state: _storage.MixedPrecisionState,
        extra_args: dict[str, Any],
    ) -> tuple[optax.Updates, _storage.MixedPrecisionState]:
        """Return (updates, new state) after an update of `inner`."""
        params, last_exact = self.arguments.params, state.last_exact
        seen_by_inner, stored = self._decode(last_exact), list(self.stored)
        count = _storage.counter_of(state, CALLER)
        keys: list[Any] = [None] * len(stored)
        if count is not None:
            keys = rounding_keys(len(stored), 0, _SALT, count)
            count = jnp.asarray(optax.safe_increment(count))

        def advance(i: int, change: Any) -> jax.Array:
            if not isinstance(stored[i], _leaves.ABSENT):
                master = optax.apply_updates(seen_by_inner[i], change)
                stored[i], change = self._advance_leaf(i, master, keys[i])
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
        self, i: int, master: Any, key: jax.Array | None
    ) -> tuple[Any, jax.Array]:
        """Return (stored, update), each `[...]`, of a leaf that moves to `master`.

        The master is floating `[...]`, the key uint32 `[1]`.
        """
        param, stored = self.arguments.params.values[i], self.stored[i]
        new_stored, target = self.settings.storage.advance(stored, param, master, key)
        # The difference to the actual param, not to the previous target: an update that
        # is rounded to 16 bits can miss its target, and the next one makes up for it.
        if target.dtype == param.dtype:
            target = target.astype(_dtypes.at_least_float32(target.dtype))
        else:
            target = _dtypes.round_to(target, param.dtype)
        update = difference(target, lax.convert_element_type(param, target.dtype))
        return new_stored, update


def _cast_update(update: Any, dtype: jnp.dtype) -> jax.Array:
    """Return `update` `[...]` in a floating dtype; complex updates are unchanged."""
    update = update if isinstance(update, jax.Array) else jnp.asarray(update)
    if not _dtypes.is_floating(update) or not jnp.issubdtype(dtype, jnp.floating):
        return update
    # The difference of two finite float16 or float8 params may overflow their dtype.
    # bfloat16 has the range of float32: a clamp would only cost time.
    if jnp.finfo(dtype).nexp < jnp.finfo(update.dtype).nexp:
        return _dtypes.saturating_cast(update, dtype)
    return lax.convert_element_type(update, dtype)
