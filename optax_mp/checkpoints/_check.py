"""check_checkpoint: whether a checkpoint matches what it is restored into."""

import optax

from optax_mp._tree import PyTree
from optax_mp.checkpoints._compare import differences, leaves_by_name, unwrap_metadata

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
        saved: what was saved, or a description of it: a tree of anything that has a
            shape and a dtype, or what Orbax returns as metadata.
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
            f"{_CALLER}: `template` is a {type(template).__name__}, expected a state; "
            "pass `jax.eval_shape(tx.init, params)`."
        )
    saved = unwrap_metadata(saved)
    found, expected = leaves_by_name(saved), leaves_by_name(template)
    if expected and not found:
        raise ValueError(
            f"{_CALLER}: `saved` is a {type(saved).__name__} without arrays, expected "
            "a tree of arrays or of anything with a shape and a dtype. A "
            "`CheckpointManager` describes what it did not save itself only if it is "
            "made with `item_handlers=orbax.checkpoint.StandardCheckpointHandler()`."
        )
    lines = differences(found, expected)
    if lines:
        raise ValueError(
            f"{_CALLER}: the checkpoint does not match `template`, expected the same "
            "leaves, shapes and dtypes.\n  " + "\n  ".join(lines) + "\n"
            "Restore into `jax.eval_shape(tx.init, params)` with the `tx` and the "
            "params of the run that saved it. Then change the form with "
            "`optax_mp.convert_opt_state(opt_state, params, tx, new_tx)`, and the "
            "dtype of the params with `optax_mp.cast_floating`."
        )
