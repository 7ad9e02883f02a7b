"""Write the evidence that comes with polysite, src/polysite/evidence/shipped.jsonl, from the tables of results.

Scores are those of docs/results/*.md, bench/README.md and src/polysite/published/*.csv; settings, networks and sizes
are those of the benchmarks that the tables name. Rows that docs/results/hospitals.md marks as not valid are left out.

    python scripts/evidence.py              after a table of results has changed; needs ../shared/data/tcga_lgg
    python scripts/evidence.py --assess     also measures the distances between the hospitals again (minutes)
    python scripts/evidence.py --check      writes nothing; exits with code 1 if the file would change

Without --assess, the distances that are in the file stay.
"""

import argparse
import re
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polysite import config, demo, study
from polysite.assessment import assessed_sites
from polysite.benchmark.bench import Bench, load
from polysite.benchmark.jobs import studies as bench_studies
from polysite.benchmark.plan import _cells as cells_of
from polysite.config import Study
from polysite.costs.budget import spent
from polysite.data.sources import Counted
from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.evidence.anonymous import method_settings, training_settings
from polysite.evidence.keep import about, distance_line, train_size
from polysite.evidence.lines import AnyLine, DistanceLine, RunLine, Spans, from_json, to_json
from polysite.heterogeneity.assessment import analyse
from polysite.payload import natural
from polysite.report.published import AT, Number, numbers

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "src" / "polysite" / "evidence" / "shipped.jsonl"
TCGA = ROOT.parent / "shared" / "data" / "tcga_lgg"
RESULTS, README = "docs/results", "bench/README.md"
bench_algorithms = SimpleNamespace(**runpy.run_path(str(ROOT / "bench" / "algorithms.py")))
INVALID = ("†", "‡", "§")  # of docs/results/hospitals.md
NUMBER = re.compile(r"[-−+]?\d+(?:\.\d+)?")
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
PAPERS = {
    "A": "Alekseenko et al., MIDL 2024", "B": "Manthe et al., 2024", "C": "Manthe et al., 2025", "D": "FedDiv",
}  # fmt: skip
PUBLISHED = (
    "paper_a_fets", "paper_a_kits", "paper_a_prostate", "paper_b", "paper_b_limited", "paper_c", "paper_d_luna",
    "paper_d_dfuc", "paper_d_brats_two", "paper_d_brats",
)  # fmt: skip
WORDS = {"emd": "Earth Mover's distance", "euclidean": "Euclidean distance"}
MEASURES = {"Dice": "Dice", "BMDice": "Dice", "BMACC": "accuracy"}


@dataclass(frozen=True)
class Markdown:
    """A table of a Markdown file below its headings."""

    headings: tuple[str, ...]
    before: str  # the last line of text above
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@cache
def tables(file: str) -> tuple[Markdown, ...]:
    """Return all tables of a file of the repository."""
    headings: list[str] = []
    found, lines, before = [], (ROOT / file).read_text(encoding="utf-8").splitlines(), ""
    block: list[tuple[str, ...]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append(tuple(cell.strip() for cell in line.strip().strip("|").split("|")))
            continue
        if block:
            found.append(Markdown(tuple(headings), before, block[0], tuple(block[2:])))
            block = []
        if line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            headings[level - 1 :] = [line.lstrip("# ")]
        elif line.strip():
            before = line
    return tuple(found)


def table(file: str, *words: str) -> Iterator[Markdown]:
    """Yield the tables of a file whose headings contain these words."""
    for each in tables(file):
        if all(any(w in h for h in each.headings) for w in words):
            yield each


def value(cell: str) -> float | None:
    """Return the first number of a cell; None for a dash."""
    found = NUMBER.search(cell.replace("**", ""))
    return float(found[0].replace("−", "-")) if found else None


def spread(cell: str) -> float | None:
    return value(cell.partition("±")[2]) if "±" in cell else None


def whole(cell: str) -> int:
    """Return 1 440 or 165 MB as a whole number; 0 for a dash."""
    text = cell.replace("**", "")
    unit = next((factor for name, factor in UNITS.items() if text.endswith(name)), 1)
    found = re.sub(r"[^\d.]", "", text)
    return round(float(found) * unit) if found else 0


@dataclass(frozen=True)
class Place:
    """A federation in the table, and where its numbers are printed."""

    data: str
    title: str
    source: str
    cases: str  # runs with the same text have the same training and test cases
    runs: int  # that every score is a mean of
    date: str = ""
    split: str = "test"
    note: str = ""


built: dict[str, dict[str, Any]] = {}  # by the settings of the network


def _facts(chosen: Study) -> dict[str, Any]:
    """Return the task and the network with its number of parameters; each network is built once."""
    source = chosen.data
    key = str(
        (chosen.model, source.modality_names, source.label_names, source.task, chosen.dims, chosen.train.exclusive)
    )
    if key not in built:
        built[key] = about(chosen, study.initial_params(chosen))
    return built[key]


def line(place: Place, chosen: Study, method: str, score: float, settings: Mapping[str, Any], **more: Any) -> RunLine:
    """Return the line of a method of a table."""
    dealt = study.deal_cases(chosen)
    order = sorted(dealt, key=lambda site: -train_size(dealt, site))
    by_site = more.pop("sites", {})
    facts = _facts(chosen)
    rounds = sum(phase.run.rounds for phase in config.phases(chosen))
    found = {
        "measure": "accuracy" if chosen.data.task == "classification" else "Dice", "rounds": rounds, "steps": None,
        "bytes": None, **facts, **more,
    }  # fmt: skip
    return RunLine(
        data=place.data, cases=place.cases, sizes=tuple(train_size(dealt, site) for site in order), method=method,
        settings=settings, training=training_settings(chosen), split=place.split, score=score, runs=place.runs,
        by_site=tuple(by_site.get(site) for site in order) if by_site else (), title=place.title, source=place.source,
        note=more.get("note", place.note), date=place.date, **{k: v for k, v in found.items() if k != "note"},
    )  # fmt: skip


def named(bench: Bench, method: str, chosen: Study) -> tuple[str, Mapping[str, Any]]:
    """Return the title and settings of a method, also of one whose groups or weights an assessment gives."""
    given = bench.methods[method]
    if "outlier" in given:
        return "weighted-fedavg", {"weights": [given["outlier"]["weight"]]}
    if "clusters" in given:
        return "clustered-fedavg", {}
    return study.title(chosen), method_settings(chosen)


def noted(bench: Bench, method: str) -> str:
    """Return the distance by which a method weights or groups hospitals, as a note."""
    given = bench.methods[method]
    by = given["outlier"]["distance"] if "outlier" in given else given.get("clusters", "")
    return f"{WORDS[by]} chose the weights or groups of {method}" if by else ""


def bench_lines(place: Place, bench: Bench, studies: Mapping[str, Study], scores: Markdown) -> Iterator[RunLine]:
    """Yield the methods of the table "Mean over all cases" of a benchmark."""
    column = {name: k for k, name in enumerate(scores.head)}
    main = "Dice" if "Dice" in column else "accuracy"
    for row in scores.rows:
        method = row[0].rstrip("§†‡ ").strip()
        if method not in studies:  # the model of one hospital, used by all
            assert method.startswith("local, model of"), method
            continue
        chosen, score = studies[method], row[column[main]]
        title, settings = named(bench, method, chosen)
        effort = {"steps": whole(row[column["steps"]]), "bytes": whole(row[column["bytes"]])}
        note = noted(bench, method)
        yield line(place, chosen, title, value(score) or 0.0, settings, spread=spread(score), **effort, note=note)


def phantoms() -> Iterator[RunLine]:
    """Yield the lines of docs/results/phantoms.md."""
    file, alike = f"{RESULTS}/phantoms.md", {f"data.sites.south-{k}.contrast": "0" for k in (1, 2, 3)}
    groups = list(table(file, "Two groups of scanners", "Mean over all cases"))
    others = [
        ("scanners", "full", {}, "scanners", "Phantoms: two groups of scanners, three hospitals each", groups[0]),
        ("scanners", "full", alike, "scanners-alike", "Phantoms: six hospitals with the same scanner", groups[1]),
        ("paper_c", "small", {}, "two-scanners", "Phantoms: two scanners in every hospital",
         next(table(file, "Two scanners in every", "Mean over all"))),
        ("classes", "full", {}, "grades", "Phantoms: grades of tumours, another one frequent at every hospital",
         next(table(file, "Grades of tumours", "Mean over all"))),
        ("phantoms", "full", {}, "phantoms", "Phantoms: four hospitals with unlike scanners",
         next(table(file, "Unlike scanners", "Mean over all"))),
    ]  # fmt: skip
    for name, scale, overrides, data, title, scores in others:
        bench = load(name, scale)
        (studies,) = cells_of(bench, overrides, False)
        place = Place(data, title, file, "seeds 0 to 2", len(bench.seeds), "2026-11-16")
        yield from bench_lines(place, bench, studies, scores)


def defaults() -> Iterator[RunLine]:
    """Yield the lines of docs/results/defaults.md: the test scores, since values were chosen by validation scores."""
    file = f"{RESULTS}/defaults.md"
    bench = load("defaults")
    chosen = cells_of(bench, {}, False)[0]["fedavg"]
    place = Place("phantoms", "Phantoms: four hospitals with unlike scanners", file, "seeds 17 and 18", 2, "2026-11-17")
    text = (ROOT / file).read_text(encoding="utf-8")
    reference = re.search(r"FedAvg: [\d., ]+\(([\d.]+)\)", text)
    assert reference is not None
    yield line(place, chosen, "fedavg", float(reference[1]), {})
    seen: list[tuple[str, Mapping[str, Any]]] = []
    for head, *cells in next(iter(tables(file))).rows:
        words = re.findall(r"`(\w+)`(?: ([\d.]+))?", head)
        (method, _), (key, _), *fixed = words
        prefix = "server." if method in ("fedadagrad", "fedadam", "fedyogi") else ""
        for cell in filter(None, cells):
            tried, score = re.findall(r"([\d.]+): .*\(([\d.]+)\)", cell)[0]
            settings = {} if "**" in cell else {prefix + k: float(v) for k, v in sorted([(key, tried), *fixed])}
            if (method, settings) not in seen:
                seen.append((method, settings))
                yield line(place, chosen, method, float(score), settings)


def tcga_hospitals(folder: Path) -> Iterator[RunLine]:
    """Yield the lines of docs/results/hospitals.md: equal steps and tuning, and equal rounds without invalid rows."""
    file, bench = f"{RESULTS}/hospitals.md", load("hospitals")
    tuned = Place(
        "tcga-lgg", "TCGA-LGG: four real hospitals", file, "five folds, equal steps, three rates tried in each", 5,
        "2026-11-18", note="in every fold the best of three learning rates",
    )  # fmt: skip
    default = Place("tcga-lgg", "TCGA-LGG: four real hospitals", file, "five folds", 5, "2026-11-16")
    for found in _hospitals(folder, tuned, bench, "Dice and cost of", "methods by hospital"):
        rates = {k: v for k, v in found.settings.items() if k != "server.lr"}  # three were tried
        yield replace(found, settings=rates, training={k: v for k, v in found.training.items() if k != "lr"})
    yield from _hospitals(folder, default, replace(bench, budget="rounds"), "Mean over all", "Dice hospital by")


def _hospitals(folder: Path, place: Place, bench: Bench, all_cases: str, by_site: str) -> Iterator[RunLine]:
    """Yield the methods of two tables of docs/results/hospitals.md, which these words of their headings name."""
    (studies,) = cells_of(bench, {"data.path": str(folder)}, False)
    means = {row[0]: row for row in next(table(place.source, all_cases)).rows}
    sites = next(table(place.source, by_site))
    names = [name.split()[0] for name in sites.head[1:-1]]
    for row in sites.rows:
        method = row[0]
        if any(mark in method for mark in INVALID) or method.startswith("local, model of"):
            continue
        chosen = studies[method]
        title, settings = named(bench, method, chosen)
        each = {site: value(cell) for site, cell in zip(names, row[1:-1], strict=True)}
        loads = list(study.loads(chosen))
        effort = {"steps": spent(loads, "steps"), "bytes": 0 if chosen.run.pooled else spent(loads, "bytes")}
        note = "; ".join(each for each in (noted(bench, method), place.note) if each)
        score, tested = means[method][1], sum(int(n.split("(")[1].rstrip(")")) for n in sites.head[1:-1])
        yield line(
            place, chosen, title, value(score) or 0.0, settings, sites=each, spread=spread(score), tested=tested,
            **effort, note=note,
        )  # fmt: skip


def ingredients(folder: Path) -> Iterator[RunLine]:
    """Yield the lines of docs/results/ingredients.md without its ensembles, which are no trainings of their own."""
    file, bench = f"{RESULTS}/ingredients.md", load("hospital_ingredients")
    (studies,) = cells_of(bench, {"data.path": str(folder)}, False)
    place = Place("tcga-lgg", "TCGA-LGG: four real hospitals", file, "five folds, second FedAvg", 5, "2026-11-18")
    scores = next(table(file, "Mean over all cases"))
    alone = replace(scores, rows=tuple(row for row in scores.rows if row[0] not in bench.ensembles))
    yield from bench_lines(place, bench, studies, alone)


PRINTED = {  # names in bench/README.md of methods of bench/algorithms.py
    "FedAvg": "fedavg", "FedProx, μ = 0.01": "fedprox", "SCAFFOLD, by size": "scaffold", "FedNova": "fednova",
    "FedAdam, server 0.03": "fedadam", "FedPIDAvg": "fedpidavg", "FedAvg_ω, HT 0.3": "fedavg, omega 0.3",
}  # fmt: skip


def readme() -> Iterator[RunLine]:
    """Yield the lines of bench/README.md: all algorithms on the demonstration's hospitals and on TCGA-LGG."""
    (simulated,) = table(README, "Four simulated hospitals")
    place = Place("demo", "Phantoms: the demonstration's four hospitals, one the outlier", README, "seeds 0 to 2", 3)
    yield from _all_algorithms(place, simulated, "phantom", {}, {})
    counted = Counted({"CS": 14, "DU": 14, "FG": 12, "HT": 14}, ("pre", "flair", "post"), ("tumour",))
    protocols = {
        "3": {}, "1": {"train.patches": "1"},
        "2": {"train.patches": "1", "train.augment": "light", "train.gamma": "1.0"},
    }  # fmt: skip
    sizes = {"CS": 11, "DU": 11, "FG": 9, "HT": 11}  # "the last three of each by name are for validation"
    for number, changes in protocols.items():
        (scores,) = (t for t in table(README, "Four real hospitals") if t.before.startswith(f"({number})"))
        note = "validation cases, which were looked at while choosing"
        place = Place(
            "tcga-lgg", "TCGA-LGG: four real hospitals", README, f"last three validate, protocol {number}", 2,
            "2026-11-15", "validation", note,
        )  # fmt: skip
        yield from _all_algorithms(place, scores, "tcga", changes, sizes, counted)


def _all_algorithms(
    place: Place,
    scores: Markdown,
    federation: str,
    changes: Mapping[str, str],
    sizes: Mapping[str, int],
    counted: Counted | None = None,
) -> Iterator[RunLine]:
    names = scores.head[1 : scores.head.index("all ± over seeds")]
    for row in scores.rows:
        method = PRINTED.get(row[0], row[0])
        outlier = bench_algorithms.OUTLIERS[federation]
        given = {k.replace("OUTLIER", outlier): v for k, v in bench_algorithms.METHODS[method].items()}
        rates = bench_algorithms.RATES[federation]
        rate = {"train.lr": rates[method]} if method in rates else {}
        text, base = (
            (demo.STUDY, bench_algorithms.PHANTOM)
            if federation == "phantom"
            else (bench_algorithms.TCGA, {"data.path": "."})
        )
        chosen = config.parse(text, {**base, **given, **rate, **changes})
        if counted:
            chosen = replace(chosen, data=counted)
        each = dict(zip(names, map(value, row[1:]), strict=False))
        score = value(row[len(names) + 1]) or 0.0
        found = line(place, chosen, study.title(chosen), score, method_settings(chosen), sites=each)
        if sizes:
            order = sorted(sizes, key=lambda site: -sizes[site])
            found = replace(found, sizes=tuple(sizes[s] for s in order), by_site=tuple(each[s] for s in order))
        yield found


def distances(folder: Path) -> Iterator[AnyLine]:
    """Yield the lines of docs/results/distances.md: sixteen federations of TCGA-LGG, FedAvg and pooled training."""
    file, bench = f"{RESULTS}/distances.md", load("distances")
    text = (ROOT / file).read_text(encoding="utf-8")
    pooled_score = re.search(r"Dice of centralised training \(([\d.]+)", text)
    assert pooled_score is not None
    scores = next(table(file, "Distances and losses"))
    column = {name: k for k, name in enumerate(scores.head)}
    cells = cells_of(bench, {"data.path": str(folder)}, False)
    pooled = cells[0]["centralised"]
    for (name, *_), row, cell, federation in zip(scores.rows, scores.rows, cells, bench.federations, strict=True):
        assert name == federation.title, (name, federation.title)
        data = "tcga-lgg" if name == "natural" else "tcga-lgg-" + re.sub(r"\W+", "-", name)
        title = "TCGA-LGG: four real hospitals" if name == "natural" else f"TCGA-LGG dealt anew: {name}"
        place = Place(data, title, file, f"one split, {name}", 3, "2026-11-16")
        yield line(place, cell["fedavg"], "fedavg", value(row[column["Dice, FedAvg"]]) or 0.0, {})
        central = replace(pooled, federation=cell["fedavg"].federation)
        yield line(place, central, "pooled", float(pooled_score[1]), {}, bytes=0)
        if name != "natural":  # measured by --assess, with chance
            known = {"emd": "EMD", "euclidean": "EUC", "energy": "energy"}
            spans = {ours: Spans(value(row[column[theirs]]) or 0.0) for ours, theirs in known.items()}
            dealt = study.deal_cases(cell["fedavg"])
            sizes = tuple(sorted((train_size(dealt, s) for s in dealt), reverse=True))
            yield DistanceLine(data, sizes, spans, date=place.date, title=title, source=file)


def published() -> Iterator[RunLine]:
    """Yield the published scores of the papers' benchmarks, with the published sizes."""
    for name in PUBLISHED:
        bench = load(name)
        cells = cells_of(bench, {}, True)
        central = {n: s for cell in cells for n, s in cell.items() if s.run.pooled}
        for federation, cell in zip(bench.dealt, cells, strict=True):
            studies = {n: s for n, s in {**central, **cell}.items() if n in bench.published.methods}
            yield from _paper(bench, federation.title, studies)


def _paper(bench: Bench, federation: str, studies: Mapping[str, Study]) -> Iterator[RunLine]:
    paper = bench.published.on(federation)
    shown = [n for t in paper.tables for n in numbers(t) if paper.shows(n) and n.value is not None]
    known = [n for n in shown if n.measure in MEASURES]
    letter = bench.name.split("_")[1].upper()
    data = re.sub(r"\W+", "-", f"{bench.name} {federation}".strip()).replace("_", "-").lower()
    title = f"{bench.title.split(': ')[-1]}{f', {federation}' if federation else ''} (paper {letter})"
    source = f"{PAPERS[letter]}, as printed: {', '.join(t for t in paper.tables if 'text' not in t)}"
    note = "best mean of any round, chosen on the test cases" if letter == "D" else ""
    place = Place(data, title, source, "published", 1, note=note)
    effort = {(n.method, n.measure): n.value for t in paper.tables for n in numbers(t) if n.where == "all"}
    for method, chosen in studies.items():
        if "IID" in method:  # another federation
            continue
        names = bench.published.methods[method]
        mine = [n for n in known if n.method in names or f"{n.method}{AT}{n.setting}" in names]
        total = next((n for n in mine if n.where == "all"), None)
        if total is None:
            continue
        scale = 100.0 if total.unit == "%" else 1.0
        title_, settings = named(bench, method, chosen)
        steps = next((s for n in names if (s := effort.get((n, "total SGD steps"))) is not None), None)
        yield line(
            place, chosen, title_, (total.value or 0.0) / scale, settings, steps=None if steps is None else int(steps),
            spread=total.spread if letter in "BC" else None, sites=_sites(chosen, mine),
            note=noted(bench, method) or note,
        )  # fmt: skip


def _sites(chosen: Study, mine: Sequence[Number]) -> dict[str, float]:
    """Return the published score of every site: 1 is the first in natural order."""
    order = list(natural(study.deal_cases(chosen)))
    found = {}
    for each in mine:
        where = each.where.removeprefix("institution ")
        if where.isdigit() and 0 < int(where) <= len(order) and each.value is not None:
            found[order[int(where) - 1]] = each.value
    return found if len(found) == len(order) else {}


def assessed(folder: Path) -> Iterator[DistanceLine]:
    """Yield the measured distances of the federations of our own results, of the first seed."""
    alike = {f"data.sites.south-{k}.contrast": "0" for k in (1, 2, 3)}
    benches = [
        ("tcga-lgg", "hospitals", "full", {"data.path": str(folder)}), ("scanners", "scanners", "full", {}),
        ("scanners-alike", "scanners", "full", alike), ("two-scanners", "paper_c", "small", {}),
        ("grades", "classes", "full", {}), ("phantoms", "phantoms", "full", {}),
    ]  # fmt: skip
    found = {data: bench_studies(load(b, scale), o)["fedavg"] for data, b, scale, o in benches}
    found["demo"] = config.parse(demo.STUDY, bench_algorithms.PHANTOM)
    for data, chosen in found.items():
        engine = assessed_sites(chosen)
        (only,) = run_rounds(chosen.assess, engine, {}, Plan(rounds=1), chosen.seed)
        print(f"{data} is assessed", file=sys.stderr, flush=True)
        yield distance_line(data, analyse(only.state.replies, chosen.assess), source="scripts/evidence.py --assess")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, default=TCGA, help="folder of TCGA-LGG")
    options.add_argument("--assess", action="store_true", help="measure the distances again")
    options.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file would change")
    given = options.parse_args()
    if not given.data.is_dir():
        sys.exit(f"{given.data} is not here; --data names the folder of TCGA-LGG, whose sizes the table needs")
    before = SHIPPED.read_text(encoding="utf-8") if SHIPPED.exists() else ""
    kept = [x for x in map(from_json, before.splitlines()) if isinstance(x, DistanceLine) and "--assess" in x.source]
    lines: list[AnyLine] = []
    for made in (
        tcga_hospitals(given.data),
        ingredients(given.data),
        readme(),
        phantoms(),
        defaults(),
        distances(given.data),
        published(),
    ):
        lines += made
        print(f"{len(lines)} lines", file=sys.stderr, flush=True)
    lines += assessed(given.data) if given.assess else kept
    text = "".join(f"{to_json(each)}\n" for each in lines)
    if given.check:
        sys.exit(f"{SHIPPED} is not what the tables give; run scripts/evidence.py" if text != before else 0)
    SHIPPED.write_text(text, encoding="utf-8")
    federations = len({each.data for each in lines})
    print(f"{len(lines)} lines of {federations} federations in {SHIPPED.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
