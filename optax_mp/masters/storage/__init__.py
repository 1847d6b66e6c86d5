"""Storages: how the masters of `mixed_precision` are kept between steps.

`Storage` in `_contract.py` says what a storage must do. Each storage has a file of its
own: `FullCopy` keeps the whole master, `Split` only the bits that a 16-bit param lacks.
"""

from optax_mp.masters.storage._contract import Storage
from optax_mp.masters.storage._full_copy import FullCopy
from optax_mp.masters.storage._split import Split

__all__ = ["FullCopy", "Split", "Storage"]
