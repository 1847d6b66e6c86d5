"""Loss scales and 8-bit optimizers of other libraries beside ours.

    python benchmarks comparisons                     # all tables, Markdown
    python benchmarks comparisons --json FILE         # also the tables as data

It wants `pip install -e . --group comparisons`. A library that is not installed is
left out, with a note. All runs are on a CPU. Times are not compared: the threads of two
frameworks in one process slow each other down.

- Loss scales: each library sees the same random steps, finite or not, in some runs. The
  scale is compared with ours after every step, to the bit.
- 8-bit Adam: 200 steps on given gradients. "error" is the distance of the weights from
  float32 Adam's over the way that float32's have gone, both by norm.
"""

import argparse
import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record

import optax_mp

RUNS, SCALE_STEPS, GROWTH_INTERVAL, BAD_SHARE = 5, 2000, 50, 0.02
START_SCALE = 2.0**16
# So wide that no run meets them: not all libraries have limits.
SMALLEST, LARGEST = 2.0**-100, 2.0**100
ADAM_STEPS, SIDE, RATE = 200, 1024, 1e-3
PACKAGES = (
    "jax optax torch flax jmp keras deepspeed megatron-core torchao bitsandbytes"
).split()

Scaler = Callable[[np.ndarray], list[float]]
AdamStep = Callable[[np.ndarray], None]


# Loss scales: from which steps are finite to the scale after each.


def ours(finite: np.ndarray, hysteresis: int = 1) -> list[float]:
    """Return the scales of `dynamic_loss_scale`."""
    tx = optax_mp.dynamic_loss_scale(
        optax.sgd(1.0),
        init_scale=START_SCALE,
        growth_interval=GROWTH_INTERVAL,
        min_scale=SMALLEST,
        max_scale=LARGEST,
        hysteresis=hysteresis,
    )

    def step(state: Any, is_finite: jax.Array) -> tuple[Any, jax.Array]:
        grad = jnp.where(is_finite, 1.0, jnp.inf)
        _, state = tx.update(grad, state, jnp.float32(0))
        return state, state.scale

    _, scales = jax.lax.scan(step, tx.init(jnp.float32(0)), jnp.asarray(finite))
    return np.asarray(scales).tolist()


def torch_scales(finite: np.ndarray) -> list[float]:
    """Return the scales of torch.amp.GradScaler."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=START_SCALE, growth_interval=GROWTH_INTERVAL
    )
    scaler.scale(torch.zeros(()))  # Makes its state.
    scales = []
    for is_finite in finite:
        weight.grad = torch.tensor(1.0 if is_finite else torch.inf)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def jmp_scales(finite: np.ndarray) -> list[float]:
    """Return the scales of jmp.DynamicLossScale."""
    import jmp

    start = jmp.DynamicLossScale(
        jnp.float32(START_SCALE),
        period=GROWTH_INTERVAL,
        min_loss_scale=jnp.float32(SMALLEST),
    )

    def step(scale: Any, is_finite: jax.Array) -> tuple[Any, jax.Array]:
        scale = scale.adjust(is_finite)
        # Its flatten leaves `min_loss_scale` out, so a scan would reset it to 1.
        return (scale.loss_scale, scale.counter), scale.loss_scale

    def restored(carry: Any, is_finite: jax.Array) -> tuple[Any, jax.Array]:
        made = jmp.DynamicLossScale(
            carry[0], carry[1], GROWTH_INTERVAL, 2, jnp.float32(SMALLEST)
        )
        return step(made, is_finite)

    carry = (start.loss_scale, jnp.int32(0))
    _, scales = jax.lax.scan(restored, carry, jnp.asarray(finite))
    return np.asarray(scales).tolist()


def flax_scales(finite: np.ndarray) -> list[float]:
    """Return the scales of flax.training.dynamic_scale.DynamicScale."""
    from flax.training.dynamic_scale import DynamicScale

    start = DynamicScale(
        growth_interval=GROWTH_INTERVAL,
        minimum_scale=SMALLEST,
        fin_steps=jnp.int32(0),
        scale=jnp.float32(START_SCALE),
    )

    def step(scale: Any, is_finite: jax.Array) -> tuple[Any, jax.Array]:
        factor = jnp.where(is_finite, 1.0, jnp.inf)
        scale, *_ = scale.value_and_grad(lambda w: w * factor)(jnp.float32(1))
        return scale, scale.scale

    _, scales = jax.lax.scan(step, start, jnp.asarray(finite))
    return np.asarray(scales).tolist()


def keras_scales(finite: np.ndarray) -> list[float]:
    """Return the scales of keras.optimizers.LossScaleOptimizer."""
    import keras

    if keras.backend.backend() != "jax":
        raise ImportError("KERAS_BACKEND is not jax")
    weight = keras.Variable(np.zeros((), np.float32))
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0),
        initial_scale=START_SCALE,
        dynamic_growth_steps=GROWTH_INTERVAL,
    )
    optimizer.build([weight])
    place = [v.path for v in optimizer.variables].index(optimizer.dynamic_scale.path)

    def step(state: Any, is_finite: jax.Array) -> tuple[Any, jax.Array]:
        grad = jnp.where(is_finite, 1.0, jnp.inf)
        _, state = optimizer.stateless_apply(state, [grad], [jnp.float32(0)])
        return state, state[place]

    start = [variable.value for variable in optimizer.variables]
    _, scales = jax.lax.scan(step, start, jnp.asarray(finite))
    return np.asarray(scales).tolist()


def deepspeed_scales(finite: np.ndarray, hysteresis: int = 1) -> list[float]:
    """Return the scales of DeepSpeed's DynamicLossScaler."""
    from deepspeed.runtime.fp16 import loss_scaler

    scaler = loss_scaler.DynamicLossScaler(
        START_SCALE, GROWTH_INTERVAL, SMALLEST, hysteresis, False
    )
    scales = []
    # It asks for its rank in order to log.
    with mock.patch.object(loss_scaler.dist, "get_rank", return_value=1):
        for is_finite in finite:
            scaler.update_scale(not is_finite)
            scales.append(scaler.cur_scale)
    return scales


def megatron_scales(finite: np.ndarray, hysteresis: int = 1) -> list[float]:
    """Return the scales of Megatron's DynamicGradScaler."""
    import torch
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    def on_cpu(values: Any, dtype: Any = None, device: Any = None) -> Any:
        del device
        return torch.as_tensor(values, dtype=dtype)

    with mock.patch.object(torch, "tensor", on_cpu):  # It asks for a GPU.
        scaler = DynamicGradScaler(
            START_SCALE, SMALLEST, 2.0, 0.5, GROWTH_INTERVAL, hysteresis
        )
    scales = []
    for is_finite in finite:
        scaler.update(not is_finite)
        scales.append(float(scaler._scale))
    return scales


SCALERS: dict[str, tuple[Scaler, int]] = {
    "torch GradScaler": (torch_scales, 1),
    "jmp DynamicLossScale": (jmp_scales, 1),
    "keras LossScaleOptimizer": (keras_scales, 1),
    "Megatron DynamicGradScaler": (megatron_scales, 1),
    "Megatron, hysteresis 2": (lambda finite: megatron_scales(finite, 2), 2),
    "Flax DynamicScale": (flax_scales, 1),
    "DeepSpeed DynamicLossScaler": (deepspeed_scales, 1),
    "DeepSpeed, hysteresis 2": (lambda finite: deepspeed_scales(finite, 2), 2),
}


def compare_scales() -> list[record.Row]:
    """Return for each library how many scales are ours, and the first that is not."""
    runs = np.random.default_rng(0).random((RUNS, SCALE_STEPS)) >= BAD_SHARE
    always = np.ones(2 * GROWTH_INTERVAL + 2, bool)
    rows = []
    for name, (scales_of, hysteresis) in SCALERS.items():
        with left_out(name):
            equal = [
                sum(
                    a == b
                    for a, b in zip(scales_of(x), ours(x, hysteresis), strict=True)
                )
                for x in runs
            ]
            grown = next(
                i + 1 for i, s in enumerate(scales_of(always)) if s > START_SCALE
            )
            rows.append(
                {
                    "scaler": name,
                    "steps": RUNS * SCALE_STEPS,
                    "scale equal to ours": sum(equal),
                    "first growth after finite steps": grown,
                }
            )
    return rows


# 8-bit Adam: a step on weights that the closure keeps.


class Adam:
    """Weights under an Adam, as float32 NumPy, and the bytes of its state."""

    def __init__(self, step: AdamStep, weights: Callable[[], np.ndarray], size: int):
        """Keep the functions, and how many bytes of state there are."""
        self.step, self.weights, self.state_bytes = step, weights, size


def optax_adam(wrap: Callable[[Any], Any]) -> Adam:
    """Return an Adam of optax in a wrapper of ours, or in none."""
    tx = wrap(optax.adam(RATE))
    held = [jnp.zeros((SIDE, SIDE))]
    held.append(jax.jit(tx.init)(held[0]))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: jax.Array, state: Any, grad: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(grad, state, weights)
        return optax.apply_updates(weights, updates), state

    def step(grad: np.ndarray) -> None:
        held[:] = jax.block_until_ready(update(*held, jnp.asarray(grad)))

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(held[1]))
    return Adam(step, lambda: np.asarray(held[0]), size)


def torch_adam(make: Callable[[list[Any]], Any]) -> Adam:
    """Return an Adam that works on torch's tensors."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(SIDE, SIDE))
    optimizer = make([weight])

    def step(grad: np.ndarray) -> None:
        weight.grad = torch.from_numpy(grad)
        optimizer.step()

    step(np.zeros((SIDE, SIDE), np.float32))  # Makes the state, and moves nothing.
    tensors = [x for x in optimizer.state[weight].values() if torch.is_tensor(x)]
    size = sum(bytes_of(tensor) for tensor in tensors)
    return Adam(step, lambda: weight.detach().numpy().copy(), size)


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the parts of torchao's."""
    if hasattr(tensor, "tensor_attrs"):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.tensor_attrs)
    return tensor.numel() * tensor.element_size()


def bitsandbytes_adam() -> Adam:
    """Return the 8-bit Adam of bitsandbytes."""
    import bitsandbytes

    return torch_adam(lambda params: bitsandbytes.optim.Adam8bit(params, lr=RATE))


def torchao_adam() -> Adam:
    """Return the 8-bit Adam of torchao."""
    from torchao.optim import Adam8bit

    return torch_adam(lambda params: Adam8bit(params, lr=RATE))


def unwrapped(tx: Any) -> Any:
    """Return plain optax."""
    return tx


ADAMS: dict[str, Callable[[], Adam]] = {
    "optax, float32": lambda: optax_adam(unwrapped),
    "low_bit_state, 8 bits": lambda: optax_adam(optax_mp.low_bit_state),
    "low_bit_state, 16 bits": lambda: optax_adam(
        lambda tx: optax_mp.low_bit_state(tx, bits=16)
    ),
    "bitsandbytes Adam8bit": bitsandbytes_adam,
    "torchao Adam8bit": torchao_adam,
}


def gradients_of(kind: str) -> list[np.ndarray]:
    """Return the gradients of all steps."""
    random = np.random.default_rng(1)
    sizes = {
        "of one size": np.ones(SIDE),
        "log-normal": np.exp(1.5 * random.normal(size=(SIDE, SIDE))),
        "columns over six decades": 10.0 ** (-6 * random.random(SIDE)),
    }[kind]
    drift = random.normal(size=(SIDE, SIDE))
    return [
        (sizes * (drift + random.normal(size=(SIDE, SIDE)))).astype(np.float32)
        for _ in range(ADAM_STEPS)
    ]


def compare_adams() -> list[record.Row]:
    """Return errors and bytes of each 8-bit Adam."""
    rows: dict[str, record.Row] = {}
    for kind in ("of one size", "log-normal", "columns over six decades"):
        grads = gradients_of(kind)
        adams = made(ADAMS)
        for adam in adams.values():
            for grad in grads:
                adam.step(grad)
        exact = adams["optax, float32"].weights()
        for name, adam in adams.items():
            row = rows.setdefault(
                name, {"Adam": name, "state bytes per weight": adam.state_bytes}
            )
            away = np.linalg.norm(adam.weights() - exact) / np.linalg.norm(exact)
            row[f"error, {kind}"] = float(away)
    for row in rows.values():
        row["state bytes per weight"] /= SIDE**2
    return list(rows.values())


def made(makers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what can be made here."""
    found = {}
    for name, make in makers.items():
        with left_out(name):
            found[name] = make()
    return found


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Go on without a library that is not installed."""
    try:
        yield
    except ImportError as error:
        print(f"Left out: {name}: {error}")


TABLES: dict[str, Callable[[], list[record.Row]]] = {
    f"loss scale, {RUNS} runs of {SCALE_STEPS} steps": compare_scales,
    f"8-bit Adam, {ADAM_STEPS} steps": compare_adams,
}


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    record.add_option(parser)
    args = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "jax")
    # The others' news: no GPU here, no Apex.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tables = {}
    for title, compare in TABLES.items():
        tables[title] = compare()
        print(f"\n### {title}\n\n{record.as_markdown(tables[title])}", flush=True)
    packages = record.installed(PACKAGES)
    record.finish(args.json, tables, record.machine_of(jax.devices()), packages)


if __name__ == "__main__":
    main()
