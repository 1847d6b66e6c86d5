"""The settings that all runs of the demo share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The model's size, the optimizer's rates and the length of a run.

    How much naive low precision loses depends on the peak learning rate, because
    rounding swallows updates that are small compared with their weight. 3e-3 is a
    compromise: large models need far lower rates, and at 1e-2 this small one loses
    nothing in naive bfloat16. docs/evidence.md has the losses at other rates.
    """

    steps: int = 3000
    seed: int = 0
    width: int = 64
    layer_count: int = 2
    head_count: int = 4
    context: int = 64
    batch_size: int = 4
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        """Check what the command line can set."""
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}, expected at least 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}, expected 0 to 2**32 - 1.")


DEFAULTS = Settings()
