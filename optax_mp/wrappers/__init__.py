"""What every wrapper of an optimizer is made of.

- `_mistakes`: errors and warnings for arguments and transforms in the wrong place.
- `_context`: what a wrapper tells the transformation inside, and the class of both.
- `_inner`: one update of the wrapped optimizer, its arguments and its errors.
- `_choose`: take a step, or skip it entirely; and what is added to a param in it.
"""
