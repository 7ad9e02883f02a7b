"""Check of a dataset before training: open every case and report all problems.

An *error* would stop or spoil training; a *warning* needs a human decision. Images of one case must have the same
shape, and their corners must lie within 0.1 voxels of one another.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from polysite import machine
from polysite.data.files import Files, agree, boxed, channel, truth_of
from polysite.data.images import BARE, Image, suffix
from polysite.data.manifest import Manifest, Row
from polysite.errors import DataError

VOXEL = (0.05, 20.0)  # plausible voxel sizes in millimetres


@dataclass(frozen=True, order=True)
class Problem:
    """A problem of one case, or of the whole dataset if site and case are empty."""

    site: str
    case: str
    kind: str  # "error" or "warning"
    what: str  # names the file, the problem and what to do
    in_common: str = field(default="", compare=False)  # the same with columns instead of files, to group cases by


@dataclass(frozen=True)
class Group:
    """Cases of a site that have the same problem."""

    site: str
    kind: str
    cases: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Finding:
    """Geometry, labels and problems of one case."""

    site: str
    case: str
    shape: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    unit: str = ""
    orientation: str = ""
    voxels: Mapping[str, int] = field(default_factory=dict)  # by label
    hashes: Mapping[str, str] = field(default_factory=dict)  # modality -> digest of its voxels
    files: Mapping[str, str] = field(default_factory=dict)
    category: str = ""
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Report:
    """Result of checking a dataset."""

    task: str
    modalities: tuple[str, ...]
    labels: tuple[str, ...]
    findings: tuple[Finding, ...]
    across: tuple[Problem, ...]  # problems that appear when cases are compared
    remarks: tuple[str, ...] = ()  # on how the folder was read

    @cached_property
    def problems(self) -> list[Problem]:
        """All problems, sorted by site and case."""
        return sorted([*(p for f in self.findings for p in f.problems), *self.across])

    @property
    def errors(self) -> list[Problem]:
        """Problems that would stop or spoil training."""
        return [p for p in self.problems if p.kind == "error"]

    def groups(self, least: int = 3) -> list[Group]:
        """Return the problems by site and case; ``least`` cases of a site with the same problem are one group."""
        members: dict[tuple[str, str, str], list[Problem]] = {}
        for p in self.problems:
            members.setdefault((p.site, p.kind, p.in_common or p.what), []).append(p)
        found = []
        for (site, kind, what), alike in members.items():
            if len({p.case for p in alike}) >= least:
                found.append(Group(site, kind, tuple(dict.fromkeys(p.case for p in alike)), what))
            else:
                found += [Group(site, kind, (p.case,), p.what) for p in alike]
        return found

    def sites(self) -> Iterator[dict[str, Any]]:
        """Yield a summary of every site."""
        for site in dict.fromkeys(f.site for f in self.findings):
            cases = [f for f in self.findings if f.site == site]
            read = [f for f in cases if f.shape]
            kinds = Counter(p.kind for p in self.problems if p.site == site)
            yield {
                "site": site,
                "cases": len(cases),
                "errors": kinds["error"],
                "warnings": kinds["warning"],
                "shape": _span([f.shape for f in read]),
                "spacing": _span([f.spacing for f in read]),
                "unit": "mm" if read and all(f.unit == "mm" for f in read) else "(unit unknown)",
                "orientation": sorted({f.orientation for f in read if f.orientation}),
                "labels": {k: v for k in self.labels if (v := self._amount(k, read))},
            }

    def _amount(self, label: str, findings: Sequence[Finding]) -> str:
        """Return the median volume of a label, or the number of cases of a class, as text."""
        if self.task == "classification":
            return str(sum(f.category == label for f in findings) or "")
        labelled = [f for f in findings if label in f.voxels]
        if not labelled:
            return ""
        if all(f.unit == "mm" and len(f.shape) == 3 for f in findings):
            return f"{median(f.voxels[label] * prod(f.spacing) / 1000 for f in labelled):.3g} ml"
        unit = "pixels" if len(findings[0].shape) == 2 else "voxels"
        return f"{median(f.voxels[label] for f in labelled):.0f} {unit}"

    def plain(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {
            "task": self.task,
            "modalities": self.modalities,
            "labels": self.labels,
            "sites": list(self.sites()),
            "problems": [{k: v for k, v in asdict(p).items() if k != "in_common"} for p in self.problems],
            "remarks": self.remarks,
            "ok": not self.errors,
        }


def check(files: Files, step: Callable[[str], None] = lambda case: None) -> Report:
    """Open and check every case of every site; ``step`` is called with the name of each finished case."""
    listed, dims = files.manifest, files.dims
    findings = []
    with ThreadPoolExecutor(machine.cores()) as pool:
        for finding in pool.map(lambda row: examine(listed, row, dims, files.allow), listed.rows):
            findings.append(finding)
            step(f"{finding.site} · {finding.case}")
    across = (*_across(findings), *_missing(listed, files.allow))
    return Report(files.task, listed.modalities, listed.label_names, tuple(findings), across, files.remarks)


def examine(listed: Manifest, row: Row, dims: int, allow: Sequence[str] = ()) -> Finding:
    """Check one case by itself."""
    problems: list[Problem] = []
    cells = {**row.images, "label": row.label}
    columns = {str(listed.file(cell)[0]): name for name, cell in cells.items() if cell}

    def say(what: str, kind: str = "error") -> None:
        problems.append(Problem(row.site, row.case, kind, what, _in_common(what, columns)))

    opened: dict[Path, Image] = {}
    images: dict[str, Image] = {}
    for name, cell in cells.items():
        try:
            if cell and name == "label":
                images[name] = boxed(truth_of(listed, row, opened), row)
            elif cell:
                images[name] = boxed(channel(listed, cell, opened, bool(row.box), row.spacing), row)
        except DataError as problem:
            say(str(problem))
    files = {name: listed.file(cells[name])[0] for name in images}
    for name, image in images.items():
        _voxels(files[name], name, image, say)
    first = next((m for m in row.images if m in images), None)
    if first is None:
        return Finding(row.site, row.case, problems=tuple(problems))
    for other in list(images)[1:]:
        try:
            agree(listed, row, first, images[first], other, images[other])
        except DataError as problem:
            say(str(problem))
    _geometry(files[first], images[first], dims, say)
    truth = images.pop("label", None)
    voxels = {} if truth is None else _labels(listed, row, truth, allow, say)
    hashes = {m: blake2b(np.ascontiguousarray(i.array).data, digest_size=16).hexdigest() for m, i in images.items()}
    _copies(files, hashes, say)
    grid = images[first]
    return Finding(
        site=row.site,
        case=row.case,
        shape=grid.shape,
        spacing=grid.spacing,
        unit=grid.unit,
        orientation="" if suffix(str(files[first])) in BARE else grid.orientation,
        voxels=voxels,
        hashes=hashes,
        files={m: str(files[m]) for m in images},
        category=row.category,
        problems=tuple(problems),
    )


Say = Callable[..., None]


def _in_common(what: str, columns: Mapping[str, str]) -> str:
    """Return a problem with the columns of the manifest in place of the files that a case has there."""
    for file in sorted(columns, key=len, reverse=True):
        what = what.replace(file, columns[file]).replace(Path(file).name, columns[file])
    return what


def _voxels(file: Path, name: str, image: Image, say: Say) -> None:
    if image.array.dtype.kind == "f":
        odd = int(image.array.size - np.count_nonzero(np.isfinite(image.array)))
        if odd:
            say(f"{file}: {odd} voxels are NaN or infinite; repair the file or leave the case out")
            return
    if name != "label" and image.array.size and image.array.min() == image.array.max():
        say(f"{file}: every voxel is {image.array.flat[0]:g}; nothing was scanned, or the export failed")


def _geometry(file: Path, image: Image, dims: int, say: Say) -> None:
    if image.dims != dims:
        say(f"{file} has {image.dims} dimensions, other cases have {dims}")
    odd = [s for s in image.spacing if not VOXEL[0] <= s <= VOXEL[1]]
    if odd:
        say(
            f"{file}: a voxel of {' x '.join(f'{s:.3g}' for s in image.spacing)} mm is not plausible "
            f"({VOXEL[0]} to {VOXEL[1]} mm); correct the header"
        )


def _labels(listed: Manifest, row: Row, truth: Image, allow: Sequence[str], say: Say) -> dict[str, int]:
    file = listed.file(row.label)[0]
    values = np.unique(truth.array)
    values = values[np.isfinite(values)]
    if values.size and (values != np.round(values)).any():
        say(f"{file}: label values such as {values[values != np.round(values)][0]:g} are not whole numbers")
        return {}
    known = {0, *(v for members in row.labels.values() for v in members)}
    undeclared = sorted({int(v) for v in values} - known)
    if undeclared:
        declared = f"(declared: {sorted(known)}); declare them in the manifest or correct the file"
        if known | {*undeclared} <= {0, 1, 255} and len(row.labels) == 1:
            declared += f", or, if 1 and 255 mean the same, declare {next(iter(row.labels))}=1,255"
        say(f"{file}: the values {undeclared} are not declared {declared}")
    if not (values != 0).any():
        say(
            f"{file}: nothing is labelled; leave the case out, or set data.allow = ['empty'] if nothing is there",
            "warning" if "empty" in allow else "error",
        )
    return {n: int(np.isin(truth.array, members).sum()) for n, members in row.labels.items()}


def _copies(files: Mapping[str, Path], hashes: Mapping[str, str], say: Say) -> None:
    seen: dict[str, str] = {}
    for modality, digest in hashes.items():
        if digest in seen:
            say(
                f"{files[modality]} is a copy of {seen[digest]}, so {modality} was probably not "
                "acquired; leave the case out, or empty its cell in the manifest and set data.allow = ['missing']",
                "warning",
            )
        seen.setdefault(digest, modality)


def _across(findings: Sequence[Finding]) -> Iterator[Problem]:
    """Yield problems between cases: identical voxels in two cases, and an orientation that most cases do not have."""
    seen: dict[tuple[str, str], Finding] = {}
    for f in findings:
        twins = {m: seen[m, d] for m, d in f.hashes.items() if (m, d) in seen}
        if twins:
            modality, other = next(iter(twins.items()))
            elsewhere = "" if other.site == f.site else f" at site {other.site!r}, so one patient may train and test"
            what = f"{f.files[modality]} holds the same voxels as case {other.case!r}{elsewhere}; remove one of them"
            yield Problem(f.site, f.case, "error", what)
        for m, d in f.hashes.items():
            seen.setdefault((m, d), f)
    axes = Counter(f.orientation for f in findings if f.orientation)
    if len(axes) > 1:
        usual = axes.most_common(1)[0][0]
        for f in findings:
            if f.orientation not in ("", usual):
                modality, file = next(iter(f.files.items()))
                what = f"the axes point to {f.orientation}, mostly it is {usual}; set prepare.orientation"
                yield Problem(f.site, f.case, "warning", f"{file}: {what}", f"{modality}: {what}")


def _missing(listed: Manifest, allow: Sequence[str]) -> Iterator[Problem]:
    """Yield the cases that lack a modality; if most cases lack it, one problem that names the few that have it."""
    kind = "warning" if "missing" in allow else "error"
    for modality in listed.modalities:
        without = [r for r in listed.rows if not r.images[modality]]
        holders = [r for r in listed.rows if r.images[modality]]
        if len(without) > len(holders):
            some = ", ".join(r.images[modality] for r in holders[:3])
            what = f"only {len(holders)} of {len(listed.rows)} cases have {modality!r} ({some}); rename or remove those"
            yield Problem("", "", kind, f"{what} files, or choose data.modalities without it")
            continue
        for row in without:
            what = f"{modality} was not acquired; leave the case out, or choose data.modalities that all cases have"
            also = "" if allow else ", or set data.allow = ['missing']"
            yield Problem(row.site, row.case, kind, what + also)


def _span(values: Sequence[tuple[float, ...]]) -> list[list[float]]:
    """Return the smallest and largest value of every axis; nothing if cases differ in dimension."""
    if not values or len({len(v) for v in values}) > 1:
        return []
    return [[min(axis), max(axis)] for axis in zip(*values, strict=True)]
