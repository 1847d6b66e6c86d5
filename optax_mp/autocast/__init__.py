"""Autocast: run any JAX function with its matrix products in 16 bits.

Public, in `optax_mp`:

- `amp`: run a function in mixed precision.
- `amp_stop`: keep amp out of a part of a function.
- `amp_report`: an `AmpReport` of `AmpOperation`s, the precision of each operation and
  the reason.
- `default_amp_rules`: how each operation runs.

A call is traced to a jaxpr, planned and run. In this order, read:

- `_rules`: which rule an operation follows, a word or a function of the user.
- `_lattice`: the precision of a value.
- `_plan`: from the rules to the precision of every value. It looks ahead by `_demand`.
- `_run`: binds each equation again, as planned; `_derivatives`: equations with
  derivative rules.
- `_changes`: writes back the changes that a function makes to Flax NNX modules.
- `_report`: the plan as a table, and the error of the outputs.

Only `optax_mp.jaxprs` knows how equations use the jaxprs inside them.
"""

from optax_mp.autocast._report import AmpOperation, AmpReport

__all__ = ["AmpOperation", "AmpReport"]
