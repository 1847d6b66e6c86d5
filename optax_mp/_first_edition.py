"""Names of optax_mp 0.1: the modules that its pickles mention, and fields of states."""

import sys
from types import ModuleType
from typing import Any, NoReturn

# Every class that can be in a pickle was public and still is. Only the private modules
# that pickles name are gone.
_OLD_MODULES = (
    "_blocks",  # Quantized
    "_gradient_range",  # GradientRangeReport, FormatRange
    "_loss_scale",  # NoOpLossScale, StaticLossScale, DynamicLossScale
    "_low_bit",  # LowBitState
    "_master_access",  # MixedPrecisionState
    "_memory",  # MemoryReport, MemoryRow
    "_scaling",  # LossScaleState
    "_split",  # Split
    "_stochastic",  # StochasticRoundingState
    "_storage",  # FullCopy
)


def _public_name(name: str) -> Any:
    package = sys.modules["optax_mp"]
    if name not in package.__all__:
        raise AttributeError(f"optax_mp has no public name {name!r}")
    return getattr(package, name)


# An unpickler looks for modules in `sys.modules`. Names are looked up when they are
# used, because the classes are not imported yet.
for _name in _OLD_MODULES:
    _module = ModuleType(f"optax_mp.{_name}", "A module of the first edition.")
    _module.__dict__["__getattr__"] = _public_name
    sys.modules[_module.__name__] = _module

# Counters, by their old names.
RENAMED_FIELDS = {
    "finite_steps": "finite_count",
    "skipped_in_a_row": "skipped_count",
    "step": "step_count",
    "total_skipped": "total_skipped_count",
}

# Fields that states have got since, and their values at `init`.
ADDED_FIELDS = {"nonfinite_index": -1}


def raise_missing_field(state: Any, name: str) -> NoReturn:
    """Raise for a missing field, naming the new name of an old one.

    A state's class uses it as `__getattr__`, which Python calls for what is not there.
    """
    kind, new = type(state).__name__, RENAMED_FIELDS.get(name)
    if new in state._fields:
        raise AttributeError(f"{kind}: `{name}` is now called `{new}`.")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")
