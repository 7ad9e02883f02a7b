"""What a study takes at a hospital, as the policy sees it; ``limits.py`` estimates it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Lower bounds of what a study takes at a hospital: parameters of its network, and bytes."""

    parameters: int
    memory: int  # main memory
    gpu: int  # memory of the GPU; 0 if the site computes on the CPU
    disk: int
