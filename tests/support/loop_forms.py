"""The forms in which loops of frameworks keep their optimizer's state."""

import optax

from optax_mp import (
    Split,
    dynamic_loss_scale,
    low_bit_state,
    mixed_precision,
    stochastic_rounding,
)

ADAMW = optax.adamw(1e-3)
_FORMS = {
    "bare": ADAMW,
    "FullCopy": mixed_precision(ADAMW),
    "Split": mixed_precision(ADAMW, storage=Split()),
    "5.1 bytes": mixed_precision(low_bit_state(ADAMW), storage=Split(bits=8)),
    "16 bits": mixed_precision(low_bit_state(ADAMW, bits=16)),
    "chance": stochastic_rounding(low_bit_state(ADAMW)),
    "scaled": dynamic_loss_scale(mixed_precision(low_bit_state(ADAMW))),
    "accumulated": optax.MultiSteps(
        mixed_precision(low_bit_state(ADAMW)), 2
    ).gradient_transformation(),
}
FORMS = {name: optax.with_extra_args_support(tx) for name, tx in _FORMS.items()}
