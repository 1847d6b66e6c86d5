"""Time of a precision report, as a ratio to tracing the gradient.

    python benchmarks precision_report
    python benchmarks precision_report --layers 24 --json FILE

A report traces a function with its backward pass, as `jax.make_jaxpr` of its gradient
does, and then looks for products and for what made them float32. Params are bfloat16
and norms float32, as shapes. Both are done in turn, in every round anew, and the
medians of the CPU time are compared.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import record

import optax_mp

ROUNDS = 5
WIDTH, HEADS, LENGTH, BATCH = 64, 4, 32, 2
Loss = Callable[[Any, Any], jax.Array]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return `x` in units of its root mean square, scaled."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def dense_layer(params: Any, x: jax.Array) -> jax.Array:
    """Return a residual layer of two products."""
    return x + jax.nn.gelu(norm(x, params["norm"]) @ params["up"]) @ params["down"]


def transformer_layer(params: Any, x: jax.Array) -> jax.Array:
    """Return a layer of attention, and a dense layer."""
    y = norm(x, params["first norm"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", y, params[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, params["out"])
    return dense_layer(params, x)


def shapes_of_layer() -> dict[str, Any]:
    """Return the shapes of the params of a layer."""
    heads = (WIDTH, HEADS, WIDTH // HEADS)
    shapes = {name: heads for name in "qkv"}
    shapes |= {"out": heads[1:] + (WIDTH,), "norm": (WIDTH,), "first norm": (WIDTH,)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {
        name: jax.ShapeDtypeStruct(shape, "float32" if "norm" in name else "bfloat16")
        for name, shape in shapes.items()
    }


def loss_of(layer: Callable[[Any, jax.Array], jax.Array], in_scan: bool) -> Loss:
    """Return the loss of layers one after the other, or in a scan."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if in_scan:
            step = lambda x, params: (layer(params, x).astype(x.dtype), None)  # noqa: E731
            x, _ = jax.lax.scan(step, x, params)
        else:
            for each in params:
                x = layer(each, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def models(layers: int) -> dict[str, tuple[Loss, Any]]:
    """Return losses, and the shapes of their params."""
    layer = shapes_of_layer()
    dense = {name: layer[name] for name in ("up", "down", "norm")}
    stacked = {
        name: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype)
        for name, x in layer.items()
    }
    return {
        f"{layers} dense layers": (loss_of(dense_layer, False), [dense] * layers),
        f"{layers} transformer layers": (
            loss_of(transformer_layer, False),
            [layer] * layers,
        ),
        f"{layers} transformer layers in a scan": (
            loss_of(transformer_layer, True),
            stacked,
        ),
    }


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the CPU time of a run, which finds nothing that JAX remembers."""
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


def report(layers: int) -> list[record.Row]:
    """Return a row for each model."""
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16)
    rows = []
    for name, (loss, params) in models(layers).items():
        runs = [
            lambda f=loss, p=params: jax.make_jaxpr(jax.value_and_grad(f))(p, x),
            lambda f=loss, p=params: optax_mp.precision_report(f, p, x),
        ]
        equations = len(runs[0]().jaxpr.eqns)
        products = len(runs[1]().products)
        times = [[milliseconds(run) for run in runs] for _ in range(ROUNDS)]
        trace, found = map(statistics.median, zip(*times, strict=True))
        rows.append(
            {
                "model": name,
                "equations": equations,
                "products": products,
                "tracing ms": trace,
                "ms": found,
                "ratio": found / trace,
            }
        )
    return rows


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100)
    record.add_option(parser)
    args = parser.parse_args()
    rows = report(args.layers)
    print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    tables = {"time of a precision report": rows}
    record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
