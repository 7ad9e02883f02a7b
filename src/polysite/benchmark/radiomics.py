"""A benchmark without training: radiomic features of all cases, their clusters, and the published numbers beside them."""

from collections.abc import Mapping
from pathlib import Path

from polysite import config
from polysite.benchmark.bench import Bench
from polysite.cluster.mixture import Settings as Mixture
from polysite.engines.rounds import Watch
from polysite.extract import Extracted, run
from polysite.radiomics import Settings


def extract(bench: Bench, out: Path, overrides: Mapping[str, str], watch: Watch = Watch()) -> Extracted:
    """Extract the features of a benchmark's cases and cluster them, into ``radiomics/`` of its folder."""
    given = dict(bench.radiomics or {})
    clusters = config.convert(Mixture, given.pop("clusters", {}), "radiomics.clusters")
    settings = config.convert(Settings, given, "radiomics")
    return run(config.build(bench.study, overrides), out / "radiomics", settings=settings, clusters=clusters, watch=watch)
