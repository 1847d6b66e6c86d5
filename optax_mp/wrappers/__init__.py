"""What every wrapper of an optimizer is made of.

- `_arguments`: errors for arguments in the wrong place.
- `_nesting`: errors and warnings for transforms in the wrong order.
- `_context`: what a wrapper tells the transformation inside, and the class of both.
- `_inner`: one update of the wrapped optimizer, its arguments and its errors.
- `_choose`: take a step, or skip it entirely.
"""
