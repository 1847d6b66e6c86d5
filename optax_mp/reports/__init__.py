"""Reports for people: data that prints as a table, and scalars for loggers.

`metrics` (`_metrics.py`) finds what a training loop logs in any optimizer state.
`memory_report` (`_memory_report.py`) counts the bytes of params and optimizer state,
also of a model that is only planned. `gradient_range_report` and `update_report`
(`_counts.py`) count gradients by magnitude, and say what each low-precision format
would lose, and updates that are too small to move a param.
`precision_report` (`_precision.py`) says in which dtype products run: it traces a
function, and follows where float32 comes from (`_precision_walk.py`).
`collectives_report` (`_collectives.py`) reads from the text of a compiled step what it
sends between devices.

The functions are in `optax_mp`; here are the classes of what they return.
"""

from optax_mp.reports._collectives import CollectiveRow, CollectivesReport
from optax_mp.reports._counts import FormatRange, GradientRangeReport, UpdateReport
from optax_mp.reports._memory_report import MemoryReport, MemoryRow
from optax_mp.reports._precision import PrecisionReport
from optax_mp.reports._precision_walk import PrecisionCause, PrecisionProduct

__all__ = [
    "CollectiveRow",
    "CollectivesReport",
    "FormatRange",
    "GradientRangeReport",
    "MemoryReport",
    "MemoryRow",
    "PrecisionCause",
    "PrecisionProduct",
    "PrecisionReport",
    "UpdateReport",
]
