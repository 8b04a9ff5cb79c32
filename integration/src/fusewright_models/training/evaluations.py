"""How much of what is held out an evaluation reads, for all of them to take no more than a share of
the run. It is counted and not timed: a run that is taken up again evaluates as one that was not.
"""

from __future__ import annotations

from .config import TrainingConfig

# A step counts as so many evaluations of its batch. By operations it is three, by the seconds of a
# CPU 2.6: docs/decisions/0034.
EVALUATIONS = 2.5


def part_size(config: TrainingConfig, *, share: float, trained: int, whole: int, each: int) -> int:
    """What an evaluation before the last one reads of ``whole``, which the last one reads.

    A unit that is evaluated counts as two fifths of one that is trained on. Where the last
    evaluation leaves nothing, the others read ``each``.

    Args:
        config: of the run.
        share: of it that evaluations may take; 1 has all of them read everything.
        trained: units, which are tokens or tasks, of a batch.
        whole: units that are held out.
        each: units that are read together, of which the size is a multiple.
    """
    if share >= 1.0:
        return whole
    steps = EVALUATIONS * trained * config.accumulation_steps * config.steps
    left = share / (1.0 - share) * steps - whole
    # One precedes the first step.
    times = 1 + (config.steps - 1) // config.evaluate_every
    return min(whole, max(each, int(left / times) // each * each))
