"""How far each form ends from float32, by the width of a model, with muP's rates.

    python benchmarks width
    python benchmarks width --json FILE
    python benchmarks width --models MLP --widths 64 128 --steps 20

An MLP learns from a random one, and the demo's transformer learns to predict letters.
Adam's rates are as in muP (arXiv 2203.03466, Table 8), written as multipliers: a matrix
that reads a hidden layer is multiplied by 64 / width and starts so much larger, so that
one rate serves all widths. Gradients are computed in float32 at the params of each
form: forms differ by what the optimizer keeps, and not by 16-bit products.

"Off by" is the distance of the weights from float32's of the same seed, over the way
that float32's have gone from their start, both by norm.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_forms as forms
import record
from the_demo import Settings, drawer, init_params, make_loss, read_corpus

import optax_mp

SEEDS, STEPS, BASE, INPUTS, OUTPUTS = 3, 150, 64, 64, 16
COMPARED = (
    "masters",
    "Split(16)",
    "Split(8)",
    "8-bit state",
    "compact",
    "stochastic rounding, 8-bit state",
)
# The first is what the others are compared with.
FORMS = {
    "float32": forms.FORMS["float32"],
    "plain bf16": forms.Form(forms.adamw),
    **{name: forms.FORMS[name] for name in COMPARED},
}


def mlp(width: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what makes the first weights of an MLP, and its loss on a batch by key."""

    def init(key: jax.Array, width: int = width) -> dict[str, jax.Array]:
        shapes = (INPUTS, width), (width, width), (width, OUTPUTS)
        keys = jax.random.split(key, 3)
        pairs = zip(keys, shapes, strict=True)
        leaves = [jax.random.normal(k, x) * x[0] ** -0.5 for k, x in pairs]
        return dict(zip(("in", "hidden", "out"), leaves, strict=True))

    def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        x = jax.nn.relu(x @ params["in"])
        return jax.nn.relu(x @ params["hidden"]) @ params["out"]

    teacher = init(jax.random.key(-1), 256)

    def loss(params: Any, key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (64, INPUTS))
        return jnp.square(apply(params, x) - apply(teacher, x)).mean()

    return init, loss


def transformer(width: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the same for the demo's transformer, with heads of 16."""
    settings = Settings(width=width, head_count=width // 16, context=32, batch_size=8)
    loss = make_loss(settings, jnp.float32)
    draw = drawer(jnp.asarray(read_corpus(settings.context)[0]), settings)
    first = partial(init_params, settings=settings)
    return first, lambda params, key: loss(params, draw(key))


# What makes each model, and its widths.
MODELS = {"MLP": (mlp, [64, 256, 1024]), "transformer": (transformer, [64, 128, 256])}


def ends(
    model: Callable[..., Any], width: int, form: forms.Form, steps: int
) -> np.ndarray:
    """Return the weights, as the model multiplies them: a row for each seed."""
    tx = form.make()
    init, loss = model(width)

    def factor(path: Any, x: jax.Array) -> float:
        reads_hidden = x.ndim > 1 and path[-1].key not in ("in", "characters")
        return BASE / width if reads_hidden else 1.0

    def run(seed: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(seed), 2)
        first = init(keys[0])
        factors = jax.tree_util.tree_map_with_path(factor, first)
        params = jax.tree.map(jnp.divide, first, factors)
        # The last layer's weights are smaller by one more root of the width.
        params["out" if "out" in params else "logits"] *= (BASE / width) ** 0.5
        # In the same values for all forms.
        params = optax_mp.cast_floating(params, jnp.bfloat16)
        params = optax_mp.cast_floating(params, form.param_dtype)

        def wide(params: Any) -> Any:
            params = optax_mp.cast_floating(params, jnp.float32)
            return jax.tree.map(jnp.multiply, params, factors)

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, state = carry
            batch = jax.random.fold_in(keys[1], number)
            grads = jax.grad(lambda params: loss(wide(params), batch))(params)
            grads = optax_mp.cast_floating(grads, form.grad_dtype)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, tx.init(params)
        (params, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
        return wide(params)

    found = jax.jit(lambda seeds: jax.lax.map(run, seeds))(jnp.arange(SEEDS))
    leaves = [np.asarray(x).reshape(SEEDS, -1) for x in jax.tree.leaves(found)]
    return np.concatenate(leaves, axis=1)


def measure(
    model: Callable[..., Any], widths: list[int], steps: int
) -> list[record.Row]:
    """Return a row for each form: how far it is off at each width, mean of seeds."""
    rows = {form: {"form": form} for form in FORMS if form != "float32"}
    for width in widths:
        exact = ends(model, width, FORMS["float32"], steps)
        way = np.linalg.norm(exact - ends(model, width, FORMS["float32"], 0), axis=1)
        for form, row in rows.items():
            apart = ends(model, width, FORMS[form], steps) - exact
            off = np.linalg.norm(apart, axis=1) / way
            row[f"width {width}"] = float(off.mean())
            row.setdefault("losses", []).append(off.tolist())
            print(f"{width}, {form}: {off}", file=sys.stderr)
    return list(rows.values())


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--widths", type=int, nargs="+", help="for all models")
    parser.add_argument("--steps", type=int, default=STEPS)
    record.add_option(parser)
    args = parser.parse_args()
    tables = {}
    for name in args.models:
        model, widths = MODELS[name]
        rows = measure(model, args.widths or widths, args.steps)
        tables[f"{name}: off by, at each width, after {args.steps} steps"] = rows
        print(f"{record.heading(jax.devices())}\n\n{record.as_markdown(rows)}")
    record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
