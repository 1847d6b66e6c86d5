"""The equations that amp decides on: where they are, and what they cost."""

from collections.abc import Iterator
from typing import NamedTuple

from optax_mp._jax._control_flow import wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, open_jaxpr
from optax_mp._jax._products import flops_of, is_product
from optax_mp._jax._source import source_line
from optax_mp.amp._places import Place, place_of
from optax_mp.amp._plan import Action, Plan
from optax_mp.amp._precision import takes_part
from optax_mp.amp._unplanned import unplanned_products


class Site(NamedTuple):
    """An equation that amp decides on.

    Attributes:
        equation: the equation.
        action: what becomes of it.
        line: its line, or that of the nearest equation around it that has one.
        places: its place, and those of the equations around it, innermost first.
        runs: how often it runs; the body of a while loop counts once.
    """

    equation: Equation
    action: Action
    line: str
    places: tuple[Place, ...]
    runs: int

    @property
    def flops(self) -> float:
        """The FLOPs of a matrix product or convolution in all runs; 0 for others."""
        return self.runs * flops_of(self.equation) if is_product(self.equation) else 0


def sites_of(
    jaxpr: AnyJaxpr,
    plan: Plan,
    line: str = "",
    around: tuple[Place, ...] = (),
    runs: int = 1,
) -> Iterator[Site]:
    """Yield the equations that amp decides on, those in regions, too."""
    for equation, action in zip(open_jaxpr(jaxpr)[0].eqns, plan.actions, strict=True):
        # A function of JAX has lines of its own only where it is called.
        own_line = source_line(equation) or line
        places = (place_of(equation), *around)
        if action.regions:
            repeats = equation.params.get("length", 1)  # of a scan
            regions = wiring_of(equation).regions
            for region, each in zip(regions, action.regions, strict=True):
                yield from sites_of(
                    region.jaxpr, each.plan, own_line, places, runs * repeats
                )
        # An equation with regions is itself listed only if it casts its carry.
        if action.how == "same" or (action.regions and action.why != "fix-point"):
            continue
        if any(map(takes_part, (*equation.invars, *equation.outvars))):
            yield Site(equation, action, own_line, places, runs)
            for product, inner_action, repeats in unplanned_products(equation, action):
                inner_line = source_line(product) or own_line
                yield Site(
                    product,
                    inner_action,
                    inner_line,
                    (place_of(product), *places),
                    runs * repeats,
                )
