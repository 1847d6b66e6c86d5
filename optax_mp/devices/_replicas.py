"""check_replicas: whether all devices hold the same values."""

import zlib
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import tree_flatten_with_path

from optax_mp._jax._arrays import is_traced
from optax_mp._tree import PyTree, describe, is_array, spell, summarize


class _Replica(NamedTuple):
    """One copy of a leaf or of one of its shards, in integers that can be sent.

    Attributes:
        leaf: the index of the leaf.
        part: a checksum of the bounds of the shard.
        checksum: a checksum of the values.
        process: the process that holds the copy.
        device: the device that holds it; 0 for an array on the host.
    """

    leaf: int
    part: int
    checksum: int
    process: int
    device: int


def check_replicas(tree: PyTree) -> None:
    """Raise unless all devices and processes hold the same bits of `tree`.

    Ranks that start from different params, or that drift apart later, train without any
    error, each towards its own weights. This function compares checksums between all
    processes: every copy of a replicated array must be the same, and every copy of a
    shard.

    Call it outside `jit`, on every process, after `init`, after loading a checkpoint,
    or every thousand steps. It copies all arrays to the host.

    Args:
        tree: params, an optimizer state, or both.

    Raises:
        TypeError: if called under `jit`, or with a tree that holds no array.
        ValueError: if copies differ, or if the processes hold different trees. Every
            process raises the same error.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = optax_mp.mixed_precision(optax.adamw(1e-3)).init(params)
        >>> optax_mp.check_replicas((params, state))
    """
    leaves = [
        (path, leaf) for path, leaf in tree_flatten_with_path(tree)[0] if is_array(leaf)
    ]
    if not leaves and jax.tree.leaves(tree):
        raise TypeError(
            f"check_replicas: `tree` is {summarize(tree)} without arrays, expected "
            "params, an optimizer state, or both."
        )
    for path, leaf in leaves:
        if is_traced(leaf):
            raise TypeError(
                f"check_replicas: leaf {spell(path)} is traced ({describe(leaf)}), "
                "expected concrete arrays; call it outside jit."
            )
    names = [f"{spell(path)}, which is {describe(leaf)}," for path, leaf in leaves]
    _check_same_tree(names)
    own = [copy for i, (_, leaf) in enumerate(leaves) for copy in _replicas_of(i, leaf)]
    differing = _find_differing(_gather_replicas(own))
    if differing:
        shown = [f"{names[leaf]} on {where}" for leaf, where in differing[:3]]
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(
            f"check_replicas: copies differ: {'; '.join(shown)}{more}, expected the "
            "same bits everywhere. Make them on all processes from one seed or one "
            "checkpoint, or send those of one process to the others with "
            "jax.experimental.multihost_utils.broadcast_one_to_all."
        )


def _check_same_tree(names: list[str]) -> None:
    # This must come before the copies are gathered: processes with different trees
    # would compare the wrong leaves, or wait for each other forever.
    own = np.array([zlib.crc32("\n".join(names).encode()), len(names)], np.uint32)
    found = _gather(own)
    others = [i for i, seen in enumerate(found) if (seen != found[0]).any()]
    if others:
        raise ValueError(
            f"check_replicas: processes {others} hold other leaves, dtypes or shapes "
            f"than process 0. This process has {len(names)} arrays, the first "
            f"{names[0] if names else 'none'}; expected the same tree on every process."
        )


def _replicas_of(index: int, leaf: Any) -> list[_Replica]:
    """Return the copies of a leaf, or of its shards, that this process holds."""
    process = jax.process_index()
    if not isinstance(leaf, jax.Array):
        return [_Replica(index, 0, _checksum(np.asarray(leaf)), process, 0)]
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return [
        _Replica(
            index,
            _checksum(np.array(_bounds(shard.index, leaf.shape))),
            _checksum(np.asarray(shard.data)),
            process,
            shard.device.id,
        )
        for shard in leaf.addressable_shards
    ]


def _bounds(slices: tuple[slice, ...], shape: tuple[int, ...]) -> list[Any]:
    return [part.indices(size) for part, size in zip(slices, shape, strict=True)]


def _checksum(array: np.ndarray) -> int:
    # Of the bits, so that NaN equals itself and 0.0 differs from -0.0.
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _gather_replicas(copies: list[_Replica]) -> list[_Replica]:
    counts = _gather(np.array([len(copies)], np.uint32))[:, 0]
    # All processes must send arrays of one shape, so these are padded, and cut again.
    own = np.zeros((max(counts), len(_Replica._fields)), np.uint32)
    own[: len(copies)] = np.array(copies, np.uint32).reshape(-1, own.shape[1])
    rows = zip(_gather(own), counts, strict=True)
    return [_Replica(*map(int, row)) for sent, count in rows for row in sent[:count]]


def _gather(own: np.ndarray) -> np.ndarray:
    """Return the arrays of all processes, stacked along a new first axis."""
    if jax.process_count() == 1:
        return own[None]
    return np.asarray(multihost_utils.process_allgather(own))


def _find_differing(copies: list[_Replica]) -> list[tuple[int, str]]:
    """Return each leaf whose copies differ, and where those in the minority are."""
    groups: dict[tuple[int, int], list[_Replica]] = defaultdict(list)
    for copy in copies:
        groups[copy.leaf, copy.part].append(copy)
    found: dict[int, str] = {}
    for (leaf, _), group in groups.items():
        sums = [copy.checksum for copy in group]
        # If two values are equally common, the first one counts as right.
        usual = max(dict.fromkeys(sums), key=sums.count)
        odd = [copy for copy in group if copy.checksum != usual]
        if odd:
            where = sorted({(copy.process, copy.device) for copy in odd})
            found.setdefault(
                leaf, ", ".join(f"process {p} (device {d})" for p, d in where)
            )
    return sorted(found.items())
