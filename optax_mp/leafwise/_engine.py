"""Take a step: trace it once, and run the end of each leaf in the best way there is.

A step is traced as one call of `jit`, which is one equation of the program. If the
program is lowered for a TPU or a GPU, the call is cut: the equations before the
elementwise ends of the leaves are lowered as written, and each end is computed

- by a kernel, if the platform has one for it and the layout of its arrays is known;
- else chunk by chunk, if it is large and the platform is a TPU;
- else as written.

On other platforms the call is lowered as written.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from optax_mp._jax import _by_platform
from optax_mp._jax._arrays import has_explicit_axes, mesh_in_type
from optax_mp._jax._by_platform import PLATFORMS, Target
from optax_mp._warnings import warn_once
from optax_mp.leafwise import _chunks, _kernels
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._layout import Layout
from optax_mp.leafwise._program import Value, form_of, read_output, run_nodes, values_in
from optax_mp.leafwise._proof import NOT_PROVED, PROVED, proof_of
from optax_mp.leafwise._traced_step import Step, TracedStep, obstacle_of

Function = Callable[..., list[Any]]


def run_step(
    step: Step,
    inputs: Any,
    kept: Any,
    shardings: Sequence[NamedSharding | None] = (),
    platforms: Collection[str] = PLATFORMS,
    state: Any = None,
) -> tuple[tuple[Any, Any], str | None]:
    """Return `step(inputs, kept)`, and why it is not cut on any platform, or None.

    Args:
        step: returns its result, and a tree that replaces `kept`.
        inputs: a pytree.
        kept: a pytree. Its arrays can be overwritten, if they are donated.
        shardings: how the leaves of `kept` are sharded under `jit`; None if that is not
            known, and then sharded leaves have no kernel.
        platforms: for which the step is cut; a step with branches is cut for all.
        state: the part of `kept` that may hold codes; by default all of it.
    """
    obstacle = obstacle_of(kept if state is None else state, (inputs, kept))
    if obstacle is not None:
        return step(inputs, kept), obstacle
    _kernels.are_on()  # an unknown word is an error here, and would be a warning later
    traced = TracedStep.as_call(step, inputs, kept, shardings)
    if traced.obstacle is not None:
        return traced.run(None), traced.obstacle
    return traced.run(partial(_rewrite, traced, platforms)), None


def _rewrite(
    traced: TracedStep,
    platforms: Collection[str],
    target: Target,
    errors: Sequence[Exception],
) -> _by_platform.Function | None:
    """Return what computes a step on a target; None for the step as it is."""
    # XLA writes whole arrays in float32 between a `cond` and the rest of a step, and
    # before it looks for the largest of columns.
    may_pay = target.platform in platforms or traced.program.has_branches
    may_pay |= any(end.group_size for end in traced.ends)
    is_cut = may_pay and any(end.obstacle is None for end in traced.ends)
    # After an error with kernels, a TPU still goes by chunks.
    is_cut &= not errors or target.platform == "tpu"
    return CutStep(traced, target, not errors).run if is_cut else None


@dataclass(frozen=True)
class CutStep:
    """A step for a target.

    Attributes:
        traced: the step.
        target: what it is lowered for.
        has_kernels: whether kernels may run.
        shared: what runs the ends that are alike, by their form.
        ways: for the first output of each end that was run, what `proof_of` its kernel
            says, or why it has none.
    """

    traced: TracedStep
    target: Target
    has_kernels: bool = True
    shared: dict[Any, Function] = field(default_factory=dict)
    ways: dict[Value, str] = field(default_factory=dict)

    def run(
        self,
        inputs: Sequence[Any],
        widened_from: Mapping[int, Any],
        shardings: Mapping[int, NamedSharding],
    ) -> list[Any]:
        """Return the outputs of the call; see `call_by_platform`."""
        traced = self.traced
        program, ends = traced.program, traced.ends
        reads, outputs = traced.call_values
        values: dict[Value, Any] = program.constants | dict(
            zip(reads, inputs, strict=True)
        )
        # First the values outside of the ends: outputs that are not elementwise, and
        # values that the ends read. Then the ends, which do not depend on each other.
        at_ends = {value for end in ends for value in end.outputs}
        others = [value for value in values_in(outputs) if value not in at_ends]
        read_by_ends = [value for end in ends for value in end.reads]
        run_nodes(program.behind([*others, *read_by_ends])[0], values)
        results = dict(values)
        # Kernels and chunks widen what they have read.
        as_stored = values | {reads[i]: x for i, x in widened_from.items()}
        known = traced.shardings or {reads[i]: x for i, x in shardings.items()}
        for end in ends:
            args = [as_stored[value] for value in end.reads]
            # A kernel sees one device. Where the layout of sharded arrays is known,
            # each device runs it on its own part, inside of a `shard_map` made here.
            turns = self.target.platform == "tpu"
            layout = Layout.find(end, args, known, turns=turns)
            made = self._by_kernel(layout, args) or self._by_chunks(layout, args)
            if made is None:
                self._warn_of_layout(end)
                local = dict(values)
                run_nodes(end.nodes, local)
                made = [local[value] for value in end.outputs]
            results.update(zip(end.outputs, made, strict=True))
        return [read_output(results, value) for value in outputs]

    def _by_kernel(self, layout: Layout, args: Sequence[Any]) -> list[Any] | None:
        """Return the outputs of an end, by a kernel; None if that cannot be."""
        end, made = layout.end, None
        kernel = _kernels.find_kernel(layout, self.target)
        if not self.has_kernels:
            kernel = "no kernel"
        if not isinstance(kernel, str):
            try:
                proof = proof_of(kernel, end, layout.part, self.target)
                if proof in (PROVED, NOT_PROVED):
                    made = self._run(layout, kernel.run_end, args)
                kernel = proof
            except Exception as error:
                kernel = _kernels.warn_of(error)
        self.ways[end.outputs[0]] = kernel
        return made

    def _warn_of_layout(self, end: End) -> None:
        is_unknown = self.ways[end.outputs[0]] == _kernels.UNKNOWN_LAYOUT
        if is_unknown and not self.traced.shardings:
            warn_once(
                "optax_mp: a step on several devices is compiled for low-bit "
                "arrays whose sharding is not known, as in a loop, `jit` within `jit` "
                "or `zero1`, so no kernel computes it, and XLA alone moves 1.5 times "
                "as many bytes on a GPU, and up to 8 times as many on a TPU. Use a "
                "mesh with explicit axes, or, but for `zero1`, pass "
                "`param_shardings=jax.tree.map(lambda p: p.sharding, params)` to "
                "`optax_mp.take_step`, in place of `tx.update`."
            )

    def _by_chunks(self, layout: Layout, args: Sequence[Any]) -> list[Any] | None:
        """Return the same chunk by chunk; None where that is not worth it."""
        is_known = layout.sharding is not None
        if layout.end.obstacle is not None or self.target.platform != "tpu":
            return None
        # Types that say how arrays are sharded would be wrong for chunks.
        is_typed = any(has_explicit_axes(mesh_in_type(x)) for x in args)
        if self.target.is_within_shard_map or (is_typed and not is_known):
            return None
        count = 1 if is_known else self.target.device_count
        cuts = _chunks.cuts_of(layout.part, count)
        if cuts is None:
            return None

        def run_end(end: End, part: Part, args: Any) -> list[Any]:
            return _chunks.run_end(end, replace(cuts, part=part), args)

        return self._run(layout, run_end, args)

    def _run(self, layout: Layout, run_end: Function, args: Any) -> list[Any]:
        """Return the outputs of an end by `run_end`, on each device for its part."""
        end, part = layout.end, layout.part
        rank = len(part.shape)

        @jax.jit
        def run(*args: Any) -> list[Any]:
            here = replace(part, origin=args[:rank])
            return list(run_end(end, here, args[rank:]))

        # Leaves of one shape have ends of one form: one function is lowered for all.
        # The place of a shard is an argument of it, as it differs among devices.
        equations = form_of(end.nodes, end.reads, end.outputs)
        form = equations, tuple(end.replaced.items()), part
        shared = self.shared.get(form, run)

        def run_part(part: Part, args: Any) -> list[Any]:
            return shared(*map(jnp.int32, part.origin), *args)

        made = layout.run(run_part, args)
        self.shared[form] = shared
        return made
