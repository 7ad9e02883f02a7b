"""Lines of the evidence bank for its tests."""

from polysite.evidence.lines import DistanceLine, RunLine, Spans

RUN = RunLine(
    "a1", "s1", "segmentation", 3, (9, 8, 4), 3, 1, "UNet", 1000, "fedavg", {}, {"lr": 0.4}, 10, 120, 4000, "test",
    "Dice", 0.7, (0.6, 0.8, None), 0.2, 12,
)  # fmt: skip
FAR = DistanceLine("a1", (9, 8, 4), {"emd": Spans(0.8, 1.1, 0.4, 0.3)}, 1, 1.6)
