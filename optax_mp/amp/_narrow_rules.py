"""Names of rules for operations that err too much, which stand for no others."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from optax_mp.amp._places import Place, place_of_name

TRANSFORMATIONS = frozenset("transpose jvp vmap pmap linearize".split())


class Measured(NamedTuple):
    """An equation, and the error that was measured of it.

    Attributes:
        primitive: its name.
        line: its line.
        places: its place, and those of the equations around it, innermost first.
        is_backward: whether it is of the backward pass of a gradient.
        own_error: what it adds to exact inputs.
        low_flops: the FLOPs of a product that runs low, or in 8 bits; 0 for other
            equations.
        is_8_bit: whether it is a product in 8 bits, which may go to 16.
    """

    primitive: str
    line: str
    places: tuple[Place, ...]
    is_backward: bool
    own_error: float
    low_flops: float
    is_8_bit: bool = False

    @property
    def place_as_written(self) -> Place:
        """Its place, whatever transformation is around."""
        return _as_written(self.places[0])


class NarrowRules(NamedTuple):
    """Names for rules, and what they cost.

    Attributes:
        names: the names.
        wide: those that stand for more than products in 8 bits.
        kept: the FLOPs of the products that still run low.
        innocent: for each name that stands for other products, too, for how many
            equations that err more, and for how many products that do not.
    """

    names: list[str]
    wide: set[str]
    kept: float
    innocent: dict[str, tuple[int, int]]


def narrow_rules(measured: Sequence[Measured], above: float) -> NarrowRules:
    """Return names for all equations that err more than `above`, and few others."""
    products = [each for each in measured if each.low_flops]
    erring = [each for each in measured if each.own_error > above]
    others = _others(products, erring)
    name_of = [(_narrow_name(each, others), each) for each in erring]
    names = sorted({name for name, _ in name_of})
    wide = {name for name, each in name_of if not each.is_8_bit}
    kept = [x for x in products if not any(_applies(name, x) for name in wide)]
    innocent = {}
    for name in names:
        count = sum(_applies(name, other) for other in others)
        if count:
            innocent[name] = (sum(_applies(name, x) for x in erring), count)
    return NarrowRules(names, wide, sum(x.low_flops for x in kept), innocent)


def _others(products: Sequence[Measured], erring: Sequence[Measured]) -> list[Measured]:
    """Return the products that err less, but for the backward pass of one that errs.

    A rule for a layer is for both of its passes, for they are written in one place.
    """
    same_pass = {(x.place_as_written, x.is_backward) for x in erring}
    other_pass = {(place, not is_backward) for place, is_backward in same_pass}
    meant = set(map(id, erring))
    return [
        each
        for each in products
        if id(each) not in meant
        and (
            (key := (each.place_as_written, each.is_backward)) not in other_pass
            or key in same_pass
        )
    ]


def _narrow_name(of: Measured, others: Sequence[Measured]) -> str:
    """Return the first name for an equation that stands for none of the others.

    If there is none, return its line, which is that of a library's function.
    """
    first = of.line or of.primitive
    for name in (first, *_names(of)):
        if not any(_applies(name, other) for other in others):
            return name
    return first


def _names(of: Measured) -> Iterator[str]:
    """Yield names for an equation's line in its scopes, or called from another line."""
    for place in of.places:
        if not place.lines:
            continue
        scopes, (*callers, own) = _as_written(place)
        if scopes:
            yield "/".join((*scopes, own))
        for caller in reversed(callers):
            yield f"{caller}/{own}"


def _as_written(place: Place) -> Place:
    """Return a place without the names that transformations put around its scopes.

    A report on `jax.grad(fun)` is to give rules for `amp(fun)`.
    """
    last = max(
        (i + 1 for i, name in enumerate(place.scopes) if name in TRANSFORMATIONS),
        default=0,
    )
    return Place(place.scopes[last:], place.lines)


def _applies(name: str, to: Measured) -> bool:
    """Return whether a rule of this name is for an equation."""
    if name == to.primitive:
        return True
    place = place_of_name(name)
    return any(
        place.contains(around, start)
        for around in to.places
        for start in range(len(around.scopes) + 1)
    )
