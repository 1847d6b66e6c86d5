"""What has been done about float16 and loss scales, as parts of this package tell.

`value_and_grad` warns if it finds float16 and no loss scale, but params may be float32,
and float16 only inside, by `amp`; and a function may scale its loss by itself. And
`check_loss_scale` warns if nobody has scaled a loss. What is counted here decides over
these two warnings only.
"""

from collections import Counter
from typing import Literal

Event = Literal["computes in float16", "scales its loss"]

_counts: Counter[Event] = Counter()


def report(event: Event) -> None:
    """Count something that is done, or traced."""
    _counts[event] += 1


def counts() -> Counter[Event]:
    """Return how often what has been done in this process, up to now."""
    return _counts.copy()
