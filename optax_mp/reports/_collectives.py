"""collectives_report: what a compiled step sends between devices, and how it sums."""

import math
from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves_with_path

from optax_mp._jax._arrays import axis_names, shard_count
from optax_mp._jax._program_text import bits_of, collectives_in
from optax_mp._table import Report, Table
from optax_mp.trees._tree import spell, summarize

_ADVICE = """\
For float32 sums of what is sent in 16 bits, use `sum_gradients` in `jax.shard_map`, or
`zero1` with `exchange_dtype`. Under `jit` alone the dtype of gradients decides, and the
rule "low_f32" of `amp` makes them float32."""


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind that carry one param, or its gradient.

    Attributes:
        kind: as XLA calls it, such as `"all-reduce"`.
        path: of the param. Found by the size of the array: if several params have it,
            the first of them, and how many more.
        axes: the mesh axes over which devices are joined, such as `"data"`.
        exchange_dtype: the dtype that is sent.
        sum_dtype: the dtype of the sum, or None if nothing is added up.
        count: how many times it is sent in one step.
        bytes: how many bytes a device sends for that to others, in a ring.

    Example:
        >>> from optax_mp.reports import CollectiveRow
        >>> row = CollectiveRow("all-gather", "['w']", "data", "uint16", None, 1, 224)
        >>> row.kind, row.sum_dtype
        ('all-gather', None)
    """

    kind: str
    path: str
    axes: str
    exchange_dtype: str
    sum_dtype: str | None
    count: int
    bytes: int


@dataclass(frozen=True)
class CollectivesReport(Report):
    """What `collectives_report` found. Printed, it is a table and advice.

    Attributes:
        rows: the collectives that carry a param or a gradient, the largest first.
        other_bytes: what a device sends in other collectives, such as activations.

    Example:
        >>> from optax_mp.reports import CollectivesReport
        >>> print(CollectivesReport((), 0))
        no params or gradients are sent; others: 0 bytes
    """

    rows: tuple[CollectiveRow, ...]
    other_bytes: int

    @property
    def low_sums(self) -> tuple[CollectiveRow, ...]:
        """The rows whose sums are narrower than float32."""
        return tuple(x for x in self.rows if x.sum_dtype in ("bfloat16", "float16"))

    def _parts(self) -> list[str | Table]:
        """Return the table, and the way to float32 for sums in 16 bits."""
        others = f"others: {self.other_bytes} bytes"
        if not self.rows:
            return [f"no params or gradients are sent; {others}"]
        cells = [["kind", "param", "axes", "sent in", "summed in", "times", "bytes"]]
        cells += [[str(x or "") for x in astuple(row)] for row in self.rows]
        advice = [_ADVICE] if self.low_sums else []
        return [Table(cells, left=5, long=1, width=56), others, *advice]


def collectives_report(compiled: Any, params: optax.Params) -> CollectivesReport:
    """Say what a compiled step sends between devices, and in which dtype it sums.

    Under `jit` with sharded arrays XLA chooses how gradients are summed, and in which
    dtype: the dtype of the products they come from. This reads its choice from the
    program: each collective that carries a param or a gradient, in which dtype it is
    sent and added up, over which mesh axes, and how many bytes a device sends. Nothing
    is run, and the devices may be simulated, or absent.

    A collective belongs to the params whose size it has: whole, a shard, or one of
    stacked layers. Loops count as often as they run.

    Args:
        compiled: `jax.jit(step).lower(*args).compile()`.
        params: the params that the step gets, or descriptions of them with shardings.

    Returns:
        The report. Printed, it is a table; with sums in 16 bits it names the way to
        float32.

    Raises:
        TypeError: if `compiled` is not a compiled program.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        >>> params = {"w": jax.ShapeDtypeStruct((64, 48), jnp.float32, sharding=whole)}
        >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=rows)
        >>> step = jax.jit(jax.grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2)))
        >>> compiled = step.lower(params, x).compile()
        >>> report = optax_mp.collectives_report(compiled, params)
        >>> all(row.sum_dtype == "float32" for row in report.rows)
        True
    """
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "collectives_report: expected `compiled` to be a compiled program, got "
            f"{summarize(compiled)}; pass `jax.jit(step).lower(*args).compile()`."
        )
    shardings = jax.tree.leaves(compiled.input_shardings)
    meshes = [x.mesh for x in shardings if isinstance(x, NamedSharding)]
    all_runs, all_bytes = Counter(), Counter()
    found = collectives_in(compiled.as_text() or "")
    for kind, arrays, devices, sum_dtype, runs in found:
        axes = _axes_of(devices, meshes[0]) if meshes else []
        share = 1 - 1 / max(len(devices), 1)
        share = {"all-reduce": 2 * share, "collective-permute": 1}.get(kind, share)
        # A TPU sends a param in a ring, from device to device in parts.
        in_parts = kind == "collective-permute"
        parts = math.prod(meshes[0].shape[x] for x in axes) if in_parts else 1
        for dtype, size in arrays:
            path = _path_of(size * parts, params, axes)
            key = (kind, path, ", ".join(axes), dtype, sum_dtype)
            all_runs[key] += runs
            all_bytes[key] += round(runs * share * size * bits_of(dtype) / 8)
    rows: list[Any] = [(*key, all_runs[key], n) for key, n in all_bytes.most_common()]
    named = tuple(CollectiveRow(*x) for x in rows if x[1])
    return CollectivesReport(named, sum(x[-1] for x in rows if not x[1]))


def _path_of(size: int, params: optax.Params, axes: list[str]) -> str | None:
    """Return the params that a collective of `size` numbers over `axes` may carry."""
    found = []
    for path, leaf in tree_leaves_with_path(params):
        sharding, whole = getattr(leaf, "sharding", None), np.size(leaf)
        if isinstance(sharding, NamedSharding):
            others = {x for i in range(leaf.ndim) for x in axis_names(sharding.spec, i)}
            whole //= shard_count(sharding.mesh, tuple(others.difference(axes)))
        layers = leaf.shape[0] if np.ndim(leaf) > 2 else 1
        if size > 1 and size in (whole, whole // layers):
            found.append(spell(path))
    more = f" or {len(found) - 1} more" if found[1:] else ""
    return found[0] + more if found else None


def _axes_of(devices: list[int], mesh: Any) -> list[str]:
    """Return the names of the mesh axes along which devices differ."""
    places = np.unravel_index(devices, mesh.devices.shape)
    pairs = zip(mesh.axis_names, places, strict=True)
    return [name for name, place in pairs if len({*place.tolist()}) > 1]
