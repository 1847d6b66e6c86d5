"""Steps of a state in host memory, and its making, with little of it on the device.

The step is traced as if all of the state were on the device, then one leaf at a time.
A job computes the outputs of one leaf, or of several leaves that read the same arrays.
It is a loop of one iteration. XLA starts copies as early as it can, and would have all
of the state on the device at once; but it does not move a copy out of a loop. In the
loop, `_chunks` runs elementwise equations; all others take whole arrays.

Values that several jobs need, such as the norm of all updates, are computed before:
leaf after leaf is copied to the device and reduced to a number. The jobs copy it again.

A state is made a few of its arrays at a time, in one program for each.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._arrays import (
    bytes_on_device,
    is_host_type,
    is_on_host,
    is_partitioned,
    to_device,
    to_device_tree,
    to_host,
)
from optax_mp._jax._jaxpr import TracedCall, groups_with_common
from optax_mp._take_step import StepFn
from optax_mp._warnings import warn
from optax_mp.engine._chunks import Chunk, first_chunk, run_tail, whole_on_device
from optax_mp.engine._layout import Part
from optax_mp.engine._program import (
    Node,
    Program,
    Value,
    backward_slice,
    read_output,
    reads_of,
    run_nodes,
    structural_key,
    values_in,
)
from optax_mp.engine._tails import ElementwiseTail, overwritten_by
from optax_mp.engine._tailwise import TracedStep
from optax_mp.wrappers._choose import select
from optax_mp.wrappers._context import Choice, Plan


def run_on_device(
    step: StepFn, inputs: Any, kept: Any, proceed: Choice = True
) -> tuple[Any, Any]:
    """Return `step(inputs, kept)`, taken on the device, with `kept` where it was.

    If `proceed` is false, arrays in host memory are what they were.
    """
    on_device = to_device_tree(kept)
    updates, new = step(inputs, on_device)
    if jax.tree.structure(new) != jax.tree.structure(kept):
        return updates, new

    def move_back(leaf: Any, before: Any, old: Any) -> Any:
        if not is_on_host(old):
            return leaf
        if leaf is before:
            return old
        return to_host(leaf if proceed is True else select(proceed, leaf, before))

    return updates, jax.tree.map(move_back, new, on_device, kept)


def step_from_host(
    step: StepFn, inputs: Any, kept: Any, plan: Plan, proceed: Choice = True
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
            "optax_mp: the update has effects, such as printing, that parts of a step "
            "would lose, so all of its state is on the device at once: leave them out."
        )
        return None
    traced_step = TracedStep(traced, kept, plan.shardings)
    # As a number that XLA does not know: a loop of one round would be no loop.
    rounds = lax.optimization_barrier(jnp.asarray(proceed).astype(jnp.int32))
    return traced.unflatten(_StepFromHost(traced_step, plan, rounds).run())


class _Job(NamedTuple):
    """Values that one loop computes, as they read or overwrite the same arrays.

    Attributes:
        outputs: the values.
        nodes: the equations that compute them, from values that are computed before.
        tail: the elementwise tail that computes them, chunk by chunk if it can; None if
            equations need whole arrays.
    """

    outputs: Sequence[Value]
    nodes: Sequence[Node]
    tail: ElementwiseTail | None = None


class _StepFromHost:
    """A step, and the values computed so far. See `step_from_host`.

    A large value that depends on arrays in host memory is on the device only within a
    loop. A small value is computed once, and stays.
    """

    def __init__(self, traced: TracedStep, plan: Plan, rounds: Any) -> None:
        self.traced, self.plan, self.rounds = traced, plan, rounds
        self.values: dict[Any, Any] = dict(traced.values)
        # For each value the arrays in host memory that it depends on, if any.
        hosted = [value for value in traced.program.inputs if is_host_type(value.aval)]
        self.sources = {value: frozenset([value]) for value in hosted}
        for node in traced.program.nodes:
            if found := [self.sources[x] for x in node.reads if x in self.sources]:
                self.sources |= dict.fromkeys(node.outputs, frozenset().union(*found))

    def run(self) -> list[Any]:
        """Return the outputs of the program."""
        # First the values outside of the jobs, and those that the jobs need. Then the
        # jobs, which do not depend on each other.
        outputs, jobs = self.traced.program.outputs, self._find_jobs()
        of_jobs = {value for job in jobs for value in job.outputs}
        others = [value for value in values_in(outputs) if value not in of_jobs]
        self._compute(others + [x for job in jobs for x in reads_of(job.nodes)])
        for job in jobs:
            self.values.update(zip(job.outputs, self._run(job), strict=True))
        return [read_output(self.values, value) for value in outputs]

    def _find_jobs(self) -> list[_Job]:
        # A job for each tail, and for each output that is in none. Jobs that share an
        # array become one: it would be copied twice, and a job that overwrites it would
        # have to wait for the others.
        tails = {tuple(tail.outputs): tail for tail in self.traced.tails}
        in_tails = {value for outputs in tails for value in outputs}
        outputs = dict.fromkeys(values_in(self.traced.program.outputs))
        together = [
            *tails,
            *((x,) for x in outputs if x.producer and x not in in_tails),
        ]
        arrays = [self._arrays_of(values) for values in together]
        jobs = []
        for group in groups_with_common(arrays):
            of_group = set[Value]().union(*(arrays[i] for i in group))
            values = tuple(value for i in group for value in together[i])
            if of_group:
                jobs.append(self._job_of(values, of_group, tails.get(values)))
        return jobs

    def _arrays_of(self, outputs: Sequence[Value]) -> set[Value]:
        """Return the arrays in host memory to read, or to overwrite, for outputs."""
        old = {overwritten_by(value, self.traced.replaced) for value in outputs}
        hosted = {x for x in old if x is not None and is_host_type(x.aval)}
        return hosted.union(_hosted(self._slice(outputs)))

    def _job_of(
        self, outputs: Sequence[Value], arrays: set[Value], tail: ElementwiseTail | None
    ) -> _Job:
        """Return the job for some outputs, of a tail or of several."""
        nodes, tail_nodes = self._slice(outputs, arrays), tail.nodes if tail else ()
        # A norm of the arrays, or a product, needs them whole.
        before = set(nodes).difference(tail_nodes)
        needs_whole = any(node.outputs[0] in self.sources for node in before)
        is_last = tail is not None and tail.axis == len(tail.shape) - 1
        if tail is None or tail.unsplittable_because or needs_whole or not is_last:
            return _Job(outputs, nodes)
        return _Job(outputs, tail.nodes, tail)

    def _is_small(self, value: Value) -> bool:
        return value.aval.size < self.plan.min_size

    def _slice(
        self, targets: Iterable[Value], arrays: Collection[Value] = ()
    ) -> list[Node]:
        """Return the equations to compute some values from those computed before.

        Args:
            targets: the values.
            arrays: the arrays that are copied whole for this. Small values that depend
                on other arrays, or on none, must be computed before.
        """

        def is_before(value: Value) -> bool:
            found = self.sources.get(value)
            return self._is_small(value) and not (found and found.issubset(arrays))

        return backward_slice(targets, is_before)

    def _compute(self, targets: Sequence[Value]) -> None:
        """Compute values that are on the device, and small ones from what is not."""
        # In the order of the program. Equations that read no large value from host
        # memory run as they are. Others are skipped: a job computes a large result
        # again where it is read, and a loop copies the arrays for a small one.
        for node in backward_slice(targets):
            hosted = [value for value in node.reads if value in self.sources]
            if all(map(self._is_small, hosted)):
                run_nodes([node], self.values)
                continue
            for value in filter(self._is_small, node.outputs):
                job = _Job([value], self._slice([value]))
                (self.values[value],) = self._run(job)

    def _run(self, job: _Job) -> list[Any]:
        """Return the outputs of a job: of a loop of one iteration, or of none."""
        # Arrays to overwrite are carried through the loop, so that XLA writes into
        # their buffers in host memory. A barrier holds back arrays that are only read:
        # XLA would copy all of these before the loop begins.
        replaced = self.traced.replaced
        old = [overwritten_by(value, replaced) for value in job.outputs]
        arrays = [value for value in _hosted(job.nodes) if value not in old]

        def body(k: Any, carry: list[Any]) -> list[Any]:
            _, held = lax.optimization_barrier((k, [self.values[v] for v in arrays]))
            both = zip([*arrays, *old], [*held, *carry], strict=True)
            local = self.values | {v: x for v, x in both if v is not None}
            if job.tail and (made := self._run_chunks(job.tail, local, carry)):
                return made
            local |= {v: whole_on_device(local[v]) for v in _hosted(job.nodes)}
            run_nodes(job.nodes, local)
            return [read_output(local, value) for value in job.outputs]

        starts = [_start(x.aval, self.values.get(replaced.get(x))) for x in job.outputs]
        made = lax.fori_loop(jnp.int32(0), self.rounds, body, starts)
        # A move tells `jit` that a result of a loop is in host memory.
        return [to_host(x) if is_host_type(x.aval) else x for x in made]

    def _run_chunks(
        self, tail: ElementwiseTail, values: dict[Value, Any], starts: list[Any]
    ) -> list[Any] | None:
        """Return the outputs of a tail, which overwrite `starts` chunk by chunk.

        None if it is not known how its arrays are sharded.
        """
        args = [values[value] for value in tail.reads]
        whole = Part.of(tail, args, self.traced.shardings)
        if whole.sharding is None and any(map(is_partitioned, args)):
            return None
        new = [x for at, x in enumerate(tail.outputs) if at not in tail.replaced]
        avals = [x.aval for x in (*tail.reads, *new) if is_host_type(x.aval)]
        sizes = [bytes_on_device(x) // x.size for x in avals if x.shape == tail.shape]
        most = max(1, self.plan.chunk_bytes // max(4, sum(sizes)))

        def run_part(part: Part, arrays: Sequence[Any]) -> list[Any]:
            first = first_chunk(part, most) or Chunk.whole(part)
            return run_tail(tail, first, arrays[: len(args)], arrays[len(args) :])

        return whole.run(run_part, [*args, *starts])


def _start(aval: Any, old: jax.Array | None) -> jax.Array:
    """Return what a loop that has no iteration returns, in the place of `old`."""
    if old is None:
        start = jnp.zeros(aval.shape, aval.dtype)
        if aval.sharding.mesh.explicit_axes:
            start = jax.sharding.reshard(start, aval.sharding)
    elif old.dtype == aval.dtype:
        return old
    else:  # widened at the first step
        start = to_device(old).astype(aval.dtype)
    return to_host(start) if is_host_type(aval) else start


def _hosted(nodes: Iterable[Node]) -> list[Value]:
    """Return the arrays in host memory that some equations read."""
    return [value for value in reads_of(nodes) if is_host_type(value.aval)]


def compute_in_groups(
    traced: TracedCall, groups: Iterable[Sequence[int]], place: Callable[[Any], Any]
) -> Any:
    """Return what a traced function returned, computed group by group.

    Args:
        traced: the function.
        groups: the indices of its outputs, each in one group.
        place: moves the list of a group's arrays to where they belong, in its program.
    """
    program = Program.of(traced.closed)
    known = program.constants | dict(zip(program.inputs, traced.arrays, strict=True))
    values: dict[int, Any] = {}
    compiled: dict[Hashable, Any] = {}  # equal computations are compiled once

    def run(nodes: Any, reads: Any, outputs: Any, args: Any) -> list[Any]:
        local = dict(zip(reads, args, strict=True))
        run_nodes(nodes, local)
        return place([read_output(local, value) for value in outputs])

    for group in groups:
        outputs = [program.outputs[i] for i in group]
        nodes = backward_slice(outputs)
        given = [value for value in values_in(outputs) if value.producer is None]
        reads = list(dict.fromkeys([*reads_of(nodes), *given]))
        if not any(value in program.inputs for value in reads):
            reads += program.inputs  # so that results are on the devices of the params
        key = structural_key(nodes, reads, outputs)
        if key not in compiled:
            own = partial(run, nodes, reads, outputs)
            compiled[key] = jax.jit(own, keep_unused=True)
        made = compiled[key]([known[value] for value in reads])
        values.update(zip(group, made, strict=True))
    return traced.unflatten([values[i] for i in range(len(values))])
