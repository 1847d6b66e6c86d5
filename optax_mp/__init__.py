"""Mixed-precision training for any optax optimizer."""

from optax_mp import _first_edition  # noqa: F401, lets old pickles load
from optax_mp._dtypes import half_dtype
from optax_mp._policy import Policy, get_policy
from optax_mp._tree import all_finite, cast_floating, nonfinite_paths, select_tree
from optax_mp.amp import (
    AmpOperation,
    AmpReport,
    amp,
    amp_report,
    amp_stop,
    default_amp_rules,
)
from optax_mp.checkpoints._check import check_checkpoint
from optax_mp.checkpoints._convert import convert_opt_state
from optax_mp.checkpoints._upgrade import upgrade_checkpoint
from optax_mp.compact._blocks import Quantized
from optax_mp.compact._low_bit import LowBitState, low_bit_state
from optax_mp.compact._stochastic import StochasticRoundingState, stochastic_rounding
from optax_mp.devices._replicas import check_replicas
from optax_mp.devices._zero1 import zero1
from optax_mp.loss_scale import (
    DynamicLossScale,
    LossScaleState,
    NoOpLossScale,
    StaticLossScale,
    check_loss_scale,
    dynamic_loss_scale,
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    loss_scale,
    scale_loss,
    static_loss_scale,
    value_and_grad,
)
from optax_mp.masters import (
    FullCopy,
    MixedPrecisionState,
    Split,
    Storage,
    master_params,
    mixed_precision,
    replace_master_params,
)
from optax_mp.reports._gradient_range import (
    FormatRange,
    GradientRangeReport,
    gradient_range_report,
)
from optax_mp.reports._memory import MemoryReport, MemoryRow, memory_report

__version__ = "0.1.0"

__all__ = [
    "AmpOperation",
    "AmpReport",
    "DynamicLossScale",
    "FormatRange",
    "FullCopy",
    "GradientRangeReport",
    "LossScaleState",
    "LowBitState",
    "MemoryReport",
    "MemoryRow",
    "MixedPrecisionState",
    "NoOpLossScale",
    "Policy",
    "Quantized",
    "Split",
    "StaticLossScale",
    "StochasticRoundingState",
    "Storage",
    "all_finite",
    "amp",
    "amp_report",
    "amp_stop",
    "cast_floating",
    "check_checkpoint",
    "check_loss_scale",
    "check_replicas",
    "convert_opt_state",
    "default_amp_rules",
    "dynamic_loss_scale",
    "dynamic_scale_grad",
    "dynamic_scale_value_and_grad",
    "get_policy",
    "gradient_range_report",
    "half_dtype",
    "loss_scale",
    "low_bit_state",
    "master_params",
    "memory_report",
    "mixed_precision",
    "nonfinite_paths",
    "replace_master_params",
    "scale_loss",
    "select_tree",
    "static_loss_scale",
    "stochastic_rounding",
    "upgrade_checkpoint",
    "value_and_grad",
    "zero1",
]
