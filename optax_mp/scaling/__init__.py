"""Loss scaling: keep small float16 gradients from becoming 0.

The loss is multiplied by a factor, the loss scale, before it is differentiated, and the
gradients are divided by it before they reach the optimizer. A step with a non-finite
gradient is skipped and lowers the scale; a long run of finite steps raises it.

The names below are the public ones. One module each:

- `_rule`: how the scale grows and shrinks, as a pure function of three counters, and
  checks of its settings.
- `_unscale`: multiply and divide trees by a scale in float32, and check them.
- `_state`: `LossScaleState`, how to find it in any optimizer state, and
  `check_loss_scale`, which stops a run that skips too many steps.
- `_loss_scaling`: `dynamic_loss_scale` and `static_loss_scale`, for optax.
- `_overwrite`: leaves that are replaced by their gradient, as in flax's fp8 layers.
- `_mark`: how a link in a chain tells later links that a step is skipped.
- `_gradients`: gradients of a scaled loss, for loops with an optimizer state.
- `_values`: loss scales for loops without an optimizer state.
"""

from optax_mp.scaling._gradients import scale_loss, value_and_grad
from optax_mp.scaling._loss_scaling import dynamic_loss_scale, static_loss_scale
from optax_mp.scaling._state import LossScaleState, check_loss_scale, loss_scale
from optax_mp.scaling._values import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
)

__all__ = [
    "DynamicLossScale",
    "LossScaleState",
    "NoOpLossScale",
    "StaticLossScale",
    "check_loss_scale",
    "dynamic_loss_scale",
    "dynamic_scale_grad",
    "dynamic_scale_value_and_grad",
    "loss_scale",
    "scale_loss",
    "static_loss_scale",
    "value_and_grad",
]
