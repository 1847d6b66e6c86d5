"""Mixed-precision training for any optax optimizer.

The package has three levels:

1. `core/`: the parts of every wrapper of an optimizer: trees, dtypes, a policy, and the
   protocol between wrappers.
2. `core/masters` and `core/scaling`: masters and loss scales. The core is all that a
   step with these needs, and it imports nothing else of the package.
3. The other folders, which build on the core and not on each other: `autocast`,
   `averages`, `checkpoints`, `compact`, `devices`, `release` and `reports`; and
   `jaxprs`, tools with which some of them read and change programs.

All public names are listed here, in this order. The classes of reports and
states, for annotations and `isinstance`, are only in the folders: `optax_mp.reports`,
`optax_mp.autocast`, `optax_mp.compact` and `optax_mp.averages`.
"""

import importlib
import threading
from typing import TYPE_CHECKING, Any

# isort: off
if TYPE_CHECKING:
    # 1. What a wrapper is made of: dtypes of params, computation and outputs; casts and
    # checks of trees; the category of all warnings.
    from optax_mp.core._policy import Policy as Policy, get_policy as get_policy
    from optax_mp.core._dtypes import half_dtype as half_dtype
    from optax_mp.core.trees._tree import (
        all_finite as all_finite,
        cast_floating as cast_floating,
        nonfinite_paths as nonfinite_paths,
        select_tree as select_tree,
    )
    from optax_mp.core._warnings import MixedPrecisionWarning as MixedPrecisionWarning

    # 2. Masters: high-precision weights in the optimizer state, and how they are kept.
    from optax_mp.core.masters._transform import mixed_precision as mixed_precision
    from optax_mp.core.masters._access import (
        follow_params as follow_params,
        master_params as master_params,
        replace_master_params as replace_master_params,
    )
    from optax_mp.core.masters._split import Split as Split
    from optax_mp.core.masters._storage import (
        FullCopy as FullCopy,
        MixedPrecisionState as MixedPrecisionState,
    )

    # Loss scales, for float16: scale the loss, skip steps that overflow.
    from optax_mp.core.scaling._loss_scaling import (
        dynamic_loss_scale as dynamic_loss_scale,
        static_loss_scale as static_loss_scale,
    )
    from optax_mp.core.scaling._gradients import (
        scale_loss as scale_loss,
        value_and_grad as value_and_grad,
    )
    from optax_mp.core.scaling._state import (
        LossScaleState as LossScaleState,
        check_loss_scale as check_loss_scale,
        loss_scale as loss_scale,
    )

    # Loss scales as values, for loops without an optimizer state.
    from optax_mp.core.scaling._values import (
        DynamicLossScale as DynamicLossScale,
        NoOpLossScale as NoOpLossScale,
        StaticLossScale as StaticLossScale,
        dynamic_scale_grad as dynamic_scale_grad,
        dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
    )

    # 3. Run a float32 function in mixed precision.
    from optax_mp.autocast._amp import amp as amp, amp_stop as amp_stop
    from optax_mp.autocast._report import amp_report as amp_report
    from optax_mp.autocast._rules import default_amp_rules as default_amp_rules

    # A moving average of the weights.
    from optax_mp.averages._average import (
        average_params as average_params,
        with_average as with_average,
    )

    # Convert the state of a run to another form.
    from optax_mp.checkpoints._convert import convert_opt_state as convert_opt_state

    # Low-bit optimizer states, and training without masters.
    from optax_mp.compact._low_bit import low_bit_state as low_bit_state
    from optax_mp.compact._stochastic import stochastic_rounding as stochastic_rounding

    # Many devices.
    from optax_mp.devices._offload import offload as offload
    from optax_mp.devices._shardings import state_shardings as state_shardings
    from optax_mp.devices._sum import sum_gradients as sum_gradients
    from optax_mp.devices._zero1 import zero1 as zero1

    # The step of stacked layers in the backward pass, without all gradients at once.
    from optax_mp.release._release import release_gradients as release_gradients
    from optax_mp.release._scan import scan_layers as scan_layers

    # In which precision a function runs, what to log while training, what low precision
    # loses, and how much memory is needed.
    from optax_mp.reports._precision import precision_report as precision_report
    from optax_mp.reports._metrics import metrics as metrics
    from optax_mp.reports._gradient_range import (
        gradient_range_report as gradient_range_report,
    )
    from optax_mp.reports._updates import update_report as update_report
    from optax_mp.reports._memory_report import memory_report as memory_report
# isort: on

# The same once more: a name is imported when it is first used, so that a program pays
# for the parts that it uses. All of them take half as long as JAX and optax.
_HOMES = {
    "core._policy": "Policy get_policy",
    "core._dtypes": "half_dtype",
    "core.trees._tree": "all_finite cast_floating nonfinite_paths select_tree",
    "core._warnings": "MixedPrecisionWarning",
    "core.masters._transform": "mixed_precision",
    "core.masters._access": "follow_params master_params replace_master_params",
    "core.masters._split": "Split",
    "core.masters._storage": "FullCopy MixedPrecisionState",
    "core.scaling._loss_scaling": "dynamic_loss_scale static_loss_scale",
    "core.scaling._gradients": "scale_loss value_and_grad",
    "core.scaling._state": "LossScaleState check_loss_scale loss_scale",
    "core.scaling._values": "DynamicLossScale NoOpLossScale StaticLossScale "
    "dynamic_scale_grad dynamic_scale_value_and_grad",
    "autocast._amp": "amp amp_stop",
    "autocast._report": "amp_report",
    "autocast._rules": "default_amp_rules",
    "averages._average": "average_params with_average",
    "checkpoints._convert": "convert_opt_state",
    "compact._low_bit": "low_bit_state",
    "compact._stochastic": "stochastic_rounding",
    "devices._offload": "offload",
    "devices._shardings": "state_shardings",
    "devices._sum": "sum_gradients",
    "devices._zero1": "zero1",
    "release._release": "release_gradients",
    "release._scan": "scan_layers",
    "reports._precision": "precision_report",
    "reports._metrics": "metrics",
    "reports._gradient_range": "gradient_range_report",
    "reports._updates": "update_report",
    "reports._memory_report": "memory_report",
}

# Names of earlier versions, and what to write instead.
_STEP = (
    "write `updates, opt_state = tx.update(grads, opt_state, params)` and "
    "`params = optax.apply_updates(params, updates)`"
)
_WITHDRAWN = {
    "take_step": _STEP,
    "step_report": f"there are no kernels to report, since XLA makes the step: {_STEP}",
}

_IMPORTS = threading.RLock()

__version__ = "1.1.0"

# Type checkers take the names above.
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    " ".join(_HOMES.values()).split()
)


def __getattr__(name: str) -> Any:
    """Return a public name, or a folder; import it."""
    for home, names in _HOMES.items():
        if home.startswith(f"{name}."):
            return _imported(name)
        if name in names.split():
            return globals().setdefault(name, getattr(_imported(home), name))
    message = f"module 'optax_mp' has no attribute {name!r}"
    if name in _WITHDRAWN:
        message += f" any more; {_WITHDRAWN[name]}."
    raise AttributeError(message)


def _imported(module: str) -> Any:
    # One at a time: two threads that import modules which need each other may find one
    # of them half made.
    with _IMPORTS:
        return importlib.import_module(f"optax_mp.{module}")


def __dir__() -> list[str]:
    """Return the public names."""
    return [*globals(), *__all__]
