"""Small made problems, each of which one form of low precision fails.

    python benchmarks failures
    python benchmarks failures --json FILE

- Rare tokens: rows of an embedding that few batches touch, by how many do.
- A bimodal gradient: a million times larger in one layer than in the other, or in every
  second column of one matrix.
- A matrix that a scan uses 1,000 times: its gradient is a sum over all uses, of which
  100 pull one way, nine times as hard as the 900 others pull the other way.
- A long tail: updates under half a unit in the last place of bfloat16, by
  `update_report`, beside the share that is predicted from weights and rate alone: for
  Adam, where the gradient is mostly noise, an update is taken to be the learning rate
  times a normal number of variance (1 - b1) / (1 + b1).
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from finetune import (
    FINE_TUNING,
    FULL,
    PRETRAINING,
    SPLIT8,
    Wrapper,
    loss_scale,
    masters,
    pretrained,
    read_code,
)
from scipy.special import erf
from the_demo import Settings, compact, drawer, make_loss

import optax_mp

SEEDS = 3
B1 = 0.9
SHORT, LONG = (4, replace(PRETRAINING, steps=40)), (200, PRETRAINING)
Loss = Callable[..., jax.Array]


def plain(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner`."""
    return inner


def train(
    loss: Loss,
    start: Any,
    form: tuple[str, Wrapper],
    steps: int,
    batch: Callable[[jax.Array], Any],
    rate: float,
) -> list[Any]:
    """Return the params of each seed after steps of Adam at a falling rate."""
    dtype, wrap = form
    tx = wrap(optax.adam(optax.cosine_decay_schedule(rate, steps)))
    params = optax_mp.cast_floating(start, dtype)

    def step(number: jax.Array, run: Any) -> Any:
        params, state, key = run
        key_now = jax.random.fold_in(key, number)
        grads = optax_mp.value_and_grad(loss)(state, params, batch(key_now))[1]
        # In the dtype of the params, as `jax.grad` gives them, but for a loss scale.
        if not hasattr(state, "total_skipped_count"):
            grads = optax_mp.cast_floating(grads, dtype)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, key

    run = jax.jit(lambda run: jax.lax.fori_loop(0, steps, step, run)[0])
    state = jax.jit(tx.init)(params)
    return [run((params, state, jax.random.key(seed))) for seed in range(SEEDS)]


FORMS = {
    "float32": ("float32", plain),
    "plain bf16": ("bfloat16", plain),
    "masters": ("bfloat16", masters(FULL)),
    "compact": ("bfloat16", compact),
    "compact, 16-bit moments": ("bfloat16", masters(SPLIT8, bits=16)),
    "compact, nearest codes": ("bfloat16", masters(SPLIT8, seed=None)),
    "stochastic rounding": ("bfloat16", optax_mp.stochastic_rounding),
}
BASIC = ("float32", "plain bf16", "masters", "compact")
SCALED = {
    "f16, no loss scale": ("float16", masters(FULL)),
    "f16, loss scale": ("float16", loss_scale(growth_interval=100)),
}


def rare_tokens(steps: int) -> list[record.Row]:
    """Train an embedding; return how far rows stay from where they should go."""
    vocabulary, width = 1024, 32
    keys = jax.random.split(jax.random.key(0), 2)
    start = jax.random.normal(keys[0], (vocabulary, width))
    start = optax_mp.cast_floating(start.astype(jnp.bfloat16), jnp.float32)
    goal = start + 0.1 * jax.random.normal(keys[1], start.shape)
    weights = 1 / np.arange(1.0, vocabulary + 1)  # Zipf's law.
    shares = jnp.asarray(np.cumsum(weights / weights.sum()), jnp.float32)

    def batch(key: jax.Array) -> jax.Array:
        drawn = jnp.searchsorted(shares, jax.random.uniform(key, (64,)))
        return jnp.minimum(drawn, vocabulary - 1)

    def loss(table: jax.Array, tokens: jax.Array) -> jax.Array:
        apart = table[tokens].astype(jnp.float32) - goal[tokens]
        return jnp.square(apart).sum(-1).mean()

    @jax.jit
    def drawn(seed: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(seed), jnp.arange(steps)
        )
        return jax.vmap(batch)(keys)

    seen = [
        np.bincount(np.ravel(drawn(seed)), minlength=vocabulary)
        for seed in range(SEEDS)
    ]
    classes = {"100 times and more": (100, np.inf), "10 to 99": (10, 99)}
    classes |= {"1 to 9": (1, 9)}
    rows = []
    for name, form in FORMS.items():
        left: dict[str, list[float]] = {title: [] for title in classes}
        tables = train(loss, start, form, steps, batch, 1e-3)
        for seed, table in enumerate(tables):
            apart = np.asarray(jnp.square(table.astype(jnp.float32) - goal).sum(-1))
            before = np.asarray(jnp.square(start - goal).sum(-1))
            for title, (least, most) in classes.items():
                chosen = (least <= seen[seed]) & (seen[seed] <= most)
                share = apart[chosen].sum() / before[chosen].sum()
                left[title].append(share**0.5)
        row = {title: f"{np.mean(shares):.3f}" for title, shares in left.items()}
        rows.append({"form": name} | row)
    return rows


def two_sizes(steps: int, is_interleaved: bool) -> list[record.Row]:
    """Regress on two outputs of which one weighs a million times the other."""
    width = 64
    keys = jax.random.split(jax.random.key(0), 2)
    goal = jax.random.normal(keys[0], (width, 2 * width)) / 8
    # By output: in blocks of their own as two matrices, or in turn as columns of one.
    weighs = np.repeat(np.float32([1e3, 1e-3]), width)
    weighs = np.tile(weighs[::width], width) if is_interleaved else weighs

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        out = jnp.concatenate([x.astype(p.dtype) @ p for p in params], axis=1)
        # By the rule of the model: the error is made in the dtype of the params.
        apart = out - (x @ goal).astype(out.dtype)
        by_output = jnp.square(apart.astype(jnp.float32)).mean(0)
        return (by_output * weighs).mean()

    def batch(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (32, width))

    parts = 1 if is_interleaved else 2
    start = jnp.split(jnp.zeros_like(goal), parts, axis=1)
    forms = FORMS
    if not is_interleaved:
        forms = {name: FORMS[name] for name in BASIC} | SCALED
    rows = []
    for name, form in forms.items():
        left = []
        for params in train(loss, start, form, steps, batch, 3e-3):
            out = jnp.concatenate(optax_mp.cast_floating(params, "float32"), axis=1)
            apart = np.asarray(jnp.square(out - goal).sum(0))
            size = np.asarray(jnp.square(goal).sum(0))
            of = [(weighs > 1), (weighs < 1)]
            left.append([(apart[x].sum() / size[x].sum()) ** 0.5 for x in of])
        large, small = np.mean(left, axis=0)
        row = {"large gradient": f"{large:.4f}", "small gradient": f"{small:.4f}"}
        rows.append({"form": name} | row)
    return rows


def many_uses(steps: int) -> list[record.Row]:
    """Fit one matrix to 1,000 uses; return the errors of its gradient and its own.

    The error of the gradient is at the goal, over the gradient's norm at the start.
    """
    width, uses = 16, 1000
    keys = jax.random.split(jax.random.key(0), 2)
    numbers = jax.random.normal(keys[0], (2, width, width)) / 4
    goal, apart = numbers.astype(jnp.bfloat16).astype(jnp.float32)
    start, norm = goal + apart, np.linalg.norm
    # The last tenth pulls as hard as all others, to the other side of the goal.
    is_late = np.arange(uses) >= 0.9 * uses
    sides, pulls = np.where(is_late, -1.0, 1.0), np.where(is_late, 9.0, 1.0)

    def loss(weight: jax.Array, batch: Any) -> jax.Array:
        def use(total: jax.Array, now: Any) -> Any:
            x, wanted, pull = now
            off = (x @ weight - wanted).astype(jnp.float32)
            return total + pull * jnp.square(off).sum(), None

        batch = optax_mp.cast_floating(batch, weight.dtype)
        return jax.lax.scan(use, jnp.float32(0), batch)[0] / uses

    def batch(key: jax.Array) -> Any:
        x = 0.5 + jax.random.normal(key, (uses, 8, width))
        return x, x @ goal + sides[:, None, None] * (x @ apart), pulls

    def by_amp(weight: jax.Array, batch: Any) -> jax.Array:
        return optax_mp.amp(loss)(optax_mp.cast_floating(weight, "float32"), batch)

    forms = {name: (FORMS[name], loss) for name in BASIC}
    forms |= {
        "amp bf16, float32 params": (FORMS["float32"], by_amp),
        "masters, amp": (FORMS["masters"], optax_mp.amp(loss)),
        "masters, amp of float32 copies": (FORMS["masters"], by_amp),
        "compact, amp of float32 copies": (FORMS["compact"], by_amp),
    }

    def gradient(of: Loss, at: jax.Array, dtype: str) -> np.ndarray:
        found = jax.jit(jax.grad(of))(optax_mp.cast_floating(at, dtype), batch(keys[1]))
        return np.asarray(found, np.float32)

    exact, first = (gradient(loss, at, "float32") for at in (goal, start))
    rows = []
    for name, (form, of) in forms.items():
        error = norm(gradient(of, goal, form[0]) - exact) / norm(first)
        ends = train(of, start, form, steps, batch, 2e-2)
        left = [norm(np.asarray(x, np.float32) - goal) / norm(apart) for x in ends]
        row = {"form": name, "error of the gradient": f"{error:.4f}"}
        rows.append(row | {"error left": f"{np.mean(left):.4f}"})
    return rows


def half_units(values: np.ndarray) -> np.ndarray:
    """Return half the distance of bfloat16 numbers, of 8 bits, around values."""
    return np.ldexp(1.0, np.frexp(np.abs(values))[1] - 9)


def flat(tree: Any) -> np.ndarray:
    """Return all numbers of a tree, in float64."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(float)


def predicted_share(params: Any, rate: float) -> float:
    """Return the share of updates under half a unit of their bfloat16 weights."""
    deviation = rate * ((1 - B1) / (1 + B1)) ** 0.5
    return float(erf(half_units(flat(params)) / (deviation * 2**0.5)).mean())


def long_tail(steps: int, pretraining: Settings) -> list[record.Row]:
    """Return how many updates of fine-tuning stall, and how many are predicted to."""
    start = pretrained(pretraining)
    draw = drawer(jnp.asarray(read_code(FINE_TUNING.context)[0]), FINE_TUNING)
    loss = make_loss(FINE_TUNING, "float32")
    tx, key = optax.scale_by_adam(B1), jax.random.key(0)

    def step(run: Any, number: jax.Array) -> Any:
        params, state, rate = run
        grads = jax.grad(loss)(params, draw(jax.random.fold_in(key, number)))
        updates, state = tx.update(grads, state, params)
        updates = jax.tree.map(lambda u: -rate * u, updates)
        report = optax_mp.update_report(params, updates, dtype=jnp.bfloat16)
        return (optax.apply_updates(params, updates), state, rate), report

    run = jax.jit(lambda run: jax.lax.scan(step, run, np.arange(steps)))
    rows = []
    for rate in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6):
        (params, *_), reports = run((start, tx.init(start), jnp.float32(rate)))
        # When the moments have settled.
        late = jax.tree.map(lambda counts: counts[-(steps // 4) :], reports)
        share = late.stalled() / (late.stalled() + late.moved())
        row = {"learning rate": f"{rate:g}", "stalled": f"{share:.1%}"}
        rows.append(row | {"predicted": f"{predicted_share(params, rate):.1%}"})
    return rows


TABLES = {
    "rare tokens: distance left to the goal, by how often a batch had the token": (
        lambda short: rare_tokens(40 if short else 1000)
    ),
    "two layers, gradients 1 to 1e6: error left": (
        lambda short: two_sizes(40 if short else 1000, is_interleaved=False)
    ),
    "columns in turn, gradients 1 to 1e6: error left": (
        lambda short: two_sizes(40 if short else 1000, is_interleaved=True)
    ),
    "one matrix, 1000 uses: error of the gradient at the goal, error left": (
        lambda short: many_uses(4 if short else 100)
    ),
    "updates under half a unit of bfloat16, by Adam's rate": (
        lambda short: long_tail(*(SHORT if short else LONG))
    ),
}


def main() -> None:
    """Read the options and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="do they run?")
    parser.add_argument("--tables", default="", help="some, by how titles begin")
    record.add_option(parser)
    args = parser.parse_args()
    tables: record.Tables = {}
    print(record.heading(jax.devices()))
    for title, measured in TABLES.items():
        if title.startswith(tuple(args.tables.split(","))):
            tables[title] = measured(args.short)
            print(f"\n### {title}\n\n{record.as_markdown(tables[title])}", flush=True)
            record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
