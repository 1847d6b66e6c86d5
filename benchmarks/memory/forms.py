"""The forms of an optimizer that benchmarks compare, and two ways to take a step."""

import functools
from collections.abc import Callable
from typing import Any

import optax

import optax_mp

BF16, F32 = "bfloat16", "float32"
adamw = functools.partial(optax.adamw, 1e-3)
masters = optax_mp.mixed_precision


def compact(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer with 8-bit state and split masters: AdamW at 5.1 bytes."""
    return masters(optax_mp.low_bit_state(inner), storage=optax_mp.Split(bits=8))


def clipped() -> optax.GradientTransformation:
    """Return the same behind clipping by the global norm."""
    rate = optax.linear_schedule(1e-3, 0.0, 100)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return compact(chain)


def scaled(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with a loss scale around it."""
    return optax_mp.dynamic_loss_scale(inner)


def linked(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with a loss scale in front of it, in a chain."""
    return optax.chain(optax_mp.dynamic_loss_scale(), inner)


def split(bits: int) -> optax.GradientTransformation:
    """Return AdamW with split masters."""
    return masters(adamw(), storage=optax_mp.Split(bits))


def unmastered() -> optax.GradientTransformation:
    """Return AdamW at 4.1 bytes per weight."""
    return optax_mp.stochastic_rounding(optax_mp.low_bit_state(adamw()))


# Form: (transformation, dtype of params, of gradients, bytes per weight at the least).
FORMS: dict[str, tuple[Callable[[], Any], str, str, float]] = {
    "float32": (adamw, F32, F32, 28),
    "apply_if_finite": (lambda: optax.apply_if_finite(adamw(), 9), F32, F32, 32),
    "masters": (lambda: masters(adamw()), BF16, BF16, 30),
    "masters, float32 gradients": (lambda: masters(adamw()), BF16, F32, 32),
    "loss scale": (lambda: scaled(masters(adamw())), BF16, BF16, 32),
    "loss scale, float32 gradients": (lambda: scaled(masters(adamw())), BF16, F32, 36),
    "link": (lambda: linked(masters(adamw())), BF16, BF16, 32),
    "link, float32 gradients": (lambda: linked(masters(adamw())), BF16, F32, 36),
    "Split(16)": (lambda: split(16), BF16, BF16, 26),
    "Split(8)": (lambda: split(8), BF16, BF16, 24),
    "8-bit state": (lambda: optax_mp.low_bit_state(adamw()), F32, F32, 16.28),
    "5.1 bytes": (lambda: compact(adamw()), BF16, BF16, 12.28),
    "5.1 bytes, clipped": (clipped, BF16, BF16, 14.28),
    "5.1 bytes, loss scale": (lambda: scaled(compact(adamw())), BF16, BF16, 14.28),
    "stochastic rounding": (unmastered, BF16, BF16, 10.28),
}


# As above, for other optimizers.
OTHERS: dict[str, tuple[Callable[[], Any], str, str, float]] = {
    "Lion, float32": (lambda: optax.lion(1e-3), F32, F32, 20),
    "Lion, compact": (lambda: compact(optax.lion(1e-3)), BF16, BF16, 10.14),
    "SGD, float32": (lambda: optax.sgd(1e-3, 0.9), F32, F32, 20),
    "SGD, compact": (lambda: compact(optax.sgd(1e-3, 0.9)), BF16, BF16, 10.14),
}
# As above. The limit leaves out products.
muon = functools.partial(optax.contrib.muon, 1e-3)
MUON: dict[str, tuple[Callable[[], Any], str, str, float]] = {
    "Muon, float32": (muon, F32, F32, 20),
    "Muon, masters": (lambda: masters(muon()), BF16, BF16, 22),
    "Muon, compact": (lambda: compact(muon()), BF16, BF16, 10.14),
}
ALL_FORMS = FORMS | OTHERS | MUON


# Donated buffers go to results of the same shape in order: hence this order.
def by_optax(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Return a step with `tx.update`."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def in_one_pass(
    tx: optax.GradientTransformation, **settings: Any
) -> Callable[..., Any]:
    """Return a step with `take_step`."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        return optax_mp.take_step(tx, grads, state, params, **settings)

    return step
