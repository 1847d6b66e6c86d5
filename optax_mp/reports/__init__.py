"""Reports for people: data that prints as a table.

`memory_report` (`_memory.py`) counts the bytes of params and optimizer state, also of a
model that is only planned. `gradient_range_report` (`_gradient_range.py`) counts
gradients by magnitude, and says what each low-precision format (`_formats.py`) would
lose.
"""

from optax_mp.reports._gradient_range import (
    FormatRange,
    GradientRangeReport,
    gradient_range_report,
)
from optax_mp.reports._memory import MemoryReport, MemoryRow, memory_report
from optax_mp.reports._precision import PrecisionReport, precision_report
from optax_mp.reports._precision_rows import PrecisionCause, PrecisionProduct

__all__ = [
    "FormatRange",
    "GradientRangeReport",
    "MemoryReport",
    "MemoryRow",
    "PrecisionCause",
    "PrecisionProduct",
    "PrecisionReport",
    "gradient_range_report",
    "memory_report",
    "precision_report",
]
