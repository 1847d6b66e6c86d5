"""How far each form goes at small learning rates, as a share of exact Adam's way.

    python benchmarks rates
    python benchmarks rates --steps 200 --json FILE

Two thousand steps of Adam at a constant rate; gradients are 1 and normal noise of
variance 1, in bfloat16, the same for all forms. The weights start at 1.0, as the scales
of norms do, or are normal, as matrices are. A cell is the mean way of all weights over
the mean way of Adam in NumPy's float64; of forms with masters, the masters' way. What
is rounded to nearest stands still where an update is less than half of the distance
between two values: float32 does so, too, at rates that are small enough.

HeavyBall (torch) and FlashOptim keep bfloat16 weights with a remainder of 8 bits, too.
Each is left out where it is not installed: `pip install --group comparisons`.
"""

import argparse
import functools
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_forms as forms
import record

import optax_mp

STEPS, SHAPE = 2000, (128, 128)
PACKAGES = ("jax", "optax", "torch", "heavyball", "flashoptim-jax")
RATES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
STARTS = {"1.0": None, "N(0, 0.1)": 0.1, "N(0, 0.02)": 0.02}
Wrapper = Callable[[optax.GradientTransformation], optax.GradientTransformation]
FORMS: dict[str, Wrapper] = {
    "plain bf16": lambda inner: inner,
    "masters": optax_mp.mixed_precision,
    "Split(16)": functools.partial(forms.masters, storage=optax_mp.Split(16)),
    "Split(8)": functools.partial(forms.masters, storage=optax_mp.Split(8)),
    "compact": forms.compact,
    "stochastic rounding": optax_mp.stochastic_rounding,
}


def first_weights(deviation: float | None) -> jax.Array:
    """Return the weights before the first step, in values that bfloat16 has."""
    if deviation is None:
        return jnp.ones(SHAPE)
    drawn = deviation * jax.random.normal(jax.random.key(0), SHAPE)
    return drawn.astype(jnp.bfloat16).astype(jnp.float32)


def gradient(step: jax.Array) -> jax.Array:
    """Return the gradient of a step."""
    key = jax.random.fold_in(jax.random.key(1), step)
    return (1 + jax.random.normal(key, SHAPE)).astype(jnp.bfloat16)


def way_of(wrap: Wrapper, dtype: str, steps: int) -> Callable[..., jax.Array]:
    """Return the function from first weights and a rate to the mean way."""

    @jax.jit
    def way(start: jax.Array, rate: jax.Array) -> jax.Array:
        tx, params = wrap(optax.adam(rate)), start.astype(dtype)

        def step(number: jax.Array, carry: Any) -> Any:
            params, state = carry
            grads = gradient(number).astype(dtype)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        first = params, tx.init(params)
        # Plain optax changes the dtype of its state in the first step.
        params, state = jax.lax.fori_loop(1, steps, step, step(jnp.int32(0), first))
        if isinstance(state, optax_mp.MixedPrecisionState):
            params = optax_mp.master_params(state, params)
        return jnp.mean(params.astype(jnp.float32) - start)

    return way


def way_of_flashoptim(steps: int) -> Callable[..., float]:
    """Return the same of FlashOptim's Adam, with its default of 24 bits a weight."""
    import flashoptim_jax

    @jax.jit
    def way(start: jax.Array, rate: jax.Array) -> jax.Array:
        # Its kernels have no form for CPUs.
        tx = flashoptim_jax.flash_adam(rate, fused=False)
        first = start.astype(jnp.bfloat16)

        def step(number: jax.Array, carry: Any) -> Any:
            return tx.step(*carry, gradient(number))

        params, state = jax.lax.fori_loop(0, steps, step, (first, tx.init(first)))
        return jnp.mean(flashoptim_jax.reconstruct_weights(params, state.ecc) - start)

    return way


def way_of_heavyball(steps: int) -> Callable[..., float]:
    """Return the same of HeavyBall, whose remainder is rounded at random."""
    import heavyball
    import torch

    heavyball.utils.compile_mode = None
    torch.set_num_threads(1)  # whose arrays are small
    grads = torch.from_numpy(gradients(steps)).to(torch.bfloat16)

    def way(start: jax.Array, rate: float) -> float:
        first = torch.from_numpy(np.array(start))
        weight = torch.nn.Parameter(first.to(torch.bfloat16))
        betas = (0.9, 0.999)
        tx = heavyball.AdamW([weight], lr=rate, betas=betas, param_ecc="bf16+8")
        for grad in grads:
            weight.grad = grad.clone()
            tx.step()
        # It has no public function for the weights with their remainders.
        remainder = tx.state_(weight)["param::ecc"]
        whole = heavyball.utils._ULPState(remainder, 127.0).decode(weight.detach())
        return float((whole - first).mean())

    return way


def gradients(steps: int) -> np.ndarray:
    """Return the gradients of all steps."""
    return np.asarray(jax.lax.map(gradient, jnp.arange(steps)), np.float32)


def exact_way(steps: int, b1: float = 0.9, b2: float = 0.999) -> float:
    """Return the mean way of Adam in float64 at a rate of 1, which others scale."""
    mean = square = way = np.zeros(SHAPE)
    for number, grad in enumerate(gradients(steps).astype(np.float64), start=1):
        mean = b1 * mean + (1 - b1) * grad
        square = b2 * square + (1 - b2) * grad**2
        root = np.sqrt(square / (1 - b2**number)) + 1e-8
        way = way - mean / (1 - b1**number) / root
    return float(way.mean())


PEERS = {"heavyball": way_of_heavyball, "flashoptim-jax": way_of_flashoptim}


def ways(steps: int) -> Iterable[tuple[str, Callable[..., Any]]]:
    """Return how to compute the way of each form, float32 first."""
    yield "float32", way_of(lambda inner: inner, "float32", steps)
    for name, wrap in FORMS.items():
        yield name, way_of(wrap, "bfloat16", steps)
    for name, make in PEERS.items():
        try:
            yield f"{name} {metadata.version(name)}", make(steps)
        except ImportError as error:
            print(f"Left out: {name}: {error}")


def measure(steps: int) -> record.Tables:
    """Return a table for each distribution of first weights."""
    tables: record.Tables = {f"from {name}": [] for name in STARTS}
    exact = exact_way(steps)
    for form, way in ways(steps):
        for name, deviation in STARTS.items():
            start, row = first_weights(deviation), {"form": form}
            for rate in RATES:
                share = float(way(start, rate)) / (rate * exact)
                row[f"{rate:g}"] = f"{share + 0.0:.2f}"  # no -0.00
            tables[f"from {name}"].append(row)
            print(name, row, flush=True)
    return tables


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    record.add_option(parser)
    args = parser.parse_args()
    tables = measure(args.steps)
    print(record.heading(jax.devices()))
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")
    machine = record.machine_of(jax.devices())
    record.finish(args.json, tables, machine, record.installed(PACKAGES))


if __name__ == "__main__":
    main()
