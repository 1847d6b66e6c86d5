"""The parts of every wrapper of an optimizer.

- `_protocol`: what a wrapper tells the transformation inside, and one update of it.
- `_arguments`: params, gradients and state of an update, matched and checked.
- `_choose`: take a step, or skip it entirely; and the mark of a skipped step.
- `_updates`: what is added to a param, in a step or without one.
- `_mistakes`: errors for wrong arguments, and transforms in the wrong order.
"""
