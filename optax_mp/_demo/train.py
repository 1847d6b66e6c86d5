"""The training loop of `python -m optax_mp`."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_mp._demo.model import init_params, make_loss, mean_loss
from optax_mp._demo.runs import GradFunction, Run
from optax_mp._demo.settings import Settings
from optax_mp._demo.text import Corpus
from optax_mp._tree import cast_floating
from optax_mp.loss_scale._state import loss_scale_state

# So many that the host takes no time next to the steps, even on a GPU, where a step
# takes a few milliseconds.
STEPS_PER_CALL = 25


class Moment(NamedTuple):
    """Where a run stands.

    Attributes:
        step: how many steps it has made.
        loss: the mean over those since the moment before; None while it compiles.
        loss_scale: the loss scale; None for a run without one.
        skipped: how many steps had gradients that were not finite; None without a loss
            scale.
    """

    step: int
    loss: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None

    @property
    def is_diverged(self) -> bool:
        """Whether all later losses are NaN too; a loss scale would skip such steps."""
        is_nan = self.loss is not None and math.isnan(self.loss)
        return is_nan and self.loss_scale is None


Report = Callable[[str, Moment], None]


@dataclass(frozen=True)
class Curve:
    """The values of a run after each of `steps`.

    Attributes:
        steps: numbers of steps.
        losses: means over the training steps since the number before.
        loss_scales: None in a run without a loss scale.
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    loss_scales: tuple[float, ...] | None


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        name: that of the run.
        param_dtype: that of the run.
        held_out_loss: nats per character at the end, on text not trained on.
        bytes_per_weight: of params and optimizer state.
        ms_per_step: the median over all calls except the first, without compilation.
        seconds: the whole run, with compilation.
        loss_scale: the last loss scale; None for a run without one.
        skipped_steps: how many steps had gradients that were not finite; None without
            a loss scale.
        curve: the losses and loss scales of the run.
    """

    name: str
    param_dtype: str
    held_out_loss: float
    bytes_per_weight: float
    ms_per_step: float
    seconds: float
    loss_scale: float | None
    skipped_steps: int | None
    curve: Curve


def train(run: Run, settings: Settings, corpus: Corpus, report: Report) -> Result:
    """Train the model in one way, and call `report(name, moment)` now and then."""
    report(run.name, Moment(0))
    start_time = time.perf_counter()
    loss = make_loss(settings, run.compute_dtype)
    tx = run.transform(make_adamw(settings))
    params, opt_state = init_run(run, settings, tx)
    size = bytes_of((params, opt_state)) / weights_of(params)
    text = jnp.asarray(corpus.train)
    train_steps = make_steps(settings, run.value_and_grad(loss), tx)
    compiled = jax.jit(train_steps).lower(params, opt_state, text, 0, 1).compile()

    moments, times = [], []
    for first, stop in call_ranges(settings.steps):
        call_time = time.perf_counter()
        params, opt_state, batch_loss = compiled(params, opt_state, text, first, stop)
        moments.append(moment_of(stop, batch_loss, opt_state))  # Waits for the result.
        times.append((time.perf_counter() - call_time) / (stop - first))
        report(run.name, moments[-1])
        if moments[-1].is_diverged:
            break

    held_out = jnp.asarray(corpus.held_out)
    held_out_loss = mean_loss(params, held_out, settings, run.compute_dtype)
    return Result(
        name=run.name,
        param_dtype=run.param_dtype,
        held_out_loss=float(held_out_loss),
        bytes_per_weight=size,
        ms_per_step=1000 * statistics.median(times[1:] or times),
        seconds=time.perf_counter() - start_time,
        loss_scale=moments[-1].loss_scale,
        skipped_steps=moments[-1].skipped,
        curve=curve_of(moments),
    )


def init_run(
    run: Run, settings: Settings, tx: optax.GradientTransformation
) -> tuple[Any, Any]:
    """Return params and optimizer state before the first step."""
    key = jax.random.fold_in(jax.random.key(settings.seed), 0)
    params = init_params(key, settings)
    # Cast between two programs: within one, XLA may drop the rounding.
    params = cast_floating(params, run.param_dtype)
    return params, jax.jit(tx.init)(params)


def make_adamw(settings: Settings) -> optax.GradientTransformation:
    """Return AdamW with warmup and cosine decay, decaying matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.peak_learning_rate,
        warmup_steps=settings.steps // 20,
        decay_steps=settings.steps,
        end_value=settings.final_learning_rate,
    )
    return optax.adamw(
        schedule,
        weight_decay=settings.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )


def make_steps(
    settings: Settings, grad_function: GradFunction, tx: optax.GradientTransformation
) -> Callable[..., Any]:
    """Return the function that trains from step `first` up to step `stop`.

    Both may be traced, so that one compilation serves calls of any length. The batch
    of a step depends on the seed and on the step's number alone.
    """
    batch_key = jax.random.fold_in(jax.random.key(settings.seed), 1)
    window = np.arange(settings.context + 1)

    def step(
        number: jax.Array, carry: tuple[Any, Any, jax.Array], text: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        params, opt_state, loss_sum = carry
        starts = jax.random.randint(
            jax.random.fold_in(batch_key, number),
            (settings.batch_size, 1),
            0,
            text.size - settings.context,
        )
        loss, grads = grad_function(opt_state, params, text[starts + window])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss_sum + loss

    def train_steps(params, opt_state, text, first, stop):
        carry = (params, opt_state, jnp.zeros((), jnp.float32))
        params, opt_state, loss_sum = jax.lax.fori_loop(
            first, stop, lambda number, carry: step(number, carry, text), carry
        )
        return params, opt_state, loss_sum / (stop - first)

    return train_steps


def call_ranges(steps: int) -> Iterator[tuple[int, int]]:
    """Yield the first step of each call, and the one after the last.

    The first call makes only one step, so that curves begin with the untrained model.
    """
    first = 0
    for stop in (1, *range(STEPS_PER_CALL, steps, STEPS_PER_CALL), steps):
        if stop > first:
            yield first, stop
            first = stop


def moment_of(step: int, loss: jax.Array, opt_state: optax.OptState) -> Moment:
    """Return where a run stands, with one transfer from the device."""
    state = loss_scale_state(opt_state, "demo")
    if state is None:
        return Moment(step, float(loss))
    values = jax.device_get((loss, state.scale, state.total_skipped_count))
    return Moment(step, float(values[0]), float(values[1]), int(values[2]))


def curve_of(moments: list[Moment]) -> Curve:
    """Return the curve through all moments."""
    steps, losses, scales, _ = zip(*moments, strict=True)
    return Curve(steps, losses, None if scales[0] is None else scales)


def bytes_of(tree: Any) -> int:
    """Return the bytes that the arrays of a tree hold."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def weights_of(params: optax.Params) -> int:
    """Return the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
