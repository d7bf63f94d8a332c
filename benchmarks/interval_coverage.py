"""How often the 95% interval of a speedup holds the truth, and how often a way that gains nothing seems to pay.

    python benchmarks/interval_coverage.py

Log-normal seconds of two ways on the same prompts, in turn: each prompt has its own seconds and its own speedup, each
measurement its own noise, and over all prompts that there could be nothing is gained. The figures of docs/bench.md are
from here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from lightning_specdec.bench.report.judged import pays
from lightning_specdec.bench.statistics import ratio_estimate

NUM_WAYS = 20
"""Ways that gain nothing, of which one is looked at."""


@dataclass(frozen=True)
class Case:
    """Standard deviations of logarithms.

    Args:
        seconds: over prompts.
        speedup: over prompts.
        noise: of a measurement.
    """

    num_prompts: int
    num_repeats: int
    seconds: float
    speedup: float
    noise: float


CASES = (
    Case(2, 5, 0.3, 0.1, 0.03),
    Case(3, 5, 0.3, 0.1, 0.03),
    Case(4, 5, 0.3, 0.1, 0.03),
    Case(4, 2, 0.3, 0.3, 0.1),
    Case(8, 3, 0.3, 0.1, 0.1),
    Case(8, 5, 0.3, 0.2, 0.03),
    Case(9, 2, 0.3, 0.3, 0.1),
    Case(9, 5, 0.8, 0.5, 0.03),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(options.seed)
    print(f"prompts  repeats  seconds  speedup  noise  held   pays, as one of {NUM_WAYS}")
    for case in CASES:
        held, paid = simulated(case, options.trials, generator)
        sizes = f"{case.num_prompts:7d}  {case.num_repeats:7d}"
        spreads = f"{case.seconds:7.2f}  {case.speedup:7.2f}  {case.noise:5.2f}"
        print(f"{sizes}  {spreads}  {held:.3f}  {paid:.4f}", flush=True)


def simulated(case: Case, trials: int, generator: torch.Generator) -> tuple[float, float]:
    """The shares of trials in which the interval holds 1, and in which the way seems to pay."""
    held = paid = 0
    for _ in range(trials):
        prompts = torch.randn(2, 1, case.num_prompts, generator=generator, dtype=torch.float64)
        noise = torch.randn(2, case.num_repeats, case.num_prompts, generator=generator, dtype=torch.float64)
        seconds = case.seconds * prompts[0] + case.noise * noise[0]
        gained = case.speedup * prompts[1] + case.speedup**2 / 2  # so that the expected seconds are the same
        other = case.seconds * prompts[0] - gained + case.noise * noise[1]
        found = ratio_estimate(seconds.exp().tolist(), other.exp().tolist())
        interval = found.interval
        held += interval.low <= 1 <= interval.high
        paid += pays(found, NUM_WAYS)
    return held / trials, paid / trials


if __name__ == "__main__":
    main()
