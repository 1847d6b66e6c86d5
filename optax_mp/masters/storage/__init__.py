"""Storages: how the masters of `mixed_precision` are kept between steps.

`Storage` in `_contract.py` says what a storage does; each member has a file of its own:
`FullCopy` (the master as it is) and `Split` (what a 16-bit param lacks to be its master).
"""

from optax_mp.masters.storage._contract import Storage
from optax_mp.masters.storage._full_copy import FullCopy
from optax_mp.masters.storage._split import Split

__all__ = ["FullCopy", "Split", "Storage"]
