"""The folder of predictions.

::

    DIR/
        CASE/CASE_LABEL.nii.gz     a mask of every label, on the grid and in the format of the scan; or CASE_labels, a
                                   map of label numbers, where a voxel has at most one label (train.exclusive)
                                   (--format dicom-seg: one file with a segment per label)
        volumes.csv                voxels and volume of every label of every case
        probabilities.csv          instead of both, in a classification: the probability of every class
        routes.csv                 the cluster and the model of every case, where a run has models for clusters
        preview.png                slices with the outlines of the predicted labels
        predictions.json           which run, how it predicted, and which scans could not be predicted

A file appears when its case is done, and the tables when all are. Everything is private to its owner. No path of a scan
is written, and a DICOM scan that is called after its patient has a pseudonym.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polysite.data import dicom_seg, mask_files
from polysite.data.case import Case
from polysite.data.images import Image
from polysite.engines.run_folder import file_name, versions
from polysite.export.bundle import file_names
from polysite.prediction.predictor import Prediction, Predictor
from polysite.report.preview import Row as PreviewRow
from polysite.report.preview import row_of, write_sheet
from polysite.spreadsheets import mappings_text
from polysite.storage import private_folder, write_file

Line = dict[str, Any]


class PredictionFolder:
    """Writer of the folder.

    Args:
        path: The new folder.
        predictor: The model.
        format: Format of the masks; ``auto`` for that of the scans.
        shown: Names of the cases that the preview shows.
    """

    def __init__(self, path: Path, predictor: Predictor, format: str, shown: Sequence[str]):
        self.path, self.predictor, self.format, self.shown = path, predictor, format, set(shown)
        self.lines: list[Line] = []
        self.routes: list[Line] = []
        self.failed: dict[str, str] = {}
        self._pictures: list[PreviewRow] = []
        private_folder(path)

    def add(self, case: Case, grid: Image, source: Path, found: Prediction, boxed: bool) -> None:
        """Write the masks of a case, and remember what the tables and the preview need.

        Args:
            case: The scan as it was read.
            grid: Its geometry.
            source: Its file, or its folder of DICOM slices.
            found: What was predicted.
            boxed: The case is a box of the scan.
        """
        labels = self.predictor.labels
        if found.route is not None:
            self.routes.append(found.route.row(case.name))
        if found.masks is None:
            assert found.probabilities is not None
            shares = dict(zip(labels, (f"{p:.6g}" for p in found.probabilities), strict=True))
            best = labels[int(found.probabilities.argmax())]
            self.lines.append({"case": case.name, "class": best, **shares})
        else:
            self._write(case.name, found.masks, grid, source, boxed)
            self.lines += [
                {"case": case.name, "label": name, **_size(mask, grid)}
                for name, mask in zip(labels, found.masks, strict=True)
            ]
        if case.name in self.shown:
            masks = np.zeros((0, *case.image.shape[1:]), np.uint8) if found.masks is None else found.masks
            facts = () if found.probabilities is None else (f"{best} {found.probabilities.max():.0%}",)
            self._pictures.append(row_of(replace(case, label=masks.astype(np.uint8)), facts))

    def _write(self, case: str, masks: np.ndarray, grid: Image, source: Path, boxed: bool) -> None:
        kind = mask_files.format_for(source, self.format, grid.dims)
        name = file_name(case)
        folder = private_folder(self.path / name)
        if kind == mask_files.DICOM_SEG:
            content = dicom_seg.content(masks, self.predictor.labels, source, case)
            write_file(folder / f"{name}_labels.dcm", lambda draft: draft.write_bytes(content))
            return
        if self.predictor.exclusive:
            numbers = np.arange(1, len(masks) + 1, dtype=np.uint8).reshape(-1, *[1] * grid.dims)
            files = {"labels": (masks * numbers).max(0)}
        else:
            white = mask_files.WHITE if kind == "png" else 1
            parts = file_names(self.predictor.labels)
            files = {part: mask.astype(np.uint8) * np.uint8(white) for part, mask in zip(parts, masks, strict=True)}
        for part, array in files.items():
            mask_files.write(folder / f"{name}_{part}{mask_files.ENDINGS[kind]}", array, source, grid, kind, boxed)

    def finish(self) -> None:
        """Write the tables, the preview, and how the scans were predicted."""
        predictor = self.predictor
        table = "probabilities.csv" if predictor.classifies else "volumes.csv"
        for name, lines in ((table, self.lines), ("routes.csv", self.routes)):
            if lines:
                self._table(name, lines)
        if self._pictures:
            count = len({line["case"] for line in self.lines})
            title = f"Predictions of {count} scan{'s' * (count != 1)}, {len(self._pictures)} shown"
            labels = () if predictor.classifies else predictor.labels
            write_sheet(self.path / "preview.png", title, self._pictures, predictor.modalities, labels)
        about: Mapping[str, Any] = {
            "runs": [predictor.served.run],
            "site": predictor.site,
            "labels": predictor.labels,
            "modalities": predictor.modalities,
            "window": predictor.window,
            "overlap": predictor.overlap,
            "mirror": predictor.mirror,
            "batch": predictor.batch,
            "device": str(predictor.device),
            "cases": len({line["case"] for line in self.lines}),
            "failed": self.failed,
            "versions": versions(),
        }
        text = json.dumps(about, indent=1, ensure_ascii=False) + "\n"
        write_file(self.path / "predictions.json", lambda draft: draft.write_text(text, encoding="utf-8"))

    def _table(self, name: str, lines: Sequence[Line]) -> None:
        text = mappings_text(lines)
        write_file(self.path / name, lambda draft: draft.write_text(text, encoding="utf-8"))


def _size(mask: np.ndarray, grid: Image) -> Line:
    """Return the voxels of a mask and its volume in millilitres, in 2D its area in mm2; empty without a unit."""
    voxels = int(np.count_nonzero(mask))
    size = voxels * abs(float(np.linalg.det(grid.affine[:-1, :-1])))
    known = grid.unit == "mm"
    if grid.dims == 2:
        return {"pixels": voxels, "mm2": f"{size:.6g}" if known else ""}
    return {"voxels": voxels, "ml": f"{size / 1000:.6g}" if known else ""}
