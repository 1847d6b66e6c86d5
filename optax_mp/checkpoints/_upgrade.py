"""upgrade_checkpoint: what the first edition saved, as a state of this edition."""

from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from optax_mp._first_edition import ADDED_FIELDS, RENAMED_FIELDS
from optax_mp._states import find_states
from optax_mp._tree import PyTree, spell
from optax_mp.checkpoints._compare import (
    NamedLeaves,
    PathNames,
    differences,
    is_key,
    leaves_by_name,
    names_of,
    unwrap_metadata,
)
from optax_mp.compact import LowBitState, StochasticRoundingState
from optax_mp.loss_scale import LossScaleState
from optax_mp.masters import MixedPrecisionState

# States with a field that had another name in the first edition.
_RENAMED_STATES = (LossScaleState, LowBitState, StochasticRoundingState)


def upgrade_checkpoint(saved: PyTree, template: PyTree) -> PyTree:
    """Return a checkpoint of the first edition in the form of this edition.

    The first edition had other names for counters, its states did not name the storage
    that made them, and its loss scale did not remember which leaf was not finite.
    Leaves are matched by the names along their paths, with the old names of the
    counters. Nothing is rounded, cast or reshaped. Restore the checkpoint without a
    template first:

    - a pickle: what `pickle.load` returns;
    - `flax.serialization`: what `msgpack_restore(encoded_bytes)` returns;
    - Orbax: what `orbax.checkpoint.PyTreeCheckpointer().restore(path)` returns.

    Save the result: from then on it is restored like any other checkpoint.

    Args:
        saved: the restored checkpoint: the state, or params and state.
        template: the same tree in this edition, made by the transformation of the run,
            as arrays or from `jax.eval_shape`.

    Returns:
        The structure of `template` with the saved values, as JAX arrays. If a leaf of
        `template` has a sharding, its array gets it.

    Raises:
        TypeError: if `saved` describes arrays instead of holding them.
        ValueError: if a leaf is missing, is not in the template, or has another shape
            or dtype.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.stochastic_rounding(optax.sgd(0.1, momentum=0.9))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> saved = {"step": 7, "inner_state": [{"trace": {"w": jnp.ones(2)}}, {}]}
        >>> template = jax.eval_shape(tx.init, params)
        >>> state = optax_mp.upgrade_checkpoint(saved, template)
        >>> int(state[0]), state.inner_state[0].trace["w"].tolist()
        (7, [1.0, 1.0])
    """
    saved = unwrap_metadata(saved)
    found, expected = leaves_by_name(saved), leaves_by_name(template)
    # An unpickled state has the new names, because pickles do not hold field names.
    for names, old_names in _old_names(template).items():
        if names not in found and old_names in found:
            found[names] = found.pop(old_names)
    found |= _missing_fields(found, template)
    lines = differences(found, expected)
    if lines:
        raise ValueError(
            "upgrade_checkpoint: the checkpoint does not match `template`, expected "
            "the same leaves, shapes and dtypes except for the names of counters.\n  "
            + "\n  ".join(lines)
            + "\nMake the template with the `tx` and the params of the run that saved "
            "it; change its form afterwards with "
            "`optax_mp.convert_opt_state(opt_state, params, tx, new_tx)`."
        )
    leaves, treedef = tree_flatten_with_path(template)
    values = [
        _as_in_template(found[names_of(path)], leaf)
        if names_of(path) in expected
        else leaf
        for path, leaf in leaves
    ]
    return treedef.unflatten(values)


def is_of_first_edition(saved: PyTree, template: optax.OptState) -> bool:
    """Return whether the first edition of this package saved a checkpoint.

    Args:
        saved: the checkpoint, or a description of it.
        template: the same in this edition.
    """
    found = leaves_by_name(saved)
    has_old_names = any(
        names not in found and old_names in found
        for names, old_names in _old_names(template).items()
    )
    # Unpickled states have the new names, but do not say which storage made them.
    has_storage = any(storage is not None for storage in _storages(template))
    lacks_storage = has_storage and None in _storages(saved)
    return has_old_names or lacks_storage or bool(_missing_fields(found, template))


def _storages(tree: PyTree) -> list[Any]:
    """Return for each state of masters the storage that it names, or None."""
    return [state.storage for _, state in find_states(tree, MixedPrecisionState)]


def _old_names(template: PyTree) -> dict[PathNames, PathNames]:
    """Return the old names of the leaves that were renamed, by their new names."""
    renamed: dict[PathNames, PathNames] = {}
    for path, _ in find_states(template, _RENAMED_STATES):
        above = names_of(path)
        for old_field, field in RENAMED_FIELDS.items():
            renamed[(*above, field)] = (*above, old_field)
    return renamed


def _missing_fields(found: NamedLeaves, template: PyTree) -> NamedLeaves:
    """Return the fields that states of the template have got since they were saved."""
    missing: NamedLeaves = {}
    for path, state in find_states(template, LossScaleState):
        above = names_of(path)
        was_saved = any((*above, field) in found for field in state._fields)
        for field, value in ADDED_FIELDS.items():
            if was_saved and (*above, field) not in found:
                missing[*above, field] = ((*path, GetAttrKey(field)), value)
    return missing


def _as_in_template(path_and_leaf: tuple[Any, Any], want: Any) -> Any:
    """Return a saved leaf as the kind of array or number that the template has."""
    path, leaf = path_and_leaf
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | Number):
        raise TypeError(
            f"upgrade_checkpoint: `saved` has a {type(leaf).__name__} at "
            f"{spell(path)}, expected an array with values; restore the checkpoint "
            "without a template first."
        )
    if isinstance(want, Number):
        return leaf
    if is_key(want) and not is_key(leaf):
        key_data = jnp.asarray(leaf)
        leaf = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(want))
    # This casts nothing: `differences` has compared the dtypes of arrays.
    array = leaf if is_key(leaf) else jnp.asarray(leaf, want.dtype)
    sharding = getattr(want, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)
