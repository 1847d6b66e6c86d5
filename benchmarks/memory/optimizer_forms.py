"""The forms of an optimizer that benchmarks compare, and the step that all take."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import by_hand
import jax
import optax

import optax_mp

BF16, F32 = "bfloat16", "float32"
Shapes = Sequence[tuple[int, ...]]
adamw = functools.partial(optax.adamw, 1e-3)
masters = optax_mp.mixed_precision


@dataclass(frozen=True)
class Form:
    """A way to keep an optimizer.

    Attributes:
        make: makes the transformation.
        param_dtype: the dtype of the params.
        grad_dtype: the dtype of the gradients.
        reads: how often a step reads the gradients at the least: twice where it has to
            know all of them before it changes one param.
    """

    make: Callable[[], optax.GradientTransformation]
    param_dtype: str = BF16
    grad_dtype: str = BF16
    reads: int = 1

    def arrays(self, shapes: Shapes) -> tuple[Any, Any, Any]:
        """Return descriptions of params of these shapes, state and gradients."""

        def tree(dtype: str) -> Any:
            made = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
            return {f"w{i:03}": leaf for i, leaf in enumerate(made)}

        params = tree(self.param_dtype)
        state = jax.eval_shape(self.make().init, params)
        return params, state, tree(self.grad_dtype)

    def limit(self, shapes: Shapes) -> float:
        """Return the bytes per weight that a step moves at the least.

        Params and state are read and written once.
        """
        params, state, grads = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(each))
            for each in self.arrays(shapes)
        )
        weights = sum(map(math.prod, shapes))
        return (2 * (params + state) + self.reads * grads) / weights


def compact(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer with 8-bit state and masters of 24 bits."""
    return masters(optax_mp.low_bit_state(inner), storage=optax_mp.Split(bits=8))


def clipped(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` behind clipping by the norm of all gradients."""
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def scaled(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with a loss scale around it."""
    return optax_mp.dynamic_loss_scale(inner)


def split(bits: int) -> optax.GradientTransformation:
    """Return AdamW with split masters."""
    return masters(adamw(), storage=optax_mp.Split(bits))


def unmastered() -> optax.GradientTransformation:
    """Return AdamW with 8-bit state and no masters."""
    return optax_mp.stochastic_rounding(optax_mp.low_bit_state(adamw()))


FORMS = {
    "float32": Form(adamw, F32, F32),
    "apply_if_finite": Form(lambda: optax.apply_if_finite(adamw(), 9), F32, F32, 2),
    "masters": Form(lambda: masters(adamw())),
    "masters, float32 gradients": Form(lambda: masters(adamw()), grad_dtype=F32),
    "loss scale": Form(lambda: scaled(masters(adamw())), reads=2),
    "loss scale, float32 gradients": Form(
        lambda: scaled(masters(adamw())), grad_dtype=F32, reads=2
    ),
    "Split(16)": Form(lambda: split(16)),
    "Split(8)": Form(lambda: split(8)),
    "8-bit state": Form(lambda: optax_mp.low_bit_state(adamw()), F32, F32),
    "compact": Form(lambda: compact(adamw())),
    "compact, clipped": Form(lambda: compact(clipped(adamw())), reads=2),
    "compact, loss scale": Form(lambda: scaled(compact(adamw())), reads=2),
    "stochastic rounding, 8-bit state": Form(unmastered),
    "by hand": Form(by_hand.by_hand),
    "by hand, clipped": Form(lambda: by_hand.by_hand(max_norm=1.0), reads=2),
}


def by_optax(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Return the step of (params, state, grads) by `tx.update`."""

    # Donated buffers go to results of the same shape in order: hence this order.
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step
