"""A benchmark without training: radiomic features of all cases, their clusters, and published numbers beside them."""

from collections.abc import Mapping
from pathlib import Path

from polysite import config, extract
from polysite.benchmark.bench import Bench
from polysite.cluster.mixture import Settings as Mixture
from polysite.engines.watch import Watch
from polysite.radiomics import Settings
from polysite.report import clusters as clusters_page
from polysite.report import published
from polysite.report.grid import Grid
from polysite.report.page import Section, layout
from polysite.storage import draft_folder


def describe(bench: Bench, out: Path, overrides: Mapping[str, str], watch: Watch = Watch()) -> list[Grid]:
    """Extract and cluster the features of a benchmark's cases, write page and figures, and return the tables.

    ``radiomics/`` of the folder has the features, ``comparison/`` the page and the published numbers.
    """
    given = dict(bench.radiomics or {})
    clusters = config.convert(Mixture, given.pop("clusters", {}), "radiomics.clusters")
    region = given.pop("region", None)
    settings = config.convert(Settings, given, "radiomics")
    study = config.build(bench.study, overrides)
    done = extract.run(study, out / "radiomics", settings=settings, label=region, clusters=clusters, watch=watch)
    beside = [published.facts(table, bench.published.setting, _measured(done)) for table in bench.published.tables]
    drawn = clusters_page.sections(extract.shown_clusters(_clusters(done)), study.seed)
    sections = [*([Section("published", "Published and measured", tuple(beside))] if beside else []), *drawn]
    page = layout(bench.title, bench.about, sections, done.about["versions"]["polysite"], remarks=bench.remarks)
    with draft_folder(out / "comparison", "comparison", private=False) as draft:
        page.write(draft)
        for grid in beside:
            (draft / f"{grid.name}.csv").write_text(grid.csv(), encoding="utf-8")
    return [*extract.tables(done), *beside]


def _clusters(done: extract.Extracted) -> extract.Clusters:
    assert done.clusters is not None  # they were asked for
    return done.clusters


def _measured(done: extract.Extracted) -> dict[str, float]:
    """Return what the paper states of its data and features, as measured here; the fit is the pooled one, as there."""
    fitted = _clusters(done)
    return {
        "scans": len(done.table.cases),
        "series of exams (scanners)": len(set(done.table.sites)),
        "components": fitted.pooled.means.shape[1],
        "variance preserved": 100 * fitted.agreement["other_explained"],
    }
