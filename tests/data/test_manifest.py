"""Manifests, and the cases they list."""

import json

import nibabel
import numpy as np
import pytest
from PIL import Image as Pillow

from polysite.data import images, manifest
from polysite.data.check import check
from polysite.data.files import Files
from polysite.data.manifest import Manifest, Row
from polysite.errors import ConfigError, DataError

LABELS = {"WT": (1, 2, 4), "ET": (4,)}


def save(path, array, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)


def files(folder, *lines, **settings):
    """The source of a manifest with these lines."""
    (folder / "m.csv").write_text("\n".join(lines) + "\n")
    return Files(path=str(folder / "m.csv"), **settings)


def rows(tmp_path, **changes):
    base = {"images": {"t1": "n/t1.nii.gz", "t2": "n/t2.nii.gz#1"}, "label": "n/seg.nii.gz", "labels": LABELS}
    return Manifest(
        (Row("north", "1", **{**base, "group": "HGG", **changes}), Row("south", "1", **{**base, "split": "test"})),
        tmp_path,
    )


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl", "deep/er/m.csv"])
def test_what_is_written_is_read_back(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    listed = rows(tmp_path, notes={"age": "54"}, images={"t1": "n/t1.nii.gz", "t2": ""})
    manifest.write(listed, tmp_path / name)
    back = manifest.read(tmp_path / name)
    assert back.modalities == ("t1", "t2") and back.label_names == ("WT", "ET") and back.task == "segmentation"
    for mine, theirs in zip(listed.rows, back.rows, strict=True):
        assert (mine.site, mine.case, mine.labels, mine.group, mine.split) == (
            theirs.site, theirs.case, theirs.labels, theirs.group, theirs.split)  # fmt: skip
        files = zip((*mine.images.values(), mine.label), (*theirs.images.values(), theirs.label), strict=True)
        assert all((listed.file(a) == back.file(b)) if a else not b for a, b in files)
    assert back.rows[0].notes["age"] == "54" and back.rows[0].images["t2"] == ""


def test_a_table_from_a_spreadsheet_is_read(tmp_path):
    (tmp_path / "m.csv").write_bytes(
        "\ufeffsite;case;ct;class;box;age\nA;1;a.mhd;nodule;1 2 3 50 50 50;54\nB;1;b.mhd;other;;\n".encode()
    )
    found = manifest.read(tmp_path / "m.csv")
    assert found.task == "classification" and found.label_names == ("nodule", "other") and found.modalities == ("ct",)
    assert found.rows[0].box == (1, 2, 3, 50, 50, 50) and found.rows[0].notes == {"age": "54"} and not found.rows[1].box


HEAD = "site,case,t1,label,labels\n"
BAD = {
    "no file": (None, "cannot be read"),
    "not text": (b"\xff\xfe\x00", "cannot be read"),
    "no case": ("site,case,t1,label,labels\n", "holds no case"),
    "no site": (HEAD + ",1,a.nii,s.nii,L=1\n", "line 2: the row has no site"),
    "twice": (HEAD + "A,1,a.nii,s.nii,L=1\nA,1,b.nii,s.nii,L=1\n", "case '1' of site 'A' is there twice"),
    "no images": ("site,case,label,labels\nA,1,s.nii,L=1\n", "no column of the manifest names image files"),
    "an odd image": (
        HEAD + "A,1,a.nii,s.nii,L=1\nA,2,b.txt,s.nii,L=1\n",
        "line 3: 'b.txt' in column 't1' is no image file",
    ),
    "no truth": ("site,case,t1\nA,1,a.nii\n", "needs either a label map"),
    "no meaning": ("site,case,t1,label\nA,1,a.nii,s.nii\n", "declares the labels none"),
    "a name of two lines": (
        HEAD + 'A,1,a.nii,s.nii,L=1\nA,2,b.nii,s.nii,"L\nM=1"\n',
        "declares the labels L M; others",
    ),
    "other names": (HEAD + "A,1,a.nii,s.nii,L=1\nA,2,b.nii,s.nii,M=1\n", "declares the labels M; others declare L"),
    "labels of no form": (HEAD + "A,1,a.nii,s.nii,L:1\n", "line 2: labels = 'L:1' is not of the form"),
    "long row": (HEAD + "A,1,a.nii,s.nii,L=1,9\n", "line 2: the row has more or fewer cells"),
    "short row": (HEAD + "A,1,a.nii\n", "line 2: the row has more or fewer cells"),
    "two columns": ("site,case,t1,t1,label,labels\nA,1,a.nii,a.nii,s.nii,L=1\n", "same name"),
    "a strange split": ("site,case,t1,class,split\nA,1,a.nii,x,tomorrow\n", "split = 'tomorrow'"),
    "a short box": ("site,case,t1,class,box\nA,1,a.nii,x,1 2 3\n", "box of 3 numbers"),
    "a box at infinity": ("site,case,t1,class,box\nA,1,a.nii,x,0 0 inf 1 1 1\n", "box of 6 numbers"),
    "an endless cell": ("site,case,t1,class\nA,1,a.nii," + "x" * 200000 + "\n", "field larger than"),
    "a reserved name": ("site,case,t1,class\nA,1,a.nii#99999,x\n", "no column of the manifest names image files"),
    "a box of words": ("site,case,t1,class,box\nA,1,a.nii,x,left lung\n", "line 2"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD.keys())
def test_a_bad_manifest_is_one_sentence(tmp_path, text, says):
    path = tmp_path / "m.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=r"m\.csv|case '") as refusal:
        manifest.read(path)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_bad_json_lines_are_named(tmp_path):
    path = tmp_path / "m.jsonl"
    for text in ('{"site": "A"', "[1, 2]", '"site"'):
        path.write_text(text)
        with pytest.raises(DataError, match="line 1: not a JSON object"):
            manifest.read(path)


@pytest.fixture
def federation(tmp_path):
    """Two sites that write the same label with different values; one channel of a file; one modality missing."""
    rng = np.random.default_rng(0)
    image = rng.random((5, 6, 7, 2)).astype(np.float32)
    truth = np.zeros((5, 6, 7), np.uint8)
    truth[1:3, 2, 2:5], truth[1, 2, 2] = 1, 3
    affine = np.diag([1.0, 2.0, 2.0, 1.0])
    for site, enhancing in (("A", 4), ("B", 3)):
        save(tmp_path / site / "both.nii.gz", image, affine)
        save(tmp_path / site / "seg.nii.gz", np.where(truth == 3, enhancing, truth).astype(np.uint8), affine)
    lines = (
        "site,case,t1,t2,label,labels,group",
        'A,1,A/both.nii.gz#0,A/both.nii.gz#1,A/seg.nii.gz,"WT=1,4; ET=4",HGG',
        'B,1,B/both.nii.gz#1,,B/seg.nii.gz,"WT=1,3; ET=3",LGG',
    )
    return files(tmp_path, *lines, allow=("missing",)), image, truth


def test_cases_are_read_as_the_manifest_says(federation):
    source, image, truth = federation
    (a,), (b,) = source.case_refs(0).values()
    assert (a.site, a.name, a.group, a.modalities, len(a.files)) == ("A", "1", "HGG", 2, 2)
    first, second = a.open(), b.open()
    assert (first.image == np.moveaxis(image, -1, 0)).all() and first.spacing == (1.0, 2.0, 2.0)
    assert (second.image[0] == image[..., 1]).all() and not second.image[1].any()
    for case in (first, second):
        assert (case.label == np.stack([truth > 0, truth == 3])).all()
    assert a.volumes() == b.volumes() == pytest.approx({"WT": 6 * 4 / 1000, "ET": 4 / 1000})


def test_a_missing_modality_is_refused_unless_allowed(federation):
    source = Files(path=federation[0].path)
    (_,), (b,) = source.case_refs(0).values()
    with pytest.raises(DataError, match=r"case '1' of site 'B' has no t2; .* data.allow = \['missing'\]"):
        b.open()
    chosen = Files(path=source.path, modalities=("t1",))
    assert [p.open().image.shape[0] for (p,) in chosen.case_refs(0).values()] == [1, 1]
    for wrong, says in (({"modalities": ("t9",)}, "'t9'"), ({"exclude": ("Z",)}, "'Z'"), ({"path": ""}, "data.path")):
        with pytest.raises(ConfigError, match=says):
            _ = Files(**{"path": source.path, **wrong}).manifest


def test_a_box_is_cut_where_it_says_in_any_orientation(tmp_path):
    """A bright voxel at a point of the patient is found in the middle of the box around it."""
    for k, axes in enumerate(([0, 1, 2], [2, 0, 1])):
        affine = np.eye(4)
        affine[:3, :3] = (np.eye(3) * [-1, 1, -1])[:, axes] * [0.5, 1.0, 2.0]
        affine[:3, 3] = [30, -20, 10]
        array = np.zeros((40, 30, 20), np.int16)
        array[20, 15, 10] = 100
        save(tmp_path / f"{k}.nii.gz", array, affine)
        x, y, z = (affine @ [20, 15, 10, 1])[:3]
        lines = "site,case,ct,class,box", f"A,1,{k}.nii.gz,n,{x} {y} {z} 9 9 9", f"A,2,{k}.nii.gz,o,"
        case, _ = (p.open() for p in files(tmp_path, *lines).case_refs(0)["A"])
        assert case.image.shape[1:] == (18, 9, 4) and case.label.tolist() == [1, 0]
        at = np.argwhere(case.image[0] == 100)[0]
        assert (abs(at - np.array([18, 9, 4]) / 2) <= 1).all()
        assert case.affine @ [*at, 1] == pytest.approx([x, y, z, 1])


def test_a_box_beyond_the_image_is_padded_and_one_outside_refused(tmp_path):
    save(tmp_path / "a.nii.gz", np.arange(64, dtype=np.int16).reshape(4, 4, 4))

    def boxed(box):
        return files(tmp_path, "site,case,ct,class,box", "A,2,a.nii.gz,o,", f"A,1,a.nii.gz,n,{box}").case_refs(0)["A"][
            1
        ]

    assert boxed("0 0 0 6 6 6").open().image.shape == (1, 6, 6, 6)
    for box, says in (("99 0 0 6 6 6", "its box lies outside"), ("0 0 0 9e3 9e3 9e3", "its box is too large")):
        with pytest.raises(DataError, match=f"case '1' of site 'A': {says}"):
            boxed(box).open()


def test_colours_of_flat_images_are_channels(tmp_path):
    colours = np.random.default_rng(0).integers(0, 255, (6, 5, 3)).astype(np.uint8)
    Pillow.fromarray(colours).save(tmp_path / "a.png")
    Pillow.fromarray((colours[..., 0] > 100).astype(np.uint8) * 255).save(tmp_path / "s.png")
    flat = files(tmp_path, "site,case,red,blue,label,labels", "A,1,a.png#0,a.png#2,s.png,L=255")
    case = flat.case_refs(0)["A"][0].open()
    assert flat.dims == 2 and (case.image == colours[..., [0, 2]].transpose(2, 0, 1)).all()
    assert (case.label[0] == (colours[..., 0] > 100)).all() and case.spacing == (1.0, 1.0)


def test_many_boxes_of_one_scan_read_it_once(tmp_path, monkeypatch):
    save(tmp_path / "a.nii.gz", np.random.default_rng(0).integers(0, 9, (9, 9, 9)).astype(np.int16))
    rows = [f"A,{k},a.nii.gz,{'no'[k % 2]},{k} 4 4 3 3 3" for k in range(1, 8)]
    source, seen = files(tmp_path, "site,case,ct,class,box", *rows), []
    assert source.dims == 3
    monkeypatch.setattr("polysite.data.images.read", lambda file, read=images.read: (seen.append(file), read(file))[1])
    assert [p.open().image.shape for p in source.case_refs(0)["A"]] == [(1, 3, 3, 3)] * 7 and len(seen) == 1
    report = check(source)
    assert not report.problems and {f.shape for f in report.findings} == {(3, 3, 3)}


def test_json_lines_may_hold_lists_and_objects(tmp_path):
    row = {"site": "A", "case": 7, "t1": "a.nii", "label": "s.nii", "labels": {"x": 1, "y": [2, 3]}, "group": None}
    (tmp_path / "m.jsonl").write_text(json.dumps(row))
    (found,) = manifest.read(tmp_path / "m.jsonl").rows
    assert found.case == "7" and found.labels == {"x": (1,), "y": (2, 3)} and found.group == ""


def test_names_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"site": "\\ud800", "case": "1", "t1": "a.nii", "class": "x"}')
    with pytest.raises(DataError, match="a name that is not valid text"):
        manifest.read(tmp_path / "m.jsonl")


def test_a_constant_image_is_not_trained_on(tmp_path):
    save(tmp_path / "a.nii.gz", np.full((4, 4, 4), 7, np.int16))
    case, _ = files(tmp_path, "site,case,ct,class", "A,1,a.nii.gz,n", "A,2,a.nii.gz,o").case_refs(0)["A"]
    with pytest.raises(DataError, match=r"a\.nii\.gz: every voxel is 7; .* data.allow = \['missing'\]"):
        case.open()


def test_volumes_of_classes_are_one_and_zero(tmp_path):
    refs = files(tmp_path, "site,case,ct,class", "A,1,a.nii.gz,n", "A,2,b.nii.gz,o").case_refs(0)["A"]
    assert [p.volumes() for p in refs] == [{"n": 1.0, "o": 0.0}, {"n": 0.0, "o": 1.0}]


def test_boxes_of_one_scan_belong_to_one_patient(tmp_path):
    lines = "site,case,ct,class,box,patient", "A,1,a.nii,n,1 1 1 9 9 9,", "A,2,b.nii,o,,Ms X"
    first, second = files(tmp_path, *lines).case_refs(0)["A"]
    assert first.patient.endswith("a.nii") and second.patient == "Ms X"


def test_an_ending_that_is_not_read_is_named(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("site,case,t1,label,labels\nA,1,a.mgz,s.mgz,L=1\n")
    with pytest.raises(DataError, match=r"\.mgz as in 'a\.mgz' is not.*polysite reads \.nii\.gz, .*\.nrrd"):
        manifest.read(path)
    path.write_text("site,case,t1,label,labels\nA,1,a.nii,s.nii,L=1\nA,2,b.mgz,s.nii,L=1\n")
    with pytest.raises(DataError, match=r"line 3: 'b\.mgz' in column 't1' is no image file.*\.mgz files are not read"):
        manifest.read(path)


def test_keys_folders_and_spacings_survive_a_manifest(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text(
        "site,case,t1,ct,label,labels,spacing\nA,1,a.h5#x/t1#2,ct/,a.h5#7,L=1,0.5 0.5 2\nA,2,b.h5#3,,b.npy#1,L=1,\n"
    )
    read = manifest.read(path)
    first, second = read.rows
    assert read.file(first.images["t1"]) == (tmp_path / "a.h5#x/t1", 2) and read.file(first.label)[1] is None
    assert first.spacing == (0.5, 0.5, 2.0) and second.spacing == ()
    assert read.file(second.label) == (tmp_path / "b.npy", 1)
    manifest.write(read, tmp_path / "again.csv")
    assert manifest.read(tmp_path / "again.csv") == read
    path.write_text("site,case,t1,label,labels,spacing\nA,1,a.npy,s.npy,L=1,0 1 1\n")
    with pytest.raises(DataError, match=r"spacing = 0\.0 1\.0 1\.0; it is the size of a voxel"):
        manifest.read(path)
