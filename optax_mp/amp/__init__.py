"""Autocast: any JAX function with its matrix products in 16 bits."""

from optax_mp.amp._amp import amp, amp_stop
from optax_mp.amp._report import AmpOperation, AmpReport, amp_report
from optax_mp.amp._rules import default_amp_rules

__all__ = [
    "AmpOperation",
    "AmpReport",
    "amp",
    "amp_report",
    "amp_stop",
    "default_amp_rules",
]
