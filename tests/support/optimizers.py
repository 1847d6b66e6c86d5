"""The table: every optimizer that optax has, found from optax itself.

A new optimizer joins by itself as long as its required arguments are named as those of
the others; one that wants something else fails the collection and says what to add.
"""

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

# Values for required parameters, by name: optax names the same thing the same.
_ARGUMENTS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "seed": 0,
    "base_optimizer": optax.adam(1e-2),
    "optimizer": optax.adam(1e-2),
    "adv_optimizer": optax.chain(optax.contrib.normalize(), optax.sgd(1e-2)),
    "inner": optax.adam(1e-2),
}
# Factories in the same modules that are no optimizers: parts of one, which the
# optimizers of the same module contain.
_PARTS = ("scale_by_", "normalize", "reduce_on_plateau", "differentially_private")
# Arguments that differ from the defaults, so that the interesting code runs.
_SETTINGS: dict[str, dict[str, Any]] = {
    "adafactor": {"learning_rate": 1e-2, "min_dim_size_to_factor": 4},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "lion": {"weight_decay": 1e-2},
    "noisy_sgd": {"key": 0},
    "galore": {"rank": 2},
    "lbfgs": {"memory_size": 3, "linesearch": None, "learning_rate": 1e-2},
}
# What optax announces when it makes one, word for word: any other deprecation is an
# error, so that the weekly run shows it.
_ANNOUNCED = {
    "dpsgd": '"seed" is deprecated and will be removed in optax 0.2.7, use "key"',
    "optimistic_adam": "`optimistic_adam` is deprecated",
}


def _is_optimizer(name: str, factory: Any) -> bool:
    if name.startswith("_") or inspect.isclass(factory) or not callable(factory):
        return False
    origin = factory.func if isinstance(factory, functools.partial) else factory
    module = getattr(origin, "__module__", "")
    if not (module.endswith("_src.alias") or module.startswith("optax.contrib.")):
        return False
    signature = inspect.signature(factory)
    # A few have no annotation, and are known by their learning rate.
    says_so = "GradientTransformation" in str(signature.return_annotation)
    is_likely = "learning_rate" in signature.parameters
    return (says_so or is_likely) and not name.startswith(_PARTS)


def _builder(
    name: str, factory: Callable[..., Any]
) -> Callable[[], optax.GradientTransformation]:
    settings = dict(_SETTINGS.get(name, {}))
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.default is inspect.Parameter.empty:
            if parameter.name not in _ARGUMENTS:
                raise LookupError(
                    f"optax's {name} wants `{parameter.name}`: add a value to "
                    "_ARGUMENTS in tests/support/optimizers.py"
                )
            settings.setdefault(parameter.name, _ARGUMENTS[parameter.name])
    if name not in _ANNOUNCED:
        return functools.partial(factory, **settings)

    def make() -> optax.GradientTransformation:
        with warnings.catch_warnings():
            text = re.escape(_ANNOUNCED[name])
            warnings.filterwarnings("ignore", text, DeprecationWarning)
            return factory(**settings)

    return make


def _discover() -> dict[str, Callable[[], optax.GradientTransformation]]:
    found = {}
    for module in (optax, optax.contrib):
        for name, factory in sorted(vars(module).items()):
            if _is_optimizer(name, factory):
                found[name] = _builder(name, factory)
    return found


OPTIMIZERS = _discover()
# By default: moments, factored ones, curvature now and then, chance.
A_FEW = {"adamw", "adafactor", "sophia", "noisy_sgd"}
# In what the slow run repeats for several dtypes: those that differ most.
DISTINCT = A_FEW | {"sgd", "lion", "muon", "sam"}
# Takes a gradient for each example, along a leading axis.
PER_EXAMPLE = ("dpsgd",)
# optax's sm3 raises IndexError on scalars.
NO_SCALARS = ("sm3",)


def example_params(dtype: Any, name: str = "") -> dict[str, Any]:
    """Return a small tree with a matrix, a vector and a scalar, for one optimizer."""
    rng = np.random.default_rng(0)
    params = {
        "kernel": rng.normal(size=(6, 5)) * 0.3,
        "layer": [{"bias": rng.normal(size=5) * 0.1}],
        "scale": np.full((1,) if name in NO_SCALARS else (), 1.1),
    }
    # Values that every dtype holds, so that all runs start from the same ones.
    exact = jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn), params)
    return jax.tree.map(lambda x: jnp.asarray(x.astype(dtype)), exact)


def objective(params: Any) -> jax.Array:
    """Return a smooth loss, for the optimizers that evaluate one."""
    return sum(
        jnp.sum((x.astype(jnp.float32) - 0.5) ** 2) for x in jax.tree.leaves(params)
    )


def example_gradients(name: str, params: Any, steps: int, dtype: Any) -> Any:
    """Return random gradients for `steps` steps, stacked along a leading axis."""
    examples = (2,) if name in PER_EXAMPLE else ()
    rng = np.random.default_rng(1)

    def random(leaf):
        numbers = rng.normal(size=(steps, *examples, *leaf.shape))
        return jnp.asarray(numbers.astype(dtype))

    return jax.tree.map(random, params)


def extra_arguments(name: str, grads: Any) -> dict[str, Any]:
    """Return what the optimizer's `update` wants beside gradients and params."""
    value = jnp.float32(1.5)
    return {
        "polyak_sgd": {"value": value},
        "momo": {"value": value},
        "momo_adam": {"value": value},
        "sophia": {"obj_fn": objective},
        "lbfgs": {"value": value, "grad": grads, "value_fn": objective},
    }.get(name, {})
