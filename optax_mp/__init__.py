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
from optax_mp.checkpoints import (
    check_checkpoint,
    convert_opt_state,
    upgrade_checkpoint,
)
from optax_mp.compact._blocks import Quantized
from optax_mp.compact._low_bit import LowBitState, low_bit_state
from optax_mp.compact._stochastic import StochasticRoundingState, stochastic_rounding
from optax_mp.devices import check_replicas, zero1
from optax_mp.loss_scale._check import check_loss_scale
from optax_mp.loss_scale._gradients import (
    dynamic_scale_grad,
    dynamic_scale_value_and_grad,
    loss_scale,
    scale_loss,
    value_and_grad,
)
from optax_mp.loss_scale._rule import DynamicLossScale, NoOpLossScale, StaticLossScale
from optax_mp.loss_scale._transform import (
    LossScaleState,
    dynamic_loss_scale,
    static_loss_scale,
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
from optax_mp.reports import (
    FormatRange,
    GradientRangeReport,
    MemoryReport,
    MemoryRow,
    gradient_range_report,
    memory_report,
)

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
