"""Datasets as they are downloaded, built small and scanned."""

import json
import re
import shutil
from collections import Counter
from itertools import product
from pathlib import Path

import h5py
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

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
OLD = {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}
NEW = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}
NAMES = {"_": ("t1", "t1ce", "t2", "flair", "seg"), "-": ("t1n", "t1c", "t2w", "t2f", "seg")}


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
    table(root / "partitioning_1.csv", "Partition_ID,Subject_ID", *(f"{n % 2 + 1},FeTS2022_0000{n}" for n in range(4)))


def brats18(root):
    top = "MICCAI_BraTS_2018_Data_Training"
    for case in ("HGG/Brats18_CBICA_AAB_1", "HGG/Brats18_2013_2_1", "LGG/Brats18_TCIA10_351_1"):
        glioma(root, f"{top}/{case}", 1, 2, 4)
    table(root / top / "survival_data.csv", "Brats18ID,Age,Survival", "Brats18_CBICA_AAB_1,60,289")


def brats17(root):
    """As MICCAI_BraTS17_Data_Training.zip unpacks."""
    top = "MICCAI_BraTS17_Data_Training"
    for case in ("HGG/Brats17_2013_2_1", "HGG/Brats17_CBICA_AAB_1", "HGG/Brats17_TCIA_105_1", "LGG/Brats17_TCIA_620_1"):
        glioma(root, f"{top}/{case}", 1, 2, 4)
    table(root / top / "survival_data.csv", "Brats17ID,Age,Survival", "Brats17_CBICA_AAB_1,60.46,289")


def kits19(root):
    put(root, "data/case_0000{0,1,2}/imaging.nii.gz", "data/case_0000{0,1,2}/segmentation.nii.gz=1 2")
    put(root, "data/case_00210/imaging.nii.gz")  # a test case: no truth
    put(root, "predictions/segmentation.nii.gz", "data/case_00299/thumbnail.nii.gz")
    rows = "case_00000,0,train,train_0", "case_00001,0,test,test_0", "case_00002,1,train,train_1"
    table(root / "thresholded_sites.csv", "case_ids,site_ids,train_test_split,train_test_split_silo", *rows)


def kits23(root):
    put(root, "case_0000{0,1}/imaging.nii.gz", "case_0000{0,1}/instances/kidney_instance-1_annotation-1.nii.gz=1")
    put(root, "case_00000/segmentation.nii.gz=1 2", "case_00001/segmentation.nii.gz=1 2 3")


def decathlon(root):
    about = {
        "name": "BRATS",
        "modality": {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
        "training": [{"image": f"./imagesTr/{c}.nii.gz", "label": f"./labelsTr/{c}.nii.gz"} for c in DECATHLON],
        "test": ["./imagesTs/BRATS_485.nii.gz"],
    }
    for case in DECATHLON[:2]:
        volume(root / f"imagesTr/{case}.nii.gz", channels=4)
        volume(root / f"labelsTr/{case}.nii.gz", 1, 2, 3)
    volume(root / "imagesTs/BRATS_485.nii.gz", channels=4)
    (root / "dataset.json").write_text(json.dumps(about))


DECATHLON = ("BRATS_002", "BRATS_457", "BRATS_999")  # the last one was not downloaded


def nnunet(root):
    top = root / "Dataset005_Prostate"
    for part, case in (("Tr", "prostate_00"), ("Tr", "prostate_01"), ("Ts", "prostate_03")):
        for channel in range(2):
            volume(top / f"images{part}/{case}_000{channel}.nii.gz")
        volume(top / f"labels{part}/{case}.nii.gz", 1, 2)
    labels = {"background": 0, "whole gland": [1, 2], "PZ": 1}
    about = {"channel_names": {"0": "T2", "1": "ADC"}, "labels": labels, "numTraining": 2, "file_ending": ".nii.gz"}
    (top / "dataset.json").write_text(json.dumps(about))


def nnunet_first(root):
    """Its dataset.json is the Decathlon's, but the files carry channel numbers."""
    for case in ("la_003", "la_004"):
        volume(root / f"imagesTr/{case}_0000.nii.gz")
        volume(root / f"labelsTr/{case}.nii.gz", 1)
    about = {
        "name": "LeftAtrium",
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "left atrium"},
        "training": [{"image": "./imagesTr/la_003.nii.gz", "label": "./labelsTr/la_003.nii.gz"}],
    }
    (root / "dataset.json").write_text(json.dumps(about))

    volume(root / "imagesTs/la_001_0000.nii.gz")  # its truth is the challenge's


def nnunet_bare(root):
    put(root, "imagesTr/{a,b}_000{0,1}.nii.gz", "labelsTr/{a,b}.nii.gz=3")


def nnunet_photographs(root):
    picture(root / "imagesTr/road-1_0000.png", colour=True)
    picture(root / "labelsTr/road-1.png", 1)
    about = {
        "channel_names": {"0": "R", "1": "G", "2": "B"},
        "labels": {"background": 0, "road": 1},
        "file_ending": ".png",
        "name": "Roads",
    }
    (root / "dataset.json").write_text(json.dumps(about))


UIDS = ("1.3.6.1.4.1.14519.5.2.1.6279.6001.105756658031515062000744821260", "1.3.6.1.4.1.14519.5.2.1.6279.6001.1087")


def luna(root):
    for subset, uid in enumerate(UIDS):
        folder = root / f"subset{subset}"
        folder.mkdir(parents=True)
        (folder / f"{uid}.raw").write_bytes(bytes(64))
        (folder / f"{uid}.mhd").write_text(
            f"NDims = 3\nDimSize = 4 4 4\nElementType = MET_UCHAR\nElementDataFile = {uid}.raw\n"
        )
    head = "seriesuid,coordX,coordY,coordZ,class"
    table(root / "CSVFILES/candidates.csv", head, f"{UIDS[0]},1,2,3,0")
    table(
        root / "CSVFILES/candidates_V2.csv",
        head,
        f"{UIDS[0]},-56.08,67.85,-311.92,0",
        f"{UIDS[0]},53.21,-244.41,-245.17,1",
        f"{UIDS[1]},0,-1,2,0",
        "1.3.6.1.4.1.14519.5.2.1.6279.6001.999,1,1,1,0",  # its scan is not on disk
    )


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
    table(
        root / "participants.tsv",
        "participant_id\tage\tcenter\tgroup",
        "sub-01\t50\tLyon\tms",
        "sub-02\t40\tRennes\tn/a",
    )
    for case, session in (("sub-01", "ses-01"), ("sub-01", "ses-02"), ("sub-02", "ses-01")):
        anat, stem = root / case / session / "anat", f"{case}_{session}"
        volume(anat / f"{stem}_T1w.nii.gz")
        volume(anat / f"{stem}_ce-gadolinium_T1w.nii.gz")
        volume(root / case / session / f"func/{stem}_task-rest_bold.nii.gz", channels=2)
        volume(root / f"derivatives/manual/{case}/{session}/anat/{stem}_label-lesion_mask.nii.gz", 1)
        volume(root / f"derivatives/fmriprep/{case}/{session}/anat/{stem}_space-MNI_desc-preproc_T1w.nii.gz")
        volume(root / f"derivatives/fmriprep/{case}/{session}/anat/{stem}_desc-preproc_T1w.nii.gz")
        volume(root / f"derivatives/fmriprep/{case}/{session}/anat/{stem}_dseg.nii.gz", 1, 2, 3)
        volume(root / f"derivatives/fmriprep/{case}/{session}/anat/{stem}_space-MNI_desc-brain_mask.nii.gz", 1)
    volume(root / "sub-02/ses-01/anat/sub-02_ses-01_FLAIR.nii.gz")


def bids_derivative(root):
    """A pipeline folder by itself: the image in the space of the mask is meant."""
    anat, stem = root / "sub-r001/anat", "sub-r001"
    for space in ("space-orig_desc-preproc", "space-MNI152", "space-MNI152_desc-preproc"):
        volume(anat / f"{stem}_{space}_T1w.nii.gz")
    volume(anat / f"{stem}_space-MNI152_dseg.nii.gz", 1, 5)


def prostate(root):
    put(root, "{BIDMC,HK,RUNMC}/Case0{0,1}.nii.gz", "HK/Case0{0,1}_Segmentation.nii.gz=1")
    put(root, "{BIDMC,RUNMC}/Case0{0,1}_segmentation.nii.gz=1")


def tree(root):
    put(root, "north/{n10,n9}/flair.nii.gz", "north/n9/t1.nii.gz", "south/{s1,s2}/t1.nii.gz")
    put(root, "north/n10/seg.nii.gz=2 1", "north/n9/seg.nii.gz=7", "south/s1/Mask.nii=1")


def pairs(root):
    put(root, "images/{x1,x2}.jpg", "masks/{x1,x2}.png=255")


def pairs_of_sites(root):
    put(root, "{kvasir/Images/cju0,ISIC/Images/ISIC_0012255}.png")
    put(root, "{kvasir/Labels/cju0,ISIC/Labels/ISIC_0012255}_Segmentation.png=1")


def pairs_of_volumes(root):
    """The prostate data as NVIDIA FLARE's example converts them."""
    put(root, "I2CVB/{Image/,Mask/}Case00.nii.gz=1", "MSD/{Image/,Mask/}prostate_00.nii.gz=1")
    put(root, "NCI_ISBI_3T/{Image/,Mask/}Prostate3T-01-0001.nii.gz=1")


def pairs_decathlon(root):
    put(root, "imagesTr/hippocampus_00{1,3}.nii.gz", "labelsTr/hippocampus_00{1,3}.nii.gz=1 2")


def classes(root):
    put(root, "NORMAL/normal-{0,1}.png", "PNEUMONIA/pneumonia-{0,1,2}.png")


def classes_of_sites(root):
    put(root, *(f"{site}/{name}/{site}-{name}.jpg" for site in ("Barcelona", "Vienna") for name in ("MEL", "NV")))
    put(root, "Vienna/MEL/more.jpg")


def classes_in_splits(root):
    put(root, "{Train,Val,Test}/{AD,CN}/{0,1}.nii.gz")


CC359 = ("CC0001_philips_15_55_M", "CC0061_philips_3_55_F", "CC0121_siemens_15_61_M", "CC0181_siemens_3_36_F",
         "CC0240_ge_15_60_F", "CC0319_ge_3_45_M", "CC0320_ge_3_50_F")  # fmt: skip


def cc359(root):
    """As its archives unpack: both kinds of masks; maps of tissues are called like the scans."""
    for number, case in enumerate(CC359):
        put(root, f"Original/Original/{case}.nii.gz={7 + number}")
        put(root, f"Silver-standard-machine-learning/Silver-standard/{case}_ss.nii.gz=1")
    put(root, *(f"Silver-standard-STAPLE/STAPLE/{case}_staple.nii.gz=1" for case in CC359[:-1]))
    put(root, f"hippocampus_staple/{CC359[-1]}_staple.nii.gz=1", f"WM-GM-CSF/{CC359[-1]}.nii.gz=1 2 3")


def left_atria(root):
    """Files of an image and its label map each, as of the left atria of 2018 in HDF5."""
    for number in range(2):
        file = root / f"case{number}" / "mri_norm2.h5"
        file.parent.mkdir()
        with h5py.File(file, "w") as arrays:
            arrays["image"] = np.arange(60.0).reshape(3, 4, 5)
            arrays["label"] = np.arange(60).reshape(3, 4, 5) < 9


def retinas(root):
    """DRIVE, with masks of the field of view, CHASE in one folder, and STARE."""
    for part, numbers in (("training", "{21,22}"), ("test", "01")):
        put(root / "DRIVE" / part, f"images/{numbers}_{part}.tif", f"1st_manual/{numbers}_manual1.gif=255")
        put(root / "DRIVE" / part, f"mask/{numbers}_{part}_mask.gif=255")
    put(root / "CHASE", "Image_01{L,R}.jpg", "Image_01{L,R}_{1st,2nd}HO.png=1")
    put(
        root / "STARE",
        "stare-images/im000{1,2}.ppm",
        "labels-ah/im000{1,2}.ah.ppm=255",
        "labels-vk/im000{1,2}.vk.ppm=255",
    )


def dicom_cases(root):
    for case in ("p1", "p2"):
        foreign.dicom_series(root / "north" / case / "ct", np.arange(24, dtype=np.int16).reshape(4, 3, 2))
        volume(root / "north" / case / "seg.nii.gz", 1)


SCANS = [  # layout, builder, cases of every site, modalities, labels or classes, one of the rows
    (
        "brats", fets, {"1": 2, "2": 2}, ("t1", "t1ce", "t2", "flair"), OLD,
        Row("2", "FeTS2022_00001", {m: f"FeTS2022_00001/FeTS2022_00001_{m}.nii.gz" if m != "t2" else "" for m in
            ("t1", "t1ce", "t2", "flair")}, "FeTS2022_00001/FeTS2022_00001_seg.nii.gz", OLD),
    ),
    (
        "brats", brats18, {"2013": 1, "CBICA": 1, "TCIA10": 1}, ("t1", "t1ce", "t2", "flair"), OLD,
        Row("TCIA10", "Brats18_TCIA10_351_1", {m: "MICCAI_BraTS_2018_Data_Training/LGG/Brats18_TCIA10_351_1/"
            f"Brats18_TCIA10_351_1_{m}.nii.gz" for m in ("t1", "t1ce", "t2", "flair")},
            "MICCAI_BraTS_2018_Data_Training/LGG/Brats18_TCIA10_351_1/Brats18_TCIA10_351_1_seg.nii.gz", OLD,
            group="LGG"),
    ),
    (
        "brats", brats17, {"2013": 1, "CBICA": 1, "TCIA": 2}, ("t1", "t1ce", "t2", "flair"), OLD,
        Row("TCIA", "Brats17_TCIA_620_1", {m: "MICCAI_BraTS17_Data_Training/LGG/Brats17_TCIA_620_1/"
            f"Brats17_TCIA_620_1_{m}.nii.gz" for m in ("t1", "t1ce", "t2", "flair")},
            "MICCAI_BraTS17_Data_Training/LGG/Brats17_TCIA_620_1/Brats17_TCIA_620_1_seg.nii.gz", OLD, group="LGG"),
    ),
    (
        "kits", kits19, {"0": 2, "1": 1}, ("ct",), {"kidney": (1, 2), "tumour": (2,)},
        Row("0", "case_00001", {"ct": "data/case_00001/imaging.nii.gz"}, "data/case_00001/segmentation.nii.gz",
            {"kidney": (1, 2), "tumour": (2,)}, split="test"),
    ),
    (
        "kits", kits23, {"all": 2}, ("ct",), {"kidney": (1, 2, 3), "tumour": (2,), "cyst": (3,)},
        Row("all", "case_00001", {"ct": "case_00001/imaging.nii.gz"}, "case_00001/segmentation.nii.gz",
            {"kidney": (1, 2, 3), "tumour": (2,), "cyst": (3,)}),
    ),
    (
        "msd", decathlon, {"BRATS": 2}, ("flair", "t1w", "t1gd", "t2w"),
        {"edema": (1,), "non-enhancing_tumor": (2,), "enhancing_tumour": (3,)},
        Row("BRATS", "BRATS_457", {m: f"imagesTr/BRATS_457.nii.gz#{i}" for i, m in
            enumerate(("flair", "t1w", "t1gd", "t2w"))}, "labelsTr/BRATS_457.nii.gz",
            {"edema": (1,), "non-enhancing_tumor": (2,), "enhancing_tumour": (3,)}),
    ),
    (
        "nnunet", nnunet, {"Dataset005_Prostate": 3}, ("t2", "adc"), {"whole_gland": (1, 2), "PZ": (1,)},
        Row("Dataset005_Prostate", "prostate_03",
            {m: f"Dataset005_Prostate/imagesTs/prostate_03_000{i}.nii.gz" for i, m in enumerate(("t2", "adc"))},
            "Dataset005_Prostate/labelsTs/prostate_03.nii.gz", {"whole_gland": (1, 2), "PZ": (1,)}, split="test"),
    ),
    (
        "nnunet", nnunet_first, {"LeftAtrium": 2}, ("mri",), {"left_atrium": (1,)},
        Row("LeftAtrium", "la_004", {"mri": "imagesTr/la_004_0000.nii.gz"}, "labelsTr/la_004.nii.gz",
            {"left_atrium": (1,)}),
    ),
    (
        "nnunet", nnunet_bare, {"root": 2}, ("channel_0", "channel_1"), {"label_3": (3,)},
        Row("root", "a", {f"channel_{i}": f"imagesTr/a_000{i}.nii.gz" for i in range(2)}, "labelsTr/a.nii.gz",
            {"label_3": (3,)}),
    ),
    (
        "nnunet", nnunet_photographs, {"Roads": 1}, ("r", "g", "b"), {"road": (1,)},
        Row("Roads", "road-1", {m: f"imagesTr/road-1_0000.png#{i}" for i, m in enumerate("rgb")},
            "labelsTr/road-1.png", {"road": (1,)}),
    ),
    (
        "luna", luna, {"subset0": 2, "subset1": 1}, ("ct",), ("nodule", "other"),
        Row("subset0", f"{UIDS[0]}-00002", {"ct": f"subset0/{UIDS[0]}.mhd"}, category="nodule",
            box=(-53.21, 244.41, -245.17, 50, 50, 50), patient=UIDS[0]),
    ),
    (
        "dfuc", dfuc, {"all": 4}, ("image",), ("both", "infection", "ischaemia", "none"),
        Row("all", "102", {"image": "DFUC2021_train/images/102.jpg"},
            category="ischaemia"),
    ),
    (
        "bids", bids, {"Lyon": 2, "Rennes": 1}, ("flair", "t1w", "t1w_ce"), {"label_1": (1,)},
        Row("Lyon", "sub-01_ses-02", {
            "flair": "", "t1w": "sub-01/ses-02/anat/sub-01_ses-02_T1w.nii.gz",
            "t1w_ce": "sub-01/ses-02/anat/sub-01_ses-02_ce-gadolinium_T1w.nii.gz"},
            "derivatives/manual/sub-01/ses-02/anat/sub-01_ses-02_label-lesion_mask.nii.gz", {"label_1": (1,)},
            group="ms", patient="sub-01"),
    ),
    (
        "bids", bids_derivative, {"all": 1}, ("t1w",), {"label_1": (1,), "label_5": (5,)},
        Row("all", "sub-r001", {"t1w": "sub-r001/anat/sub-r001_space-MNI152_desc-preproc_T1w.nii.gz"},
            "sub-r001/anat/sub-r001_space-MNI152_dseg.nii.gz", {"label_1": (1,), "label_5": (5,)}),
    ),
    (
        "cc359", cc359,
        {"ge_3": 2, "ge_15": 1, "philips_3": 1, "philips_15": 1, "siemens_3": 1, "siemens_15": 1}, ("t1",),
        {"brain": (1,)},
        Row("philips_15", CC359[0], {"t1": f"Original/Original/{CC359[0]}.nii.gz"},
            f"Silver-standard-STAPLE/STAPLE/{CC359[0]}_staple.nii.gz", {"brain": (1,)}),
    ),
    (
        "prostate", prostate, {"BIDMC": 2, "HK": 2, "RUNMC": 2}, ("t2",), {"prostate": (1, 2)},
        Row("HK", "Case01", {"t2": "HK/Case01.nii.gz"}, "HK/Case01_Segmentation.nii.gz", {"prostate": (1, 2)}),
    ),
    (
        "tree", tree, {"north": 2, "south": 1}, ("flair", "t1"), {"label_1": (1,), "label_2": (2,), "label_7": (7,)},
        Row("south", "s1", {"flair": "", "t1": "south/s1/t1.nii.gz"}, "south/s1/Mask.nii",
            {"label_1": (1,), "label_2": (2,), "label_7": (7,)}),
    ),
    (
        "pairs", pairs, {"all": 2}, ("image",), {"mask": (1, 255)},
        Row("all", "x2", {"image": "images/x2.jpg"}, "masks/x2.png",
            {"mask": (1, 255)}),
    ),
    (
        "pairs", pairs_of_sites, {"ISIC": 1, "kvasir": 1}, ("image",), {"label_1": (1,)},
        Row("ISIC", "ISIC_0012255", {"image": "ISIC/Images/ISIC_0012255.png"},
            "ISIC/Labels/ISIC_0012255_Segmentation.png", {"label_1": (1,)}),
    ),
    (
        "pairs", pairs_of_volumes, {"I2CVB": 1, "MSD": 1, "NCI_ISBI_3T": 1}, ("image",), {"label_1": (1,)},
        Row("MSD", "prostate_00", {"image": "MSD/Image/prostate_00.nii.gz"}, "MSD/Mask/prostate_00.nii.gz",
            {"label_1": (1,)}),
    ),
    (
        "pairs", pairs_decathlon, {"all": 2}, ("image",), {"label_1": (1,), "label_2": (2,)},
        Row("all", "hippocampus_003", {"image": "imagesTr/hippocampus_003.nii.gz"},
            "labelsTr/hippocampus_003.nii.gz", {"label_1": (1,), "label_2": (2,)}),
    ),
    (
        "imagefolder", classes, {"all": 5}, ("image",), ("NORMAL", "PNEUMONIA"),
        Row("all", "pneumonia-2", {"image": "PNEUMONIA/pneumonia-2.png"}, category="PNEUMONIA"),
    ),
    (
        "imagefolder", classes_of_sites, {"Barcelona": 2, "Vienna": 3}, ("image",), ("MEL", "NV"),
        Row("Vienna", "more", {"image": "Vienna/MEL/more.jpg"},
            category="MEL"),
    ),
    (
        "keyed", left_atria, {"all": 2}, ("image",), {"label_1": (1,)},
        Row("all", "case1", {"image": "case1/mri_norm2.h5#image"}, "case1/mri_norm2.h5#label", {"label_1": (1,)}),
    ),
    (
        "tree", dicom_cases, {"north": 2}, ("ct",), {"label_1": (1,)},
        Row("north", "p2", {"ct": "north/p2/ct/"}, "north/p2/seg.nii.gz", {"label_1": (1,)}),
    ),
    (
        "pairs", retinas, {"CHASE": 2, "DRIVE": 3, "STARE": 2}, ("image",), {"mask": (1, 255)},
        Row("DRIVE", "22_training", {"image": "DRIVE/training/images/22_training.tif"},
            "DRIVE/training/1st_manual/22_manual1.gif", {"mask": (1, 255)}, split="train"),
    ),
    (
        "imagefolder", classes_in_splits, {"all": 12}, ("image",), ("AD", "CN"),
        Row("all", "validation_CN_1", {"image": "Val/CN/1.nii.gz"}, category="CN", split="validation"),
    ),
]  # fmt: skip


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("layout", "build", "sites", "modalities", "labels", "sample"), SCANS, ids=[s[1].__name__ for s in SCANS]
)
def test_a_dataset_is_recognised_and_read(root, layout, build, sites, modalities, labels, sample):
    """Its manifest survives a file, given labels replace its own, and hidden files and folders change nothing."""
    build(root)
    found = scan(root)
    assert found.format == layout and found == scan(root, layout)
    assert {s: len(rows) for s, rows in found.manifest.sites.items()} == sites
    assert found.manifest.modalities == modalities and found.manifest.root == root.resolve()
    assert found.manifest.label_names == tuple(labels)
    assert [r for r in found.manifest.rows if (r.site, r.case) == (sample.site, sample.case)] == [sample]
    assert [f for r in found.manifest.rows for f in (*r.images.values(), r.label) if f and not on_disk(found, f)] == []
    given = scan(root, labels={"lesion": (1, 2)}).manifest
    assert {tuple(r.labels.items()) for r in given.rows} == {(("lesion", (1, 2)),) if sample.label else ()}
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
    shutil.rmtree(root / "Silver-standard-STAPLE")
    assert all(r.label.endswith("_ss.nii.gz") for r in scan(root).manifest.rows)
    multiple = root / "twos_staple.nii.gz"  # whole numbers stay what they are
    volume(multiple, 1, 2)
    assert set(np.unique(channel_of(files.manifest, str(multiple), {}).array)) == {0, 1, 2}


def test_foot_ulcers_without_a_class_are_named_once(root):
    dfuc(root)
    found = scan(root)
    assert "2 cases have no class and were left out: 104, 105" in found.remarks
    assert "nothing was taken from DFUC2021_test: 6 .jpg files" in found.remarks
    inside = scan(root / "DFUC2021_train")  # the folder itself may be named
    assert inside.format == "dfuc" and [r.case for r in inside.manifest.rows] == ["100", "101", "102", "103"]
    assert not check(Files(str(root))).problems
    three = Files(str(root), classes=("none", "infection", "both"))
    assert three.label_names == ("both", "infection", "none") and len(three.case_refs(0)["all"]) == 3


def test_a_foot_ulcer_of_two_classes_or_without_a_file(root):
    dfuc(root)
    file = root / "DFUC2021_train/train.csv"
    file.write_text(file.read_text() + "107.jpg,1,0,0,0\n")
    assert "1 case has no image and was left out: 107" in scan(root).remarks
    file.write_text(file.read_text() + "108.jpg,1,1,0,0\n")
    with pytest.raises(DataError, match=r"train.csv cannot be used .*108.jpg is in the classes none and infection"):
        scan(root)


def test_the_table_of_another_dataset_is_no_foot_ulcer(root):
    classes(root)
    (root / "train.csv").write_bytes(b"image,none\xff\n" + bytes(9))
    assert scan(root).format == "imagefolder"


def test_both_readings_of_the_kidney(root):
    """The organ with its tumour, as the layout reads it, or label 1 alone, whose volumes paper A prints."""
    kits19(root)
    whole, alone = Files(str(root)), Files(str(root), labels={"kidney": (1,), "tumour": (2,)})
    assert whole.case_refs(0)["0"][0].volumes() == {"kidney": 0.002, "tumour": 0.001}
    assert alone.case_refs(0)["0"][0].volumes() == {"kidney": 0.001, "tumour": 0.001}


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({"sites": ("6", "13")}, ["06", "13"]),
        ({"sites": ("13", "06")}, ["06", "13"]),  # in natural order, not in the given one
        ({"sites": ("6", "13", "20"), "exclude": ("20",)}, "both name '20'"),
        ({"exclude": ("6",)}, ["13", "20"]),
        ({"sites": ("7",)}, r"data.sites names '7', which is no site of the data; known: 06, 13, 20"),
        ({"sites": ("133",)}, "did you mean '13'"),
        ({"exclude": ("30",)}, r"data.exclude names '30', which is no site of the data; known: 06, 13, 20"),
        ({"exclude": ("6", "13", "20")}, "data.exclude names all sites"),
    ],
)
def test_sites_are_chosen_by_name(root, keys, left):
    for number in range(6):
        glioma(root, f"FeTS2022_0000{number}", 1, 2, 4)
    sites = ("6", "13", "20")
    lines = (f"{sites[n % 3]},FeTS2022_0000{n}" for n in range(6))
    table(root / "partitioning_1.csv", "Partition_ID,Subject_ID", *lines)
    files = Files(str(root), **keys)
    if isinstance(left, list):
        assert list(files.case_refs(0)) == list(files.manifest.sites) == left
    else:
        with pytest.raises(ConfigError, match=left):
            files.case_refs(0)


def test_classes_are_chosen_by_name(root):
    classes_of_sites(root)
    assert len(Files(str(root), classes=("NV", "MEL")).manifest.rows) == 5
    with pytest.raises(ConfigError, match=r"data.classes names 'MEEL', which is no class of .*did you mean 'MEL'"):
        _ = Files(str(root), classes=("MEEL", "NV")).manifest
    with pytest.raises(ConfigError, match="takes two classes or more"):
        _ = Files(str(root), classes=("NV",)).manifest
    shutil.rmtree(root)
    fets(root)
    with pytest.raises(ConfigError, match=r"data.classes chooses classes, but .* has label maps"):
        _ = Files(str(root), classes=("WT", "TC")).manifest


def on_disk(found, name):
    files = files_of(found.manifest.file(name)[0])
    return bool(files) and all(f.is_file() for f in files)


@pytest.mark.parametrize(
    ("folder", "values", "site", "group", "labels"),
    [
        ("Brats17TrainingData/HGG/Brats17_TCIA_192_1", (1, 2, 4), "TCIA", "HGG", OLD),
        ("MICCAI_BraTS_2018_Data_Training/LGG/Brats18_TCIA01_147_1", (1, 2), "TCIA01", "LGG", OLD),
        ("HGG/BraTS19_CBICA_AAB_1", (1, 2, 4), "CBICA", "HGG", OLD),
        ("HGG/BraTS19_TMC_06643_1", (1, 2, 4), "TMC", "HGG", OLD),
        ("HGG/BraTS19_2013_2_1", (1, 2, 4), "2013", "HGG", OLD),
        ("MICCAI_BraTS2020_TrainingData/BraTS20_Training_001", (1, 2, 4), "all", "", OLD),
        ("BraTS2021_00000", (1, 2, 4), "all", "", OLD),
        ("BraTS2021_00002", (1, 2, 3), "all", "", NEW),  # a renumbered copy
        ("FeTS21_Training_001", (1, 2, 4), "all", "", OLD),
        ("a/b/FeTS2022_00000", (1, 2, 4), "all", "", OLD),
        ("BraTS-GLI-00000-000", (1, 2, 3), "all", "", NEW),
        ("BraTS-MEN-00004-000", (1, 2), "all", "", NEW),
        ("BraTS-MET-00001-000", (1, 2, 3), "all", "", NEW),
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
    assert row.labels == labels and list(row.images) == ["t1", "t1ce", "t2", "flair"]
    stem, mark = f"{folder}/{Path(folder).name}", "-" if "BraTS-" in folder else "_"
    assert [f.removeprefix(stem + mark).split(".")[0] for f in (*row.images.values(), row.label)] == [*NAMES[mark]]
    assert ["one site, 'all'" in r for r in found.remarks] == [True] * (site == "all")


def test_one_child_of_many_has_oedema_and_tells_the_numbering(root):
    for number in range(40):
        glioma(root, f"BraTS-PED-000{number:02d}-000", 1, 2, 3, 4 * (number == 1))
    assert scan(root).manifest.rows[0].labels["ET"] == (1,)


def test_values_are_looked_for_from_the_first_case_to_the_last(root):
    for number in range(40):
        glioma(root, f"BraTS2021_000{number:02d}", 1, 2, 3 * (number == 39))
    assert scan(root).manifest.rows[0].labels == NEW


def test_numberings_of_two_years_stand_side_by_side(root):
    glioma(root, "2021/BraTS2021_00000", 1, 2, 4)
    glioma(root, "2019/HGG/BraTS19_CBICA_AAB_1", 1, 2, 4)
    glioma(root, "2023/BraTS-GLI-00000-000", 1, 2, 3)
    assert [(r.site, r.case, r.labels) for r in scan(root).manifest.rows] == [
        ("CBICA", "BraTS19_CBICA_AAB_1", OLD),
        ("all", "BraTS2021_00000", OLD),
        ("all", "BraTS-GLI-00000-000", NEW),
    ]


def test_the_misnamed_truth_of_2020_is_found(root):
    glioma(root, "BraTS20_Training_355", suffix=".nii", without=["seg"])
    volume(root / "BraTS20_Training_355/W39_1998.09.19_Segm.nii", 1, 2, 4)
    assert scan(root).manifest.rows[0].label == "BraTS20_Training_355/W39_1998.09.19_Segm.nii"


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
    lines = ["Partition_ID,Subject_ID", *(f"{n},FeTS2022_0000{n}" for n in range(4))]
    table(root / "partitioning_2.csv", *lines)
    found = scan(root)
    assert len(found.manifest.sites) == 2
    assert found.remarks == (
        "the sites are those of partitioning_1.csv; use --table partitioning_2.csv for the others",
    )
    assert len(scan(root, tables=[root / "partitioning_2.csv"]).manifest.sites) == 4


def test_a_table_above_the_folder_is_found_and_one_of_other_cases_is_not_used(root):
    fets(root)
    shutil.move(root / "partitioning_1.csv", root.parent)
    assert len(scan(root).manifest.sites) == 2
    table(root.parent / "partitioning_1.csv", "Partition_ID,Subject_ID", "1,FeTS21_Training_001")
    found = scan(root)
    assert list(found.manifest.sites) == ["all"]
    assert found.remarks[0] == "partitioning_1.csv names none of the cases on disk and was not used"


def test_participants_may_be_listed_without_the_prefix(root):
    bids(root)
    table(root / "participants.tsv", "participant_id\tsite", "01\tLyon", "02\tRennes")
    assert {r.case: r.site for r in scan(root).manifest.rows} == {
        "sub-01_ses-01": "Lyon",
        "sub-01_ses-02": "Lyon",
        "sub-02_ses-01": "Rennes",
    }


def test_the_name_mapping_of_2020_tells_grades_and_institutions(root):
    for number in (1, 2, 3):
        glioma(root, f"BraTS20_Training_00{number}", 1, 2, 4)
    table(
        root / "name_mapping.csv",
        "Grade,BraTS_2017_subject_ID,BraTS_2018_subject_ID,TCGA_TCIA_subject_ID,BraTS_2019_subject_ID,BraTS_2020_subject_ID",
        "HGG,Brats17_CBICA_AAB_1,Brats18_CBICA_AAB_1,NA,BraTS19_CBICA_AAB_1,BraTS20_Training_001",
        "LGG,Brats17_TCIA_192_1,Brats18_TCIA13_192_1,TCGA-DU-6404,NA,BraTS20_Training_002",
        "HGG,NA,NA,NA,NA,BraTS20_Training_003",
    )
    found = scan(root)
    assert [(r.site, r.group) for r in found.manifest.rows] == [("CBICA", "HGG"), ("TCIA13", "LGG"), ("unknown", "HGG")]
    assert found.remarks == (
        "1 case has no site in the table and was put into the site 'unknown': BraTS20_Training_003",
    )


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
        (["Partition_ID,Subject_ID", "1,FeTS2021_00000"], "names none of the cases on disk, such as 'FeTS2022_00000'"),
        (["age,sex", "1,f"], "no column that names the cases"),
        ([], "no column that names the cases"),
        (["case,site", "FeTS2022_00000,a", "FeTS2022_00000,b"], "case 'FeTS2022_00000' is in two rows that differ"),
        (["case,split", "FeTS2022_00000,half"], "case 'FeTS2022_00000' of site 'all' has split = 'half'"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(root, lines, says):
    fets(root)
    table(root / "mine.csv", *lines)
    with pytest.raises(DataError, match=says):
        scan(root, tables=[root / "mine.csv"])
    with pytest.raises(DataError, match=r"absent\.csv cannot be used .*No such file"):
        scan(root, tables=[root / "absent.csv"])


def with_one_unlabelled(build, *files):
    def both(root):
        build(root)
        for file in files:
            volume(root / file)

    return both


@pytest.mark.parametrize(
    ("build", "remarks"),
    [
        (
            kits19,
            [
                "nothing was taken from predictions: 1 .gz files",
                "1 case on disk is in no table and was left out: case_00210",
            ],
        ),
        (decathlon, ["1 case has no label map and was left out: BRATS_999"]),
        (
            tree,
            [
                "1 case has no label map and was left out: s2",
                "labels are named by their values (label_1, label_2, label_7); "
                "name them by labels in [data], or, to 'data scan', --labels 'NAME=1; NAME=2; NAME=7'",
            ],
        ),
        (fets, []),
        (nnunet_first, ["1 case has no label map and was left out: la_001"]),
        (with_one_unlabelled(prostate, "HK/Case09.nii.gz"), ["1 case has no label map and was left out: Case09"]),
        (
            with_one_unlabelled(decathlon, "imagesTr/BRATS_999.nii.gz"),
            ["1 case has no label map and was left out: BRATS_999"],
        ),
        (
            with_one_unlabelled(bids_derivative, "sub-r010/anat/sub-r010_T1w.nii.gz", "sub-r9/anat/sub-r9_T1w.nii.gz"),
            ["2 cases have no label map and were left out: sub-r9, sub-r010"],
        ),
        (
            with_one_unlabelled(pairs_decathlon, "imagesTr/hippocampus_009.nii.gz"),
            ["1 case has no label map and was left out: hippocampus_009"],
        ),
        (
            with_one_unlabelled(fets, "FeTS2022_00009/FeTS2022_00009_t2.nii.gz"),
            ["1 case on disk is in no table and was left out: FeTS2022_00009"],
        ),
    ],
)
def test_what_is_left_out_or_assumed_is_remarked(root, build, remarks):
    build(root)
    found = [r for r in scan(root).remarks if "one site" not in r and (build is tree or "values" not in r)]
    assert found == remarks


def test_a_truth_without_image_is_left_out_and_damaged_label_maps_count_as_1(root):
    tree(root)
    for file in root.rglob("*"):
        if file.name.startswith(("seg", "Mask")):
            file.write_bytes(b"no image")
    (root / "north/n9/flair.nii.gz").unlink()
    (root / "north/n9/t1.nii.gz").unlink()
    found = scan(root)
    assert found.manifest.rows[0].labels == {"label_1": (1,)}
    assert found.remarks[1] == "1 case has no image and was left out: n9"


def test_several_truths_in_a_case_never_become_images(root):
    for name in ("t1", "mask", "label", "seg"):
        volume(root / f"north/n1/{name}.nii.gz", 1)
    (row,) = scan(root).manifest.rows
    assert (row.images, row.label) == ({"t1": "north/n1/t1.nii.gz"}, "north/n1/seg.nii.gz")


@pytest.mark.parametrize(("names", "mark"), [(["MRI"], [""]), (["T2", "ADC"], ["#0", "#1"])])
def test_only_files_of_several_channels_are_taken_apart(root, names, mark):
    decathlon(root)
    about = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps(about | {"modality": dict(enumerate(names))}))
    row = scan(root).manifest.rows[0]
    assert list(row.images.items()) == [
        (n.lower(), f"imagesTr/BRATS_002.nii.gz{m}") for n, m in zip(names, mark, strict=True)
    ]


@pytest.mark.parametrize(
    ("files", "images"),
    [  # all of sub-1/anat; the truth first
        (["one/*_mask", "one/*_desc-preproc_T2w", "*_T2w", "*_T1w"], ["*_T1w", "one/*_desc-preproc_T2w"]),
        (["one/*_space-A_mask", "one/*_space-B_T1w", "*_T1w", "one/*_space-B_T2w"], ["*_T1w"]),
        (["one/*_space-A_mask", "two/*_space-A_T1w", "*_T1w", "*_ct"], ["*_ct", "two/*_space-A_T1w"]),
        (["*_space-A_mask", "*_space-B_T1w", "*_space-A_T1w"], ["*_space-A_T1w"]),
        (["one/*_label-lesion_mask", "*_desc-other_mask", "*_run-2_T1w", "*_run-1_T1w"], ["*_run-1_T1w"]),
    ],
)
def test_images_are_taken_from_the_space_and_pipeline_of_the_mask(root, files, images):
    def path(file):
        pipeline, _, name = file.rpartition("/")
        return f"{f'derivatives/{pipeline}/' if pipeline else ''}sub-1/anat/{name.replace('*', 'sub-1')}.nii.gz"

    for file in files:
        volume(root / path(file), 1)
    (row,) = scan(root, "bids").manifest.rows
    assert (row.label, list(row.images.values())) == (path(files[0]), [path(f) for f in images])


def test_channels_of_a_volume_are_not_called_colours(root):
    volume(root / "images/a.nii.gz", channels=3)
    volume(root / "labels/a.nii.gz", 1)
    assert scan(root).manifest.modalities == ("channel_0", "channel_1", "channel_2")


def test_channels_of_one_name_are_told_apart_and_label_names_fit_a_cell(root):
    nnunet(root)
    file = root / "Dataset005_Prostate/dataset.json"
    about = json.loads(file.read_text())
    about |= {"channel_names": {"1": "MRI", "0": "MRI"}, "labels": {"background": 0, "a = b, c;d": 1}}
    file.write_text(json.dumps(about))
    found = scan(root).manifest
    assert found.modalities == ("mri", "mri_2") and found.rows[0].labels == {"a_b_cd": (1,)}


def test_pictures_of_one_name_in_a_class_and_in_two_classes_stay_apart(root):
    for name in ("A/1.png", "A/2.png", "A/1.jpg", "B/1.png"):
        picture(root / name)
    assert sorted(r.case for r in scan(root).manifest.rows) == ["A_1", "A_1.png", "A_2", "B_1"]


def empty(root):
    (root / "notes").mkdir()


def unlabelled_cases(root):
    """Looks like pictures in classes, but every folder holds the same sequences."""
    put(root, "north/n{0,1,2,3,4}/t{1,2}.nii.gz")


def unmatched_pairs(root):
    put(root, "Images/a.png", "Labels/b.png=1")


def classes_at_two_levels(root):
    classes(root)
    classes_of_sites(root)


@pytest.mark.parametrize("build", [empty, unlabelled_cases, unmatched_pairs, classes_at_two_levels])
def test_where_nothing_is_found_the_files_are_named(root, build):
    build(root)
    with pytest.raises(DataError, match="no dataset of a known layout") as refusal:
        scan(root)
    assert "\n" not in str(refusal.value)
    assert {
        empty: "no file at all",
        unlabelled_cases: "10 .nii.gz in north/n0, north/n1, north/n2, north/n3, …; nearest layout: tree",
        unmatched_pairs: "2 .png in Images, Labels; nearest layout: pairs",
        classes_at_two_levels: "its folder Barcelona is a dataset of the layout imagefolder: name",
    }[build] in str(refusal.value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_named_format_says_what_it_looked_for(root, name):
    with pytest.raises(DataError, match=f"no case of the format '{name}'") as refusal:
        scan(root, name)
    (line,) = LAYOUTS[name].__doc__.splitlines()
    assert str(refusal.value).endswith(line)


def test_an_unknown_format_and_a_folder_that_is_none_are_refused(root):
    with pytest.raises(ConfigError, match=r"no format called 'brast'; did you mean 'brats'\?"):
        scan(root, "brast")
    with pytest.raises(DataError, match="gone is not a folder"):
        scan(root / "gone")


def test_cases_that_all_lack_the_truth_are_refused(root):
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
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=says) as refusal:
        scan(root)
    assert str(file) in str(refusal.value)
    for text in ("{", "[]", "[" * 100_000, "\xff"):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match="cannot be used as it is"):
            scan(root)


@pytest.mark.parametrize("row", ["1,2,,0", "1,2,3,5", "1,two,3,0"])
def test_a_candidate_that_makes_no_sense_is_refused(root, row):
    luna(root)
    table(root / "CSVFILES/candidates_V2.csv", "seriesuid,coordX,coordY,coordZ,class", f"{UIDS[0]},{row}")
    with pytest.raises(DataError, match=r"candidates_V2\.csv cannot be used"):
        scan(root)


def test_scans_of_luna_without_their_candidates_are_not_taken_for_classes(root):
    luna(root)
    shutil.rmtree(root / "CSVFILES")
    with pytest.raises(DataError, match=r"candidates\.csv cannot be used .*No such file"):
        scan(root)


def test_a_bids_dataset_per_hospital_makes_a_site_each(root):
    for site in ("lyon", "rennes"):
        volume(root / site / "rawdata/sub-01/anat/sub-01_FLAIR.nii.gz")
        volume(root / site / "sourcedata/sub-01/anat/sub-01_FLAIR.nii.gz")
        volume(root / site / "derivatives/manual/sub-01/anat/sub-01_mask.nii.gz", 1)
    rows = scan(root).manifest.rows
    assert [(r.site, r.case, r.images["flair"]) for r in rows] == [
        (s, "sub-01", f"{s}/rawdata/sub-01/anat/sub-01_FLAIR.nii.gz") for s in ("lyon", "rennes")
    ]


@pytest.fixture
def shared():
    if not SHARED.is_dir():
        pytest.skip(f"the real data of {SHARED} are not there")
    return SHARED


@pytest.mark.parametrize(
    ("year", "sizes"),
    [
        (2021, [129, 14, 5, 9, 22, 34, 12, 8, 4, 8, 6, 9, 27, 3, 11, 34, 6]),
        (2022, [511, 6, 15, 47, 22, 34, 12, 8, 4, 8, 14, 11, 35, 6, 13, 30, 9, 382, 4, 33, 35, 7, 5]),
    ],
)
def test_the_real_partitionings_of_fets(root, shared, year, sizes):
    shutil.copy(shared / f"fets_partitions/fets{year}_partitioning_1.csv", root / "partitioning_1.csv")
    text = (root / "partitioning_1.csv").read_text()
    cases = [cell for cell in text.replace("\n", ",").split(",") if cell.startswith("FeTS")]
    for case in cases:
        (root / case).mkdir()
        for name in NAMES["_"]:
            (root / case / f"{case}_{name}.nii.gz").touch()
    found = scan(root)
    assert len(cases) == sum(sizes) and found.remarks == ()
    assert {s: len(rows) for s, rows in found.manifest.sites.items()} == {
        f"{i:02d}": n for i, n in enumerate(sizes, start=1)
    }
    assert found.manifest.label_names == ("WT", "TC", "ET")


def test_the_real_gliomas_are_a_tree(shared):
    found = scan(shared / "tcga_lgg")
    assert found.format == "tree" and found.manifest.modalities == ("flair", "post", "pre")
    assert Counter(r.site for r in found.manifest.rows) == {"CS": 14, "DU": 14, "EZ": 1, "FG": 12, "HT": 14}
    assert found.manifest.rows[0].labels == {"label_1": (1,)}


def test_the_real_hippocampi_are_pairs(shared):
    found = scan(shared / "msd_hippocampus")
    assert found.format == "pairs" and len(found.manifest.rows) == 72
    assert found.manifest.rows[0].labels == {"label_1": (1,), "label_2": (2,)}


def cases_of(root, *names, sites=("A", "B")):
    for site in sites:
        for case in ("p1", "p2"):
            for name in names:
                volume(root / site / case / name.format(case=case), 1)


def test_cases_may_carry_their_name_in_every_file(root):
    cases_of(root, "{case}_T1.nii.gz", "{case}-flair.nii.gz", "{case}_seg.nii.gz")
    found = scan(root)
    assert found.format == "tree" and found.manifest.modalities == ("flair", "t1") and len(found.manifest.rows) == 4
    assert found.manifest.rows[0].label == "A/p1/p1_seg.nii.gz"


def test_the_folder_of_one_hospital_is_a_site(root):
    cases_of(root, "t1.nii.gz", "seg.nii.gz")
    found = scan(root / "A")
    assert found.format == "tree" and set(found.manifest.sites) == {"A"} and len(found.manifest.rows) == 2


def test_label_maps_are_never_classified(root):
    cases_of(root, "{case}x_1_t1.nii.gz", "{case}x_2_seg.nii.gz")
    with pytest.raises(DataError, match="no dataset of a known layout"):
        scan(root)


def test_folders_that_gave_nothing_and_rare_modalities_are_remarked(root):
    cases_of(root, "t1.nii.gz", "seg.nii.gz")
    volume(root / "A" / "p1" / "t1 (copy).nii.gz", 1)
    (root / "lake" / "p9").mkdir(parents=True)
    (root / "lake" / "p9" / "0001.dcm").touch()
    remarks = scan(root).remarks
    assert "nothing was taken from lake: 1 .dcm files" in remarks
    assert any(r.startswith("1 case of 4 has 't1 (copy)', so name the data.modalities") for r in remarks)


def test_links_that_lead_up_do_not_hold_up_the_search(root):
    cases_of(root, "t1.nii.gz", "seg.nii.gz")
    for k in range(12):
        (root / "A" / f"l{k}").symlink_to(root)
    assert len(scan(root).manifest.rows) == 4


@pytest.mark.parametrize(
    ("files", "patients"),
    [
        ([f"BraTS-GLI-{n}/BraTS-GLI-{n}-{{}}.nii.gz" for n in ("00005-100", "00005-101", "00006-100")],
         ["BraTS-GLI-00005", "BraTS-GLI-00005", "BraTS-GLI-00006"]),
        (["BraTS2021_00001/BraTS2021_00001_{}.nii.gz", "BraTS2021_00002/BraTS2021_00002_{}.nii.gz"], ["", ""]),
        (["sub-1/ses-1/anat/sub-1_ses-1_{}.nii.gz", "sub-1/ses-2/anat/sub-1_ses-2_{}.nii.gz",
          "sub-2/anat/sub-2_{}.nii.gz"], ["sub-1", "sub-1", ""]),
    ],
    ids=["time points", "one each", "sessions"],
)  # fmt: skip
def test_the_cases_of_one_patient_are_known_as_such(root, files, patients):
    for file in files:
        kinds = ("T1w", "mask") if "sub-" in file else ("t2f", "seg") if "-GLI-" in file else ("flair", "seg")
        for kind in kinds:
            volume(root / file.format(kind), 1)
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
    (root / "text").mkdir()
    (root / "text/a.mgz").touch()
    with pytest.raises(DataError, match=r"1 \.mgz in the folder itself, none of which is read; convert them"):
        scan(root / "text")


def test_a_single_pair_is_a_dataset(root):
    picture(root / "images/21_training.tif")
    picture(root / "1st_manual/21_manual1.gif", 255)
    assert [(r.case, r.label) for r in scan(root).manifest.rows] == [("21_training", "1st_manual/21_manual1.gif")]
