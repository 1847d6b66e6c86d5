"""Loss scales and 8-bit optimizers of other libraries beside ours.

    python benchmarks comparisons                     # all tables, Markdown
    python benchmarks comparisons --json FILE         # also the tables as data
    python benchmarks comparisons --only "loss scale"

It wants `pip install -e . --group comparisons`. A library that is not installed is
left out, with a note. All runs are on a CPU. Times are not compared: the threads of two
frameworks in one process slow each other down.

- Loss scales: each library sees the same random steps, finite or not, in 20 runs. The
  scale is compared with ours after every step, to the bit.
- 8-bit Adam: 200 steps on given gradients. "error" is the distance of the weights from
  float32 Adam's over the way that float32's have gone, both by norm.
- Adam against torch's: our forms in the test that TransformerEngine has for its own
  Adam. It runs on a CPU, which TransformerEngine does not.
"""

import argparse
import contextlib
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record

import optax_mp

RUNS, SCALE_STEPS, GROWTH_INTERVAL, BAD_SHARE = 20, 2000, 50, 0.02
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
    "low_bit_state, 8 bits, no column scales": lambda: optax_adam(
        lambda tx: optax_mp.low_bit_state(tx, column_scales=False)
    ),
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


# Our forms in the test that TransformerEngine has for its "precision-aware" Adam:
# https://github.com/NVIDIA/TransformerEngine/blob/0518eea877c6dcce8f45cf4d510c4db9db39454c/tests/pytorch/test_fused_optimizer.py
# Bfloat16 params of an attention layer of width 1024 make 7 steps of length 1 with
# random gradients, the state is saved and loaded, then 7 more. After each, masters and
# params are compared with torch's Adam in float32.

SHAPES = {"qkv": (3072, 1024), "bias": (3072,), "out": (1024, 1024), "last": (1024,)}
STEPS_TO_SAVE = 7
FLOAT32, COARSE, IN_8_BITS = (1.3e-6, 1e-5), (2e-3, 2e-3), (1e-2, 1e-2)
PARAMS_WITHIN = (1.6e-2, 1e-5)
# Form: what goes around Adam, its storage, the gradients' dtype, and the rtol and atol
# that TransformerEngine has for masters with gradients or moments of that kind.
PRECISIONS: dict[str, tuple[Callable[[Any], Any], Any, str, tuple[float, float]]] = {
    "masters": (unwrapped, optax_mp.FullCopy(), "float32", FLOAT32),
    "masters, bf16 gradients": (unwrapped, optax_mp.FullCopy(), "bfloat16", COARSE),
    "Split(16)": (unwrapped, optax_mp.Split(16), "float32", FLOAT32),
    "masters, bf16 moments": (
        partial(optax_mp.low_bit_state, dtype=jnp.bfloat16),
        optax_mp.FullCopy(),
        "float32",
        COARSE,
    ),
    "masters, 16-bit moments": (
        partial(optax_mp.low_bit_state, bits=16),
        optax_mp.FullCopy(),
        "float32",
        COARSE,
    ),
    "masters, 8-bit moments": (
        optax_mp.low_bit_state,
        optax_mp.FullCopy(),
        "float32",
        IN_8_BITS,
    ),
}


def compare_with_torch() -> list[record.Row]:
    """Return for each form how many masters and params are outside the tolerances."""
    rows = []
    for name, (wrap, storage, grad_dtype, within) in PRECISIONS.items():
        with left_out(f"torch Adam, {name}"):
            masters_off, params_off, furthest = 0.0, 0.0, 0.0
            adam = wrap(optax.adam(1.0, b1=0.1, b2=0.25))
            tx = optax_mp.mixed_precision(adam, storage=storage)
            for exact, masters, params in in_step_with_torch(tx, grad_dtype):
                masters_off = max(masters_off, share_outside(masters, exact, within))
                rounded = {k: v.astype(jnp.bfloat16) for k, v in exact.items()}
                off = share_outside(params, rounded, PARAMS_WITHIN)
                params_off = max(params_off, off)
                apart = (np.abs(masters[k] - exact[k]).max() for k in exact)
                furthest = max(furthest, float(max(apart)))
            rows.append(
                {
                    "Adam": name,
                    "rtol, atol of masters": "{:g}, {:g}".format(*within),
                    "masters outside": f"{masters_off:.3%}",
                    "params outside": f"{params_off:.3%}",
                    "largest difference of a master": furthest,
                }
            )
    return rows


def in_step_with_torch(tx: Any, grad_dtype: str) -> Iterator[tuple[Any, Any, Any]]:
    """Yield torch's weights, our masters and our params after each step."""
    import torch

    random = np.random.default_rng(3)
    start = {k: 0.023 * random.standard_normal(s) for k, s in SHAPES.items()}
    params = {k: jnp.asarray(x, jnp.bfloat16) for k, x in start.items()}
    opt_state = jax.jit(tx.init)(params)
    update = jax.jit(tx.update)
    weights = {k: torch.tensor(np.asarray(x, np.float32)) for k, x in params.items()}
    adam = torch.optim.Adam(weights.values(), lr=1.0, betas=(0.1, 0.25))
    for number in range(2 * STEPS_TO_SAVE):
        grads = {k: random.random(s, np.float32) for k, s in SHAPES.items()}
        for name, weight in weights.items():
            weight.grad = torch.from_numpy(grads[name])
        adam.step()
        low = {k: jnp.asarray(g, grad_dtype) for k, g in grads.items()}
        updates, opt_state = update(low, opt_state, params)
        params = optax.apply_updates(params, updates)
        masters = jax.device_get(optax_mp.master_params(opt_state, params))
        yield {k: w.numpy() for k, w in weights.items()}, masters, params
        if number + 1 == STEPS_TO_SAVE:
            opt_state = pickle.loads(pickle.dumps(jax.device_get(opt_state)))


def share_outside(found: Any, exact: Any, within: tuple[float, float]) -> float:
    """Return the share of numbers that differ by more than rtol and atol allow."""
    outside = [
        np.abs(a - b) > within[1] + within[0] * np.abs(b)
        for a, b in (
            (np.asarray(found[k], np.float32), np.asarray(exact[k], np.float32))
            for k in exact
        )
    ]
    return sum(int(x.sum()) for x in outside) / sum(x.size for x in outside)


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
    "torch's Adam, by TransformerEngine's test": compare_with_torch,
}


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tables whose title has this")
    record.add_option(parser)
    args = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "jax")
    # The others' news: no GPU here, no Apex.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tables = {}
    for title, compare in TABLES.items():
        if args.only in title:
            tables[title] = compare()
            print(f"\n### {title}\n\n{record.as_markdown(tables[title])}", flush=True)
    record.finish(args.json, tables, record.machine_of(jax.devices()), installed())


def installed() -> list[str]:
    """Return the packages that are here."""
    found = {each.metadata["Name"].lower() for each in metadata.distributions()}
    return [name for name in PACKAGES if name in found]


if __name__ == "__main__":
    main()
