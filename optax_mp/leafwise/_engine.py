"""Take a step leaf by leaf: in one pass over each, where a platform has a kernel."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from optax_mp._jax._apart import apart
from optax_mp._jax._arrays import is_traced_by_jit, looks_for_leaks
from optax_mp._jax._by_platform import Way, by_platform, kernel_obstacle
from optax_mp._jax._jaxpr import open_jaxpr
from optax_mp._jax._memory import is_on_host
from optax_mp._jax._traced import TracedCall, is_dynamic
from optax_mp._tree import is_array
from optax_mp.leafwise import _chunks, _gpu, _tpu
from optax_mp.leafwise._alike import form_of
from optax_mp.leafwise._block_operations import is_block_operation
from optax_mp.leafwise._ends import End, cut, is_packed
from optax_mp.leafwise._evaluator import Part, PartEvaluator
from optax_mp.leafwise._in_turn import Turns
from optax_mp.leafwise._layout import Layout, Shardings, shardings_of_inputs
from optax_mp.leafwise._program import Program, Value, read_output
from optax_mp.leafwise._together import Team, TeamRun

Step = Callable[[Any, Any], tuple[Any, Any]]
_KERNELS = {"tpu": _tpu, "cuda": _gpu}
# Whether a step is being traced: one within it is a part of that.
_is_within: ContextVar[bool] = ContextVar("_is_within", default=False)


def run_leafwise(
    step: Step,
    given: Any,
    kept: Any,
    shardings: Sequence[NamedSharding | None] = (),
    platforms: Collection[str] = (*_KERNELS, "cpu"),
) -> tuple[Any, Any]:
    """Return `step(given, kept)`, with the elementwise end of each leaf in one pass.

    Args:
        step: returns what it makes, and what takes the place of `kept`.
        given: a pytree.
        kept: another. Its arrays can be overwritten, if they are donated.
        shardings: how the leaves of `kept` are sharded under `jit`, None where that is
            not known. A kernel goes only where it is known.
        platforms: those that have a way of their own.
    """
    if _is_within.get():
        return step(given, kept)
    cut_step = CutStep.of(step, given, kept, shardings)
    if isinstance(cut_step, str):
        with within_step():
            return step(given, kept)
    return cut_step.run(platforms)


@contextmanager
def within_step() -> Iterator[None]:
    """Leave all steps that are taken in here as they are: they are part of one."""
    token = _is_within.set(True)
    try:
        yield
    finally:
        _is_within.reset(token)


@dataclass(frozen=True)
class CutStep:
    """A step, traced and cut.

    Attributes:
        traced: the step.
        program: its equations.
        ends: the elementwise end of each leaf.
        shardings: of the program's inputs, where they are known.
    """

    traced: TracedCall
    program: Program
    ends: list[End]
    shardings: Shardings

    @classmethod
    def of(
        cls,
        step: Step,
        given: Any,
        kept: Any,
        shardings: Sequence[NamedSharding | None] = (),
    ) -> "CutStep | str":
        """Trace and cut a step, or return why that cannot be, or would not pay.

        Args:
            step: see `run_leafwise`, as for the others.
            given: a pytree.
            kept: another.
            shardings: how the leaves of `kept` are sharded.
        """
        leaves = jax.tree.leaves((given, kept))
        if not any(is_array(x) and is_packed(x) for x in leaves):
            return "nothing in few bits"
        # Under `vmap` or `grad` there is no kernel. What is known stays known.
        if not all(is_traced_by_jit(x) for x in leaves if is_dynamic(x)):
            return "arrays not traced by `jit` alone"
        if any(map(is_on_host, leaves)):
            return "state in host memory"
        if looks_for_leaks():
            return "JAX looks for leaked tracers"
        with within_step():
            traced = TracedCall.of(lambda both: step(*both), (given, kept))
        if not _has_fixed_shapes(traced):
            return "sizes known later only"
        # What nothing reads the result of, such as printing, would be lost.
        if any(map(_is_seen, traced.closed.effects)):
            return "the update has effects"
        program = Program.of(traced.closed, is_block_operation)
        replaced = {
            output: read
            for output, read in traced.replaced(
                kept, traced.unflatten_outputs()[1]
            ).items()
            if _are_alike(program.outputs[output], program.inputs[read])
        }
        ends = cut(program, replaced)
        return cls(traced, program, ends, shardings_of_inputs(program, kept, shardings))

    def run(self, platforms: Collection[str]) -> Any:
        """Return the result of the step, computed in the way of these platforms."""
        program, ends = self.program, self.ends
        at_ends = {i for end in ends for i in end.outputs}
        others = [v for i, v in enumerate(program.outputs) if i not in at_ends]
        inputs = zip(program.inputs, self.traced.arrays, strict=True)
        known: dict[Value, Any] = dict(inputs) | program.constants
        reads = [value for end in ends for value in end.reads]
        program.run(program.needed([*others, *reads]), known)
        results: dict[int, Any] = {}
        runners, turns = _Runners(program, platforms), Turns(program)
        for team in self._teams(known, platforms):
            args = [known[value] for value in team.reads]
            run = partial(runners.run_team, team, shardings=self.shardings)
            if len(team.ends) == 1 and "cpu" in platforms:
                run = partial(turns.run, team.ends[0], run)
            outputs = run(args)
            places = [i for end in team.ends for i in end.outputs]
            results.update(zip(places, outputs, strict=True))
        for i, value in enumerate(program.outputs):
            if i not in at_ends:
                results[i] = read_output(known, value)
        return self.traced.unflatten([results[i] for i in range(len(results))])

    def _teams(self, known: dict[Value, Any], platforms: Collection[str]) -> list[Team]:
        """Return the ends, together with those that they may be stacked with."""

        def form(end: End) -> Hashable:
            args = [known[value] for value in end.reads]
            is_spread = Layout.find(end, args, self.shardings) is not None
            return object() if is_spread else form_of(self.program, end)

        if "cpu" not in platforms:
            return [Team([end]) for end in self.ends]
        return Team.find(self.ends, form)

    def obstacle(self, end: End, platform: str, is_sharded: bool) -> str | None:
        """Return why an end has no kernel on a platform; None if it has one.

        Args:
            end: one of the ends.
            platform: "tpu" or "cuda".
            is_sharded: whether its arrays are on several devices.
        """
        if end.obstacle is not None or kernel_obstacle() is not None:
            return end.obstacle or kernel_obstacle()
        inputs = dict(zip(self.program.inputs, self.traced.arrays, strict=True))
        args = [inputs.get(value, 0) for value in end.reads]
        layout = Layout.find(end, args, self.shardings)
        if layout is None and is_sharded:
            return "layout not known, or uneven"
        part = layout.part(end) if layout else Part.of(end)
        return _KERNELS[platform].obstacle(self.program, end, part)


def _has_fixed_shapes(traced: TracedCall) -> bool:
    opened, _ = open_jaxpr(traced.closed)
    sizes = [size for var in opened.invars for size in getattr(var.aval, "shape", ())]
    return all(isinstance(size, int) for size in sizes)


def _is_seen(effect: Any) -> bool:
    """Return whether an effect is more than to read the name of an axis of a mesh."""
    # By name, because this class is not in JAX's documented API.
    return type(effect).__name__ != "NamedAxisEffect"


def _are_alike(new: Any, old: Value) -> bool:
    """Return whether a value can be written where another one is."""
    return (new.aval.shape, new.aval.dtype) == (old.aval.shape, old.aval.dtype)


class _Runners:
    """Runs the ends of a program. Those that are alike are traced and lowered once."""

    def __init__(self, program: Program, platforms: Collection[str]) -> None:
        self._program = program
        self._platforms = platforms
        self._known: dict[Any, Callable[..., list[Any]]] = {}

    def run_team(
        self, team: Team, args: Sequence[Any], shardings: Shardings
    ) -> list[Any]:
        """Return the outputs of the ends of a team, given what it reads."""
        end, count, is_shared = team.ends[0], len(team.ends), team.is_shared
        if count == 1:
            return self.run(end, args, shardings)
        form = form_of(self._program, end), count, is_shared
        if form not in self._known:
            each = TeamRun(lambda *args: self.run(end, args, {}), count, is_shared)
            whole = TeamRun(run_whole(self._program, end), count, is_shared)
            separately, stacked = jax.jit(each.separately), apart(whole.stacked)

            def on_cpu(device_count: int, *args: Any) -> list[Any]:
                # XLA would gather what is stacked from several devices.
                return (stacked if device_count == 1 else separately)(*args)

            self._known[form] = partial(by_platform, separately, {}, {"cpu": on_cpu})
        return self._known[form](*args)

    def run(self, end: End, args: Sequence[Any], shardings: Shardings) -> list[Any]:
        """Return the outputs of an end."""

        def run_part(part: Part, args: Sequence[Any]) -> list[Any]:
            return self._runner(end, part)(*map(jnp.int32, part.origin), *args)

        if end.obstacle is not None:
            return self._runner(end, None)(*args)
        layout = Layout.find(end, args, shardings)
        if layout is None:
            return run_part(Part.of(end), args)
        return layout.run(run_part, self._program, end, args)

    def _runner(self, end: End, part: Part | None) -> Callable[..., list[Any]]:
        """Return a function of the place of a part, and of what an end reads of it.

        Without a part, of what it reads alone.
        """
        form = form_of(self._program, end), part and replace(part, origin=())
        if form not in self._known:
            self._known[form] = (
                run_part(self._program, end, replace(part, origin=()), self._platforms)
                if part
                else run_whole(self._program, end)
            )
        return self._known[form]


def run_whole(program: Program, end: End) -> Callable[..., list[Any]]:
    """Return what runs an end as it is written."""

    @jax.jit
    def run(*args: Any) -> list[Any]:
        known: dict[Value, Any] = dict(zip(end.reads, args, strict=True))
        program.run(end.places, known)
        return [known[program.outputs[i]] for i in end.outputs]

    return run


def run_part(
    program: Program, end: End, part: Part, platforms: Collection[str]
) -> Callable[..., list[Any]]:
    """Return what runs an end on one device, by a kernel if there is one."""
    rank = len(part.shape)

    @jax.jit
    def anywhere(*args: Any) -> list[Any]:
        known: dict[Value, Any] = dict(zip(end.reads, args[rank:], strict=True))
        if part.is_shard:
            PartEvaluator(replace(part, origin=args[:rank])).run_all(
                program, end, known
            )
        else:
            program.run(end.places, known)
        return [known[program.outputs[i]] for i in end.outputs]

    def by_kernel(kernel: Any, *args: Any) -> list[Any]:
        here = replace(part, origin=args[:rank])
        return list(kernel.run_end(program, end, here, args[rank:]))

    @partial(jax.jit, static_argnums=0)
    def by_chunks(device_count: int, *args: Any) -> list[Any]:
        here = replace(part, origin=args[:rank])
        cuts = _chunks.cuts_of(here, device_count)
        if cuts is None:
            return anywhere(*args)
        return _chunks.run_end(program, end, cuts, args[rank:])

    kernels = {
        platform: Way(partial(by_kernel, kernel))
        for platform, kernel in _KERNELS.items()
        if platform in platforms and kernel.obstacle(program, end, part) is None
    }
    return partial(by_platform, anywhere, kernels, {"tpu": by_chunks})
