"""Take a step whose state is in host memory, with little of it on the device at a time.

The step is traced as if all of the state were on the device, and then run job by job.
A job computes the outputs of one leaf, or of several leaves that read the same arrays.
It is a loop of one iteration. XLA starts copies as early as it can, and would have all
of the state on the device at once; but it does not move a copy out of a loop. In the
loop, `_chunks` runs elementwise equations; all others take whole arrays.

Values that several jobs need, such as the norm of all updates, are computed before:
leaf after leaf is copied to the device and reduced to a number. The jobs copy it again.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from optax_mp._choose import select
from optax_mp._context import Choice
from optax_mp._jax._arrays import has_explicit_axes, is_partitioned
from optax_mp._jax._memory import bring, is_host_type, is_on_host, to_device, to_host
from optax_mp._jax._traced import TracedCall
from optax_mp._warnings import warn
from optax_mp.leafwise._chunks import Cuts, as_stored, cuts_of, run_end
from optax_mp.leafwise._ends import End, overwritten_by
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._layout import Layout
from optax_mp.leafwise._program import (
    Node,
    Program,
    Value,
    groups_with_common,
    read_output,
    reads_of,
    run_nodes,
    values_in,
)
from optax_mp.leafwise._traced_step import Step, TracedStep


class Plan(NamedTuple):
    """What may be on the device, and how arrays are laid out on several devices.

    Attributes:
        min_size: arrays of fewer elements stay on the device.
        chunk_bytes: how many bytes of the others are on the device at a time, by
            `bytes_on_device`.
        shardings: of the leaves of the state under `jit`; None for those that are not
            known, which are copied whole.
    """

    min_size: int
    chunk_bytes: int
    shardings: Sequence[NamedSharding | None] = ()


def bytes_on_device(aval: Any) -> int:
    """Return how many bytes an array takes on the device.

    Low-bit codes become numbers of 32 bits there.
    """
    return aval.size * max(4, aval.dtype.itemsize)


def run_between_moves(
    step: Step, inputs: Any, kept: Any, proceed: Choice = True
) -> tuple[Any, Any]:
    """Return `step(inputs, kept)`, taken on the device, with `kept` where it was.

    If `proceed` is false, arrays in host memory are what they were.
    """
    leaves, treedef = jax.tree.flatten(kept)
    brought = bring(leaves)
    updates, new = step(inputs, treedef.unflatten(brought))
    new_leaves, new_def = jax.tree.flatten(new)
    if new_def != treedef:
        return updates, new
    for i, old in enumerate(leaves):
        if not is_on_host(old):
            continue
        leaf, before = new_leaves[i], brought[i]
        if leaf is not before and proceed is not True:
            leaf = select(proceed, leaf, before)
        new_leaves[i] = old if leaf is before else to_host(leaf)
    return updates, new_def.unflatten(new_leaves)


def run_from_host(
    step: Step,
    inputs: Any,
    kept: Any,
    plan: Plan,
    proceed: Choice = True,
) -> tuple[Any, Any] | None:
    """Return `step(inputs, kept)`; None if it cannot be taken in parts.

    Args:
        step: returns its result, and a tree that replaces `kept`. It moves arrays to
            the device and back.
        inputs: a pytree.
        kept: a pytree. Its arrays in host memory are overwritten there, if they are
            donated.
        plan: what may be on the device.
        proceed: if false, nothing is copied, arrays in host memory keep their values,
            and the rest of the result has no meaning.
    """
    traced = TracedCall.of(lambda both: step(*both), (inputs, kept))
    if traced.closed.effects:
        warn(
            "optax_mp: the update has effects, such as printing, that would be lost in "
            "parts of a step: all of its state is brought to the device at once. Leave "
            "them out, or expect as much memory as without `offload`."
        )
    if traced.closed.effects:
        return None
    traced_step = TracedStep(traced, kept, plan.shardings)
    # As a number that XLA does not know: a loop of one round would be no loop.
    rounds = lax.optimization_barrier(jnp.asarray(proceed).astype(jnp.int32))
    return traced.unflatten(_StepFromHost.of(traced_step, plan, rounds).run())


def _find_sources(program: Program) -> dict[Value, frozenset[Value]]:
    """Return for each value the arrays in host memory that it depends on, if any."""
    hosted = [value for value in program.inputs if is_host_type(value.aval)]
    sources = {value: frozenset([value]) for value in hosted}
    for node in program.nodes:
        inputs = [v for v in values_in(node.inputs) if v in sources]
        if inputs:
            union = frozenset().union(*(sources[v] for v in inputs))
            sources.update(dict.fromkeys(node.outputs, union))
    return sources


@dataclass(frozen=True)
class _Job:
    """Outputs that read or overwrite the same arrays in host memory.

    Attributes:
        arrays: the arrays.
        outputs: the outputs.
        layout: of the elementwise end that computes all of them; None if whole arrays
            are copied.
    """

    arrays: set[Value]
    outputs: list[Value]
    layout: Layout | None


@dataclass(frozen=True)
class _StepFromHost:
    """A step, and the values computed so far. See `run_from_host`.

    A value is *transferred* if it is large and depends on arrays in host memory: it is
    on the device only within a loop. A small value is computed once, and stays.
    """

    traced: TracedStep
    values: dict[Value, Any]
    sources: dict[Value, frozenset[Value]]
    plan: Plan
    rounds: Any

    @classmethod
    def of(cls, traced: TracedStep, plan: Plan, rounds: Any) -> "_StepFromHost":
        """Return a step before anything is computed."""
        sources = _find_sources(traced.program)
        return cls(traced, dict(traced.values), sources, plan, rounds)

    def run(self) -> list[Any]:
        """Return the outputs of the program."""
        # First the values outside of the jobs, and those that these read. Then the
        # jobs, which do not depend on each other.
        outputs = self.traced.program.outputs
        jobs = self._find_jobs()
        of_jobs = {value for job in jobs for value in job.outputs}
        others = [value for value in values_in(outputs) if value not in of_jobs]
        self._compute(others + [x for job in jobs for x in self._needed_before(job)])
        results = dict(self.values)
        for job in jobs:
            results.update(zip(job.outputs, self._run_job(job), strict=True))
        return [read_output(results, value) for value in outputs]

    def _find_jobs(self) -> list[_Job]:
        # A job for each end, and for each output that no end computes. Jobs that share
        # an array become one: it would be copied twice, and a job that overwrites it
        # would have to wait for the others.
        ends = self.traced.ends
        end_of = {value: end for end in ends for value in end.outputs}
        outputs = dict.fromkeys(values_in(self.traced.program.outputs))
        alone = [[value] for value in outputs if value not in end_of]
        together = [end.outputs for end in ends] + alone
        arrays = [self._arrays_of(values) for values in together]
        jobs = []
        for group in groups_with_common(arrays):
            of_group = set[Value]().union(*(arrays[at] for at in group))
            if of_group:
                made = [value for at in group for value in together[at]]
                end = end_of.get(made[0]) if len(group) == 1 else None
                jobs.append(_Job(of_group, made, self._layout_of(end, of_group)))
        return jobs

    def _arrays_of(self, outputs: Sequence[Value]) -> set[Value]:
        """Return the arrays to bring, or to overwrite, for these outputs."""
        arrays = set(self._arrays_read(self._behind(outputs)[0]))
        made = [x for x in outputs if x.made_at is not None and is_host_type(x.aval)]
        replaced = self.traced.replaced
        return arrays | {replaced[value] for value in made if value in replaced}

    def _layout_of(self, end: End | None, arrays: set[Value]) -> Layout | None:
        """Return the layout of an end; None if it needs whole arrays."""
        if end is None or end.entangled or end.axis != len(end.shape) - 1:
            return None
        for value in end.reads:
            # A norm of the arrays needs them whole, so the job takes whole arrays.
            if value.made_at is not None and (
                self._is_made_of(value, arrays) or self._is_brought(value)
            ):
                return None
        # Values that are still to be computed have no sharding yet.
        args = [self.values.get(value, 0) for value in end.reads]
        layout = Layout.find(end, args, self.traced.shardings)
        is_unknown = layout.sharding is None and any(map(is_partitioned, args))
        return None if is_unknown else layout

    def _needed_before(self, job: _Job) -> list[Value]:
        """Return the values that must be computed before a job is run."""
        if job.layout is not None:
            return job.layout.end.reads
        return self._behind(job.outputs, job.arrays)[1]

    def _is_small(self, value: Value) -> bool:
        return value.aval.size < self.plan.min_size

    def _is_brought(self, value: Value) -> bool:
        return value in self.sources and not self._is_small(value)

    def _is_made_of(self, value: Value, arrays: Collection[Value]) -> bool:
        return value in self.sources and self.sources[value].issubset(arrays)

    def _arrays_read(self, nodes: Iterable[Node]) -> list[Value]:
        """Return the arrays in host memory that some equations read."""
        return [v for v in reads_of(nodes) if v.made_at is None and v in self.sources]

    def _behind(
        self, targets: Iterable[Value], arrays: Collection[Value] = ()
    ) -> tuple[list[Node], list[Value]]:
        """Return the equations to compute some values, and the values they need.

        Args:
            targets: the values.
            arrays: the arrays that are copied whole for this. Small values that depend
                on other arrays, or on none, must be computed before.
        """
        return self.traced.program.behind(
            targets, lambda v: self._is_small(v) and not self._is_made_of(v, arrays)
        )

    def _compute(self, targets: Sequence[Value]) -> None:
        """Compute values that are not brought, and small ones from what is."""
        # In the order of the program. Equations that read no brought value run as they
        # are. Others are skipped: a job computes a large result again where it is read,
        # and a loop copies the arrays for a small one.
        for node in self.traced.program.behind(targets)[0]:
            if not any(map(self._is_brought, values_in(node.inputs))):
                run_nodes([node], self.values)
                continue
            for value in filter(self._is_small, node.outputs):
                nodes, _ = self._behind([value])
                compute = partial(self._run_whole, nodes, [value])
                (self.values[value],) = self._run_once(compute, nodes, [value])

    def _run_job(self, job: _Job) -> list[Any]:
        """Return the outputs of a job."""
        if job.layout is None:
            nodes, _ = self._behind(job.outputs, job.arrays)
            compute = partial(self._run_whole, nodes, job.outputs)
        else:
            nodes = job.layout.end.nodes
            compute = partial(self._run_end, job.layout)
        made = self._run_once(compute, nodes, job.outputs)
        # A move tells `jit` that a result of a loop is in host memory.
        return [to_host(x) if is_host_type(x.aval) else x for x in made]

    def _start(self, output: Value) -> jax.Array:
        """Return the value of an output if no iteration runs."""
        aval, old = output.aval, self.traced.replaced.get(output)
        if old is None:
            array = jnp.zeros(aval.shape, aval.dtype)
            if has_explicit_axes(aval.sharding.mesh):
                array = jax.sharding.reshard(array, aval.sharding)
        else:
            array = self.values[old]
            if array.dtype == aval.dtype:
                return array
            array = to_device(array).astype(aval.dtype)  # widened at the first step
        return to_host(array) if is_host_type(aval) else array

    def _run_once(
        self,
        compute: Callable[[dict[Value, Any], list[Any]], list[Any]],
        nodes: Sequence[Node],
        outputs: Sequence[Value],
    ) -> list[Any]:
        """Run a function in a loop of one iteration, or of none.

        Args:
            compute: takes the values computed so far, and the arrays that the outputs
                overwrite.
            nodes: the equations that it runs.
            outputs: what it returns.
        """
        # Arrays to overwrite are carried through the loop, so that XLA writes into
        # their buffers in host memory. A barrier holds back arrays that are only read:
        # XLA would copy all of these before the loop begins.
        old = [overwritten_by(value, self.traced.replaced) for value in outputs]
        arrays = [value for value in self._arrays_read(nodes) if value not in old]

        def body(k: Any, carry: list[Any]) -> list[Any]:
            _, held = lax.optimization_barrier((k, [self.values[v] for v in arrays]))
            local = self.values | dict(zip(arrays, held, strict=True))
            carried = zip(old, carry, strict=True)
            local.update((v, x) for v, x in carried if v is not None)
            return compute(local, carry)

        starts = list(map(self._start, outputs))
        return lax.fori_loop(jnp.int32(0), self.rounds, body, starts)

    def _run_whole(
        self,
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        local: dict[Value, Any],
        carry: list[Any],
    ) -> list[Any]:
        """Return values that are computed from whole arrays."""
        for value in self._arrays_read(nodes):
            local[value] = _bring_whole(local[value])
        run_nodes(nodes, local)
        return [read_output(local, value) for value in outputs]

    def _run_end(
        self, layout: Layout, local: dict[Value, Any], carry: list[Any]
    ) -> list[Any]:
        """Return the outputs of an end, computed chunk by chunk."""
        end = layout.end
        count = len(end.reads)
        # The number of elements of a chunk: the bytes of the plan, divided by the bytes
        # per element of all arrays in host memory.
        new = [v for at, v in enumerate(end.outputs) if at not in end.replaced]
        avals = [v.aval for v in (*end.reads, *new) if is_host_type(v.aval)]
        sizes = [bytes_on_device(x) // x.size for x in avals if x.shape == end.shape]
        most = max(1, self.plan.chunk_bytes // max(4, sum(sizes)))

        def run_part(part: Part, arrays: Sequence[Any]) -> list[Any]:
            cuts = cuts_of(part, most=most)
            brought = [
                x if cuts is not None and cuts.can_leave_host(x) else _bring_whole(x)
                for x in arrays
            ]
            cuts = cuts or Cuts.whole(part)
            made = run_end(end, cuts, brought[:count], brought[count:])
            return [
                to_host(as_stored(x))
                if is_host_type(v.aval) and not is_on_host(x)
                else x
                for v, x in zip(end.outputs, made, strict=True)
            ]

        return layout.run(run_part, [*(local[v] for v in end.reads), *carry])


def _bring_whole(x: jax.Array) -> jax.Array:
    """Return an array on the device."""
    return as_stored(to_device(x)) if is_on_host(x) else x
