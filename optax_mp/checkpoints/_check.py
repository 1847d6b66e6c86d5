"""check_checkpoint: whether a checkpoint matches the state to restore into.

Leaves are compared name by name.
"""

from functools import partial
from numbers import Number
from typing import Any

import jax
import optax
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from optax_mp._dtypes import bits
from optax_mp.trees._tree import PyTree, describe, is_array, is_floating, is_key, spell

_CALLER = "check_checkpoint"


def check_checkpoint(saved: PyTree, template: optax.OptState) -> None:
    """Raise if a checkpoint does not match the state that it would be restored into.

    Call this before you restore. Orbax casts what it restores to the dtypes of the
    template: with a template of 16-bit masters it rounds the float32 masters that were
    saved, without any error. `flax.serialization` checks neither dtypes nor shapes.

    Containers may have lost their types, as in metadata and state dicts: fields of a
    NamedTuple, keys and indices are compared by name. A PRNG key matches its data,
    which is what Orbax saves. Nodes without arrays (None, `optax.MaskedNode()`, an
    empty state) may be present on one side only.

    Args:
        saved: the saved tree, or a description of it: a tree of anything that has a
            shape and a dtype, or the metadata that Orbax returns.
        template: the state, or params and state, to restore into, as arrays or from
            `jax.eval_shape`.

    Raises:
        TypeError: if `template` is the optimizer itself.
        ValueError: if a leaf is missing, is not in the template, or has another shape
            or dtype.

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

        With a `CheckpointManager` pass `manager.item_metadata(step)`; make the manager
        with `item_handlers=orbax.checkpoint.StandardCheckpointHandler()`. With Orbax's
        newer interface pass `ocp.metadata(path)`, with `flax.serialization`
        `msgpack_restore(encoded_bytes)`, and with pickle what was loaded.
    """
    if isinstance(template, optax.GradientTransformation):
        raise TypeError(
            f"{_CALLER}: expected `template` to be a state, got a "
            f"{type(template).__name__}; pass `jax.eval_shape(tx.init, params)`."
        )
    saved_leaves = leaves_by_name(unwrap_metadata(saved))
    lines = differences(saved_leaves, leaves_by_name(template))
    if lines and not saved_leaves:
        raise ValueError(
            f"{_CALLER}: expected arrays in `saved`, got none; to describe what it did "
            "not save itself, a `CheckpointManager` needs "
            "`item_handlers=orbax.checkpoint.StandardCheckpointHandler()`."
        )
    if lines:
        raise ValueError(
            f"{_CALLER}: expected the leaves, shapes and dtypes of `template` in the "
            "checkpoint, got others.\n  " + "\n  ".join(lines) + "\nRestore into "
            "`jax.eval_shape(tx.init, params)` of the run that saved it. Then change "
            "the form with `optax_mp.convert_opt_state(opt_state, params, tx, new_tx)`,"
            " and the dtype of the params with `optax_mp.cast_floating`."
        )


# Path and leaf by the names along the path, without the types of the containers.
NamedLeaves = dict[tuple[str, ...], tuple[Any, Any]]

_MOST_SHOWN = 3  # differences of each kind


def unwrap_metadata(saved: PyTree) -> PyTree:
    """Return the tree inside the objects that Orbax returns as metadata."""
    for name in ("item_metadata", "metadata"):
        if all_leaves([saved]) and not is_array(saved):
            saved = getattr(saved, name, saved)
    return saved


def names_of(path: Any) -> tuple[str, ...]:
    """Return the names along a path."""
    names = tuple(keystr((entry,), simple=True) for entry in path)
    # Flax's boxes hold their array in `value`; its pure trees have no boxes.
    return names[:-1] if names[-1:] == ("value",) else names


# By name and not by path: metadata and state dicts have dicts and lists where states
# have NamedTuples and tuples.
def leaves_by_name(tree: PyTree) -> NamedLeaves:
    """Return path and leaf of every number and array, by the names along the path."""
    return {
        names_of(path): (path, leaf)
        for path, leaf in tree_flatten_with_path(tree)[0]
        if is_array(leaf) or isinstance(leaf, Number)
    }


def differences(saved: NamedLeaves, expected: NamedLeaves) -> list[str]:
    """Return a line for each difference between a checkpoint and a template.

    Those that a restore would not raise for come first.
    """
    changed, missing = [], []
    for names, (path, want) in expected.items():
        wanted = f"expected {spell(path)} to be {describe(want)}"
        if names not in saved:
            missing.append(f"{wanted}, got none")
        elif consequence := _consequence(leaf := saved[names][1], want, names):
            changed.append(f"{wanted}, got {describe(leaf)}: {consequence}")
    # Shifts belong to codes in blocks, from before lines had scales.
    additional = [
        f"expected no {spell(path)}, got {describe(leaf)}"
        + ", made by 1.0.0 or a development version" * (names[-1] == "shifts")
        for names, (path, leaf) in saved.items()
        if names not in expected
    ]
    return [*_shorten(changed), *_shorten(missing), *_shorten(additional)]


def _shorten(lines: list[str]) -> list[str]:
    rest = len(lines) - _MOST_SHOWN
    return lines[:_MOST_SHOWN] + ([f"and {rest} more like these"] if rest > 0 else [])


def _consequence(leaf: Any, want: Any, names: tuple[str, ...]) -> str:
    """Return what a restore would do to a leaf; an empty string if nothing is wrong."""
    if is_key(leaf) != is_key(want):
        key_data = partial(jax.eval_shape, jax.random.key_data)
        leaf, want = (key_data(x) if is_key(x) else x for x in (leaf, want))
    if tuple(getattr(leaf, "shape", ())) != tuple(getattr(want, "shape", ())):
        return "another shape"
    if not (is_array(leaf) and is_array(want)) or leaf.dtype == want.dtype:
        return ""
    are_floats = is_floating(leaf) and is_floating(want)
    # Orbax describes Python's numbers in 64 bits, where JAX uses its widest dtype.
    if not (want.shape or is_key(want)):
        may_be_number = getattr(want, "weak_type", False) or not are_floats
        if may_be_number and jax.dtypes.canonicalize_dtype(leaf.dtype) == want.dtype:
            return ""
    whose = "the masters" if "master_params" in names else "the values"
    if are_floats and bits(leaf.dtype) < bits(want.dtype):
        return "saved in a narrower dtype than the template"
    return f"a restore would {'round' if are_floats else 'cast'} {whose}"
