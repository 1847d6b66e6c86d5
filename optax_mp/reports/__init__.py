"""Reports for people: data that prints as a table, and scalars for loggers.

`metrics` (`_metrics.py`) finds what a training loop logs in any optimizer state.
`memory_report` (`_memory_report.py`) counts the bytes of params and optimizer state,
also of a model that is only planned. `gradient_range_report` (`_gradient_range.py`)
counts gradients by magnitude, and says what each low-precision format would lose;
`update_report` (`_updates.py`) counts updates that are too small to move a param.
Reports of both kinds can be added (`_leaf_counts.py`). `precision_report`
(`_precision.py`) says in which dtype products run: it traces a function, and follows
where float32 comes from (`_precision_walk.py`).

The functions are in `optax_mp`; the classes that they return are here.
"""

from optax_mp.reports._gradient_range import FormatRange, GradientRangeReport
from optax_mp.reports._memory_report import MemoryReport, MemoryRow
from optax_mp.reports._precision import PrecisionReport
from optax_mp.reports._precision_walk import PrecisionCause, PrecisionProduct
from optax_mp.reports._updates import UpdateReport

__all__ = [
    "FormatRange",
    "GradientRangeReport",
    "MemoryReport",
    "MemoryRow",
    "PrecisionCause",
    "PrecisionProduct",
    "PrecisionReport",
    "UpdateReport",
]
