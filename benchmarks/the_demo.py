"""The task and the training loop of examples/demo, which is no package, to import."""

# ruff: noqa: E402, F401
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "demo"
sys.path.append(str(FOLDER))

from model import (
    HELD_OUT_WINDOWS,
    LossFunction,
    Settings,
    attention,
    init_params,
    make_loss,
    read_corpus,
    rms_norm,
)
from train import (
    FORMS,
    Form,
    Result,
    calls,
    compact,
    is_matrix,
    make_adamw,
    make_schedule,
    make_steps,
    scaled,
    train,
    unscaled_value_and_grad,
)
