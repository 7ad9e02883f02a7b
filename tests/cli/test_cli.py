"""The command line as people and scripts meet it: what it prints, what it refuses, what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest

from polysite.algorithms import ALGORITHMS
from studies import text

TINY = text({"north": 4, "south": 3}, "overlap = 0.0", "rounds = 2", patch=8)
LAST = "models/last.safetensors"


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def contents(folder):
    return {p: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def refused(answer, says):
    """One sentence, exit code 2, and no run is left behind."""
    code, out, err = answer
    assert code == 2 and out == "" and err.startswith("polysite: ") and err.count("\n") == 1 and says in err
    assert not Path("runs").exists()


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


def test_train_prints_a_table_and_a_finished_run_that_is_resumed_does_not_change(polysite, tiny):
    code, out, _ = polysite("train", tiny, "--out", "runs/one")
    assert code == 0 and "north" in out and "south" in out and "runs/one" in out
    before = contents("runs/one")
    assert before[Path("runs/one/log.txt")].count(b"finished") == 1
    assert polysite("train", "--resume", "runs/one", "--quiet") == (0, "", "")
    assert contents("runs/one") == before


def test_quiet_is_quiet_json_is_json_and_the_wire_changes_nothing(polysite, tiny):
    assert polysite("train", tiny, "--quiet", "--set", "run.wire=true") == (0, "", "")
    (wired,) = Path("runs").iterdir()
    code, out, _ = polysite("train", tiny, "--json", "--set", "run.wire=false")
    *rounds, result = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [r["round"] for r in rounds] == [0, 1]
    assert len(list(Path("runs").iterdir())) == 2  # every run its own folder
    assert (Path(result["run"]) / LAST).read_bytes() == (wired / LAST).read_bytes()


def test_print_config_and_set(polysite, tiny):
    sets = ("--set", "algorithm.lr=0.2", "--set", "train.optimiser=adam")
    code, out, _ = polysite("train", tiny, *sets, "--print-config")
    assert code == 0 and "lr = 0.2" in out and 'optimiser = "adam"' in out and not Path("runs").exists()


@pytest.fixture
def folder_config(polysite, tiny, tmp_path):
    """A configuration on NIfTI files, written by ``polysite data phantom``."""
    sites = "data.sites={north={cases=3},south={cases=3}}"
    code, out, err = polysite("data", "phantom", tmp_path / "data", "--set", "data.shape=[24,24,24]", "--set", sites)
    assert (code, err) == (0, "") and "6 cases of 2 hospitals" in out
    files = '[model]\nfilters = [2, 4, 4]\n[data]\nname = "files"\npath = "data"\n'
    labels = "[data.labels]\nWT = [1, 2, 4]\nTC = [1, 4]\nET = [4]\n"
    path = tmp_path / "folder.toml"
    path.write_text(f"{files}{labels}{TINY[TINY.index('[train]') :]}")
    return path


CONFIGS = {
    None: "cannot be read",
    b"\xff\xfe\x00": "cannot be read",
    "[run\nrounds = 3": "is not valid TOML",
    '[algorithm]\nname = "fedavgg"': "no algorithm called 'fedavgg'; did you mean 'fedavg'?",
    "[trian]\nlr = 1": "unknown key 'trian'; did you mean 'train'?",
    "[algorithm]\nbatch = 1": "unknown key 'algorithm.batch'; did you mean 'train.batch'?",
    '[train]\nlr = "fast"': "train.lr = 'fast' must be a number",
    '[train]\noptimiser = "lion"': "train.optimiser = 'lion' must be one of 'sgd', 'adam', 'adamw'",
    "seed = -1": "seed = -1 must lie between",
    "[run]\nrounds = -1": "run.rounds must be at least one",
    "[algorithm]\nepochs = 1\nsteps = 2": "not both",
    '[algorithm]\nname = "fedadam"\nserver.lr = 0': "algorithm.server: lr = 0.0 must be",
    '[algorithm]\nname = "local"\n[run]\npooled = true': "goes with fedavg or cfft, not with 'local'",
    '[algorithm]\nname = "weighted"\nweights.isle = 0.3': "names 'isle', which is no site that trains; did you mean",
    '[algorithm]\nname = "weighted"\nweights.island = "low"': "algorithm.weights.island",
    '[algorithm]\nname = "weighted"\ninner.name = "scaffold"\n[train]\nmomentum = 0.9': "derived for plain SGD",
    '[algorithm]\nname = "qfedavg"\n[train]\nclip_gradients = 1.0': "would be wrong with train.clip_gradients = 1.0",
    "[train]\nmomentum = -0.5": "train.momentum must not be negative",
    '[train]\nclip_gradients = 1.0\nprivate.unit = "patient"': "has no effect with train.private.unit = 'patient'",
    "[train]\npatch = [30, 30, 30]": "multiple of 8",
    '[train]\ndevice = "mps"': "is not supported",
    '[train]\nloss = "ce"': "train.loss = 'ce' is a softmax over background and labels",
    '[model]\nname = "densenet_small"': "the data are for segmentation, the model for",
    '[data]\nname = "files"': "data.path is missing",
    '[data]\nname = "files"\npath = "nowhere"': "the manifest nowhere cannot be read",
    "[data.sites.north]\ncases = 0": "data.sites.north: cases = 0",
    "[data.sites.north]\ncases = 1": "site 'north' has one case, 'north-000'; it takes two",
    'preset = "fets"': "no preset called 'fets'; known: cc359, distance_aware",
    "[split]\nfolds = 5\nfold = 5": "split.fold = 5: with split.folds = 5 it lies below 5",
    "[split]\nfolds = 3\n[data.sites.north]\ncases = 2": "site 'north' has 2 cases; cross-validation takes three",
    '[federation]\nname = "leave_out"\nsite = "isle"': "did you mean 'island'?",
    '[federation]\nname = "by_label_size"\nlabel = "XT"': "federation.label names 'XT', which is not in the data",
    '[prepare]\norientation = "RAX"': "one letter of each of LR, PA and IS",
}


@pytest.mark.parametrize(("text", "says"), CONFIGS.items())
def test_a_bad_configuration_is_one_sentence_and_exit_code_2(polysite, tmp_path, text, says):
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(polysite("train", path), says)


def test_a_bad_override_is_one_sentence(polysite):
    for words, says in (
        ("--set algorithm.lr", "KEY=VALUE"),
        ("--set algorithm.momentun=1", "unknown key"),
        ("--resume nowhere", "not a run folder"),
        ("--resume nowhere --set a=1", "leave out"),
    ):
        refused(polysite("train", *words.split()), says)


CASE = "north-001"
FILE = f"data/north/{CASE}"


def rewrite(name, change):
    file = Path(FILE) / f"{name}.nii.gz"
    old = nibabel.load(file)
    nibabel.save(nibabel.Nifti1Image(change(np.asarray(old.dataobj).copy()), old.affine), file)


def with_nan(array):
    array[tuple(s // 2 for s in array.shape)] = np.nan
    return array


def cut(file):
    file.write_bytes(file.read_bytes()[:900])


DAMAGE = {  # the same checks as those of ``polysite data check``, which tests/data tries one by one
    f"case '{CASE}' of site 'north': 1 voxels of the image are NaN": lambda: rewrite("t1", with_nan),
    f"{FILE}/t2.nii.gz cannot be read": lambda: cut(Path(f"{FILE}/t2.nii.gz")),
    f"case '{CASE}' of site 'north' has no flair": lambda: Path(f"{FILE}/flair.nii.gz").unlink(),
    f"{FILE}/t1.nii.gz has 2 channels; say which, as in t1.nii.gz#0": lambda: rewrite(
        "t1", lambda a: a[..., None].repeat(2, -1)
    ),
    f"{FILE}/seg.nii.gz: nothing is labelled": lambda: rewrite("seg", lambda a: 0 * a),
}


@pytest.mark.parametrize(("says", "damage"), DAMAGE.items())
def test_a_bad_case_is_named_in_one_sentence(polysite, folder_config, says, damage):
    damage()
    refused(polysite("train", folder_config), says)


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
    whole, full = Path("runs/whole"), Path("runs/full")
    for out, every in ((whole, 1), (full, 2)):
        words = ("--set", "run.rounds=4", "--set", f"run.checkpoint_every={every}")
        polysite("train", tiny, "--quiet", "--out", out, *words)
    for late in (full / "result.json", *full.glob("checkpoints/*-00000[23].safetensors"), *full.glob("models/*")):
        late.unlink()
    before = contents(full / "checkpoints")
    limit = (whole / "checkpoints/round-000003.safetensors").stat().st_size - 2000
    words = ["train", "--resume", str(full), "--quiet"]
    run = subprocess.run([sys.executable, "-c", FULL.format(limit=limit, words=words)], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "could not be written" in run.stderr, run.stderr
    assert len(before) == 2 and contents(full / "checkpoints") == before
    assert not [p for p in full.rglob("*") if "partial" in p.name]
    assert polysite("train", "--resume", full, "--quiet")[0] == 0  # once there is room again
    assert (full / LAST).read_bytes() == (whole / LAST).read_bytes()


@pytest.fixture
def assessed(tmp_path):
    (tmp_path / "study.toml").write_text(TINY.replace("cases = 4", "cases = 8").replace("cases = 3", "cases = 7"))


def test_assess_tells_and_writes(polysite, assessed):
    """A table, advice and where to read on; or everything as JSON."""
    code, out, _ = polysite("assess", "study.toml", "--out", "found")
    assert code == 0
    for words in ("2 hospitals with 9 cases", "Strategies", "1. Federated averaging", "What left each hospital"):
        assert words in out
    assert "found/index.html" in out and "polysite train found/strategies/1-fedavg.toml" in out
    code, out, _ = polysite("assess", "study.toml", "--out", "again", "--json")
    assert code == 0 and json.loads(out)["cases"] == {"north": 4, "south": 5}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--out .", "exists already"),
        ("--out study.toml/x", "study.toml is no folder"),
        ("--set assess.take=-1", "assess.take = -1 must be at least 0"),
        ("--set assess.take=1", "assess.take = 1, but of 2 sites"),
        ("--set encoder=medicalnet", "encoder.path is missing"),
        ("--set encoder.name=medicalnet --set encoder.path=none.pth", "none.pth"),
        ("--set encoder=resnet", "there is no encoder called 'resnet'"),
    ],
)
def test_assess_refuses_in_a_sentence(polysite, tmp_path, assessed, words, reason):
    refused(polysite("assess", "study.toml", *words.split()), reason)
    assert [p.name for p in tmp_path.iterdir()] == ["study.toml"]


def test_an_advice_over_hospitals_is_refused_before_a_port_is_opened(polysite):
    for words, why in (
        (("--no-models", "--trainings", 3), "has no budget"),
        (("--set", "run.pooled=true"), "scans would have to leave the hospitals"),
        ((), "server.toml"),
    ):
        code, _, said = polysite("deploy", "advise", *words)
        assert code == 2 and why in " ".join(said.split())
