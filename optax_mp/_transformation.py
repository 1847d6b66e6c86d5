"""What may be given as an optimizer to wrap."""

from typing import Any

import optax


def as_transformation(
    inner: Any, caller: str, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` in the form that takes extra arguments; the others are for errors.

    Args:
        inner: what should be a transformation.
        caller: the public function at work.
        name: of its argument.
    """
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` would drop the extra arguments.
        update: Any = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{caller}: `{name}` is a {type(inner).__name__}, expected an optax "
            "gradient transformation; call its factory first, as `optax.adamw(1e-3)`."
        )
    return optax.with_extra_args_support(inner)
