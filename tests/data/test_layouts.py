"""Datasets as they are downloaded, built small and scanned."""

import json
import re
import shutil
from itertools import product
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

import foreign_scans as foreign
from polysite.data import manifest
from polysite.data.check import check
from polysite.data.files import Files
from polysite.data.files import channel as channel_of
from polysite.data.images import files_of
from polysite.data.layouts import LAYOUTS, scan
from polysite.data.manifest import Row
from polysite.errors import ConfigError, DataError

OLD = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
NEW = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}
MODALITIES = ("t1", "t1ce", "t2", "flair")
NAMES = {"_": (*MODALITIES, "seg"), "-": ("t1n", "t1c", "t2w", "t2f", "seg")}
PARTITION = "Partition_ID,Subject_ID"


def volume(file, *values, channels=0):
    """A NIfTI file that holds these values among zeros."""
    array = np.zeros((4, 4, 4, channels) if channels else (4, 4, 4), np.uint8)
    array.flat[: len(values)] = values
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.nifti1.Nifti1Image(array, np.eye(4)), file)


def picture(file, *values, colour=False):
    array = np.zeros((4, 4, 3) if colour else (4, 4), np.uint8)
    array.flat[: len(values)] = values
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(file)


def put(root, *files):
    """Write images below a folder: ``a/{b,c}.nii.gz=1 2`` are two volumes that hold 1 and 2; ``.jpg`` has colours."""
    for file in files:
        names, _, values = file.partition("=")
        parts = [re.split(",", part) for part in re.split(r"[{}]", names)]  # alternately plain text and choices
        parts[::2] = [[",".join(part)] for part in parts[::2]]
        for chosen in product(*parts):
            path, held = root / "".join(chosen), map(int, values.split())
            volume(path, *held) if ".nii" in path.name else picture(path, *held, colour=path.suffix == ".jpg")


def table(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def describe(file, **about):
    """Write a dataset.json, or change what it says."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | about))


def glioma(root, folder, *values, suffix=".nii.gz", without=()):
    """A case of BraTS with these label values."""
    case = Path(folder).name
    mark = "-" if case.startswith("BraTS-") else "_"
    for name in NAMES[mark]:
        if name not in without:
            volume(root / folder / f"{case}{mark}{name}{suffix}", *(values if name == "seg" else ()))


def fets(root):
    for number in range(4):
        glioma(root, f"FeTS2022_0000{number}", 1, 2, 4, without=["t2"] * (number == 1))
    table(root / "partitioning_1.csv", PARTITION, *(f"{n % 2 + 1},FeTS2022_0000{n}" for n in range(4)))


def files(*names):
    """A dataset that consists of these images."""
    return lambda root: put(root, *names)


def kits19(root):
    put(root, "data/case_0000{0,1,2}/imaging.nii.gz", "data/case_0000{0,1,2}/segmentation.nii.gz=1 2")
    put(root, "data/case_00210/imaging.nii.gz")  # a test case: no truth
    put(root, "predictions/segmentation.nii.gz", "data/case_00299/thumbnail.nii.gz")
    rows = "case_00000,0,train,train_0", "case_00001,0,test,test_0", "case_00002,1,train,train_1"
    table(root / "thresholded_sites.csv", "case_ids,site_ids,train_test_split,train_test_split_silo", *rows)


bids_of_sites = files(
    "{lyon,rennes}/{rawdata,sourcedata}/sub-01/anat/sub-01_FLAIR.nii.gz",
    "{lyon,rennes}/derivatives/manual/sub-01/anat/sub-01_mask.nii.gz=1",
)
kits23 = files(
    "case_0000{0,1}/imaging.nii.gz", "case_0000{0,1}/instances/kidney_instance-1_annotation-1.nii.gz=1",
    "case_00000/segmentation.nii.gz=1 2", "case_00001/segmentation.nii.gz=1 2 3",
)  # fmt: skip
prostate = files(
    "{BIDMC,HK,RUNMC}/Case0{0,1}.nii.gz", "HK/Case0{0,1}_Segmentation.nii.gz=1",
    "{BIDMC,RUNMC}/Case0{0,1}_segmentation.nii.gz=1",
)  # fmt: skip
tree = files(
    "north/{n10,n9}/flair.nii.gz", "north/n9/t1.nii.gz", "south/{s1,s2}/t1.nii.gz",
    "north/n10/seg.nii.gz=2 1", "north/n9/seg.nii.gz=7", "south/s1/Mask.nii=1",
)  # fmt: skip
pairs = files("images/{x1,x2}.jpg", "masks/{x1,x2}.png=255")
pairs_of_sites = files(
    "{kvasir/Images/cju0,ISIC/Images/ISIC_0012255}.png",
    "{kvasir/Labels/cju0,ISIC/Labels/ISIC_0012255}_Segmentation.png=1",
)  # fmt: skip
pairs_decathlon = files("imagesTr/hippocampus_00{1,3}.nii.gz", "labelsTr/hippocampus_00{1,3}.nii.gz=1 2")
classes = files("NORMAL/normal-{0,1}.png", "PNEUMONIA/pneumonia-{0,1,2}.png")
classes_of_sites = files("{Barcelona,Vienna}/{MEL/mel,NV/nv}.jpg", "Vienna/MEL/more.jpg")
classes_in_splits = files("{Train,Val,Test}/{AD,CN}/{0,1}.nii.gz")


DECATHLON = ("BRATS_002", "BRATS_457", "BRATS_999")  # the last one was not downloaded


def decathlon(root):
    for case in DECATHLON[:2]:
        volume(root / f"imagesTr/{case}.nii.gz", channels=4)
        volume(root / f"labelsTr/{case}.nii.gz", 1, 2, 3)
    volume(root / "imagesTs/BRATS_485.nii.gz", channels=4)
    describe(
        root / "dataset.json",
        name="BRATS",
        modality={"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
        labels={"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
        training=[{"image": f"./imagesTr/{c}.nii.gz", "label": f"./labelsTr/{c}.nii.gz"} for c in DECATHLON],
        test=["./imagesTs/BRATS_485.nii.gz"],
    )


def nnunet(root):
    top = root / "Dataset005_Prostate"
    put(top, "images{Tr/prostate_00,Tr/prostate_01,Ts/prostate_03}_000{0,1}.nii.gz")
    put(top, "labels{Tr/prostate_00,Tr/prostate_01,Ts/prostate_03}.nii.gz=1 2")
    labels = {"background": 0, "whole gland": [1, 2], "PZ": 1}
    channels = {"0": "T2", "1": "ADC"}
    describe(top / "dataset.json", channel_names=channels, labels=labels, numTraining=2, file_ending=".nii.gz")


def nnunet_first(root):
    """Its dataset.json is the Decathlon's, but the files carry channel numbers."""
    put(root, "imagesTr/la_00{3,4}_0000.nii.gz", "labelsTr/la_00{3,4}.nii.gz=1")
    put(root, "imagesTs/la_001_0000.nii.gz")  # its truth is the challenge's
    listed = [{"image": "./imagesTr/la_003.nii.gz", "label": "./labelsTr/la_003.nii.gz"}]
    labels = {"0": "background", "1": "left atrium"}
    describe(root / "dataset.json", name="LeftAtrium", modality={"0": "MRI"}, labels=labels, training=listed)


def nnunet_photographs(root):
    picture(root / "imagesTr/road-1_0000.png", colour=True)
    picture(root / "labelsTr/road-1.png", 1)
    channels, labels = {"0": "R", "1": "G", "2": "B"}, {"background": 0, "road": 1}
    describe(root / "dataset.json", channel_names=channels, labels=labels, file_ending=".png", name="Roads")


UIDS = ("1.3.6.1.4.1.14519.5.2.1.6279.6001.105756658031515062000744821260", "1.3.6.1.4.1.14519.5.2.1.6279.6001.1087")
CANDIDATES = "seriesuid,coordX,coordY,coordZ,class"


def luna(root):
    head = "NDims = 3\nDimSize = 4 4 4\nElementType = MET_UCHAR\nElementDataFile = {}.raw\n"
    for subset, uid in enumerate(UIDS):
        folder = root / f"subset{subset}"
        folder.mkdir(parents=True)
        (folder / f"{uid}.raw").write_bytes(bytes(64))
        (folder / f"{uid}.mhd").write_text(head.format(uid))
    table(root / "CSVFILES/candidates.csv", CANDIDATES, f"{UIDS[0]},1,2,3,0")
    places = f"{UIDS[0]},-56.08,67.85,-311.92,0", f"{UIDS[0]},53.21,-244.41,-245.17,1", f"{UIDS[1]},0,-1,2,0"
    absent = "1.3.6.1.4.1.14519.5.2.1.6279.6001.999,1,1,1,0"  # its scan is not on disk
    table(root / "CSVFILES/candidates_V2.csv", CANDIDATES, *places, absent)


DFUC = {"100.jpg": "1.0,0.0,0.0,0.0", "101.jpg": "0,1,0,0", "102.jpg": "0,0,1,0", "103.jpg": "0,0,0,1",
        "105.jpg": ",,,"}  # fmt: skip


def dfuc(root):
    """As DFUC2021 unpacks: images without a class have a row without numbers, or none."""
    top = root / "DFUC2021_train"
    for k, name in enumerate((*DFUC, "104.jpg")):
        picture(top / "images" / name, *np.random.default_rng(k).integers(256, size=48), colour=True)
        picture(root / "DFUC2021_test" / f"9{name}", colour=True)
    table(top / "train.csv", "image,none,infection,ischaemia,both", *(f"{n},{marks}" for n, marks in DFUC.items()))


def bids(root):
    table(root / "dataset_description.json", '{"Name": "lesions", "BIDSVersion": "1.8.0"}')
    people = "sub-01\t50\tLyon\tms", "sub-02\t40\tRennes\tn/a"
    table(root / "participants.tsv", "participant_id\tage\tcenter\tgroup", *people)
    for case, session in (("sub-01", "ses-01"), ("sub-01", "ses-02"), ("sub-02", "ses-01")):
        stem, place = f"{case}_{session}", f"{case}/{session}"
        volume(root / place / f"func/{stem}_task-rest_bold.nii.gz", channels=2)
        put(root / place / "anat", f"{stem}_{{,ce-gadolinium_}}T1w.nii.gz")
        put(root / "derivatives/manual" / place / "anat", f"{stem}_label-lesion_mask.nii.gz=1")
        pipeline = root / "derivatives/fmriprep" / place / "anat"
        put(pipeline, f"{stem}_{{,space-MNI_}}desc-preproc_T1w.nii.gz", f"{stem}_dseg.nii.gz=1 2 3")
        put(pipeline, f"{stem}_space-MNI_desc-brain_mask.nii.gz=1")
    volume(root / "sub-02/ses-01/anat/sub-02_ses-01_FLAIR.nii.gz")


def bids_derivative(root):
    """A pipeline folder by itself: the image in the space of the mask is meant."""
    spaces = "space-orig_desc-preproc,space-MNI152,space-MNI152_desc-preproc"
    put(root / "sub-r001/anat", f"sub-r001_{{{spaces}}}_T1w.nii.gz", "sub-r001_space-MNI152_dseg.nii.gz=1 5")


CC359 = ("CC0001_philips_15_55_M", "CC0061_philips_3_55_F", "CC0121_siemens_15_61_M", "CC0181_siemens_3_36_F",
         "CC0240_ge_15_60_F", "CC0319_ge_3_45_M", "CC0320_ge_3_50_F")  # fmt: skip


def cc359(root):
    """As its archives unpack: both kinds of masks; maps of tissues are called like the scans."""
    for number, case in enumerate(CC359):
        put(root, f"Original/Original/{case}.nii.gz={7 + number}")
        put(root, f"Silver-standard-machine-learning/Silver-standard/{case}_ss.nii.gz=1")
    put(root, *(f"Silver-standard-STAPLE/STAPLE/{case}_staple.nii.gz=1" for case in CC359[:-1]))
    put(root, f"hippocampus_staple/{CC359[-1]}_staple.nii.gz=1", f"WM-GM-CSF/{CC359[-1]}.nii.gz=1 2 3")


def retinas(root):
    """DRIVE, with masks of the field of view, CHASE in one folder, and STARE."""
    for part, numbers in (("training", "{21,22}"), ("test", "01")):
        put(root / "DRIVE" / part, f"images/{numbers}_{part}.tif", f"1st_manual/{numbers}_manual1.gif=255")
        put(root / "DRIVE" / part, f"mask/{numbers}_{part}_mask.gif=255")
    put(root / "CHASE", "Image_01{L,R}.jpg", "Image_01{L,R}_{1st,2nd}HO.png=1")
    put(root / "STARE", "stare-images/im000{1,2}.ppm", *(f"labels-{x}/im000{{1,2}}.{x}.ppm=255" for x in ("ah", "vk")))


def dicom_cases(root):
    for case in ("p1", "p2"):
        foreign.dicom_series(root / "north" / case / "ct", np.arange(24, dtype=np.int16).reshape(4, 3, 2))
        volume(root / "north" / case / "seg.nii.gz", 1)


ONE, TWO = {"label_1": (1,)}, {"label_1": (1,), "label_2": (2,)}
MASK, PROSTATE = {"mask": (1, 255)}, {"prostate": (1, 2)}
KIDNEY = {"kidney": (1, 2), "tumour": (2,)}
TUMOUR = {"edema": (1,), "non-enhancing_tumor": (2,), "enhancing_tumour": (3,)}
SCANNERS = {"ge_3": 2, "ge_15": 1, "philips_3": 1, "philips_15": 1, "siemens_3": 1, "siemens_15": 1}
T1W = "sub-01/ses-02/anat/{case}_"
SCANS = [  # layout, builder, cases of every site, modalities, labels or classes, one of the rows
    ("brats", fets, {"1": 2, "2": 2}, MODALITIES, OLD,
     ["2", "FeTS2022_00001", "{case}/{case}_{m}.nii.gz", "{case}/{case}_seg.nii.gz"], {"lacks": ["t2"]}),
    ("kits", kits19, {"0": 2, "1": 1}, ("ct",), KIDNEY,
     ["0", "case_00001", "data/{case}/imaging.nii.gz", "data/{case}/segmentation.nii.gz"], {"split": "test"}),
    ("kits", kits23, {"all": 2}, ("ct",), {"kidney": (1, 2, 3), "tumour": (2,), "cyst": (3,)},
     ["all", "case_00001", "{case}/imaging.nii.gz", "{case}/segmentation.nii.gz"], {}),
    ("msd", decathlon, {"BRATS": 2}, ("flair", "t1w", "t1gd", "t2w"), TUMOUR,
     ["BRATS", "BRATS_457", "imagesTr/{case}.nii.gz#{i}", "labelsTr/{case}.nii.gz"], {}),
    ("nnunet", nnunet, {"Dataset005_Prostate": 3}, ("t2", "adc"), {"whole_gland": (1, 2), "PZ": (1,)},
     ["Dataset005_Prostate", "prostate_03", "Dataset005_Prostate/imagesTs/{case}_000{i}.nii.gz",
      "Dataset005_Prostate/labelsTs/{case}.nii.gz"], {"split": "test"}),
    ("nnunet", nnunet_first, {"LeftAtrium": 2}, ("mri",), {"left_atrium": (1,)},
     ["LeftAtrium", "la_004", "imagesTr/{case}_0000.nii.gz", "labelsTr/{case}.nii.gz"], {}),
    ("nnunet", nnunet_photographs, {"Roads": 1}, ("r", "g", "b"), {"road": (1,)},
     ["Roads", "road-1", "imagesTr/{case}_0000.png#{i}", "labelsTr/{case}.png"], {}),
    ("luna", luna, {"subset0": 2, "subset1": 1}, ("ct",), ("nodule", "other"),
     ["subset0", f"{UIDS[0]}-00002", f"subset0/{UIDS[0]}.mhd", ""],
     {"category": "nodule", "box": (-53.21, 244.41, -245.17, 50, 50, 50), "patient": UIDS[0]}),
    ("dfuc", dfuc, {"all": 4}, ("image",), ("both", "infection", "ischaemia", "none"),
     ["all", "102", "DFUC2021_train/images/{case}.jpg", ""], {"category": "ischaemia"}),
    ("bids", bids, {"Lyon": 2, "Rennes": 1}, ("flair", "t1w", "t1w_ce"), ONE,
     ["Lyon", "sub-01_ses-02", {"t1w": T1W + "T1w.nii.gz", "t1w_ce": T1W + "ce-gadolinium_T1w.nii.gz"},
      "derivatives/manual/sub-01/ses-02/anat/{case}_label-lesion_mask.nii.gz"],
     {"group": "ms", "patient": "sub-01", "lacks": ["flair"]}),
    ("bids", bids_derivative, {"all": 1}, ("t1w",), {"label_1": (1,), "label_5": (5,)},
     ["all", "sub-r001", "{case}/anat/{case}_space-MNI152_desc-preproc_T1w.nii.gz",
      "{case}/anat/{case}_space-MNI152_dseg.nii.gz"], {}),
    ("cc359", cc359, SCANNERS, ("t1",), {"brain": (1,)},
     ["philips_15", CC359[0], "Original/Original/{case}.nii.gz",
      "Silver-standard-STAPLE/STAPLE/{case}_staple.nii.gz"], {}),
    ("prostate", prostate, {"BIDMC": 2, "HK": 2, "RUNMC": 2}, ("t2",), PROSTATE,
     ["HK", "Case01", "HK/{case}.nii.gz", "HK/{case}_Segmentation.nii.gz"], {}),
    ("tree", tree, {"north": 2, "south": 1}, ("flair", "t1"), {**TWO, "label_7": (7,)},
     ["south", "s1", "south/s1/{m}.nii.gz", "south/s1/Mask.nii"], {"lacks": ["flair"]}),
    ("tree", dicom_cases, {"north": 2}, ("ct",), ONE, ["north", "p2", "north/p2/ct/", "north/p2/seg.nii.gz"], {}),
    ("pairs", pairs, {"all": 2}, ("image",), MASK, ["all", "x2", "images/x2.jpg", "masks/x2.png"], {}),
    ("pairs", pairs_of_sites, {"ISIC": 1, "kvasir": 1}, ("image",), ONE,
     ["ISIC", "ISIC_0012255", "ISIC/Images/{case}.png", "ISIC/Labels/{case}_Segmentation.png"], {}),
    ("pairs", pairs_decathlon, {"all": 2}, ("image",), TWO,
     ["all", "hippocampus_003", "imagesTr/{case}.nii.gz", "labelsTr/{case}.nii.gz"], {}),
    ("pairs", retinas, {"CHASE": 2, "DRIVE": 3, "STARE": 2}, ("image",), MASK,
     ["DRIVE", "22_training", "DRIVE/training/images/{case}.tif", "DRIVE/training/1st_manual/22_manual1.gif"],
     {"split": "train"}),
    ("pairs", files("images/21_training.tif", "1st_manual/21_manual1.gif=255"), {"all": 1}, ("image",), MASK,
     ["all", "21_training", "images/{case}.tif", "1st_manual/21_manual1.gif"], {}),
    ("tree", files("north/n1/{t1,mask,label,seg}.nii.gz=1"), {"north": 1}, ("t1",), ONE,
     ["north", "n1", "north/n1/t1.nii.gz", "north/n1/seg.nii.gz"], {}),
    ("tree", files("{A,B}/{p1/p1,p2/p2}{_T1,-flair,_seg}.nii.gz=1"), {"A": 2, "B": 2}, ("flair", "t1"), ONE,
     ["A", "p1", {"flair": "A/p1/p1-flair.nii.gz", "t1": "A/p1/p1_T1.nii.gz"}, "A/p1/p1_seg.nii.gz"], {}),
    ("bids", bids_of_sites, {"lyon": 1, "rennes": 1}, ("flair",), ONE,
     ["rennes", "sub-01", "rennes/rawdata/{case}/anat/{case}_FLAIR.nii.gz",
      "rennes/derivatives/manual/{case}/anat/{case}_mask.nii.gz"], {}),
    ("imagefolder", classes, {"all": 5}, ("image",), ("NORMAL", "PNEUMONIA"),
     ["all", "pneumonia-2", "PNEUMONIA/{case}.png", ""], {"category": "PNEUMONIA"}),
    ("imagefolder", classes_of_sites, {"Barcelona": 2, "Vienna": 3}, ("image",), ("MEL", "NV"),
     ["Vienna", "more", "Vienna/MEL/{case}.jpg", ""], {"category": "MEL"}),
    ("imagefolder", classes_in_splits, {"all": 12}, ("image",), ("AD", "CN"),
     ["all", "validation_CN_1", "Val/CN/1.nii.gz", ""], {"category": "CN", "split": "validation"}),
]  # fmt: skip


def sample(modalities, labels, site, case, images, label, lacks=(), **facts):
    """The row of a case; its files are patterns, of all modalities but those that it lacks."""
    patterns = images if isinstance(images, dict) else dict.fromkeys(modalities, images)
    files = {m: "" if m in lacks else patterns[m].format(case=case, m=m, i=i) for i, m in enumerate(modalities)}
    return Row(site, case, files, label.format(case=case), labels if label else {}, **facts)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("layout", "build", "sites", "modalities", "labels", "row", "facts"),
    SCANS,
    ids=[f"{s[0]} {s[5][1]}" for s in SCANS],
)
def test_a_dataset_is_recognised_and_read(root, layout, build, sites, modalities, labels, row, facts):
    """Its manifest survives a file, given labels replace its own, and hidden files and folders change nothing."""
    build(root)
    found, wanted = scan(root), sample(modalities, labels, *row, **facts)
    assert found.format == layout and found == scan(root, layout)
    assert {s: len(rows) for s, rows in found.manifest.sites.items()} == sites
    assert found.manifest.modalities == modalities and found.manifest.root == root.resolve()
    assert found.manifest.label_names == tuple(labels)
    assert [r for r in found.manifest.rows if (r.site, r.case) == (wanted.site, wanted.case)] == [wanted]
    for name in (f for r in found.manifest.rows for f in (*r.images.values(), r.label) if f):
        files = files_of(found.manifest.file(name)[0])
        assert files and all(f.is_file() for f in files), name
    given = scan(root, labels={"lesion": (1, 2)}).manifest
    assert {tuple(r.labels.items()) for r in given.rows} == {(("lesion", (1, 2)),) if wanted.label else ()}
    manifest.write(found.manifest, root / "manifest.csv")
    assert manifest.read(root / "manifest.csv").rows == found.manifest.rows
    (root / "manifest.csv").unlink()
    shutil.copytree(root, root / ".copy")
    for file in [f for f in root.rglob("*.*") if f.is_file() and ".copy" not in f.parts]:
        (file.parent / f"._{file.name}").write_bytes(b"\0\5\x16\7")
    assert scan(root) == found


def test_probabilities_of_staple_are_cut_at_one_half(root):
    """CC359's STAPLE maps; where there is none, the mask by machine learning counts."""
    cc359(root)
    chances = np.linspace(0, 1, 64, dtype=np.float32).reshape(4, 4, 4)
    file = root / f"Silver-standard-STAPLE/STAPLE/{CC359[0]}_staple.nii.gz"
    nibabel.save(nibabel.nifti1.Nifti1Image(chances, np.eye(4)), file)
    files = Files(str(root))
    assert next(r for r in files.manifest.rows if r.case == CC359[-1]).label.endswith("_ss.nii.gz")
    case = files.case_refs(0)["philips_15"][0]
    assert np.array_equal(case.open().label[0], chances > 0.5) and case.volumes() == {"brain": 0.032}
    assert not check(files).problems
    assert any("nothing was taken from WM-GM-CSF, hippocampus_staple" in remark for remark in files.remarks)
    put(root, "twos_staple.nii.gz=1 2")  # whole numbers stay what they are
    assert set(np.unique(channel_of(files.manifest, str(root / "twos_staple.nii.gz"), {}).array)) == {0, 1, 2}


def test_foot_ulcers_of_no_class_of_two_and_without_a_file(root):
    dfuc(root)
    found = scan(root)
    assert "2 cases have no class and were left out: 104, 105" in found.remarks
    assert "nothing was taken from DFUC2021_test: 6 .jpg files" in found.remarks
    inside = scan(root / "DFUC2021_train")  # the folder itself may be named
    assert inside.format == "dfuc" and [r.case for r in inside.manifest.rows] == ["100", "101", "102", "103"]
    assert not check(Files(str(root))).problems
    three = Files(str(root), classes=("none", "infection", "both"))
    assert three.label_names == ("both", "infection", "none") and len(three.case_refs(0)["all"]) == 3
    file = root / "DFUC2021_train/train.csv"
    file.write_text(file.read_text() + "107.jpg,1,0,0,0\n")
    assert "1 case has no image and was left out: 107" in scan(root).remarks
    file.write_text(file.read_text() + "108.jpg,1,1,0,0\n")
    with pytest.raises(DataError, match=r"train.csv cannot be used .*108.jpg is in the classes none and infection"):
        scan(root)


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({"sites": ("13", "6")}, ["06", "13"]),  # in natural order, not in the given one
        ({"exclude": ("6",)}, ["13", "20"]),
        ({"sites": ("6", "13", "20"), "exclude": ("20",)}, "both name '20'"),
        ({"sites": ("133",)}, "data.sites names '133', which is no site of the data; did you mean '13'"),
        ({"exclude": ("30",)}, r"data.exclude names '30', which is no site of the data; known: 06, 13, 20"),
        ({"exclude": ("6", "13", "20")}, "data.exclude names all sites"),
    ],
)
def test_sites_are_chosen_by_name(root, keys, left):
    sites = ("6", "13", "20")
    for number in range(3):
        glioma(root, f"FeTS2022_0000{number}", 1, 2, 4)
    table(root / "partitioning_1.csv", PARTITION, *(f"{s},FeTS2022_0000{n}" for n, s in enumerate(sites)))
    files = Files(str(root), **keys)
    if isinstance(left, list):
        assert list(files.case_refs(0)) == list(files.manifest.sites) == left
    else:
        with pytest.raises(ConfigError, match=left):
            files.case_refs(0)


@pytest.mark.parametrize(
    ("build", "chosen", "why"),
    [
        (classes_of_sites, ("MEEL", "NV"), r"data.classes names 'MEEL', which is no class of .*did you mean 'MEL'"),
        (classes_of_sites, ("NV",), "takes two classes or more"),
        (fets, ("WT", "TC"), r"data.classes chooses classes, but .* has label maps"),
    ],
)
def test_classes_that_cannot_be_chosen_are_refused(root, build, chosen, why):
    build(root)
    with pytest.raises(ConfigError, match=why):
        _ = Files(str(root), classes=chosen).manifest


@pytest.mark.parametrize(
    ("folder", "values", "site", "group", "labels"),
    [
        ("Brats17TrainingData/HGG/Brats17_TCIA_192_1", (1, 2, 4), "TCIA", "HGG", OLD),
        ("MICCAI_BraTS_2018_Data_Training/LGG/Brats18_TCIA01_147_1", (1, 2), "TCIA01", "LGG", OLD),
        ("HGG/BraTS19_TMC_06643_1", (1, 2, 4), "TMC", "HGG", OLD),
        ("MICCAI_BraTS2020_TrainingData/BraTS20_Training_001", (1, 2, 4), "all", "", OLD),
        ("BraTS2021_00002", (1, 2, 3), "all", "", NEW),  # a renumbered copy
        ("FeTS21_Training_001", (1, 2, 4), "all", "", OLD),
        ("a/b/FeTS2022_00000", (1, 2, 4), "all", "", OLD),
        ("BraTS-MEN-00004-000", (1, 2), "all", "", NEW),
        ("BraTS-SSA-00002-000", (1, 2, 4), "all", "", OLD),  # a renumbered copy
        ("BraTS-GoAT-00000", (1, 2, 3), "all", "", NEW),
        ("BraTS-GLI-02405-100", (1, 2, 3, 4), "all", "", {**NEW, "RC": (4,)}),
        ("BraTS-PED-00002-000", (1, 2, 3), "all", "", NEW),
        ("BraTS-PED-00002-001", (1, 2, 3, 4), "all", "", {"WT": (1, 2, 3, 4), "TC": (1, 2, 3), "ET": (1,)}),
    ],
)
def test_every_year_of_brats_by_its_names(root, folder, values, site, group, labels):
    glioma(root, folder, *values, suffix=".nii" if "2020" in folder else ".nii.gz")
    found = scan(root)
    (row,) = found.manifest.rows
    assert (found.format, row.site, row.case, row.group) == ("brats", site, Path(folder).name, group)
    assert row.labels == labels and tuple(row.images) == MODALITIES
    stem, mark = f"{folder}/{Path(folder).name}", "-" if "BraTS-" in folder else "_"
    assert [f.removeprefix(stem + mark).split(".")[0] for f in (*row.images.values(), row.label)] == [*NAMES[mark]]
    assert ["one site, 'all'" in r for r in found.remarks] == [True] * (site == "all")


@pytest.mark.parametrize(
    ("name", "values", "rare", "at", "enhancing"),
    [("BraTS-PED-000{:02d}-000", (1, 2, 3), 4, 1, 1), ("BraTS2021_000{:02d}", (1, 2), 3, 39, 3)],
    ids=["a child with oedema", "the last adult"],
)
def test_one_case_of_forty_tells_the_numbering(root, name, values, rare, at, enhancing):
    for number in range(40):
        glioma(root, name.format(number), *values, rare * (number == at))
    assert scan(root).manifest.rows[0].labels["ET"] == (enhancing,)


@pytest.mark.parametrize(
    "lines",
    [
        ["Subject_ID,Partition_ID", "FeTS2022_00000,1", "FeTS2022_00002,10"],
        ["Partition_ID,Subject_ID\r", "1,FeTS2022_00000\r", "10,FeTS2022_00002"],
        [",Subject_ID,Partition_ID", "0,FeTS2022_00000, 1", "1,FeTS2022_00002,10 "],
        ["subject_id;SITE", "FeTS2022_00000;01", "FeTS2022_00002;10"],
    ],
)
def test_a_partitioning_decides_on_sites_and_cases(root, lines):
    fets(root)
    table(root / "partitioning_1.csv", *lines, "1,FeTS2022_09999" if lines[0].startswith("P") else "")
    found = scan(root)
    assert [(r.site, r.case) for r in found.manifest.rows] == [("01", "FeTS2022_00000"), ("10", "FeTS2022_00002")]
    left = "2 cases on disk are in no table and were left out: FeTS2022_00001, FeTS2022_00003"
    gone = "1 case of partitioning_1.csv is not on disk: FeTS2022_09999"
    assert found.remarks == ((gone, left) if lines[0].startswith("P") else (left,))


def test_of_two_partitionings_the_first_is_taken_and_the_other_can_be_named(root):
    fets(root)
    table(root / "partitioning_2.csv", PARTITION, *(f"{n},FeTS2022_0000{n}" for n in range(4)))
    found = scan(root)
    other = "the sites are those of partitioning_1.csv; use --table partitioning_2.csv for the others"
    assert len(found.manifest.sites) == 2 and found.remarks == (other,)
    assert len(scan(root, tables=[root / "partitioning_2.csv"]).manifest.sites) == 4


def test_a_table_above_the_folder_is_found_and_one_of_other_cases_is_not_used(root):
    fets(root)
    shutil.move(root / "partitioning_1.csv", root.parent)
    assert len(scan(root).manifest.sites) == 2
    table(root.parent / "partitioning_1.csv", PARTITION, "1,FeTS21_Training_001")
    found = scan(root)
    assert list(found.manifest.sites) == ["all"]
    assert found.remarks[0] == "partitioning_1.csv names none of the cases on disk and was not used"


def test_the_name_mapping_of_2020_tells_grades_and_institutions(root):
    for number in (1, 2, 3):
        glioma(root, f"BraTS20_Training_00{number}", 1, 2, 4)
    years = ",".join(f"BraTS_{year}_subject_ID" for year in (2017, 2018, 2019, 2020))
    table(
        root / "name_mapping.csv",
        f"Grade,TCGA_TCIA_subject_ID,{years}",
        "HGG,NA,Brats17_CBICA_AAB_1,Brats18_CBICA_AAB_1,BraTS19_CBICA_AAB_1,BraTS20_Training_001",
        "LGG,TCGA-DU-6404,Brats17_TCIA_192_1,Brats18_TCIA13_192_1,NA,BraTS20_Training_002",
        "HGG,NA,NA,NA,NA,BraTS20_Training_003",
    )
    found = scan(root)
    assert [(r.site, r.group) for r in found.manifest.rows] == [("CBICA", "HGG"), ("TCIA13", "LGG"), ("unknown", "HGG")]
    (said,) = found.remarks
    assert said == "1 case has no site in the table and was put into the site 'unknown': BraTS20_Training_003"


def test_tables_add_up_and_the_first_one_counts(root):
    kits19(root)
    table(root / "anony_sites.csv", "case,site_id", "case_00000,7", "case_00001,7", "case_00002,12", "case_00210,3")
    table(root / "more.csv", "Patient_ID,Scanner,Split,Site", "case_00000,GE,Valid,99", "case_00001,NA,,99")
    assert set(scan(root).manifest.sites) == {"0", "1"}
    found = scan(root, tables=[root / "anony_sites.csv", root / "more.csv"])
    assert [(r.site, r.case, r.group, r.split) for r in found.manifest.rows] == [
        ("07", "case_00000", "GE", "validation"),
        ("07", "case_00001", "", ""),
        ("12", "case_00002", "", ""),
    ]
    assert found.remarks[1:] == ("1 case has no label map and was left out: case_00210",)


def test_sites_are_named_as_in_the_first_of_their_columns_and_ordered_in_natural_order(root):
    tree(root)
    table(root / "mine.csv", "case,site,hospital", "n10,ward 2,x", "n9,ward 10,y", "s1,7,z")
    found = scan(root, tables=[root / "mine.csv"]).manifest
    assert [(r.site, r.case) for r in found.rows] == [("7", "s1"), ("ward 2", "n10"), ("ward 10", "n9")]
    assert [r.case for r in scan(root).manifest.rows] == ["n9", "n10", "s1"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([PARTITION, "1,FeTS2021_00000"], "names none of the cases on disk, such as 'FeTS2022_00000'"),
        (["age,sex", "1,f"], "no column that names the cases"),
        ([], "no column that names the cases"),
        (["case,site", "FeTS2022_00000,a", "FeTS2022_00000,b"], "case 'FeTS2022_00000' is in two rows that differ"),
        (["case,split", "FeTS2022_00000,half"], "case 'FeTS2022_00000' of site 'all' has split = 'half'"),
        (None, r"mine\.csv cannot be used .*No such file"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(root, lines, says):
    fets(root)
    if lines is not None:
        table(root / "mine.csv", *lines)
    with pytest.raises(DataError, match=says):
        scan(root, tables=[root / "mine.csv"])


NO_MAP = "1 case has no label map and was left out: "
VALUES = (
    "labels are named by their values (label_1, label_2, label_7); "
    "name them by labels in [data], or, to 'data scan', --labels 'NAME=1; NAME=2; NAME=7'"
)
TWO_SUBJECTS = ("sub-r010/anat/sub-r010_T1w.nii.gz", "sub-r9/anat/sub-r9_T1w.nii.gz")


@pytest.mark.parametrize(
    ("build", "unlabelled", "remarks"),
    [
        (kits19, (), ["nothing was taken from predictions: 1 .gz files",
                      "1 case on disk is in no table and was left out: case_00210"]),
        (decathlon, (), [NO_MAP + "BRATS_999"]),
        (tree, (), [NO_MAP + "s2", VALUES]),
        (nnunet_first, (), [NO_MAP + "la_001"]),
        (prostate, ("HK/Case09.nii.gz",), [NO_MAP + "Case09"]),
        (bids_derivative, TWO_SUBJECTS, ["2 cases have no label map and were left out: sub-r9, sub-r010"]),
        (pairs_decathlon, ("imagesTr/hippocampus_009.nii.gz",), [NO_MAP + "hippocampus_009"]),
        (fets, ("FeTS2022_00009/FeTS2022_00009_t2.nii.gz",),
         ["1 case on disk is in no table and was left out: FeTS2022_00009"]),
    ],
)  # fmt: skip
def test_what_is_left_out_or_assumed_is_remarked(root, build, unlabelled, remarks):
    build(root)
    put(root, *unlabelled)
    found = [r for r in scan(root).remarks if "one site" not in r and (build is tree or "values" not in r)]
    assert found == remarks


@pytest.mark.parametrize(
    ("files", "images"),
    [  # all of sub-1/anat; the truth first
        (["one/*_mask", "one/*_desc-preproc_T2w", "*_T2w", "*_T1w"], ["*_T1w", "one/*_desc-preproc_T2w"]),
        (["one/*_space-A_mask", "one/*_space-B_T1w", "*_T1w", "one/*_space-B_T2w"], ["*_T1w"]),
        (["one/*_space-A_mask", "two/*_space-A_T1w", "*_T1w", "*_ct"], ["*_ct", "two/*_space-A_T1w"]),
        (["one/*_label-lesion_mask", "*_desc-other_mask", "*_run-2_T1w", "*_run-1_T1w"], ["*_run-1_T1w"]),
    ],
)
def test_images_are_taken_from_the_space_and_pipeline_of_the_mask(root, files, images):
    def path(file):
        pipeline, _, name = file.rpartition("/")
        return f"{f'derivatives/{pipeline}/' if pipeline else ''}sub-1/anat/{name.replace('*', 'sub-1')}.nii.gz"

    put(root, *(f"{path(file)}=1" for file in files))
    (row,) = scan(root, "bids").manifest.rows
    assert (row.label, list(row.images.values())) == (path(files[0]), [path(f) for f in images])


def test_channels_are_called_as_their_files_say(root):
    """Of a single channel no number is needed; of a volume none are called colours; equal names are told apart."""
    decathlon(root)
    for names, mark in ((["MRI"], [""]), (["T2", "ADC"], ["#0", "#1"])):
        describe(root / "dataset.json", modality=dict(enumerate(names)))
        found = list(scan(root).manifest.rows[0].images.items())
        assert found == [(n.lower(), f"imagesTr/BRATS_002.nii.gz{m}") for n, m in zip(names, mark, strict=True)]
    volume(root / "three/images/a.nii.gz", channels=3)
    volume(root / "three/labels/a.nii.gz", 1)
    assert scan(root / "three").manifest.modalities == ("channel_0", "channel_1", "channel_2")
    nnunet(root / "nnunet")
    about = {"channel_names": {"1": "MRI", "0": "MRI"}, "labels": {"background": 0, "a = b, c;d": 1}}
    describe(root / "nnunet/Dataset005_Prostate/dataset.json", **about)
    same = scan(root / "nnunet").manifest
    assert same.modalities == ("mri", "mri_2") and same.rows[0].labels == {"a_b_cd": (1,)}  # it fits a cell


def test_pictures_of_one_name_in_a_class_and_in_two_classes_stay_apart(root):
    put(root, "A/{1,2}.png", "A/1.jpg", "B/1.png")
    assert sorted(r.case for r in scan(root).manifest.rows) == ["A_1", "A_1.png", "A_2", "B_1"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "no file at all"),
        (["north/n{0,1,2,3,4}/t{1,2}.nii.gz"], "10 .nii.gz in north/n0, north/n1, north/n2, north/n3, …"),
        (["{A,B}/{p1/p1,p2/p2}x_{1_t1,2_seg}.nii.gz=1"], "8 .nii.gz in A/p1, A/p2, B/p1, B/p2"),  # no classes
        (["Images/a.png", "Labels/b.png=1"], "2 .png in Images, Labels; nearest layout: pairs"),
        (["A/{0,1}.png", "B/{2,3}.png", "V/{MEL/m,NV/n}.jpg"], "its folder V is a dataset of the layout imagefolder"),
    ],
)
def test_where_nothing_is_found_the_files_are_named(root, names, says):
    put(root, *names)
    with pytest.raises(DataError, match="no dataset of a known layout") as refusal:
        scan(root)
    assert "\n" not in str(refusal.value) and says in str(refusal.value)


def test_formats_without_a_case_or_a_name_and_folders_that_are_none_are_refused(root):
    for name in LAYOUTS:
        with pytest.raises(DataError, match=f"no case of the format '{name}'") as refusal:
            scan(root, name)
        assert str(refusal.value).endswith(LAYOUTS[name].__doc__)  # what it looked for
    with pytest.raises(ConfigError, match=r"no format called 'brast'; did you mean 'brats'\?"):
        scan(root, "brast")
    with pytest.raises(DataError, match="gone is not a folder"):
        scan(root / "gone")
    glioma(root, "BraTS-GLI-00001-000", without=["seg"])
    with pytest.raises(DataError, match="read as 'brats': none of the 1 cases has a file for its label map"):
        scan(root)


@pytest.mark.parametrize(
    ("build", "change", "says"),
    [
        (nnunet, {"labels": {"background": 0, "PZ": 1, "ignore": 2}}, "'ignore', for voxels without a label"),
        (nnunet, {"file_ending": ".mgz"}, "'.mgz' are not read"),
        (nnunet, {"labels": {"background": 0, "PZ": "one"}}, "cannot be used as it is.*ValueError"),
        (nnunet, {"channel_names": ["T2"]}, "cannot be used as it is"),
        (decathlon, {"training": [{"image": "../a.nii.gz", "label": "b.nii.gz"}]}, "'../a.nii.gz', which is not below"),
        (decathlon, {"training": [{"image": "/etc/a.nii", "label": "b.nii.gz"}]}, "'/etc/a.nii', which is not below"),
        (decathlon, {"training": ["a.nii.gz"]}, "cannot be used as it is.*TypeError"),
        (decathlon, {"training": [{"image": "a.nii.gz"}]}, "cannot be used as it is.*KeyError: 'label'"),
    ],
)
def test_a_dataset_json_that_makes_no_sense_is_refused(root, build, change, says):
    build(root)
    (file,) = root.rglob("dataset.json")
    describe(file, **change)
    with pytest.raises(DataError, match=says) as refusal:
        scan(root)
    assert str(file) in str(refusal.value)
    for text in ("{", "[]", "[" * 100_000, "\xff"):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match="cannot be used as it is"):
            scan(root)


def test_candidates_that_make_no_sense_or_are_missing_are_refused(root):
    luna(root)
    for row in ("1,2,,0", "1,2,3,5", "1,two,3,0"):
        table(root / "CSVFILES/candidates_V2.csv", CANDIDATES, f"{UIDS[0]},{row}")
        with pytest.raises(DataError, match=r"candidates_V2\.csv cannot be used"):
            scan(root)
    shutil.rmtree(root / "CSVFILES")  # the scans are not taken for classes
    with pytest.raises(DataError, match=r"candidates\.csv cannot be used .*No such file"):
        scan(root)


def test_the_real_partitioning_of_fets(root, shared):
    sizes = (511, 6, 15, 47, 22, 34, 12, 8, 4, 8, 14, 11, 35, 6, 13, 30, 9, 382, 4, 33, 35, 7, 5)
    shutil.copy(shared / "fets_partitions/fets2022_partitioning_1.csv", root / "partitioning_1.csv")
    for case in re.findall(r"FeTS\w+", (root / "partitioning_1.csv").read_text()):
        (root / case).mkdir()
        for name in ("flair", "seg"):
            (root / case / f"{case}_{name}.nii.gz").touch()
    found = scan(root)
    held = {s: len(rows) for s, rows in found.manifest.sites.items()}
    assert held == {f"{i:02d}": n for i, n in enumerate(sizes, start=1)}
    assert found.manifest.label_names == ("WT", "TC", "ET") and found.remarks == ()


def test_what_is_odd_about_a_tree_is_remarked_and_links_that_lead_up_are_not_followed(root):
    put(root, "{A,B}/{p1,p2}/{t1,seg}.nii.gz=1", "A/p1/t1 (copy).nii.gz=1")
    (root / "lake" / "p9").mkdir(parents=True)
    (root / "lake" / "p9" / "0001.dcm").touch()
    for k in range(12):
        (root / "A" / f"l{k}").symlink_to(root)
    found, alone = scan(root), scan(root / "B")  # the folder of one hospital is a site
    assert "nothing was taken from lake: 1 .dcm files" in found.remarks and len(found.manifest.rows) == 4
    assert any(r.startswith("1 case of 4 has 't1 (copy)', so name the data.modalities") for r in found.remarks)
    assert alone.format == "tree" and set(alone.manifest.sites) == {"B"} and len(alone.manifest.rows) == 2


@pytest.mark.parametrize(
    ("files", "patients"),
    [
        (["BraTS-GLI-{00005-100/BraTS-GLI-00005-100,00005-101/BraTS-GLI-00005-101}-{t2f,seg}.nii.gz=1",
          "BraTS-GLI-00006-100/BraTS-GLI-00006-100-{t2f,seg}.nii.gz=1"],
         ["BraTS-GLI-00005", "BraTS-GLI-00005", "BraTS-GLI-00006"]),
        (["BraTS2021_0000{1/BraTS2021_00001,2/BraTS2021_00002}_{flair,seg}.nii.gz=1"], ["", ""]),
        (["sub-1/ses-{1/anat/sub-1_ses-1,2/anat/sub-1_ses-2}_{T1w,mask}.nii.gz=1",
          "sub-2/anat/sub-2_{T1w,mask}.nii.gz=1"], ["sub-1", "sub-1", ""]),
    ],
    ids=["time points", "one each", "sessions"],
)  # fmt: skip
def test_the_cases_of_one_patient_are_known_as_such(root, files, patients):
    put(root, *files)
    assert [r.patient for r in scan(root).manifest.rows] == patients


def test_folders_above_and_below_are_hinted_at(root):
    retinas(root)
    with pytest.raises(DataError, match=r"part of a dataset: name the folder above it, .*DRIVE/training$"):
        scan(root / "DRIVE/training/images")
    assert scan(root / "DRIVE/training").format == "pairs"
    assert any("nothing was taken from DRIVE/test/mask, DRIVE/training/mask" in r for r in scan(root).remarks)
    dicom_cases(root / "deep/er")
    with pytest.raises(DataError, match=r"is one DICOM series, so one image; name the folder above"):
        scan(root / "deep/er/north/p1/ct")
