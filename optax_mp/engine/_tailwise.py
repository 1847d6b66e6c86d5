"""Take a step: trace it once, and run the tail of each leaf in the best way there is.

A step is traced as one call of `jit`, which is one equation of the program. When the
program is lowered for a platform, another program takes the place of the call. On a
CPU that takes one leaf after another (`_in_turn`). On a TPU or a GPU it computes the
equations before the elementwise tails of the leaves as written, and each tail

- by a kernel, if the platform has one for it and the layout of its arrays is known;
- else chunk by chunk, if it is large and the platform is a TPU;
- else in two passes, if the platform is a GPU;
- else as written.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from optax_mp._jax._arrays import compiles, is_on_host, is_traced, mesh_in_type
from optax_mp._jax._block_operations import LARGEST
from optax_mp._jax._contact import is_seen, is_traced_by_jit
from optax_mp._jax._control_flow import STEP
from optax_mp._jax._jaxpr import Equation, TracedCall, bind, evaluate
from optax_mp._take_step import StepFn
from optax_mp._warnings import warn_once
from optax_mp.engine import _chunks, _kernels
from optax_mp.engine._by_platform import PLATFORMS, Function, Target, call_by_platform
from optax_mp.engine._in_turn import run_in_turn
from optax_mp.engine._layout import Part, Shardings
from optax_mp.engine._program import (
    Program,
    Value,
    backward_slice,
    read_output,
    run_nodes,
    structural_key,
    values_in,
)
from optax_mp.engine._proof import NOT_PROVED, PROVED, proof_of
from optax_mp.engine._tails import NO_LOW_BITS, ElementwiseTail, split_tails
from optax_mp.wrappers._context import may_hold_codes

TRANSFORMED = "within `vmap` or `grad`"


def is_transformed(leaves: Sequence[Any]) -> bool:
    """Return whether arrays are traced by another transformation than `jit`.

    There, arrays may have concrete values, which a step may look at.
    """
    return any(is_traced(x) and not is_traced_by_jit(x) for x in leaves)


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step, and its equations.

    Attributes:
        traced: its jaxpr, of one call of `jit`.
        kept: the last part of its argument, which the last part of its result replaces.
        known_shardings: of the leaves of `kept`, or of the first ones; None where they
            are not known.
    """

    traced: TracedCall
    kept: Any
    known_shardings: Sequence[NamedSharding | None] = ()

    @property
    def call(self) -> Equation:
        """The call of `jit`."""
        (call,) = self.traced.closed.jaxpr.eqns
        return call

    @cached_property
    def program(self) -> Program:
        """Its equations."""
        return Program.of(self.traced.closed)

    @cached_property
    def values(self) -> dict[Value, Any]:
        """The arrays that are known before the step."""
        program, arrays = self.program, self.traced.arrays
        return dict(zip(program.inputs, arrays, strict=True)) | program.constants

    @cached_property
    def call_values(self) -> tuple[list[Value], list[Any]]:
        """The values that the call reads, and those that it returns."""
        # It may read the constants of the jaxpr as well, and does not return inputs.
        jaxpr: Any = self.traced.closed.jaxpr
        call, program = self.call, self.program
        read = dict(zip(jaxpr.invars, program.inputs, strict=True))
        read.update(zip(jaxpr.constvars, program.constants, strict=False))
        made = dict(zip(map(id, jaxpr.outvars), program.outputs, strict=True))
        return [read[v] for v in call.invars], [made[id(v)] for v in call.outvars]

    @cached_property
    def replaced(self) -> dict[Value, Value]:
        """Which input of the program an output takes the place of.

        There are none if the structure of what is kept changes.
        """
        kept = self.traced.unflatten(self.program.outputs)[1]
        leaves, structure = jax.tree.flatten(kept)
        if structure != jax.tree.structure(self.kept):
            return {}
        both = zip(leaves, self._kept_inputs, strict=True)
        return {new: x for new, x in both if x is not None and isinstance(new, Value)}

    @cached_property
    def tails(self) -> list[ElementwiseTail]:
        """The elementwise tail of each leaf."""
        return split_tails(self.program, self.replaced)

    @cached_property
    def shardings(self) -> Shardings:
        """The shardings of the program's inputs, where they are known."""
        both = zip(self._kept_inputs, self.known_shardings, strict=False)
        return {x: s for x, s in both if x is not None and s is not None}

    @cached_property
    def _kept_inputs(self) -> list[Value | None]:
        """For each leaf of `kept` the input of the program that it is, if it is one."""
        inputs = dict(zip(self.traced.places, self.program.inputs, strict=True))
        count = self.traced.leaf_count
        first = count - jax.tree.structure(self.kept).num_leaves
        return list(map(inputs.get, range(first, count)))


def trace_step(
    step: StepFn, inputs: Any, kept: Any, shardings: Sequence[NamedSharding | None] = ()
) -> tuple[TracedStep | None, str | None]:
    """Trace a step as one equation, a call of `jit`, and say why that has to stay.

    There is none if the step has to run as written.

    The inputs of the call are the arrays that `jit` traces. Concrete arrays are its
    constants, so that a rule may look at them. JAX has all rules for a call of `jit`:
    it can be lowered, batched and differentiated without evaluating its equations
    again. For the arguments see `run_step`.
    """
    leaves = jax.tree.leaves((inputs, kept))
    finds_leaks = getattr(jax.config, "jax_check_tracer_leaks", False)
    obstacles = {
        NO_LOW_BITS: not may_hold_codes(kept),
        "not within `jit`": not any(map(is_traced, leaves)) or not compiles(),
        TRANSFORMED: is_transformed(leaves),
        "state in host memory": any(map(is_on_host, leaves)),
        "JAX looks for leaked tracers": finds_leaks,
    }
    for obstacle, is_found in obstacles.items():
        if is_found:
            return None, obstacle
    _kernels.are_on()  # an unknown word is an error here, and would be a warning later
    traced = TracedCall.of(
        lambda both: step(*both), (inputs, kept), is_traced, jit_name=STEP
    )
    # An equation without a result, such as printing, would be lost.
    has_effects = any(map(is_seen, traced.closed.effects))
    sizes = {type(n) for x in traced.arrays for n in jax.typeof(x).shape}
    unknown = None if sizes <= {int} else "sizes known later only"
    obstacle = "the update has effects" if has_effects else unknown
    return TracedStep(traced, kept, shardings), obstacle


def run_step(
    step: StepFn,
    inputs: Any,
    kept: Any,
    shardings: Sequence[NamedSharding | None] = (),
    platforms: Collection[str] = PLATFORMS,
) -> tuple[tuple[Any, Any], str | None]:
    """Return `step(inputs, kept)`, and why it runs as written everywhere, or None.

    Args:
        step: returns its result, and a tree that replaces `kept`.
        inputs: a pytree.
        kept: a pytree. Its arrays can be overwritten, if they are donated.
        shardings: how the leaves of `kept` are sharded under `jit`; None if that is not
            known, and then sharded leaves have no kernel.
        platforms: whose kernels and chunks may run the tails; all, if it has branches.
    """
    traced, obstacle = trace_step(step, inputs, kept, shardings)
    if traced is None:
        return step(inputs, kept), obstacle
    call, run = traced.traced, bind
    if obstacle is None:
        rewrite = partial(_rewrite, traced, platforms)
        run = partial(call_by_platform, rewrite=rewrite)
    # Not `step` again, but the traced program: nested wrappers would double traces.
    return call.unflatten(evaluate(call.closed, call.arrays, run)), obstacle


def update_leafwise(
    update: Callable[..., tuple[Any, Any]],
    updates: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
    shardings: Sequence[NamedSharding | None] = (),
) -> tuple[Any, Any]:
    """Return `update(updates, state, params, **extra_args)`, in one pass if that pays.

    The new param is computed outside, in one more pass. So kernels pay on a TPU, where
    XLA by itself passes over low-bit arrays several times; with branches; and with
    shifts.
    """
    # A function among the arguments, as for a line search, may have side effects.
    if any(map(callable, jax.tree.leaves(extra_args))):
        return update(updates, state, params, **extra_args)

    def step(inputs: Any, kept: Any) -> tuple[Any, Any]:
        updates, params, extra_args = inputs
        return update(updates, kept, params, **extra_args)

    inputs = updates, params, extra_args
    result, _ = run_step(step, inputs, state, shardings, platforms=("tpu",))
    return result


def _rewrite(
    traced: TracedStep, platforms: Collection[str], target: Target
) -> Function | None:
    """Return what computes a step on a target; None for the step as it is."""
    if target.platform == "cpu":
        return partial(run_in_turn, traced.call, target)
    # XLA writes whole arrays in float32 between a `cond` and the rest of a step, and
    # before it looks for the largest of columns.
    may_pay = target.platform in platforms or traced.program.has_branches
    may_pay |= any(tail.group_size > 1 for tail in traced.tails)
    is_split = may_pay and any(tail.obstacle is None for tail in traced.tails)
    return TailwiseStep(traced, target).run if is_split else None


@dataclass(frozen=True)
class TailwiseStep:
    """A step for a target, tail by tail.

    Attributes:
        traced: the step.
        target: what it is lowered for.
        shared: what runs the tails that are alike, by their form.
        decisions: for the outputs of each tail that was run, what `proof_of` its kernel
            says, or why it has none.
    """

    traced: TracedStep
    target: Target
    shared: dict[Any, Callable[..., list[Any]]] = field(default_factory=dict)
    decisions: dict[Value, str] = field(default_factory=dict)

    def run(
        self,
        inputs: Sequence[Any],
        widened_from: Mapping[int, Any],
        shardings: Mapping[int, NamedSharding],
    ) -> list[Any]:
        """Return the outputs of the call; see `call_by_platform`."""
        traced = self.traced
        program, tails = traced.program, traced.tails
        reads, outputs = traced.call_values
        values = program.constants | dict(zip(reads, inputs, strict=True))
        # First the values outside of the tails: outputs that are not elementwise, and
        # values that the tails read. Then the tails, which do not depend on each other.
        at_tails = {value for tail in tails for value in tail.outputs}
        others = [value for value in values_in(outputs) if value not in at_tails]
        read_by_tails = [value for tail in tails for value in tail.reads]
        run_nodes(backward_slice([*others, *read_by_tails]), values)
        # Kernels and chunks widen what they have read.
        as_stored = values | {reads[i]: x for i, x in widened_from.items()}
        known = traced.shardings or {reads[i]: x for i, x in shardings.items()}
        for tail in tails:
            args = [as_stored[value] for value in tail.reads]
            # A kernel sees one device. If the layout of sharded arrays is known, each
            # device runs it on its own part, inside of a `shard_map` made here.
            part = Part.of(tail, args, known)
            made = self._by_kernel(tail, part, args)
            made = made or self._by_chunks(tail, part, args)
            if made is not None:
                values.update(zip(tail.outputs, made, strict=True))
                continue
            self._warn_of_layout(tail)
            if self.target.platform == "cuda":
                _run_in_two_passes(tail, values)
            else:
                run_nodes(tail.nodes, values)
        return [read_output(values, value) for value in outputs]

    def _by_kernel(
        self, tail: ElementwiseTail, part: Part, args: Sequence[Any]
    ) -> list[Any] | None:
        """Return the outputs of a tail, by a kernel, or None if it has none."""
        made = None
        kernel = _kernels.find_kernel(tail, part, self.target)
        if not isinstance(kernel, str):
            try:
                # Without devices of the target's kind, there is no proof.
                proof = NOT_PROVED
                if self.target.kind:
                    proof = proof_of(kernel, tail, part, self.target)
                if proof in (PROVED, NOT_PROVED):
                    made = self._run(tail, part, kernel.run_tail, args)
                kernel = proof
            except Exception as error:
                kernel = _kernels.warn_of(error)
        self.decisions.update(dict.fromkeys(tail.outputs, kernel))
        return made

    def _warn_of_layout(self, tail: ElementwiseTail) -> None:
        is_unknown = self.decisions[tail.outputs[0]] == _kernels.UNKNOWN_LAYOUT
        if is_unknown and not self.traced.shardings:
            warn_once(
                "optax_mp: the sharding of low-bit arrays is not known, as in a loop, "
                "so a step without kernels moves at least 1.4 times as many bytes on a "
                "TPU, 2.2 times on a GPU. Use a mesh with explicit axes, or pass "
                "`param_shardings=jax.tree.map(lambda p: p.sharding, params)` to "
                "`optax_mp.take_step`, in place of `tx.update`."
            )

    def _by_chunks(
        self, tail: ElementwiseTail, part: Part, args: Sequence[Any]
    ) -> list[Any] | None:
        """Return the same in chunks, or None where chunks do not pay."""
        is_known, target = part.sharding is not None, self.target
        if tail.obstacle or target.platform != "tpu" or target.is_within_shard_map:
            return None
        # Types that say how arrays are sharded would be wrong for chunks.
        if not is_known and any(mesh_in_type(x).explicit_axes for x in args):
            return None
        count = 1 if is_known else target.device_count
        if (first := _chunks.first_chunk(part, _chunks.COUNT, count)) is None:
            return None

        def run_tail(tail: ElementwiseTail, part: Part, args: Any) -> list[Any]:
            return _chunks.run_tail(tail, replace(first, part=part), args)

        return self._run(tail, part, run_tail, args)

    def _run(
        self, tail: ElementwiseTail, part: Part, run_tail: Callable[..., Any], args: Any
    ) -> list[Any]:
        """Return the outputs of a tail by `run_tail`, on each device for its part."""

        @jax.jit
        def run(origin: Any, args: Any) -> list[Any]:
            return run_tail(tail, replace(part, origin=origin), args)

        # Leaves of one shape have tails of one form: one function is lowered for all.
        # The place of a shard is an argument of it, as it differs among devices.
        equations = structural_key(tail.nodes, tail.reads, tail.outputs)
        form = equations, tuple(tail.replaced.items()), part
        shared = self.shared.get(form, run)

        def run_part(part: Part, args: Any) -> list[Any]:
            return shared(tuple(map(jnp.int32, part.origin)), args)

        made = part.run(run_part, args)
        self.shared[form] = shared
        return made


def _run_in_two_passes(tail: ElementwiseTail, values: dict[Any, Any]) -> None:
    """Evaluate a tail, first its scales, then all outputs; add these to `values`.

    Between the passes XLA for GPUs would write in float32 what both need. To compute it
    twice moves less.
    """
    reads = set(tail.reads)
    found = [x for x in tail.nodes if x.equation.params.get("kind") == LARGEST]
    scales = [value for node in found for value in node.outputs]
    run_nodes(backward_slice(scales, reads.__contains__), values)
    # Behind the barrier XLA does not find that it computes the same again.
    arrays = [x for x in (*tail.reads, *scales) if x.aval.ndim]
    held = jax.lax.optimization_barrier([values[x] for x in arrays])
    second = values | dict(zip(arrays, held, strict=True))
    given = reads.union(scales)
    run_nodes(backward_slice(tail.outputs, given.__contains__), second)
    values.update((x, second[x]) for x in tail.outputs)
