"""The precision of a value, and what a plan says of an equation.

Only values that are float32 or float64 as written take part. Such a value is in one of
three states: `LOW`, in the compute dtype; `FULL`, as written; or `Weak`, a literal or a
repetition of one, which follows what it is combined with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from optax_mp._jax._jaxpr import is_shaped

LOW = "low"
FULL = "full"

# What returns the value that it is given, perhaps several times.
REPEATS = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p pvary "
    "pbroadcast pcast stop_gradient".split()
)


class Weak(NamedTuple):
    """The state of a literal, and of what only repeats one; its value, if known."""

    value: float | None = None


State = Weak | str | None
States = tuple[State, ...]


@dataclass(frozen=True)
class Inner:
    """How a jaxpr inside an equation is run. A value: equal ones need one conversion.

    Attributes:
        plan: what becomes of it.
        given: the states in which its inputs come, cast to those it is planned for.
        returned: the states in which its outputs go.
    """

    plan: "Plan"
    given: States
    returned: States


@dataclass(frozen=True, eq=False)
class Step:
    """What becomes of one equation.

    Attributes:
        how: "bind", cast and bound; "same", its input; "function", as a user's function
            says; or, where a jaxpr inside changes, the kind of the equation.
        inputs: the state to which each input is cast.
        outputs: the states of its outputs.
        rule: the rule that it follows.
        why: what decided.
        scope: the rule of the scope that it stands in.
        params: its parameters, where they change.
        inner: how the jaxprs inside are run.
    """

    how: str
    inputs: States
    outputs: States
    rule: Any
    why: str
    scope: Any = None
    params: dict[str, Any] | None = None
    inner: tuple[Inner, ...] = ()

    @property
    def changed(self) -> bool:
        """Return whether anything is other than as written."""
        changed_inside = any(inner.plan.changed for inner in self.inner)
        changed_here = LOW in self.inputs or LOW in self.outputs
        return self.how == "function" or changed_here or changed_inside


@dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of one jaxpr, a step for each equation; `changed` if anything does.

    Attributes:
        inputs: the states of its inputs.
        steps: a step for each equation.
        outputs: the states of its outputs.
        changed: whether anything is other than as written.
    """

    inputs: States
    steps: tuple[Step, ...]
    outputs: States
    changed: bool


def takes_part(atom: Any) -> bool:
    """Return whether amp may choose the precision of a value."""
    return is_shaped(atom.aval) and atom.aval.dtype in (np.float32, np.float64)


def written(atoms: Iterable[Any]) -> States:
    """Return the states of values that are as written."""
    return tuple(FULL if takes_part(atom) else None for atom in atoms)


def literal_state(atom: Any) -> State:
    """Return the state of a literal."""
    if not takes_part(atom):
        return None
    return Weak(float(atom.val)) if np.ndim(atom.val) == 0 else FULL


def settled(states: Iterable[State]) -> States:
    """Return the states with nothing weak among them: a literal is as written."""
    return tuple(FULL if isinstance(state, Weak) else state for state in states)


def widest(states: Sequence[State]) -> str:
    """Return the state of what combines values: literals follow, alone they are full.

    Values that do not take part say nothing.
    """
    strong = {state for state in states if state in (LOW, FULL)}
    return LOW if strong == {LOW} else FULL


def cast_to(target: str, states: Iterable[State]) -> States:
    """Return `target` for each value that takes part."""
    return tuple(None if state is None else target for state in states)
