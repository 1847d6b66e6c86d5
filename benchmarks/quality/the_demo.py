"""The task and the training loop of examples/demo, which is no package, to import."""

# ruff: noqa: E402, F401
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

FOLDER = Path(__file__).parents[2] / "examples" / "demo"
sys.path.append(str(FOLDER))

from model import (
    HELD_OUT_WINDOWS,
    LossFunction,
    Settings,
    attention,
    init_params,
    make_loss,
    predict,
    read_corpus,
    rms_norm,
)
from train import (
    FORMS,
    Form,
    Result,
    calls,
    compact,
    compile_form,
    is_matrix,
    make_adamw,
    make_schedule,
    make_steps,
    scaled,
    train,
    unscaled_value_and_grad,
)


def drawer(text: jax.Array, settings: Settings) -> Callable[[jax.Array], jax.Array]:
    """Return the function that draws a batch of windows of a text by a key."""
    window = np.arange(settings.context + 1)
    shape, last = (settings.batch_size, 1), text.size - window.size
    return lambda key: text[jax.random.randint(key, shape, 0, last) + window]
