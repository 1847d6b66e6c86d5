"""check_checkpoint: that a checkpoint is of the form that it is restored into."""

from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from optax_mp._dtypes import bits
from optax_mp._tree import PyTree, describe, is_array, is_floating, place

_CALLER = "check_checkpoint"
_SHOWN = 3  # problems of each kind
Key = tuple[str, ...]
Named = dict[Key, tuple[tuple[Any, ...], Any]]


def check_checkpoint(saved: PyTree, template: optax.OptState) -> None:
    """Raise if a checkpoint is of another form than the state it is restored into.

    Orbax casts what it restores to the dtypes of the template: into a state made for
    16-bit params it rounds float32 masters, and says nothing. `flax.serialization`
    looks at neither dtypes nor shapes. So ask before the restore, when nothing is
    overwritten yet.

    Containers may have lost their types, as in metadata and state dicts: fields of a
    NamedTuple, keys and indices are compared by name. A PRNG key is like its data,
    which is what Orbax saves. What holds no arrays (None, `optax.MaskedNode()`, an
    empty state) may be there or not.

    Args:
        saved: what was saved, or a description of it: a tree of whatever has a shape
            and a dtype, or what Orbax returns as metadata.
        template: the state, or params and state, that it is to be restored into, as
            arrays or by `jax.eval_shape`.

    Raises:
        ValueError: if a leaf is missing or one too many, or has another shape or dtype.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(optax.adamw(1e-3))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> saved = tx.init(params)
        >>> template = jax.eval_shape(tx.init, params)
        >>> optax_mp.check_checkpoint(saved, template)
        >>> plain = jax.eval_shape(optax.adamw(1e-3).init, params)
        >>> optax_mp.check_checkpoint(saved[1], plain)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: check_checkpoint: ...

        With Orbax, where `path` is a checkpoint of such a state::

            checkpointer = orbax.checkpoint.StandardCheckpointer()
            optax_mp.check_checkpoint(checkpointer.metadata(path), template)
            state = checkpointer.restore(path, template)

        A `CheckpointManager` gives `manager.item_metadata(step)`, if it was made with
        `item_handlers=orbax.checkpoint.StandardCheckpointHandler()`; the newer API
        `ocp.metadata(path)`. With `flax.serialization` give
        `msgpack_restore(encoded_bytes)`, with pickle what was loaded.
    """
    found, wanted = _by_name(_unwrapped(saved)), _by_name(template)
    if wanted and not found:
        raise ValueError(
            f"{_CALLER}: `saved` is a {type(saved).__name__} without arrays, expected "
            "a tree of arrays or of what has a shape and a dtype. A `CheckpointManager`"
            " knows what it has not saved itself only if it is made with "
            "`item_handlers=orbax.checkpoint.StandardCheckpointHandler()`."
        )
    missing = [
        f"{place(path)} was not saved, the template wants {describe(leaf)}"
        for key, (path, leaf) in wanted.items()
        if key not in found
    ]
    additional = [
        f"{place(path)} was saved as {describe(leaf)}, the template has no such leaf"
        for key, (path, leaf) in found.items()
        if key not in wanted
    ]
    lines = [*_first(_differing(found, wanted)), *_first(missing), *_first(additional)]
    if lines:
        raise ValueError(
            f"{_CALLER}: the checkpoint is of another form than `template`, expected "
            "the same leaves, shapes and dtypes.\n  " + "\n  ".join(lines) + "\n"
            "Restore into `jax.eval_shape(tx.init, params)` with the `tx` and with "
            "params as they were when it was saved; then change the form by "
            "`optax_mp.convert_opt_state(state, params, tx, new_tx)`, and the dtype of "
            "params by `optax_mp.cast_floating`."
        )


def _unwrapped(saved: PyTree) -> PyTree:
    """Return the tree in what Orbax has around it: `item_metadata`, or `metadata`."""
    for name in ("item_metadata", "metadata"):
        if all_leaves([saved]) and not is_array(saved):
            saved = getattr(saved, name, saved)
    return saved


def _by_name(tree: PyTree) -> Named:
    """Return path and leaf of all numbers and arrays, by the names along the path."""
    named = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        names = tuple(keystr((entry,), simple=True) for entry in path)
        # Flax's boxes hold their array in `value`; its pure trees have no boxes.
        names = names[:-1] if names[-1:] == ("value",) else names
        if is_array(leaf) or isinstance(leaf, Number):
            named[names] = (path, leaf)
    return named


def _differing(found: Named, wanted: Named) -> list[str]:
    lines = []
    for key in (key for key in wanted if key in found):
        (path, want), (_, leaf) = wanted[key], found[key]
        consequence = _consequence(leaf, want, key)
        if consequence:
            lines.append(
                f"{place(path)} was saved as {describe(leaf)}, the template wants "
                f"{describe(want)}: {consequence}"
            )
    return lines


def _first(lines: list[str]) -> list[str]:
    rest = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"and {rest} more like these"] if rest > 0 else [])


def _consequence(leaf: Any, want: Any, key: Key) -> str:
    """Return what is wrong with a leaf that was saved; nothing if it fits."""
    leaf, want = _without_key_type(leaf, want), _without_key_type(want, leaf)
    if tuple(getattr(leaf, "shape", ())) != tuple(getattr(want, "shape", ())):
        return "another shape"
    if not (is_array(leaf) and is_array(want)):
        is_like = _kind(leaf) == _kind(want)
        return "" if is_like else "a restore would make another kind of number of it"
    if leaf.dtype == want.dtype or _was_number(leaf, want):
        return ""
    if is_floating(leaf) and is_floating(want):
        if bits(leaf.dtype) < bits(want.dtype):
            return "it lacks the bits that are wanted, for it is of another form"
        return f"a restore would round {_role(key)}"
    return f"a restore would cast {_role(key)}, for they are kept in another form"


def _was_number(leaf: Any, want: Any) -> bool:
    """Return whether a scalar may have been a Python number when it was saved.

    Orbax describes those in 64 bits; JAX takes them as its widest.
    """
    if want.shape or not jnp.issubdtype(want.dtype, jnp.number):
        return False
    is_loose = jnp.issubdtype(want.dtype, jnp.integer) or getattr(
        want, "weak_type", False
    )
    return is_loose and jax.dtypes.canonicalize_dtype(leaf.dtype) == want.dtype


def _kind(x: Any) -> Any:
    """Return what a number is, whatever its width; None for what is none."""
    dtype = x.dtype if is_array(x) else np.asarray(x).dtype
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)


def _role(key: Key) -> str:
    return "the masters" if "master_params" in key else "the values"


def _without_key_type(leaf: Any, other: Any) -> Any:
    """Return the data of a PRNG key, where the other is not one."""
    is_key, other_is_key = (
        is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        for x in (leaf, other)
    )
    return jax.eval_shape(jax.random.key_data, leaf) if is_key > other_is_key else leaf
