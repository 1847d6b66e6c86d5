"""Loss scaling: keep small float16 gradients from becoming 0.

The loss is multiplied by a factor, the loss scale, before it is differentiated, and the
gradients are divided by it before they reach the optimizer. A step with a non-finite
gradient is skipped and lowers the scale; a long run of finite steps raises it.

All public names are in `optax_mp`. One module each:

- `_rule`: how the scale grows and shrinks, as a pure function of three counters, and
  checks of its settings.
- `_unscale`: multiply and divide trees by a scale in float32, and check them.
- `_state`: `LossScaleState`, how to find it in any optimizer state, and
  `check_loss_scale`, which stops a run that skips too many steps.
- `_loss_scaling`: `dynamic_loss_scale` and `static_loss_scale`, for optax.
- `_gradients`: gradients of a scaled loss, for loops with an optimizer state.
- `_values`: loss scales for loops without an optimizer state.
"""
