"""The forms that the demo compares, and the training loop that they share."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import LossFunction, Settings, init_params, make_loss

import optax_mp

Wrapper = Callable[[optax.GradientTransformation], optax.GradientTransformation]
# So many that the host takes no time next to the steps, even on a GPU.
STEPS_PER_CALL = 25


def compact(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with 8-bit moments, on masters of 24 bits: the compact form.

    The default `min_size` is for larger models. This one includes all matrices of the
    demo's model, and excludes its norms.
    """
    moments = optax_mp.low_bit_state(inner, min_size=128)
    return optax_mp.mixed_precision(moments, storage=optax_mp.Split(bits=8))


def scaled(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` on masters, with a loss scale that grows sooner than by default.

    So it overflows even in a short run, and the demo shows skipped steps.
    """
    masters = optax_mp.mixed_precision(inner)
    return optax_mp.dynamic_loss_scale(masters, growth_interval=50)


def unscaled_value_and_grad(loss_fn: LossFunction) -> Callable[..., Any]:
    """Return JAX's own value and gradient, which do not need the state."""
    gradients = jax.value_and_grad(loss_fn)
    return lambda opt_state, params, windows: gradients(params, windows)


class Form(NamedTuple):
    """A way to train.

    Attributes:
        name: what README calls it.
        dtype: the dtype of params and computation.
        wrap: makes the optimizer from the AdamW that all forms share.
        value_and_grad: makes a function of state, params and batch from the loss.
    """

    name: str
    dtype: str
    wrap: Wrapper = lambda inner: inner
    value_and_grad: Callable[[LossFunction], Any] = unscaled_value_and_grad


FORMS = (
    Form("float32", "float32"),
    Form("plain optax on bfloat16 params", "bfloat16"),
    Form("bfloat16 with masters", "bfloat16", optax_mp.mixed_precision),
    Form("bfloat16 with masters, compact", "bfloat16", compact),
    Form("plain optax on float16 params", "float16"),
    Form(
        "float16 with masters and a loss scale",
        "float16",
        scaled,
        optax_mp.value_and_grad,
    ),
)


class Result(NamedTuple):
    """The result of one form, from all seeds.

    Attributes:
        form: the form of the run.
        losses: of held-out text, in nats per character, one for each seed.
        curves: for each seed the mean loss of the steps of each call.
        bytes_per_weight: of params and optimizer state.
        ms_per_step: the median over all calls.
        skipped: steps with gradients that were not finite; None without a loss scale.
    """

    form: Form
    losses: list[float]
    curves: list[list[float]]
    bytes_per_weight: float
    ms_per_step: float
    skipped: int | None


class Program(NamedTuple):
    """What trains in one form, compiled.

    Attributes:
        form: the form.
        tx: its optimizer.
        train_steps: see `make_steps`.
        evaluate: the loss of params and windows.
    """

    form: Form
    tx: optax.GradientTransformation
    train_steps: Callable[..., Any]
    evaluate: Callable[..., Any]


def compile_form(
    form: Form, settings: Settings, corpus: tuple[np.ndarray, np.ndarray]
) -> Program:
    """Compile the training of one form."""
    tx = form.wrap(make_adamw(settings))
    loss_fn = make_loss(settings, form.dtype)
    steps = make_steps(form.value_and_grad(loss_fn), tx, settings)
    run = init_run(form, settings, tx, key := jax.random.key(0))
    text, held_out = map(jnp.asarray, corpus)
    train_steps = jax.jit(steps, donate_argnums=(0, 1)).lower(*run, text, key, 0, 1)
    evaluate = jax.jit(loss_fn).lower(run[0], held_out)
    return Program(form, tx, train_steps.compile(), evaluate.compile())


def train(
    program: Program,
    settings: Settings,
    corpus: tuple[np.ndarray, np.ndarray],
    report: Callable[[int], None] = lambda steps: None,
) -> Result:
    """Train in one form from each seed; call `report(steps just made)` now and then."""
    form, tx, train_steps, evaluate = program
    text, held_out = map(jnp.asarray, corpus)
    losses, curves, times, skipped = [], [], [], []
    for seed in settings.seeds:
        key = jax.random.key(seed)
        params_key, batch_key = (jax.random.fold_in(key, i) for i in (0, 1))
        run, curve = init_run(form, settings, tx, params_key), []
        for first, stop in calls(settings.steps):
            start = time.perf_counter()
            *run, loss = train_steps(*run, text, batch_key, first, stop)
            curve.append(float(loss))  # Waits for the result.
            times.append((time.perf_counter() - start) / (stop - first))
            report(stop - first)
        losses.append(float(evaluate(run[0], held_out)))
        curves.append(curve)
        skipped.append(int(getattr(run[1], "total_skipped_count", -1)))
    size = sum(x.nbytes for x in jax.tree.leaves(run))
    per_weight = size / sum(x.size for x in jax.tree.leaves(run[0]))
    all_skipped = sum(skipped) if min(skipped) >= 0 else None
    ms_per_step = 1000 * statistics.median(times)
    return Result(form, losses, curves, per_weight, ms_per_step, all_skipped)


def init_run(
    form: Form, settings: Settings, tx: optax.GradientTransformation, key: jax.Array
) -> tuple[optax.Params, optax.OptState]:
    """Return params and optimizer state before the first step."""
    # Cast between two programs: within one, XLA may drop the rounding.
    params = optax_mp.cast_floating(init_params(key, settings), form.dtype)
    return params, jax.jit(tx.init)(params)


def calls(steps: int) -> list[tuple[int, int]]:
    """Return the first step of each call, and the one after its last.

    The first call makes one step only, so that curves begin with the untrained model.
    """
    stops = [1, *range(STEPS_PER_CALL, steps, STEPS_PER_CALL), steps]
    return [(a, b) for a, b in zip([0, *stops], stops, strict=False) if a < b]


def make_schedule(settings: Settings) -> optax.Schedule:
    """Return the learning rate: warmup and cosine decay."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.peak_learning_rate,
        warmup_steps=settings.steps // 20,
        decay_steps=settings.steps,
        end_value=settings.final_learning_rate,
    )


def make_adamw(settings: Settings) -> optax.GradientTransformation:
    """Return AdamW with that schedule, decaying matrices only."""
    decay = settings.weight_decay
    return optax.adamw(make_schedule(settings), weight_decay=decay, mask=is_matrix)


def is_matrix(params: optax.Params) -> Any:
    """Return which leaves are matrices."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def make_steps(
    gradients: Callable[..., Any], tx: optax.GradientTransformation, settings: Settings
) -> Callable[..., Any]:
    """Return the function that trains from step `first` up to step `stop`.

    Both are traced, so that one program serves calls of any length. The batch of a step
    depends on the key and on the step's number alone.
    """
    window = np.arange(settings.context + 1)

    def train_steps(params, opt_state, text, key, first, stop):
        def step(number, carry):
            params, opt_state, loss_sum = carry
            key_now, shape = jax.random.fold_in(key, number), (settings.batch_size, 1)
            starts = jax.random.randint(key_now, shape, 0, text.size - settings.context)
            loss, grads = gradients(opt_state, params, text[starts + window])
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, opt_state, loss_sum + loss

        carry = (params, opt_state, jnp.float32(0))
        *run, loss_sum = jax.lax.fori_loop(first, stop, step, carry)
        return *run, loss_sum / (stop - first)

    return train_steps
