"""Predict all scans of a folder, a manifest or a file. The next scan is read while the network sees the one before."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polysite.data import mask_files
from polysite.data.case import Case
from polysite.data.images import Image
from polysite.data.manifest import Row
from polysite.data.placement import Placement
from polysite.data.unlabelled import Unlabelled, find
from polysite.errors import DataError, PolysiteError
from polysite.prediction.folder import Line, PredictionFolder
from polysite.prediction.predictor import Predictor
from polysite.spreadsheets import csv_text
from polysite.storage import vacant, write_private

Progress = Callable[[float, int, str], None]
PREVIEWED = 12  # cases on the preview


@dataclass(frozen=True)
class Predicted:
    """What ``predict`` wrote."""

    folder: Path
    table: list[Line]  # rows of volumes.csv, or of probabilities.csv
    failed: dict[str, str]  # scans that could not be predicted, with the reason
    pseudonyms: int  # scans that were called after their patient


def predict(
    run: Path | str,
    scans: Path | str,
    out: Path | str,
    *,
    site: str | None = None,
    mirror: bool | None = None,
    overlap: float | None = None,
    batch: int = 0,
    device: str = "auto",
    format: str = "auto",
    preview: int = PREVIEWED,
    key: Path | str | None = None,
    watch: Progress = lambda *_: None,
) -> Predicted:
    """Predict unlabelled scans with the best model of a finished run, and write masks, tables and a preview.

    A scan that cannot be read is left out, and ``failed`` of the result says why; if none can be, an error is raised.

    Args:
        run: The folder of a finished run.
        scans: A manifest, a folder of scans in any format that polysite reads, or one scan. Labels are ignored.
        out: The new folder.
        site: The hospital whose model is used; not needed if all hospitals use the same.
        mirror: Average over mirror images; None: as the run did.
        overlap: Overlap of the sliding window; None: that of the run.
        batch: Windows per pass; 0 for as many as suit the device and its free memory.
        device: "auto", "cpu", "cuda" or "cuda:1".
        format: Format of the masks: nifti, nrrd, png, npy, dicom-seg, or ``auto`` for that of every scan.
        preview: Number of cases on the preview sheet; 0 for no sheet.
        key: File to write that says which pseudonym stands for which folder; keep it away from the predictions.
        watch: Called with the number of scans that are done, a fraction included, that of all, and the current one.
    """
    target = vacant(Path(out), "predictions")
    predictor = Predictor(run, site=site, mirror=mirror, overlap=overlap, batch=batch, device=device)
    found = find(Path(scans), predictor.modalities, predictor.zero, predictor.missing)
    for row in found.rows if not predictor.classifies else ():
        mask_files.format_for(found.source(row), format, predictor.dims)
    if key is not None:
        _write_key(vacant(Path(key), "key"), found)
    names = [row.case for row in found.rows]
    chosen = np.unique(np.linspace(0, len(names) - 1, min(preview, len(names))).round().astype(int))
    folder = PredictionFolder(target, predictor, format, [names[k] for k in chosen])
    for number, (row, opened) in enumerate(_ahead(predictor, found)):

        def step(share: float, done: int = number, name: str = row.case) -> None:
            watch(done + share, len(names), name)

        step(0.0)
        try:
            case, grid, prepared, place = opened.result()
            masks = predictor.predict(prepared, place, step)
            folder.add(case, grid, found.source(row), masks, bool(row.box))
        except DataError as problem:
            private = row.case in found.pseudonyms
            folder.failed[row.case] = "it could not be read" if private else str(problem)
            if len(folder.failed) == len(names):
                target.rmdir()
                raise
        step(1.0)
    folder.finish()
    return Predicted(target, folder.lines, dict(folder.failed), len(found.pseudonyms))


Opened = tuple[Case, Image, Case, Placement]


def _ahead(predictor: Predictor, found: Unlabelled) -> Iterator[tuple[Row, "Future[Opened]"]]:
    """Yield every case with the future of its prepared scan; the one after it is read meanwhile."""

    def opened(row: Row) -> Opened:
        case, grid = found.open(row, predictor.zero, predictor.missing)
        if case.image.ndim - 1 != predictor.dims:
            raise DataError(
                f"case {row.case!r} has {case.image.ndim - 1} dimensions, and the model was trained on "
                f"{predictor.dims}D scans; leave it out"
            )
        return case, grid, *predictor.prepared(case)

    with ThreadPoolExecutor(1) as pool:
        waiting: list[tuple[Row, Future[Opened]]] = []
        try:
            for row in found.rows:
                waiting.append((row, pool.submit(opened, row)))
                if len(waiting) > 1:
                    yield waiting.pop(0)
            yield from waiting
        finally:
            pool.shutdown(cancel_futures=True)


def _write_key(path: Path, found: Unlabelled) -> None:
    try:
        write_private(path, csv_text(("pseudonym", "name"), found.pseudonyms.items()))
    except OSError as problem:
        raise PolysiteError(f"the key {path} could not be written: {problem.strerror}") from problem
