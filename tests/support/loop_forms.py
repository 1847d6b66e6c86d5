"""The forms in which loops of frameworks keep their optimizer's state."""

import dataclasses

import jax.numpy as jnp
import optax
from own_storages import TwoBfloat16

from optax_mp import (
    Split,
    dynamic_loss_scale,
    low_bit_state,
    mixed_precision,
    stochastic_rounding,
)

ADAMW = optax.adamw(1e-3)
FORMS = {
    "bare": ADAMW,
    "FullCopy": mixed_precision(ADAMW),
    "Split": mixed_precision(ADAMW, storage=Split()),
    "two arrays": mixed_precision(ADAMW, storage=TwoBfloat16()),
    "5.1 bytes": mixed_precision(low_bit_state(ADAMW), storage=Split(bits=8)),
    "16 bits": mixed_precision(low_bit_state(ADAMW, bits=16)),
    "bfloat16": mixed_precision(low_bit_state(ADAMW, dtype=jnp.bfloat16)),
    "chance": stochastic_rounding(low_bit_state(ADAMW)),
    "scaled": dynamic_loss_scale(mixed_precision(low_bit_state(ADAMW))),
    "accumulated": optax.MultiSteps(mixed_precision(low_bit_state(ADAMW)), 2),
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a loop needs of a form: it differs in `MultiSteps`."""

    tx: optax.GradientTransformationExtraArgs

    @classmethod
    def of(cls, name):
        tx = FORMS[name]
        if isinstance(tx, optax.MultiSteps):
            tx = tx.gradient_transformation()
        return cls(optax.with_extra_args_support(tx))


def collectives(compiled):
    """Return how often a compiled program talks between devices, by the operation."""
    text = compiled.as_text()
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    counts = {name: text.count(f" {name}(") for name in names}
    return {name: count for name, count in counts.items() if count}


def wanted_collectives(name):
    """Return what a form's step may send: a loss scale, whether all is finite."""
    return {"all-reduce": 1} if name == "scaled" else {}


def name_of(check, form):
    """Return how a check of one form is called on a command line."""
    return f"{check}[{form.replace(' ', '_')}]"
