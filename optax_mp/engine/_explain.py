"""Say what computes the step of each param, without a step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_mp.engine._by_platform import PLATFORMS, Target, explain, kind_here
from optax_mp.engine._tailwise import (
    TRANSFORMED,
    TailwiseStep,
    TracedStep,
    is_transformed,
    trace_step,
)


def explain_step(
    bind: Callable[..., Any], arrays: tuple[Any, ...], device_counts: Sequence[int]
) -> list[tuple[str, ...]]:
    """Return for each param what computes its step on a TPU, and on a GPU.

    Args:
        bind: returns the arguments of `run_step` from `arrays`, while these are traced.
            The last part of what the step replaces are the params.
        arrays: pytrees of arrays, or of descriptions of them.
        device_counts: on how many devices each param is.
    """
    decisions: Any = TRANSFORMED

    def trace(*arrays: Any) -> None:
        nonlocal decisions
        traced, decisions = trace_step(*bind(*arrays))
        if traced is not None and decisions is None:
            decisions = _decide(traced, device_counts)

    if not is_transformed(jax.tree.leaves(arrays)):
        jax.eval_shape(trace, *arrays)
    if isinstance(decisions, str):  # why no param has a kernel
        return [(decisions,) * len(PLATFORMS)] * len(device_counts)
    return decisions


def _decide(traced: TracedStep, device_counts: Sequence[int]) -> list[tuple[str, ...]]:
    """Return what computes each param."""
    # The params are the last of the step's results.
    outputs = traced.program.outputs
    params = outputs[len(outputs) - len(device_counts) :]
    count = max(device_counts, default=1)
    targets = [Target(x, count, kind=kind_here(x)) for x in PLATFORMS]
    on_each = [_decisions_on(traced, target) for target in targets]
    rest = "not changed element by element"
    return [tuple(x.get(param, rest) for x in on_each) for param in params]


def _decisions_on(traced: TracedStep, target: Target) -> dict[Any, str]:
    """Return for each output of a tail whether a kernel computes it, or why not."""
    step = TailwiseStep(traced, target)
    try:
        step.run([traced.values[x] for x in traced.call_values[0]], {}, {})
    except Exception as error:  # as while it is lowered, it runs as written then
        outputs = [output for tail in traced.tails for output in tail.outputs]
        return dict.fromkeys(outputs, explain(error))
    return step.decisions
