"""Take a step leaf by leaf: in one pass over each, where a platform has a kernel."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from optax_mp._jax._arrays import is_traced
from optax_mp._jax._by_platform import Way, by_platform
from optax_mp._jax._jaxpr import open_jaxpr
from optax_mp._jax._traced import TracedCall, is_dynamic, is_output
from optax_mp._tree import is_array
from optax_mp.leafwise import _chunks, _gpu, _tpu
from optax_mp.leafwise._alike import form_of
from optax_mp.leafwise._blocks import is_block_operation
from optax_mp.leafwise._cut import End, cut
from optax_mp.leafwise._layout import Layout, Shardings
from optax_mp.leafwise._part import Piece, Shard
from optax_mp.leafwise._program import Program, Value, read

_KERNELS = {"tpu": _tpu, "cuda": _gpu}


def run_leafwise(
    step: Callable[[Any, Any], Any],
    given: Any,
    kept: Any,
    shardings: Sequence[NamedSharding | None] = (),
) -> Any:
    """Return `step(given, kept)`, with the elementwise end of each leaf in one piece.

    Args:
        step: returns what takes the place of `kept`.
        given: a pytree.
        kept: another. Its arrays can be overwritten, if they are donated.
        shardings: how the leaves of `kept` are sharded under `jit`, None where that is
            not known. A kernel goes only where it is known.
    """
    leaves = jax.tree.leaves((given, kept))
    is_worth_it = any(map(is_traced, leaves)) and any(map(_is_packed, leaves))
    if not is_worth_it:
        return step(given, kept)
    traced = TracedCall.of(lambda both: step(*both), (given, kept))
    if not _can_cut(traced):
        return step(given, kept)
    program = Program.of(traced.closed, is_block_operation)
    ends = cut(program, _replaced(traced, kept))
    known_shardings = _of_inputs(program, kept, shardings)
    at_ends = {i for end in ends for i in end.outputs}
    others = [v for i, v in enumerate(program.outputs) if i not in at_ends]
    known: dict[Value, Any] = dict(zip(program.inputs, traced.arrays, strict=True))
    known.update(program.constants)
    reads = [value for end in ends for value in end.reads]
    program.run(program.needed([*others, *reads]), known)
    results: dict[int, Any] = {}
    runners = _Runners(program)
    for end in ends:
        args = [known[value] for value in end.reads]
        outputs = runners.run(end, args, known_shardings)
        results.update(zip(end.outputs, outputs, strict=True))
    for i, value in enumerate(program.outputs):
        if i not in at_ends:
            results[i] = _as_array(read(known, value), value.aval)
    return traced.unflatten([results[i] for i in range(len(program.outputs))])


def _can_cut(traced: TracedCall) -> bool:
    """Return whether a step has known shapes, and does nothing but compute.

    What has an effect, such as printing, would be lost where nothing reads its result.
    """
    opened, _ = open_jaxpr(traced.closed)
    sizes = [size for var in opened.invars for size in getattr(var.aval, "shape", ())]
    is_fixed = all(isinstance(size, int) for size in sizes)
    return is_fixed and not traced.closed.effects


def _as_array(x: Any, aval: Any) -> Any:
    """Return an output; one that is a literal is a plain number."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


def _of_inputs(
    program: Program, kept: Any, shardings: Sequence[NamedSharding | None]
) -> Shardings:
    """Return the shardings by the inputs of a program, the last of which are `kept`."""
    leaves = jax.tree.leaves(kept)
    of_arrays = [s for x, s in zip(leaves, shardings, strict=False) if is_dynamic(x)]
    inputs = program.inputs[len(program.inputs) - len(of_arrays) :]
    both = zip(inputs, of_arrays, strict=True)
    return {value: sharding for value, sharding in both if sharding is not None}


def _is_packed(leaf: Any) -> bool:
    """Return whether an array holds codes, or the bits that a param lacks."""
    return (
        is_array(leaf)
        and jnp.issubdtype(leaf.dtype, jnp.integer)
        and leaf.dtype.itemsize < 4
    )


def _replaced(traced: TracedCall, kept: Any) -> dict[int, int]:
    """Return for each array of the result the one of the argument that it replaces."""
    if jax.tree.structure(kept) != traced.treedef:
        return {}
    arrays, count = len(traced.arrays), sum(map(is_output, traced.outputs))
    return {count - i: arrays - i for i in range(1, count + 1)}


class _Runners:
    """Runs the ends of a program. Those that are alike are traced and lowered once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[Any, Callable[..., list[Any]]] = {}

    def run(self, end: End, args: Sequence[Any], shardings: Shardings) -> list[Any]:
        """Return the outputs of an end."""

        def run_piece(piece: Piece, args: Sequence[Any]) -> list[Any]:
            return self._runner(end, piece)(*map(jnp.int32, piece.origin), *args)

        if not end.has_kernel:
            return self._runner(end, None)(*args)
        layout = Layout.find(end, args, shardings)
        if layout is None:
            return run_piece(Piece.of(end), args)
        return layout.run(run_piece, self._program, end, args)

    def _runner(self, end: End, piece: Piece | None) -> Callable[..., list[Any]]:
        """Return a function of the place of a piece, and of what an end reads of it.

        Without a piece, of what it reads alone.
        """
        form = form_of(self._program, end), piece and replace(piece, origin=())
        if form not in self._known:
            self._known[form] = (
                run_piece(self._program, end, replace(piece, origin=()))
                if piece
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


def run_piece(program: Program, end: End, piece: Piece) -> Callable[..., list[Any]]:
    """Return what runs an end on one device, by a kernel if there is one."""
    rank = len(piece.shape)

    @jax.jit
    def anywhere(*args: Any) -> list[Any]:
        known: dict[Value, Any] = dict(zip(end.reads, args[rank:], strict=True))
        if piece.is_shard:
            Shard(replace(piece, origin=args[:rank])).run_all(program, end, known)
        else:
            program.run(end.places, known)
        return [known[program.outputs[i]] for i in end.outputs]

    def by_kernel(kernel: Any, *args: Any) -> list[Any]:
        here = replace(piece, origin=args[:rank])
        return list(kernel.run_end(program, end, here, args[rank:]))

    @partial(jax.jit, static_argnums=0)
    def by_chunks(device_count: int, *args: Any) -> list[Any]:
        here = replace(piece, origin=args[:rank])
        cuts = _chunks.Cuts.of(here, device_count)
        if cuts is None:
            return anywhere(*args)
        return _chunks.run_end(program, end, cuts, args[rank:])

    kernels = {
        platform: Way(partial(by_kernel, kernel))
        for platform, kernel in _KERNELS.items()
        if kernel.takes(program, end, piece)
    }
    return partial(by_platform, anywhere, kernels, {"tpu": by_chunks})
