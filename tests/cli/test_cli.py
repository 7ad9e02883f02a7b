"""The command line as people and scripts meet it: what it prints, what it refuses, what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest

from polysite.algorithms import ALGORITHMS
from studies import text

TINY = text({"north": 4, "south": 3}, "overlap = 0.0", "rounds = 2", patch=8)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_help_waits_for_nothing_heavy():
    heavy = ("torch", "monai", "numpy", "matplotlib", "nibabel", "h5py", "pydicom")
    code = f"import sys, polysite.cli; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_algorithms_lists_all_with_their_paper(polysite):
    code, out, _ = polysite("algorithms", "--json")
    listed = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and {a["name"] for a in listed} == set(ALGORITHMS)
    assert all(a["paper"] and a["summary"].endswith(".") for a in listed)
    assert "McMahan" in polysite("algorithms")[1]


def test_train_prints_a_table_and_names_the_folder(polysite, tiny):
    code, out, _ = polysite("train", tiny, "--out", "runs/one")
    assert code == 0 and "north" in out and "south" in out and "runs/one" in out
    assert (Path("runs/one") / "log.txt").read_text().count("finished") == 1


def test_quiet_is_quiet_and_json_is_json(polysite, tiny):
    assert polysite("train", tiny, "--quiet") == (0, "", "")
    code, out, _ = polysite("train", tiny, "--json")
    *rounds, result = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [r["round"] for r in rounds] == [0, 1] and Path(result["run"]).is_dir()
    assert len(list(Path("runs").iterdir())) == 2  # every run its own folder


def test_print_config_and_set(polysite, tiny):
    code, out, _ = polysite(
        "train", tiny, "--set", "algorithm.lr=0.2", "--set", "train.optimiser=adam", "--print-config"
    )
    assert code == 0 and "lr = 0.2" in out and 'optimiser = "adam"' in out and not Path("runs").exists()


def test_wire_and_no_wire_give_the_same_model(polysite, tiny):
    for wire in ("true", "false"):
        polysite("train", tiny, "--quiet", "--out", f"runs/{wire}", "--set", f"run.wire={wire}")
    assert (
        Path("runs/true/models/last.safetensors").read_bytes()
        == Path("runs/false/models/last.safetensors").read_bytes()
    )


def test_a_finished_run_can_be_resumed_and_does_not_change(polysite, tiny):
    polysite("train", tiny, "--quiet", "--out", "runs/one")
    before = {p: p.read_bytes() for p in Path("runs/one").rglob("*") if p.is_file()}
    assert polysite("train", "--resume", "runs/one", "--quiet")[0] == 0
    assert {p: p.read_bytes() for p in Path("runs/one").rglob("*") if p.is_file()} == before


def test_phantoms_written_as_nifti_train_like_a_folder(polysite, folder_config):
    code, out, _ = polysite("train", folder_config, "--out", "runs/folder")
    assert code == 0 and "north" in out
    assert json.loads(Path("runs/folder/result.json").read_text())["test"]["north"]


@pytest.fixture
def folder_config(polysite, tiny, tmp_path):
    """A configuration on NIfTI files, written by ``polysite data phantom``."""
    sites = "data.sites={north={cases=3},south={cases=3}}"
    code, out, err = polysite("data", "phantom", tmp_path / "data", "--set", "data.shape=[24,24,24]", "--set", sites)
    assert (code, err) == (0, "") and "6 cases of 2 hospitals" in out
    rest = TINY[TINY.index("[train]") :]
    path = tmp_path / "folder.toml"
    path.write_text(
        '[model]\nfilters = [2, 4, 4]\n[data]\nname = "files"\npath = "data"\n'
        f"[data.labels]\nWT = [1, 2, 4]\nTC = [1, 4]\nET = [4]\n{rest}"
    )
    return path


CONFIGS = {
    "no such file": (None, "cannot be read"),
    "not TOML": ("[run\nrounds = 3", "is not valid TOML"),
    "not text": (b"\xff\xfe\x00", "cannot be read"),
    "unknown algorithm": ('[algorithm]\nname = "fedavgg"', "no algorithm called 'fedavgg'; did you mean 'fedavg'?"),
    "unknown section": ("[trian]\nlr = 1", "unknown key 'trian'; did you mean 'train'?"),
    "unknown key": ("[train]\nlearning_rate = 1", "unknown key 'train.learning_rate'"),
    "key of another section": ("[algorithm]\nbatch = 1", "unknown key 'algorithm.batch'; did you mean 'train.batch'?"),
    "wrong type": ('[train]\nlr = "fast"', "train.lr = 'fast' must be a number"),
    "wrong choice": ('[train]\noptimiser = "lion"', "train.optimiser = 'lion' must be one of 'sgd', 'adam', 'adamw'"),
    "a section that is a value": ("train = 3", "train = 3 must be a section"),
    "negative rounds": ("[run]\nrounds = -1", "run.rounds must be at least one"),
    "momentum under scaffold": (
        '[algorithm]\nname = "scaffold"\n[train]\nmomentum = 0.9',
        "scaffold is derived for plain SGD",
    ),
    "epochs and steps": ("[algorithm]\nepochs = 1\nsteps = 2", "not both"),
    "patch that the network cannot halve": ("[train]\npatch = [30, 30, 30]", "multiple of 8"),
    "flat patch": ("[train]\npatch = [32, 32]", "2 sides for 3D data"),
    "no cases at a site": ("[data.sites.north]\ncases = 0", "data.sites.north: cases = 0"),
    "one case at a site": ("[data.sites.north]\ncases = 1", "site 'north' has one case, 'north-000'; it takes two"),
    "a name that is a list": ('[algorithm]\nname = ["fedavg"]', "no algorithm called ['fedavg']"),
    "negative seed": ("seed = -1", "seed = -1 must lie between"),
    "negative momentum": ("[train]\nmomentum = -0.5", "train.momentum must not be negative"),
    "no epochs": ("[algorithm]\nepochs = 0", "algorithm: epochs = 0 must be at least 1"),
    "a negative mu": ('[algorithm]\nname = "fedprox"\nmu = -1', "algorithm: mu = -1.0 must be at least 0"),
    "a server that stands still": (
        '[algorithm]\nname = "fedadam"\nserver.lr = 0',
        "algorithm.server: lr = 0.0 must be",
    ),
    "krum among four": ('[algorithm]\nname = "krum"', "among 5 or more, and there are 4"),
    "a factor for nobody": (
        '[algorithm]\nname = "weighted"\nweights.isle = 0.3',
        "algorithm.weights names 'isle', which is no site that trains; did you mean 'island'?",
    ),
    "a factor that is a word": ('[algorithm]\nname = "weighted"\nweights.island = "low"', "algorithm.weights.island"),
    "factors around krum": ('[algorithm]\nname = "weighted"\ninner.name = "krum"', "Krum does not average by weights"),
    "a weighted scaffold with momentum": (
        '[algorithm]\nname = "weighted"\ninner.name = "scaffold"\n[train]\nmomentum = 0.9',
        "derived for plain SGD",
    ),
    "q-fedavg with momentum": ('[algorithm]\nname = "qfedavg"\n[train]\nmomentum = 0.9', "derived for plain SGD"),
    "q-fedavg with clipped gradients": (
        '[algorithm]\nname = "qfedavg"\n[train]\nclip_gradients = 1.0',
        "would be wrong with train.clip_gradients = 1.0; set train.clip_gradients = 0.0",
    ),
    "a negative norm": ("[train]\nclip_gradients = -1", "train.clip_gradients must not be negative"),
    "gradients clipped twice": (
        '[train]\nclip_gradients = 1.0\nprivate.unit = "patient"',
        "train.clip_gradients = 1 has no effect with train.private.unit = 'patient'",
    ),
    "no patience": ("[run]\npatience = 0", "run.patience must be at least one"),
    "pooled local training": (
        '[algorithm]\nname = "local"\n[run]\npooled = true',
        "goes with fedavg or cfft, not with 'local'",
    ),
    "no such device": ('[train]\ndevice = "mps"', "is not supported"),
    "no path": ('[data]\nname = "files"', "data.path is missing"),
    "path is nowhere": ('[data]\nname = "files"\npath = "nowhere"', "the manifest nowhere cannot be read"),
    "no such preset": ('preset = "fets"', "no preset called 'fets'; known: cc359, distance_aware"),
    "a network that classifies": ('[model]\nname = "densenet_small"', "the data are for segmentation, the model for"),
    "a loss that classifies": (
        '[train]\nloss = "ce"',
        "train.loss = 'ce' is a softmax over background and labels",
    ),
    "no such fold": ("[split]\nfolds = 5\nfold = 5", "split.fold = 5: with split.folds = 5 it lies below 5"),
    "too few cases to cross-validate": (
        "[split]\nfolds = 3\n[data.sites.north]\ncases = 2",
        "site 'north' has 2 cases; cross-validation takes three",
    ),
    "an unknown site to leave out": ('[federation]\nname = "leave_out"\nsite = "isle"', "did you mean 'island'?"),
    "an unknown label to sort by": (
        '[federation]\nname = "by_label_size"\nlabel = "XT"',
        "federation.label names 'XT', which is not in the data",
    ),
    "an orientation that is none": ('[prepare]\norientation = "RAX"', "one letter of each of LR, PA and IS"),
    "unknown modality": ('[data.sites.north]\nmissing = ["t9"]', "t9"),
}


@pytest.mark.parametrize(("text", "says"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_bad_configuration_is_one_sentence_and_exit_code_2(polysite, tmp_path, text, says):
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = polysite("train", path)
    assert code == 2 and out == "" and err.startswith("polysite: ") and err.count("\n") == 1 and says in err
    assert not Path("runs").exists()  # nothing is left behind


def test_a_bad_override_is_one_sentence(polysite):
    for words, says in (
        (["--set", "algorithm.lr"], "KEY=VALUE"),
        (["--set", "algorithm.momentun=1"], "unknown key"),
        (["--resume", "nowhere"], "not a run folder"),
        (["--resume", "nowhere", "--set", "a=1"], "leave out"),
    ):
        code, _, err = polysite("train", *words)
        assert code == 2 and says in err and err.count("\n") == 1


def image(case, name="t1"):
    return nibabel.load(Path("data") / "north" / case / f"{name}.nii.gz")


def rewrite(case, name, change, affine=None):
    old = image(case, name)
    array = change(np.asarray(old.dataobj).copy())
    nibabel.save(
        nibabel.Nifti1Image(array, old.affine if affine is None else affine),
        Path("data") / "north" / case / f"{name}.nii.gz",
    )


def put(value):
    def change(array):
        array[tuple(s // 2 for s in array.shape)] = value
        return array

    return change


def flip(path):
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 255
    Path(path).write_bytes(content)


CASE = "north-001"
FILE = f"data/north/{CASE}"
DAMAGE = {
    "NaN in an image": (
        lambda: rewrite(CASE, "t1", put(np.nan)),
        f"case '{CASE}' of site 'north': 1 voxels of the image are NaN",
    ),
    "label outside the declared": (
        lambda: rewrite(CASE, "seg", put(7)),
        f"{FILE}/seg.nii.gz: label values [7] are not declared",
    ),
    "truncated file": (
        lambda: Path(f"{FILE}/t2.nii.gz").write_bytes(Path(f"{FILE}/t2.nii.gz").read_bytes()[:900]),
        f"{FILE}/t2.nii.gz cannot be read",
    ),
    "not NIfTI": (lambda: Path(f"{FILE}/t2.nii.gz").write_bytes(b"hello"), f"{FILE}/t2.nii.gz cannot be read"),
    "one flipped bit": (lambda: flip(f"{FILE}/t2.nii.gz"), f"{FILE}/t2.nii.gz cannot be read"),
    "missing modality": (
        lambda: Path(f"{FILE}/flair.nii.gz").unlink(),
        f"case '{CASE}' of site 'north' has no flair",
    ),
    "other shape": (
        lambda: rewrite(CASE, "t1ce", lambda a: a[:-1]),
        f"{FILE}/t1ce.nii.gz has the shape (23, 24, 24), flair.nii.gz has (24, 24, 24)",
    ),
    "other affine": (lambda: rewrite(CASE, "t1ce", lambda a: a, np.diag([2.0, 1, 1, 1])), "lie up to 23 voxels apart"),
    "four dimensions": (
        lambda: rewrite(CASE, "t1", lambda a: a[..., None].repeat(2, -1)),
        f"{FILE}/t1.nii.gz has 2 channels; say which, as in t1.nii.gz#0",
    ),
    "an empty label map": (lambda: rewrite(CASE, "seg", lambda a: 0 * a), f"{FILE}/seg.nii.gz: nothing is labelled"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_bad_case_is_named_in_one_sentence(polysite, folder_config, damage, says):
    damage()
    code, out, err = polysite("train", folder_config)
    assert code == 2 and out == "" and err.startswith("polysite: ") and err.count("\n") == 1 and says in err
    assert not Path("runs").exists()


FULL = """
import resource, signal, sys
from polysite import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.argv = ["polysite", *{words!r}]
cli.main()
"""


def test_a_full_disk_ends_in_a_sentence_and_loses_nothing(polysite, tiny):
    """A run that stands after round 1 of 4 goes on where the kernel refuses files as large as a checkpoint."""
    polysite(
        "train", tiny, "--quiet", "--out", "runs/whole", "--set", "run.rounds=4", "--set", "run.checkpoint_every=1"
    )
    polysite("train", tiny, "--quiet", "--out", "runs/full", "--set", "run.rounds=4", "--set", "run.checkpoint_every=2")
    full = Path("runs/full")
    for late in (full / "result.json", *full.glob("checkpoints/*-00000[23].safetensors"), *full.glob("models/*")):
        late.unlink()
    before = {p: p.read_bytes() for p in full.glob("checkpoints/*")}
    limit = Path("runs/whole/checkpoints/round-000003.safetensors").stat().st_size - 2000
    words = ["train", "--resume", str(full), "--quiet"]
    run = subprocess.run([sys.executable, "-c", FULL.format(limit=limit, words=words)], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "could not be written" in run.stderr, run.stderr
    assert len(before) == 2 and {p: p.read_bytes() for p in full.glob("checkpoints/*")} == before
    assert not [p for p in full.rglob("*") if "partial" in p.name]
    assert polysite("train", "--resume", full, "--quiet")[0] == 0  # once there is room again
    last = "models/last.safetensors"
    assert (full / last).read_bytes() == (Path("runs/whole") / last).read_bytes()


ASSESSED = TINY.replace("cases = 4", "cases = 8").replace("cases = 3", "cases = 7")


def test_assess_tells_and_writes(polysite, tmp_path):
    """A table, advice and where to read on; or everything as JSON; or nothing."""
    (tmp_path / "study.toml").write_text(ASSESSED)
    code, out, _ = polysite("assess", "study.toml", "--out", "found")
    assert code == 0
    for words in ("2 hospitals with 9 cases", "Strategies", "1. Federated averaging", "What left each hospital"):
        assert words in out
    assert "found/index.html" in out and "polysite train found/strategies/1-fedavg.toml" in out
    code, out, _ = polysite("assess", "study.toml", "--out", "again", "--json")
    assert code == 0 and json.loads(out)["cases"] == {"north": 4, "south": 5}
    assert polysite("assess", "study.toml", "--out", "quiet", "--quiet") == (0, "", "")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--out", "."], "exists already"),
        (["--set", "assess.take=-1"], "assess.take = -1 must be at least 0"),
        (["--set", "assess.take=often"], "assess.take = 'often' must be one of"),
        (["--set", "assess.take=1"], "assess.take = 1, but of 2 sites"),
        (["--set", "assess.fewest=99"], "0 of 2 can be described"),
        (["--set", "encoder=medicalnet"], "encoder.path is missing"),
        (["--set", "encoder.name=medicalnet", "--set", "encoder.path=none.pth"], "none.pth"),
        (["--set", "encoder=resnet"], "there is no encoder called 'resnet'"),
        (["--set", "assess.level=3"], "did you mean 'levels'?"),
        (["--out", "study.toml/x"], "study.toml is no folder"),
    ],
)
def test_assess_refuses_in_a_sentence(polysite, tmp_path, words, reason):
    (tmp_path / "study.toml").write_text(ASSESSED)
    code, out, err = polysite("assess", "study.toml", *words)
    assert code == 2 and reason in err and err.startswith("polysite: ") and err.count("\n") == 1 and not out
    assert [p.name for p in tmp_path.iterdir()] == ["study.toml"]


def test_assess_names_the_study_of_its_first_strategy(polysite, tmp_path, monkeypatch):
    """Not the first file by name: weights that are tried beside it have studies, too."""
    from polysite import assessment
    from polysite.report import tables

    strategy = SimpleNamespace(file="1-weighted.toml")
    done = SimpleNamespace(folder=tmp_path / "found", assessment=None, verdict=SimpleNamespace(strategies=[strategy]))
    (done.folder / "strategies").mkdir(parents=True)
    for name in ("1-weighted-0.1.toml", "1-weighted.toml"):
        (done.folder / "strategies" / name).touch()
    monkeypatch.setattr(assessment, "assess", lambda *_: done)
    monkeypatch.setattr(tables, "show_assessment", lambda *_: None)
    (tmp_path / "study.toml").write_text(TINY)
    code, out, _ = polysite("assess", "study.toml", "--out", "found")
    assert code == 0 and f"polysite train {done.folder / 'strategies' / '1-weighted.toml'}\n" in out
