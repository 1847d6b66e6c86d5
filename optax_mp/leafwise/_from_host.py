"""Take a step whose state is in host memory, with little of it on the device at a time.

A leaf is brought chunk by chunk where its step goes element by element, else as a
whole. XLA starts every copy as early as it can, so that all of the state would be on
the device at once; what is copied inside of a loop waits for the loop's turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from optax_mp._jax._arrays import is_partitioned
from optax_mp._jax._choose import Choice, select
from optax_mp._jax._jaxpr import is_literal
from optax_mp._jax._memory import (
    bring,
    is_host_type,
    is_on_host,
    moves_memory,
    to_device,
    to_host,
)
from optax_mp._jax._traced import TracedCall, is_dynamic
from optax_mp._warnings import warn
from optax_mp.leafwise._block_operations import is_block_operation
from optax_mp.leafwise._ends import End, cut
from optax_mp.leafwise._evaluator import Part
from optax_mp.leafwise._host_chunks import run_chunks, start_value
from optax_mp.leafwise._host_flow import HostFlow
from optax_mp.leafwise._layout import Layout, Shardings
from optax_mp.leafwise._program import Program, Value, read, read_output, values_in


class Limits(NamedTuple):
    """What may be on the device.

    Attributes:
        min_size: arrays of fewer elements always are.
        chunk_bytes: of the others as many bytes at a time, by `bytes_on_device`.
    """

    min_size: int
    chunk_bytes: int


def run_from_host(
    step: Callable[[Any, Any], tuple[Any, Any]],
    given: Any,
    kept: Any,
    limits: Limits,
    shardings: Sequence[NamedSharding | None] = (),
    proceed: Choice = True,
) -> tuple[Any, Any]:
    """Return `step(given, kept)`.

    Args:
        step: returns updates, and what takes the place of `kept`.
        given: a pytree.
        kept: another. Its arrays in host memory are overwritten there, if they are
            donated.
        limits: what may be on the device.
        shardings: how the leaves of `kept` are sharded under `jit`, None where that is
            not known. What is sharded in an unknown way is brought as a whole.
        proceed: if false, nothing is brought, what was in host memory stays as it was,
            and the rest of the result is of no use.
    """
    traced = TracedCall.of(lambda both: _between_moves(step, *both), (given, kept))
    if traced.closed.effects:
        warn(
            "optax_mp: the update has effects, such as printing, that would be lost in "
            "parts of a step: all of its state is brought to the device at once. Leave "
            "them out, or expect as much memory as without `offload`."
        )
        return _between_moves(step, given, kept, proceed)
    program = Program.of(traced.closed, is_block_operation, opens_branches=True)
    known: dict[Value, Any] = dict(zip(program.inputs, traced.arrays, strict=True))
    known.update(program.constants)
    step_from_host = _StepFromHost(
        program=program,
        known=known,
        flow=HostFlow.of(program, limits.min_size),
        replaced=traced.replaced(kept, traced.unflatten_outputs()[1]),
        limits=limits,
        shardings=_shardings_of_inputs(program, kept, shardings),
        proceed=proceed,
    )
    return traced.unflatten(step_from_host.run())


def _shardings_of_inputs(
    program: Program, kept: Any, shardings: Sequence[NamedSharding | None]
) -> Shardings:
    """Return the shardings by the inputs of a program, the last of which are `kept`."""
    leaves = jax.tree.leaves(kept)
    of_arrays = [s for x, s in zip(leaves, shardings, strict=False) if is_dynamic(x)]
    inputs = program.inputs[len(program.inputs) - len(of_arrays) :]
    both = zip(inputs, of_arrays, strict=True)
    return {value: sharding for value, sharding in both if sharding is not None}


def _between_moves(
    step: Any, given: Any, kept: Any, proceed: Choice = True
) -> tuple[Any, Any]:
    """Return `step(given, kept)`, taken on the device, with `kept` where it was.

    If `proceed` is false, `kept` is what it was.
    """
    leaves, treedef = jax.tree.flatten(kept)
    brought = bring(leaves)
    updates, new = step(given, treedef.unflatten(brought))
    new_leaves, new_def = jax.tree.flatten(new)
    if new_def != treedef:
        return updates, new
    for i, old in enumerate(leaves):
        if is_on_host(old):
            leaf = new_leaves[i]
            if leaf is not brought[i] and proceed is not True:
                leaf = select(proceed, leaf, brought[i])
            new_leaves[i] = old if leaf is brought[i] else to_host(leaf)
    return updates, new_def.unflatten(new_leaves)


@dataclass
class _Job:
    """Outputs that are made of the same arrays in host memory, or overwrite them.

    Attributes:
        arrays: these.
        outputs: which outputs of the program.
        ends: the elementwise ends that make them. If there are several, or none, or
            `by_chunks` is false, the arrays are brought as a whole.
        by_chunks: whether they are brought chunk by chunk.
        layout: how they are sharded, if that is known.
    """

    arrays: set[Value]
    outputs: list[int]
    ends: list[End]
    by_chunks: bool = False
    layout: Layout | None = None


@dataclass(frozen=True)
class _StepFromHost:
    """A step, and what of it is known so far. See `run_from_host`."""

    program: Program
    known: dict[Value, Any]
    flow: HostFlow
    replaced: dict[int, int]
    limits: Limits
    shardings: Shardings
    proceed: Choice

    def run(self) -> list[Any]:
        """Return the outputs of the program."""
        outputs = self.program.outputs
        jobs, others = self._find_jobs()
        wanted = list(values_in([outputs[i] for i in others]))
        for job in jobs:
            self._choose_way(job)
            wanted += self._needed_before(job)
        for turn in self.flow.schedule(wanted):
            self._reduce(turn.reduced)
            self.program.run(sorted(turn.places), self.known)
        results = {i: read_output(self.known, outputs[i]) for i in others}
        for job in jobs:
            run = self._run_chunks if job.by_chunks else self._run_whole
            results.update(zip(job.outputs, map(_mark_memory, run(job)), strict=True))
        return [results[i] for i in range(len(outputs))]

    def _find_jobs(self) -> tuple[list[_Job], list[int]]:
        """Return the jobs, and the outputs that are of none."""
        ends = cut(self.program, self.replaced)
        at_ends = {i for end in ends for i in end.outputs}
        rest = [i for i in range(len(self.program.outputs)) if i not in at_ends]
        found = [_Job(self._arrays_of(end.outputs), end.outputs, [end]) for end in ends]
        found += [_Job(self._arrays_of([i]), [i], []) for i in rest]
        jobs: list[_Job] = []
        for job in found:
            if not job.arrays:
                continue
            for other in [x for x in jobs if x.arrays & job.arrays]:
                jobs.remove(other)
                job.arrays |= other.arrays
                job.outputs = [*other.outputs, *job.outputs]
                job.ends = [*other.ends, *job.ends]
            jobs.append(job)
        of_jobs = {i for job in jobs for i in job.outputs}
        others = [i for i in range(len(self.program.outputs)) if i not in of_jobs]
        return jobs, others

    def _arrays_of(self, outputs: Sequence[int]) -> set[Value]:
        """Return the arrays to bring, or to overwrite, for these outputs."""
        arrays: set[Value] = set()
        for i in outputs:
            value = self.program.outputs[i]
            if is_literal(value) or value.made_at is None:
                continue
            arrays.update(self.flow.arrays_read(self.flow.cone([value])[0]))
            if is_host_type(value.aval) and i in self.replaced:
                arrays.add(self.program.inputs[self.replaced[i]])
        return arrays

    def _choose_way(self, job: _Job) -> None:
        """Bring the arrays of a job chunk by chunk, if all goes element by element."""
        if len(job.ends) != 1 or len(job.ends[0].outputs) != len(job.outputs):
            return
        if any(i in self.replaced and not self._overwritten(i) for i in job.outputs):
            return  # of another type than before
        end = self._with_replaced(job.ends[0])
        for value in end.reads:
            if value.made_at is None:
                continue
            sources = self.flow.sources.get(value, frozenset())
            # A norm of the arrays: once they are here for it, all can be done.
            if self.flow.is_brought(value) or (sources and sources <= job.arrays):
                return
        if end.entangled is not None:
            return
        # What is still to be computed says nothing of how arrays are sharded.
        args = [self.known.get(value, 0) for value in end.reads]
        job.layout = Layout.find(end, args, self.shardings)
        is_local = not any(map(is_partitioned, args))
        if job.layout is not None or is_local:
            job.ends, job.outputs, job.by_chunks = [end], end.outputs, True

    def _with_replaced(self, end: End) -> End:
        """Return an end that reads all arrays that it overwrites."""
        reads, places = list(end.reads), dict(end.replaced)
        for at, i in enumerate(end.outputs):
            old = self._overwritten(i)
            if at not in places and old is not None:
                places[at] = len(reads)
                reads.append(old)
        return replace(end, reads=reads, replaced=places)

    def _needed_before(self, job: _Job) -> list[Value]:
        """Return what must be known before a job is run."""
        if job.by_chunks:
            return job.ends[0].reads
        targets = [self.program.outputs[i] for i in job.outputs]
        return self.flow.cone(targets, job.arrays)[1]

    def _reduce(self, targets: Sequence[Value]) -> None:
        """Compute small values from arrays that are brought as a whole."""
        groups: list[tuple[set[Value], list[Value]]] = []
        for target in targets:
            brought = filter(self.flow.is_brought, self.flow.inputs_of(target))
            arrays, members = set(self.flow.sources_of(brought)), [target]
            for group in [x for x in groups if x[0] & arrays]:
                groups.remove(group)
                arrays |= group[0]
                members = [*group[1], *members]
            groups.append((arrays, members))
        for _, members in groups:
            starts = [start_value(v.aval, v.aval.shape, 0) for v in members]
            results = self._run_once(members, self._rounds(), starts)
            self.known.update(zip(members, results, strict=True))

    def _run_whole(self, job: _Job) -> list[Any]:
        outputs = [self.program.outputs[i] for i in job.outputs]
        overwritten = [self._overwritten(i) for i in job.outputs]
        proceed, fills = self._choice(job.outputs)
        starts = list(map(self._start, job.outputs, fills))
        rounds = self._rounds(proceed)
        return self._run_once(outputs, rounds, starts, overwritten, job.arrays)

    def _start(self, i: int, fill: Any) -> jax.Array:
        """Return what an output is if nothing is brought."""
        aval, old = self.program.outputs[i].aval, self.replaced.get(i)
        if old is None:
            return start_value(aval, aval.shape, fill)
        array = self.known[self.program.inputs[old]]
        if array.dtype == aval.dtype:
            return array
        array = to_device(array).astype(aval.dtype)  # widened at the first step
        return to_host(array) if is_host_type(aval) else array

    def _overwritten(self, i: int) -> Value | None:
        """Return the input that an output can overwrite."""
        if i not in self.replaced:
            return None
        old, new = self.program.inputs[self.replaced[i]], self.program.outputs[i]
        return old if old.aval == new.aval else None

    def _run_once(
        self,
        targets: Sequence[Value],
        rounds: Any,
        starts: Sequence[Any],
        overwritten: Sequence[Value | None] = (),
        arrays: Sequence[Value] | set[Value] = (),
    ) -> list[Any]:
        """Compute values in a loop of one round."""
        places, _ = self.flow.cone(targets, arrays)
        read = self.flow.arrays_read(places)

        def body(k: Any, carry: Any) -> list[Any]:
            # XLA would bring what a loop only reads ahead of it, and so all at once.
            _, held = lax.optimization_barrier((k, [self.known[v] for v in read]))
            local = self.known | dict(zip(read, held, strict=True))
            for old, value in zip(overwritten, carry, strict=False):
                if old is not None:
                    local[old] = value
            self.program.run(places, local)
            return [read_output(local, target) for target in targets]

        return lax.fori_loop(jnp.int32(0), rounds, body, list(starts))

    def _run_chunks(self, job: _Job) -> list[Any]:
        (end,) = job.ends
        args = [self.known[value] for value in end.reads]
        proceed, fills = self._choice(end.outputs)
        run_part = partial(
            run_chunks,
            self.program,
            end,
            rounds=self._rounds(proceed),
            fills=fills,
            chunk_bytes=self.limits.chunk_bytes,
        )
        if job.layout is None:
            return run_part(Part.of(end), args)
        return job.layout.run(run_part, self.program, end, args)

    def _rounds(self, proceed: Any = True) -> Any:
        """Return 1, or 0 if the step is skipped, as a number that XLA does not know.

        A loop of one round would be no loop for it.
        """
        rounds = jnp.asarray(proceed & self.proceed).astype(jnp.int32)
        return lax.optimization_barrier(rounds)

    def _choice(self, outputs: Sequence[int]) -> tuple[Any, list[Any]]:
        """Return whether the step itself proceeds, and what outputs are if it does not.

        A wrapper inside of the step may choose between each new value and the old one,
        or a constant. If all outputs are chosen by one number, nothing is brought where
        it is false.
        """
        chosen = [self._chosen(i) for i in outputs]
        predicates = {each[0] for each in chosen if each is not None}
        if None in chosen or len(predicates) != 1:
            return True, [0] * len(outputs)
        return read(self.known, *predicates), [each[1] for each in chosen if each]

    def _chosen(self, i: int) -> tuple[Value, Any] | None:
        """Return by what an output is chosen, and the constant it can be; or None."""
        value = self._moved(self.program.outputs[i])
        at = getattr(value, "made_at", None)
        if at is None or self.program.nodes[at].equation.primitive.name != "select_n":
            return None
        predicate, other, *_ = self.program.nodes[at].inputs
        if is_literal(predicate) or predicate not in self.known:
            return None
        if predicate.aval.shape or predicate.aval.dtype != bool:
            return None
        old = self._overwritten(i)
        if old is not None:
            return (predicate, 0) if self._moved(other) is old else None
        fill = self._constant(other)
        return None if fill is None else (predicate, fill)

    def _moved(self, value: Any) -> Any:
        """Return what a value was before it was moved to another memory."""
        while isinstance(value, Value) and value.made_at is not None:
            node = self.program.nodes[value.made_at]
            if not moves_memory(node.equation):
                break
            (value,) = node.inputs
        return value

    def _constant(self, value: Any) -> Any:
        """Return the number that an array repeats, or None."""
        if not isinstance(value, Value) or value.made_at is None:
            return None
        node = self.program.nodes[value.made_at]
        if node.equation.primitive.name != "broadcast_in_dim":
            return None
        (number,) = node.inputs
        is_known = is_literal(number) or number in self.known
        return read(self.known, number) if is_known and not number.aval.ndim else None


def _mark_memory(x: jax.Array) -> jax.Array:
    """Return a result of a loop; of one that is in host memory `jit` learns that."""
    return to_host(x) if is_host_type(x.aval) else x
