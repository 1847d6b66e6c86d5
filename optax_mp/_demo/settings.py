"""The settings that all runs of the demo share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The model's size, the optimizer's rates and the length of a run.

    How much naive low precision loses depends on the peak learning rate, because
    rounding swallows updates that are small compared with their weight. 3e-3 is a
    compromise: large models need far lower rates, and at 1e-2 this small one loses
    nothing in naive bfloat16. docs/evidence.md has the losses at other rates.

    A run trains once from each seed, so that the noise between seeds can be seen.
    """

    steps: int = 800
    seeds: tuple[int, ...] = (0, 1)
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
        for seed in self.seeds:
            if not 0 <= seed < 2**32:
                raise ValueError(f"seed is {seed}, expected 0 to 2**32 - 1.")


DEFAULTS = Settings()
FULL_STEPS = 3000  # Naive bfloat16 falls behind float32 further, the longer it trains.
