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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from optax_mp._choose import Choice, select
from optax_mp._jax._arrays import has_explicit_axes, is_partitioned
from optax_mp._jax._block_operations import is_block_operation
from optax_mp._jax._jaxpr import is_literal
from optax_mp._jax._memory import bring, is_host_type, is_on_host, to_device, to_host
from optax_mp._jax._traced import TracedCall
from optax_mp._warnings import warn
from optax_mp.leafwise._chunks import Cuts, cuts_of, in_rows, run_end
from optax_mp.leafwise._ends import End, cut
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._layout import Layout
from optax_mp.leafwise._program import (
    Program,
    Value,
    groups_with_common,
    read_output,
    values_in,
)

Step = Callable[[Any, Any], tuple[Any, Any]]
OUTER_STEP = "optax_mp_outer_step"  # the extra argument


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


@dataclass(eq=False)
class OuterStep:
    """A step of which `offload` is a part, such as that of `take_step`.

    It is an extra argument of the update. `offload` then only moves arrays.

    Attributes:
        plans: of the `offload`s inside, without shardings.
        param_shardings: those that the last `offload` was called with.
    """

    plans: list[Plan] = field(default_factory=list)
    param_shardings: Any = None

    def plan(self, shardings: Sequence[NamedSharding | None]) -> Plan | None:
        """Return a plan that fits all plans; None if there is no `offload`."""
        return min(self.plans)._replace(shardings=shardings) if self.plans else None


def bytes_on_device(aval: Any) -> int:
    """Return how many bytes an array takes on the device.

    Codes of few bits become numbers of 32 bits there.
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
    make_plan: Callable[[], Plan | None],
    proceed: Choice = True,
) -> tuple[Any, Any]:
    """Return `step(inputs, kept)`.

    Args:
        step: returns its result, and a tree that replaces `kept`. It moves arrays to
            the device and back.
        inputs: a pytree.
        kept: a pytree. Its arrays in host memory are overwritten there, if they are
            donated.
        make_plan: called after the step was traced; returns None if all of the state
            may be on the device.
        proceed: if false, nothing is copied, arrays in host memory keep their values,
            and the rest of the result has no meaning.
    """
    traced = TracedCall.of(lambda both: step(*both), (inputs, kept))
    plan = make_plan()
    if traced.closed.effects:
        warn(
            "optax_mp: the update has effects, such as printing, that would be lost in "
            "parts of a step: all of its state is brought to the device at once. Leave "
            "them out, or expect as much memory as without `offload`."
        )
    if traced.closed.effects or plan is None:
        updates, new = step(inputs, kept)
        return updates, _keep_unless(proceed, new, kept)
    program = Program.of(traced.closed, is_block_operation, opens_branches=True)
    values: dict[Value, Any] = dict(zip(program.inputs, traced.arrays, strict=True))
    shardings = traced.by_input(kept, plan.shardings)
    step_from_host = _StepFromHost(
        program=program,
        values=values | program.constants,
        sources=_find_sources(program),
        replaced=traced.replaced(kept),
        plan=plan,
        shardings={program.inputs[i]: x for i, x in shardings.items()},
        # As a number that XLA does not know: a loop of one round would be no loop.
        rounds=lax.optimization_barrier(jnp.asarray(proceed).astype(jnp.int32)),
    )
    return traced.unflatten(step_from_host.run())


def _keep_unless(proceed: Choice, new: Any, kept: Any) -> Any:
    """Return a new state; if not `proceed`, the arrays in host memory as before."""
    if proceed is True:
        return new

    def choose(new: Any, old: Any) -> Any:
        if not is_on_host(old):
            return new
        return to_host(select(proceed, to_device(new), to_device(old)))

    return jax.tree.map(choose, new, kept)


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
        outputs: which outputs of the program.
        end: the elementwise end that computes all of them; None if whole arrays are
            copied.
        layout: how its arrays are sharded, if that is known.
    """

    arrays: set[Value]
    outputs: list[int]
    end: End | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class _StepFromHost:
    """A step, and the values computed so far. See `run_from_host`.

    A value is *brought* if it is large and depends on arrays in host memory: it is on
    the device only within a loop. A small value is computed once, and stays.
    """

    program: Program
    values: dict[Value, Any]
    sources: dict[Value, frozenset[Value]]
    replaced: dict[int, int]
    plan: Plan
    shardings: dict[Value, NamedSharding]
    rounds: Any

    def run(self) -> list[Any]:
        """Return the outputs of the program."""
        outputs = self.program.outputs
        jobs = self._find_jobs()
        of_jobs = {i for job in jobs for i in job.outputs}
        others = [i for i in range(len(outputs)) if i not in of_jobs]
        self._compute(
            [outputs[i] for i in others]
            + [value for job in jobs for value in self._needed_before(job)]
        )
        results = {i: read_output(self.values, outputs[i]) for i in others}
        for job in jobs:
            results.update(zip(job.outputs, self._run_job(job), strict=True))
        return [results[i] for i in range(len(outputs))]

    def _find_jobs(self) -> list[_Job]:
        # A job for each end, and for each output that no end computes. Jobs that share
        # an array become one: it would be copied twice, and a job that overwrites it
        # would have to wait for the others.
        ends: list[Any] = cut(self.program, self.replaced)
        at_ends = {i for end in ends for i in end.outputs}
        rest = [i for i in range(len(self.program.outputs)) if i not in at_ends]
        makers = [(end, end.outputs) for end in ends] + [(None, [i]) for i in rest]
        of_makers = [
            (self._arrays_of(outputs), outputs, end) for end, outputs in makers
        ]
        found = [maker for maker in of_makers if maker[0]]
        jobs = []
        for group in groups_with_common([arrays for arrays, _, _ in found]):
            arrays = set[Value]().union(*(found[at][0] for at in group))
            outputs = [i for at in group for i in found[at][1]]
            ends = [found[at][2] for at in group if found[at][2] is not None]
            end = ends[0] if len(ends) == 1 and ends[0].outputs == outputs else None
            jobs.append(self._by_chunks(arrays, end) or _Job(arrays, outputs))
        return jobs

    def _arrays_of(self, outputs: Sequence[int]) -> set[Value]:
        """Return the arrays to bring, or to overwrite, for these outputs."""
        arrays: set[Value] = set()
        for i in outputs:
            value = self.program.outputs[i]
            if is_literal(value) or value.made_at is None:
                continue
            arrays.update(self._arrays_read(self._behind([value])[0]))
            if is_host_type(value.aval) and i in self.replaced:
                arrays.add(self.program.inputs[self.replaced[i]])
        return arrays

    def _by_chunks(self, arrays: set[Value], end: End | None) -> _Job | None:
        """Return the job of an end; None if it needs whole arrays."""
        if end is None or end.entangled is not None:
            return None
        if any(i in self.replaced and not self._overwritten(i) for i in end.outputs):
            return None  # of another type than before
        for value in end.reads:
            # A norm of the arrays needs them whole, so the job takes whole arrays.
            if value.made_at is not None and (
                self._is_made_of(value, arrays) or self._is_brought(value)
            ):
                return None
        end = self._with_replaced(end)
        # Values that are still to be computed have no sharding yet.
        args = [self.values.get(value, 0) for value in end.reads]
        layout = Layout.find(end, args, self.shardings)
        if layout is None and any(map(is_partitioned, args)):
            return None
        return _Job(arrays, end.outputs, end, layout)

    def _with_replaced(self, end: End) -> End:
        """Return an end all of whose outputs overwrite something that it reads."""
        reads, places = list(end.reads), dict(end.replaced)
        for at, i in enumerate(end.outputs):
            if at not in places:
                places[at] = len(reads)
                new = Value(self.program.outputs[i].aval)  # what the loop carries
                reads.append(self._overwritten(i) or new)
        return replace(end, reads=reads, replaced=places)

    def _overwritten(self, i: int) -> Value | None:
        """Return the input that an output can overwrite."""
        if i not in self.replaced:
            return None
        old, new = self.program.inputs[self.replaced[i]], self.program.outputs[i]
        return old if old.aval == new.aval else None

    def _needed_before(self, job: _Job) -> list[Value]:
        """Return the values that must be computed before a job is run."""
        if job.end is not None:
            return job.end.reads
        targets = [self.program.outputs[i] for i in job.outputs]
        return self._behind(targets, job.arrays)[1]

    def _is_small(self, value: Value) -> bool:
        return value.aval.size < self.plan.min_size

    def _is_brought(self, value: Value) -> bool:
        return value in self.sources and not self._is_small(value)

    def _is_made_of(self, value: Value, arrays: Collection[Value]) -> bool:
        return value in self.sources and self.sources[value].issubset(arrays)

    def _arrays_read(self, places: Sequence[int]) -> list[Value]:
        """Return the arrays in host memory that some equations read."""
        reads = self.program.reads_of(places)
        return [v for v in reads if v.made_at is None and v in self.sources]

    def _behind(
        self, targets: Iterable[Value], arrays: Collection[Value] = ()
    ) -> tuple[list[int], list[Value]]:
        """Return the equations to compute some values, and the values they need.

        Args:
            targets: the values.
            arrays: the arrays that are copied whole for this. Small values that depend
                on other arrays, or on none, must be computed before.
        """
        return self.program.behind(
            targets, lambda v: self._is_small(v) and not self._is_made_of(v, arrays)
        )

    def _compute(self, targets: Sequence[Value]) -> None:
        """Compute values that are not brought, and small ones from what is."""
        # In the order of the program. Equations that read no brought value run as they
        # are. Others are skipped: a job computes a large result again where it is read,
        # and a loop copies the arrays for a small one.
        for place in self.program.behind(targets)[0]:
            node = self.program.nodes[place]
            if not any(map(self._is_brought, values_in(node.inputs))):
                self.program.run([place], self.values)
                continue
            for value in filter(self._is_small, node.outputs):
                compute = partial(self._run_whole, [value])
                read = self._arrays_read(self._behind([value])[0])
                start = _start_value(value.aval)
                (self.values[value],) = self._run_once(compute, [start], read)

    def _run_job(self, job: _Job) -> list[Any]:
        """Return the outputs of a job."""
        outputs = [self.program.outputs[i] for i in job.outputs]
        if job.end is None:
            overwritten = [self._overwritten(i) for i in job.outputs]
            places = self._behind(outputs, job.arrays)[0]
            compute = partial(self._run_whole, outputs, arrays=job.arrays)
        else:
            replaced = sorted(job.end.replaced.items())
            overwritten = [job.end.reads[i] for _, i in replaced]
            places = job.end.places
            compute = partial(self._run_end, job.end, job.layout)
        # Arrays to overwrite are carried through the loop, so that XLA writes into
        # their buffers in host memory. A barrier holds back arrays that are only read.
        read = [v for v in self._arrays_read(places) if v not in overwritten]
        starts = list(map(self._start, job.outputs))
        made = self._run_once(compute, starts, read, overwritten)
        # A move tells `jit` that a result of a loop is in host memory.
        return [to_host(x) if is_host_type(x.aval) else x for x in made]

    def _start(self, i: int) -> jax.Array:
        """Return the value of an output if no iteration runs."""
        aval, old = self.program.outputs[i].aval, self.replaced.get(i)
        if old is None:
            return _start_value(aval)
        array = self.values[self.program.inputs[old]]
        if array.dtype == aval.dtype:
            return array
        array = to_device(array).astype(aval.dtype)  # widened at the first step
        return to_host(array) if is_host_type(aval) else array

    def _run_once(
        self,
        compute: Callable[[dict[Value, Any]], list[Any]],
        starts: Sequence[Any],
        arrays: Sequence[Value],
        overwritten: Sequence[Value | None] = (),
    ) -> list[Any]:
        """Run a function in a loop of one iteration, or of none.

        Args:
            compute: takes the values computed so far.
            starts: the arrays to be replaced.
            arrays: the arrays in host memory that it only reads.
            overwritten: for each of `starts`, the value that it is.
        """

        def body(k: Any, carry: Any) -> list[Any]:
            # XLA would copy all arrays that a loop only reads before the loop begins.
            _, held = lax.optimization_barrier((k, [self.values[v] for v in arrays]))
            local = self.values | dict(zip(arrays, held, strict=True))
            both = zip(overwritten, carry, strict=False)
            return compute(local | {v: x for v, x in both if v is not None})

        return lax.fori_loop(jnp.int32(0), self.rounds, body, list(starts))

    def _run_whole(
        self,
        targets: Sequence[Value],
        local: dict[Value, Any],
        arrays: Collection[Value] = (),
    ) -> list[Any]:
        """Return values that are computed from whole arrays."""
        places, _ = self._behind(targets, arrays)
        for value in self._arrays_read(places):
            local[value] = _bring_whole(local[value])
        self.program.run(places, local)
        return [read_output(local, target) for target in targets]

    def _run_end(
        self, end: End, layout: Layout | None, local: dict[Value, Any]
    ) -> list[Any]:
        """Return the outputs of an end, computed chunk by chunk."""
        args = [local[value] for value in end.reads]
        run_part = partial(self._run_part, end)
        if layout is None:
            return run_part(Part.of(end), args)
        return layout.run(run_part, self.program, end, args)

    def _run_part(self, end: End, part: Part, args: Sequence[Any]) -> list[Any]:
        """Return the outputs of an end for the part that one device has."""
        # The number of elements of a chunk: the bytes of the plan, divided by the bytes
        # per element of all arrays in host memory.
        avals = [v.aval for v in end.reads if is_host_type(v.aval)]
        sizes = [bytes_on_device(x) // x.size for x in avals if x.shape == end.shape]
        most = max(1, self.plan.chunk_bytes // max(4, sum(sizes)))
        cuts = cuts_of(part, most=most)
        brought = [
            x if cuts is not None and cuts.can_leave_host(x) else _bring_whole(x)
            for x in args
        ]
        made = run_end(self.program, end, cuts or Cuts.whole(part), brought)
        outputs = [self.program.outputs[i] for i in end.outputs]
        return [
            to_host(in_rows(x)) if is_host_type(v.aval) and not is_on_host(x) else x
            for v, x in zip(outputs, made, strict=True)
        ]


def _start_value(aval: Any) -> jax.Array:
    """Return an array to be overwritten, of a type."""
    array = jnp.zeros(aval.shape, aval.dtype)
    if has_explicit_axes(aval.sharding.mesh):
        array = jax.sharding.reshard(array, aval.sharding)
    return to_host(array) if is_host_type(aval) else array


def _bring_whole(x: jax.Array) -> jax.Array:
    """Return an array on the device."""
    return in_rows(to_device(x)) if is_on_host(x) else x
