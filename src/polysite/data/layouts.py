"""Layouts of public datasets on disk: recognise a folder and turn it into a manifest.

A layout is a function from a folder to rows; its docstring describes the files that it looks for. It leaves fields
empty that the folder does not determine (site, label map, meaning of values). ``scan`` fills them in from tables and
from the files themselves, with a remark on each.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from polysite import plugins
from polysite.data.dicom import is_slice
from polysite.data.images import KEYED, SUFFIXES, Image, read, stem, suffix
from polysite.data.images import keys as array_names
from polysite.data.manifest import COLUMNS, Labels, Manifest, Row, locate, natural
from polysite.data.pairing import IMAGES, in_one_folder, match, rank
from polysite.data.private_names import Pseudonyms
from polysite.data.seen import describe
from polysite.data.tables import INSTITUTION, SPLITS, find_facts, joined, keys, read_rows, remark, sensible
from polysite.errors import ConfigError, DataError, nearest
from polysite.foreign import parse_json

Layout = Callable[[Path], list[Row]]

SAMPLED_FILES = 16  # label maps that are opened to see which values occur
TRUTHS = ("seg", "label", "mask", "segmentation", "labels", "truth")
DFUC_CLASSES = ("none", "infection", "ischaemia", "both")
BRATS_CASE = re.compile(r"(brats|fets)(\d+_|-[a-z]+-)", re.IGNORECASE)
BRATS_2023 = {"t1n": "t1", "t1c": "t1ce", "t2w": "t2", "t2f": "flair", "segm": "seg"}  # Segm: in one case of 2020
CC359_CASE = re.compile(r"CC\d{4}_(?P<scanner>[a-z]+_\d+)_\d+_[MF]")  # vendor, field strength (15 or 3), age, sex
BIDS_IMAGE = re.compile(r"t[12]w|flair|t2starw?|pdw|pdt2|t[12]map|inplanet[12]|unit1|angio|swi|ct")
BIDS_FOLDER = re.compile(
    r"(?!.*sourcedata/)(?:(?P<home>.+?)/)??(?:rawdata/|derivatives/(?P<pipeline>[^/]+)/)?"
    r"(?P<case>sub-[^/]+(?:/ses-[^/]+)?)/[^/]+"
)


@dataclass(frozen=True)
class Scan:
    """The manifest of a folder, with remarks on how it was read, one sentence each."""

    format: str
    manifest: Manifest
    remarks: tuple[str, ...] = ()


def scan(root: Path, format: str = "auto", tables: Sequence[Path] = (), labels: Labels | None = None) -> Scan:
    """Find the cases below a folder.

    Args:
        root: The folder.
        format: A layout, or ``auto`` to try all.
        tables: Tables with sites, groups and splits of the cases.
        labels: Meaning of the label values, instead of the layout's own.
    """
    root, remarks = root.resolve(), list[str]()
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; name the one that holds the dataset")
    name, rows = _recognised(root, format)
    if name in COMPLETE:
        remarks += _unused(root, rows)
    elif name == "pairs":
        remarks += _beside(root, rows)
    rows = joined(rows, find_facts(root, tables, {k for r in rows for k in keys(r.case)}, remarks), remarks)
    rows = _usable(rows, f"{root}, read as {name!r}", remarks)
    rows = _labelled(rows, root, labels, remarks)
    if not all(r.site for r in rows):
        remarks.append(
            "neither folders nor a table name the hospitals, so the cases form one site, 'all'; "
            "--table FILE, a CSV with the columns case and site, names them"
        )
        rows = [r if r.site else replace(r, site="all") for r in rows]
    rows = _without_patients(rows, root, remarks)
    order = {site: i for i, site in enumerate(natural({r.site for r in rows}))}
    return Scan(name, Manifest(tuple(sorted(rows, key=lambda r: order[r.site])), root), tuple(remarks))


def _without_patients(rows: Sequence[Row], root: Path, remarks: list[str]) -> list[Row]:
    """Return the rows with pseudonyms for DICOM scans whose case is called after its patient."""
    names = Pseudonyms()
    found = []
    for row in rows:
        name = names.of(row.case, locate(root, next(f for f in row.images.values() if f))[0])
        found.append(replace(row, case=name, patient=row.patient and name) if name != row.case else row)
    if names.known:
        some = ", ".join(list(names.known)[:5]) + ", ..." * (len(names.known) > 5)
        remarks.append(
            f"{len(names.known)} cases have a name or number of their patient in the name of their folder; they are "
            f"called {some} (the manifest still says where the files are: do not pass it on)"
        )
    return found


def brats(root: Path) -> list[Row]:
    """FeTS2022_00000/*_flair.nii.gz or BraTS-GLI-00000-000/*-t2f.nii.gz, as of FeTS and BraTS 2017 to 2024."""
    rows = []
    for folder, files in image_files(root, 3).items():
        *_, above, case = ("", *folder.split("/"))
        kinds = {re.split("[_-]", name)[-1].lower(): file for name, file in files.items()}
        kinds = {BRATS_2023.get(k, k): file for k, file in kinds.items()}
        images = {m: kinds.get(m, "") for m in ("t1", "t1ce", "t2", "flair")}
        if BRATS_CASE.match(case) and (any(images.values()) or "seg" in kinds):
            site, grade = INSTITUTION.match(case), above if above in ("HGG", "LGG") else ""
            patient = re.sub(r"(brats-[a-z]+-\d+)-\d{3}$", r"\1", case, flags=re.IGNORECASE)  # the last is a time point
            row = Row(site[1] if site else "", case, images, kinds.get("seg", ""), group=grade)
            rows.append(row if patient == case else replace(row, patient=patient))
    meaning = {f: _tumour(f, root, [r for r in rows if _family(r) == f]) for f in {_family(r) for r in rows}}
    return [replace(r, labels=meaning[_family(r)]) for r in rows]


def _family(row: Row) -> str:
    """Return the BraTS family of a case; all cases of a family use the same numbers for their labels."""
    case = row.case.lower()
    return "paediatric" if case.startswith("brats-ped-") else "new" if case.startswith("brats-") else "old"


def _tumour(family: str, root: Path, rows: Sequence[Row]) -> Labels:
    """Return the numbering of the labels: by the names of the cases, unless the values contradict them."""
    # Oedema is rare in children, and without a 4 their two numberings look alike, so every label map is read.
    values = _values(root, rows, len(rows) if family == "paediatric" else SAMPLED_FILES)
    if family == "paediatric" and 4 in values:
        return {"WT": (1, 2, 3, 4), "TC": (1, 2, 3), "ET": (1,)}
    seen = values & {3, 4}
    enhancing = min(seen) if len(seen) == 1 else 4 if family == "old" else 3
    cavity = {"RC": (4,)} if len(seen) == 2 and family == "new" else {}
    return {"WT": (1, 2, enhancing), "TC": (1, enhancing), "ET": (enhancing,), **cavity}


def kits(root: Path) -> list[Row]:
    """case_00000/imaging.nii.gz and segmentation.nii.gz, as of KiTS19 to KiTS23."""
    rows = []
    for folder, files in image_files(root, 3).items():
        case = folder.rpartition("/")[2]
        if re.fullmatch(r"case_\d{5}", case) and files.keys() & {"imaging", "segmentation"}:
            truth = files.get("segmentation") or files.get("aggregated_MAJ_seg", "")  # the latter in KiTS21
            rows.append(Row("", case, {"ct": files.get("imaging", "")}, truth))
    cyst = {"cyst": (3,)} if 3 in _values(root, rows) else {}
    return [replace(r, labels={"kidney": (1, 2, 3) if cyst else (1, 2), "tumour": (2,), **cyst}) for r in rows]


def msd(root: Path) -> list[Row]:
    """dataset.json with a list "training" of image and label, as of the Medical Segmentation Decathlon."""
    rows: list[Row] = []
    for home in ("", *natural(p.parent.name for p in root.glob("[!.]*/dataset.json"))):
        with sensible(root / home / "dataset.json"):
            about = _about(root / home / "dataset.json")
            if "channel_names" in about or "training" not in about:
                continue  # nnU-Net's
            names, labels, listed = _channels(about.get("modality", {})) or ["image"], _meanings(about, root / home), []
            for entry in about["training"]:
                image, truth = (_inside(root, home, entry[k]) for k in ("image", "label"))
                cells = {m: f"{image}#{i}" if image and len(names) > 1 else image for i, m in enumerate(names)}
                case = stem(PurePosixPath(entry["image"]).name)
                listed.append(Row(str(about.get("name") or (root / home).name), case, cells, truth, labels))
            # nnU-Net's first version has the same list, but its files are called x_0000
            rows += listed if any(any(r.images.values()) for r in listed) else []
    return rows


def _inside(root: Path, home: str, name: str) -> str:
    """Return the path of a file that a dataset.json names, or an empty string if there is none."""
    path = PurePosixPath(home, name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"{root / home / 'dataset.json'} names {name!r}, which is not below its folder; move it there")
    return str(path) if (root / path).is_file() else ""


def nnunet(root: Path) -> list[Row]:
    """imagesTr/CASE_0000.nii.gz and labelsTr/CASE.nii.gz, as of nnU-Net, with or without dataset.json."""
    folders, rows = image_files(root, 2), []
    for home in [f.removesuffix("imagesTr") for f in folders if PurePosixPath(f).name == "imagesTr"]:
        with sensible(root / home / "dataset.json"):
            about = _about(root / home / "dataset.json")
            names = _channels(about.get("channel_names", about.get("modality", {})))
            site, labels = str(about.get("name") or (root / home).name), _meanings(about, root / home)
        for ending, split in (("Tr", ""), ("Ts", "test")):
            truths = folders.get(f"{home}labels{ending}", {})
            cases = _numbered(folders.get(f"{home}images{ending}", {}), names)
            rows += [Row(site, c, cells, truths.get(c, ""), labels, split=split) for c, cells in cases.items()]
    return rows


def _numbered(files: Mapping[str, str], names: Sequence[str]) -> Mapping[str, dict[str, str]]:
    """Return modality -> file for every case of nnU-Net."""
    cases: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for name, file in files.items():
        if match := re.fullmatch(r"(.+)_(\d{4})", name):
            cases[match[1]][int(match[2])] = file
    last = max((i for numbered in cases.values() for i in numbered), default=0)
    if not last and len(names) > 1:  # photographs: their colours are the channels of one file
        return {c: {m: f"{numbered[0]}#{i}" for i, m in enumerate(names)} for c, numbered in cases.items()}
    names = names if len(names) > last else [f"channel_{i}" for i in range(last + 1)] if last else ["image"]
    return {c: {m: numbered.get(i, "") for i, m in enumerate(names)} for c, numbered in cases.items()}


def luna(root: Path) -> list[Row]:
    """subset0/UID.mhd to subset9 with candidates.csv or candidates_V2.csv, as of LUNA16: a classification."""
    folders = {f: files for f, files in image_files(root, 2).items() if re.fullmatch(r"(.*/)?subset\d", f)}
    scans = {uid: (PurePosixPath(f).name, {"ct": file}) for f, files in folders.items() for uid, file in files.items()}
    tables = [t for n in ("candidates_V2.csv", "candidates.csv") for t in (root / n, *sorted(root.glob(f"[!.]*/{n}")))]
    table = next((t for t in tables if t.is_file()), root / "candidates.csv")
    rows, count = [], dict.fromkeys(scans, 0)
    with sensible(table):
        for line in read_rows(table) if scans else ():
            if (uid := line["seriesuid"]) in scans:
                (site, images), count[uid] = scans[uid], count[uid] + 1
                x, y, z = (float(line[c]) for c in ("coordx", "coordy", "coordz"))
                # LUNA's x and y point to the left and to the back; the table holds hundredths of a millimetre.
                box = (*(round(v, 2) + 0.0 for v in (-x, -y, z)), 50.0, 50.0, 50.0)
                category = {"0": "other", "1": "nodule"}[line["class"]]
                rows.append(Row(site, f"{uid}-{count[uid]:05d}", images, category=category, box=box, patient=uid))
    return rows


def dfuc(root: Path) -> list[Row]:
    """images/100.jpg and train.csv (image,none,infection,ischaemia,both), as of DFUC2021: a classification."""
    rows: list[Row] = []
    for table in filter(_is_dfuc, (root / "train.csv", *sorted(root.glob("[!.]*/train.csv")))):
        home = "" if table.parent == root else table.parent.name
        found = image_files(root, 1, home).get(f"{home}/images".lstrip("/"), {})
        files = {PurePosixPath(file).name: file for file in found.values()}
        with sensible(table):
            classes = {line["image"]: _marked(line) for line in read_rows(table)}
        names = {**classes, **files}
        rows += [Row("", stem(n), {"image": files.get(n, "")}, category=classes.get(n, "")) for n in names]
    return rows


def _is_dfuc(table: Path) -> bool:
    """Return whether a table has the columns of DFUC2021."""
    if not table.is_file():
        return False
    with sensible(table), table.open(encoding="utf-8-sig", errors="replace") as lines:
        return {"image", *DFUC_CLASSES} <= {*re.findall(r"\w+", lines.readline(10_000).lower())}


def _marked(line: Mapping[str, str]) -> str:
    """Return the class that a row of DFUC2021's table marks by 1; an empty text for an image without a class."""
    marked = [c for c in DFUC_CLASSES if line[c] and float(line[c]) == 1]
    if len(marked) > 1:
        raise ValueError(f"{line['image']} is in the classes {' and '.join(marked)}")
    return "".join(marked)


def bids(root: Path) -> list[Row]:
    """sub-01/anat/sub-01_T1w.nii.gz with *_mask.nii.gz or *_dseg.nii.gz among them or in derivatives/PIPELINE."""
    cases: defaultdict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
    for folder, files in image_files(root, 6).items():
        if at := BIDS_FOLDER.fullmatch(folder):
            for name, file in files.items():
                *pairs, kind = name.split("_")
                entities = dict(p.split("-", 1) for p in pairs if "-" in p)
                place = {"kind": kind.lower(), "pipeline": at["pipeline"] or "", "file": file}
                cases[PurePosixPath(at["home"] or "").name, at["case"].replace("/", "_")].append(entities | place)
    patients = {case: case.partition("_ses-")[0] for _, case in cases if "_ses-" in case}
    rows = [Row(site, c, *_session(files), patient=patients.get(c, "")) for (site, c), files in cases.items()]
    return [r for r in rows if r.images or r.label]


def _session(files: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], str]:
    """Return modality -> file and the label map: preferably a mask with a label, and the images in its space."""
    truths = [f for f in files if f["kind"] in ("mask", "dseg")]
    truth = min(truths, key=lambda f: ("brain" in (f.get("desc"), f.get("label")), "label" not in f), default={})

    def distance(f: Mapping[str, str]) -> tuple[int, ...]:
        foreign = f["pipeline"] != truth.get("pipeline") and 1 + bool(f["pipeline"])  # raw ones before other pipelines
        return f.get("space") != truth.get("space"), foreign, f.get("desc") != "preproc"

    images: dict[str, str] = {}
    for f in sorted((f for f in files if BIDS_IMAGE.fullmatch(f["kind"])), key=distance):
        if not f["pipeline"] or f.get("space") == truth.get("space"):
            images.setdefault(f["kind"] + "_ce" * ("ce" in f), f["file"])
    return {m: images[m] for m in natural(images)}, truth.get("file", "")


def cc359(root: Path) -> list[Row]:
    """Original/CC0001_philips_15_55_M.nii.gz and STAPLE/*_staple.nii.gz or Silver-standard/*_ss.nii.gz, as of CC359."""
    folders = {f: files for f, files in image_files(root, 4).items() if "hippocampus" not in f.lower()}
    everything = {name: file for files in folders.values() for name, file in files.items()}
    rows = []
    for folder, files in folders.items():
        for case, file in files.items() if "original" in folder.lower().split("/") else ():
            if match := CC359_CASE.fullmatch(case):
                masks = (everything.get(f"{case}_{kind}", "") for kind in ("staple", "ss"))
                truth = next(filter(None, masks), "")
                rows.append(Row(match["scanner"], case, {"t1": file}, truth, {"brain": (1,)}))
    return rows if any(r.label for r in rows) else []


def prostate(root: Path) -> list[Row]:
    """SITE/Case00.nii.gz and Case00_segmentation.nii.gz, as of the multi-site prostate MRI."""
    rows = []
    for folder, files in image_files(root, 2).items():
        lower, site = {n.lower(): f for n, f in files.items()}, folder.rpartition("/")[2]
        for case in [n for n in files if re.fullmatch(r"case\d+", n.lower())]:
            truth = lower.get(f"{case.lower()}_segmentation", "")
            # some hospitals segment the two zones of the gland
            rows.append(Row(site, case, {"t2": files[case]}, truth, {"prostate": (1, 2)}))
    return rows if any(r.label for r in rows) else []


def tree(root: Path) -> list[Row]:
    """SITE/CASE/modality.nii.gz (or CASE_modality) with seg, label, mask or segmentation; also one SITE by itself."""
    rows, folders = [], image_files(root, 2)
    if [*folders] == [""]:  # the root is one case
        folders = {root.name: folders[""]}
    depth = 1 if any("/" in f for f in folders) else 0  # without folders of sites, the root is one hospital
    for folder, files in folders.items():
        if folder and folder.count("/") == depth:
            *above, case = folder.split("/")
            # T1, t1 and CASE_t1 are the same modality
            plain = {
                re.sub(rf"^{re.escape(case)}[_-]", "", n, flags=re.IGNORECASE).lower(): f for n, f in files.items()
            }
            truth = next((plain[t] for t in TRUTHS if t in plain), "")
            images = {n: f for n, f in plain.items() if n not in TRUTHS}
            rows.append(
                Row(above[0] if above else root.parent.name if case == root.name else root.name, case, images, truth)
            )
    return rows if any(r.label for r in rows) else []


def keyed(root: Path) -> list[Row]:
    """SITE/CASE.h5 or SITE/CASE/scan.h5 (or .hdf5, .npz) with the arrays image and label (or mask, seg) in each."""
    folders = {f: [p for p in files.values() if suffix(p) in KEYED] for f, files in image_files(root, 3).items()}
    folders = {f: files for f, files in folders.items() if files}
    names: list[str] = []
    with suppress(DataError):
        names = array_names(root / next(iter(folders.values()))[0]) if folders else []
    truth = next((n for t in TRUTHS for n in names if n.rpartition("/")[2].lower() == t), "")
    images = [n for n in names if n != truth and n.rpartition("/")[2].lower() not in TRUTHS]
    if not truth or not images:
        return []
    single = len(folders) > 1 and all(len(files) == 1 for files in folders.values())  # a folder is a case
    rows = []
    for folder, files in folders.items():
        above = folder.split("/") if folder else []
        for file in files:
            case = above[-1] if single and above else stem(PurePosixPath(file).name)
            cells = {n.replace("/", "_").lower(): f"{file}#{n}" for n in images}
            rows.append(_placed(Row("", case, cells, f"{file}#{truth}"), above[:-1] if single else above))
    return _unique_names(rows)


def pairs(root: Path) -> list[Row]:
    """images/x.png and labels/x.png (or masks, 1st_manual; x_mask beside x), also below SITE or training and test."""
    folders, rows = image_files(root, 3), []
    for folder, files in folders.items():
        *above, last = folder.split("/")
        beside = {f.rpartition("/")[2]: f for f in folders if f.rpartition("/")[0] == "/".join(above) and f != folder}
        order = natural(f for name, f in beside.items() if rank(name) >= 0)
        order.sort(key=lambda f: rank(f.rpartition("/")[2]))
        if IMAGES.fullmatch(last.lower()) and order:
            matches = ((folders[f], match([*files], [*folders[f]])) for f in order)
            truths, matched = next((m for m in matches if m[1]), ({}, {}))
            paired = [Row("", n, {"image": f}, truths[matched[n]] if n in matched else "") for n, f in files.items()]
            rows += [_placed(r, above) for r in paired if matched]
        elif found := in_one_folder([*files]):
            at = folder.split("/") if folder else []
            rows += [_placed(Row("", n, {"image": files[n]}, files[found[n]]), at) for n in natural(found)]
    return _channelled(root, _unique_names(rows)) if any(r.label for r in rows) else []


def imagefolder(root: Path) -> list[Row]:
    """CLASS/x.png or SITE/CLASS/x.png, with train, val and test as one more level if wanted: a classification."""
    rows = []
    for folder, files in image_files(root, 3).items():
        *above, category = folder.split("/")
        rows += [_placed(Row("", n, {"image": f}, category=category), above) for n, f in files.items() if category]
    classes, names = {r.category for r in rows}, {r.case for r in rows}
    other = [c for c in classes if c.lower() in SPLITS or IMAGES.fullmatch(c.lower()) or rank(c) >= 0]
    # Folders of cases look similar, but repeat the same few names in every folder and hold label maps.
    truths = any(re.search(rf"(^|[_-])({'|'.join(TRUTHS)})$", n.lower()) for n in names)
    if other or truths or not 2 <= len(classes) <= len(names) or len({bool(r.site) for r in rows}) > 1:
        return []
    return _channelled(root, _unique_names(rows))


def _unique_names(rows: list[Row]) -> list[Row]:
    """Make the names of cases unique in their site, if necessary with split and class as a prefix."""
    if len({(r.site, r.case) for r in rows}) == len(rows):
        return rows
    return [replace(r, case="_".join(filter(None, (r.split, r.category, r.case)))) for r in rows]


LAYOUTS: Mapping[str, Layout] = {  # in the order in which they are tried
    f.__name__: f
    for f in (brats, kits, msd, nnunet, luna, dfuc, bids, cc359, prostate, keyed, tree, pairs, imagefolder)
}
# use every folder; one that is not used is remarked on
COMPLETE = ("brats", "kits", "dfuc", "cc359", "prostate", "tree", "imagefolder")


def _own(root: Path, format: str) -> list[Row]:
    """Return the cases that a layout from outside of polysite finds."""
    layout = plugins.find(format, "data.format")
    if layout is None:
        raise ConfigError(f"there is no format called {format!r}; {nearest(format, ['auto', *LAYOUTS])}")
    kind = getattr(layout, "__annotations__", {}).get("return", "") if callable(layout) else ""
    if "Row" not in str(kind):  # a study names it: no other function, such as one that deletes folders, is ever called
        raise ConfigError(f"data.format = {format!r} must be a function of a folder, annotated to return list[Row]")
    rows = list(layout(root))
    if not rows or not all(isinstance(row, Row) for row in rows):
        raise DataError(f"the layout {format!r} found no case in {root}, or something that is no Row")
    return rows


def _recognised(root: Path, format: str) -> tuple[str, list[Row]]:
    if format not in ("auto", *LAYOUTS):
        return format, _own(root, format)
    if is_series(root):
        raise DataError(
            f"{root} is one DICOM series, so one image; name the folder above, {root.parent}, or its parent"
        )
    for name in LAYOUTS if format == "auto" else [format]:
        if rows := LAYOUTS[name](root):
            return name, rows
    if format != "auto":
        raise DataError(f"{root} holds no case of the format {format!r}, which looks for {LAYOUTS[format].__doc__}")
    raise DataError(describe(root, LAYOUTS))


def _unused(root: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Remark on top-level folders without any case, and on their content."""
    taken = {PurePosixPath(f).parts[0] for f in _used(rows)}
    folders = [e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith((".", "__"))]
    if left := natural(name for name in folders if name not in taken):
        kinds = Counter(Path(f).suffix for n in left for _, _, files in os.walk(root / n) for f in files if f[0] != ".")
        held = ", ".join(f"{n} {kind or 'other'} files" for kind, n in kinds.most_common(2)) or "no file"
        yield f"nothing was taken from {_some(left)}: {held}"


def _beside(root: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Remark on folders of images that pairs left out, such as masks of the field of view or a second reader's."""
    taken = {PurePosixPath(f).parent for f in _used(rows)}
    if left := [f for f in image_files(root, 3) if PurePosixPath(f) not in taken]:
        truths = natural({str(PurePosixPath(r.label).parent) for r in rows if r.label})
        yield f"nothing was taken from {_some(left)}: the label maps are those of {', '.join(truths[:5])}"


def _used(rows: Sequence[Row]) -> set[str]:
    """Return all files of the rows."""
    return {f for r in rows for f in (*r.images.values(), r.label) if f}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", …" * (len(names) > 5)


def _usable(rows: list[Row], where: str, remarks: list[str]) -> list[Row]:
    """Return the cases that have an image and a label map or class, all with the same modalities."""
    truth = "class" if any(r.category for r in rows) else "label map"
    for what, has in ((truth, lambda r: r.label or r.category), ("image", lambda r: any(r.images.values()))):
        lacking = [r.case for r in rows if not has(r)]
        if len(lacking) == len(rows):
            raise DataError(f"{where}: none of the {len(rows)} cases has a file for its {what}; see {lacking[0]!r}")
        remark(remarks, lacking, f"have no {what} and were left out")
        rows = [r for r in rows if has(r)]
    orders = {tuple(r.images) for r in rows}
    names = orders.pop() if len(orders) == 1 else natural({m for order in orders for m in order})
    used = [m for m in names if any(r.images.get(m) for r in rows)]
    for modality in used:
        holders = [r.case for r in rows if r.images.get(modality)]
        if 2 * len(holders) < len(rows):
            what = f"of {len(rows)} have {modality!r}, so name the data.modalities to use, or rename files"
            remark(remarks, holders, what)
    return [r if [*r.images] == used else replace(r, images={m: r.images.get(m, "") for m in used}) for r in rows]


def _labelled(rows: list[Row], root: Path, labels: Labels | None, remarks: list[str]) -> list[Row]:
    """Give every label map a meaning: the given one, the layout's, or names made of its values."""
    if labels is not None:
        return [replace(r, labels=labels) if r.label else r for r in rows]
    bare = [r for r in rows if r.label and not r.labels]
    if not bare:
        return rows
    sets = _value_sets(root, bare)
    values = sorted(set().union(*sets)) or [1]
    if 255 in values and all(len(found) <= 1 for found in sets) and {*values} <= {1, 255}:
        made: Labels = {"mask": (1, 255)}
        seen = " or ".join(f"0 and {v}" for v in values)
        remarks.append(
            f"the label maps hold {seen}: they are read as one label, 'mask', with the values 1 and 255; name it "
            "by labels in [data], or, to 'data scan', --labels 'NAME=1,255'"
        )
    else:
        made = {f"label_{v}": (v,) for v in values}
        example = "; ".join(f"NAME={v}" for v in values)
        named = f"labels are named by their values ({', '.join(made)})"
        remarks.append(f"{named}; name them by labels in [data], or, to 'data scan', --labels '{example}'")
    return [replace(r, labels=r.labels or made) for r in rows]


def image_files(root: Path, depth: int, at: str = "") -> dict[str, dict[str, str]]:
    """Return name -> file of the images in a folder (``""``) and up to some levels below; hidden files are skipped."""
    with sensible(root / at), os.scandir(root / at) as entries:
        below = {e.name: e.is_dir() and not _leads_up(e) for e in entries if not e.name.startswith(".")}
    folders: dict[str, dict[str, str]] = {}
    files: dict[str, str] = {}
    for name in natural(below):
        path = f"{at}/{name}".lstrip("/")
        if below[name] and is_series(root / path):
            files[name] = f"{path}/"
        elif below[name]:
            folders |= image_files(root, depth - 1, path) if depth else {}
        elif suffix(name):
            files[name if stem(name) in files else stem(name)] = path
    return ({at: files} if files else {}) | folders


def is_series(folder: Path) -> bool:
    """Return whether a folder holds DICOM slices, which are one image: by its first files."""
    with suppress(OSError), os.scandir(folder) as entries:
        first = islice((e for e in entries if not e.name.startswith(".") and e.is_file()), 4)
        return any(is_slice(Path(e.path)) for e in first)
    return False


def _leads_up(entry: os.DirEntry[str]) -> bool:
    """Return whether a link points to a folder above itself, where a search would never end."""
    return entry.is_symlink() and Path(entry.path).resolve() in Path(entry.path).absolute().parents


def _samples(root: Path, files: Sequence[str], count: int = SAMPLED_FILES) -> Iterator[Image]:
    """Yield evenly spaced files, opened. Unreadable files are skipped; ``polysite data check`` reports them."""
    for i in np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int):
        with suppress(DataError):
            yield read(root / files[i])


def _values(root: Path, rows: Iterable[Row], count: int = SAMPLED_FILES) -> set[int]:
    """Return the integers other than 0 that occur in a sample of the label maps."""
    return set().union(*_value_sets(root, rows, count))


def _value_sets(root: Path, rows: Iterable[Row], count: int = SAMPLED_FILES) -> list[set[int]]:
    """Return the integers other than 0 in every label map of a sample."""
    sets = []
    for image in _samples(root, [r.label for r in rows if r.label], count):
        values = np.unique(image.array[image.array != 0]).tolist()  # most voxels are 0 and need no sorting
        sets.append({int(v) for v in values if float(v).is_integer()})
    return sets


def _channelled(root: Path, rows: list[Row]) -> list[Row]:
    """Make every channel of volumes a modality. Pictures in three colours stay one, which opens as its channels."""
    first = next(_samples(root, [r.images["image"] for r in rows if r.images["image"]]), None)
    if first is None or first.channels == 1 or (first.channels == 3 and first.dims == 2):
        return rows

    def channels(file: str) -> dict[str, str]:
        return {f"channel_{i}": f"{file}#{i}" if file else "" for i in range(first.channels)}

    return [replace(r, images=channels(r.images["image"])) for r in rows]


def _placed(row: Row, folders: Sequence[str]) -> Row:
    """Set the site and the split of a case by the folders above its image."""
    splits = [SPLITS[f.lower()] for f in folders if f.lower() in SPLITS]
    return replace(row, site="_".join(f for f in folders if f.lower() not in SPLITS), split="".join(splits[:1]))


def _about(file: Path) -> Mapping[str, Any]:
    """Read a dataset.json; an empty mapping if there is none."""
    about: dict[str, Any] = parse_json(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}
    if (ending := about.get("file_ending")) and not suffix(ending):
        raise DataError(f"{file}: images of the kind {ending!r} are not read; write {', '.join(SUFFIXES)}")
    return about


def _channels(given: Mapping[str, str]) -> list[str]:
    """Return the modalities of a dataset.json in the order of their numbers, with unique names."""
    names: list[str] = []
    for name in [re.sub(r"\s+", "_", given[key].strip().lower()) or "channel" for key in sorted(given, key=int)]:
        numbered = (name, *(f"{name}_{i}" for i in range(2, len(given) + 2)))
        names.append(next(n for n in numbered if n not in names and n not in COLUMNS))
    return names


def _meanings(about: Mapping[str, Any], folder: Path) -> Labels:
    """Return the labels of a dataset.json: value -> name in the Decathlon, name -> value or values in nnU-Net."""
    given, labels = about.get("labels", {}), {}
    if all(key.isdecimal() for key in given):
        given = {given[key]: int(key) for key in sorted(given, key=int)}
    if "ignore" in given:
        why = "for voxels without a label; finish the label maps and remove it"
        raise DataError(f"{folder / 'dataset.json'} has a label 'ignore', {why}")
    for name, value in given.items():
        values = tuple(int(v) for v in (value if isinstance(value, list) else [value]))
        if values != (0,):
            labels[re.sub(r"\s+", "_", re.sub("[=;,]", "", name).strip()) or f"label_{values[0]}"] = values
    return labels
