"""Settings from the data: rules by hand, what a study keeps, and pictures that train with no setting at all."""

import json
import logging
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

import polysite as ps
import retinas
from polysite import config, planning
from polysite.cli import app
from polysite.cli.base import study_of
from polysite.data.files import Files
from polysite.engines import phases
from polysite.engines.plan import Plan
from polysite.engines.record import RoundRecord, SiteRecord
from polysite.errors import ConfigError, DataError
from polysite.planning import SiteStatistics, make_plan
from polysite.planning.rules import Frame
from polysite.planning.studies import for_hospitals

BRAIN = SiteStatistics(
    "north", 20, 4, 3, "segmentation", (140, 172, 140), (1.0, 1.0, 1.0), 1.0, ("RAS",), (140, 172, 140), (1.0, 1.0, 1.0)
)
PHOTO = SiteStatistics("drive", 40, 3, 1, "segmentation", (999, 960), turned_shape=(999, 960))


def test_volumes_of_one_spacing_are_left_as_they_are():
    values = make_plan([BRAIN, replace(BRAIN, site="south")]).values
    assert values == {
        "train.patch": (40, 40, 40),
        "train.batch": 2,
        "train.patches": 9,  # 12 training cases: 50 steps of 2
        "train.foreground": 0.33,
        "train.lr": 0.099,
        "run.validate_every": 8,  # 6 * 8 * 6 windows of a fifth of the cases, against 3 * 9 patches of three fifths
    }
    large = make_plan([BRAIN], Frame(divisor=16, device="cuda")).values
    assert large["train.patch"] == (128, 128, 128) and large["train.batch"] == 2 and large["train.lr"] > 0.5
    assert "run.validate_every" not in large


def test_a_large_picture_is_not_validated_in_small_windows():
    plan = make_plan([PHOTO])
    assert plan.values["train.patch"] == (256, 256) and "train.window" not in plan.values  # that of the patch
    assert plan.validation == pytest.approx(0.2 * 49 / (0.6 * 5 * 3)) and plan.values["run.validate_every"] == 3
    small = make_plan([replace(PHOTO, shape=(70, 50), turned_shape=(70, 50))]).values
    assert small["train.patch"] == (72, 56) and small["train.batch"] == 12


def test_unlike_spacings_and_axes_are_brought_together():
    thick = replace(
        BRAIN, site="south", cases=30, axes=("LPS",), spacing=(0.5, 0.5, 5.0), turned_spacing=(0.5, 0.5, 5.0),
        shape=(400, 420, 30), turned_shape=(400, 420, 30),
    )  # fmt: skip
    values = make_plan([BRAIN, thick]).values
    assert values["prepare.orientation"] == "RAS"
    assert values["prepare.spacing"] == (0.5, 0.5, 1.0)  # 5 mm is more than 3 times 0.5: as at the finest site
    assert values["train.patch"][2] < 64
    near = replace(BRAIN, site="south", spacing=(1.05, 1, 1), turned_spacing=(1.05, 1, 1))
    assert "prepare.spacing" not in make_plan([BRAIN, near]).values
    own = make_plan([BRAIN, thick], Frame(spacing=(2.0, 2.0, 2.0), orientation="LPS")).values
    assert not {"prepare.spacing", "prepare.orientation"} & own.keys()
    assert make_plan([BRAIN], Frame(slices="coronal")).values["train.patch"] == (144, 144)


def test_sites_that_do_not_go_together_are_named():
    with pytest.raises(DataError, match=r"site 'drive' has 3 modalities of 2D images .* and site 'north' 4 of 3D"):
        make_plan([BRAIN, PHOTO])


def test_the_statistics_of_a_folder_are_medians(tmp_path):
    rows = ["site,case,t1,label,labels"]
    for k, code in enumerate(("RAS", "RAS", "SPL")):
        image = np.zeros((30, 20, 10) if code == "RAS" else (10, 20, 30), np.float32)
        image[2:-2, 1:-1, 1:-1] = np.random.default_rng(k).random(np.array(image.shape) - (4, 2, 2)) + 1
        affine = np.diag([1, 2, 3, 1.0]) if code == "RAS" else np.array(
            [[0, 0, -1, 0], [0, -2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 1.0]]
        )  # fmt: skip
        made = nibabel.Nifti1Image(image, affine)
        made.header.set_xyzt_units("mm")
        nibabel.save(made, tmp_path / f"{k}.nii.gz")
        nibabel.save(nibabel.Nifti1Image((image > 1.5).astype(np.uint8), affine), tmp_path / f"{k}_seg.nii.gz")
        rows.append(f"all,c{k},{k}.nii.gz,{k}_seg.nii.gz,x=1")
    (tmp_path / "m.csv").write_text("\n".join(rows))
    (found,) = planning.measure(Files(str(tmp_path / "m.csv")))
    assert found.turned_shape == (26, 18, 8) and found.turned_spacing == (1.0, 2.0, 3.0)
    assert found.axes == ("RAS", "SPL") and found.spread == 1.0 and (found.cases, found.channels) == (3, 1)
    assert SiteStatistics.parse(found.to_json(), "here") == found
    study = ps.plan(tmp_path / "m.csv", run={"rounds": 3})
    assert study.prepare.orientation == "RAS" and study.train.patch == (32, 24, 8) and study.run.rounds == 3
    for odd in ("{}", '{"site": 3}', found.to_json().replace("26", "0"), found.to_json().replace("26", "1e999"), "[]"):
        with pytest.raises(DataError, match=r"here (does not hold|holds) "):
            SiteStatistics.parse(odd, "here")


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    return retinas.write(tmp_path_factory.mktemp("eyes") / "scans", cases=4, side=160)


@pytest.mark.parametrize("side", ["1" + 400 * "0", "1e999", "NaN", "-3", "0"])
def test_statistics_that_no_images_have_are_refused(side):
    text = SiteStatistics("north", 9, 2, 3, "segmentation", (140, 77, 88)).to_json().replace("77", side)
    with pytest.raises(DataError, match=r"north\.json (holds statistics that no images have|does not hold)"):
        SiteStatistics.parse(text, "north.json")


def test_only_what_a_study_leaves_open_is_planned(eyes, tmp_path):
    said = []
    study = study_of(eyes, ["train.lr=0.5", "run.rounds=4"], said)
    assert study.train.patch == (160, 160) and study.train.lr == 0.5 and study.run.rounds == 4
    assert not any("train.lr" in line for line in said) and "the median image has" in said[0]
    assert config.parse(config.dump(study)) == study  # as config.toml has it
    own = tmp_path / "study.toml"
    own.write_text(f'[data]\nname = "files"\npath = "{eyes}"\n[train]\nbatch = 3\n')
    assert study_of(own, []).train.patch == (160, 160) and study_of(own, []).train.batch == 3
    own.write_text(f'[data]\nname = "files"\npath = "{eyes}"\n[train]\npatch = [64, 64]\n')
    assert study_of(own, []) == config.load(own)
    own.write_text(f'preset = "fets_benchmark"\n[data]\nname = "files"\npath = "{eyes}"\n')
    assert study_of(own, []) == config.load(own) and study_of(own, []).train.patch == (128, 128, 128)
    own.write_text('[data]\nname = "files"\npath = "nowhere.csv"\n')
    assert study_of(own, []) == config.load(own)  # 'train --print-config' needs no images
    assert study_of(None, []) == config.Study()
    assert study_of(eyes, ["train.patch=[32,32]"]).train.patch == (32, 32)


def test_hospitals_send_medians_if_their_policy_allows_it(eyes, tmp_path, capsys):
    from polysite.deploy.site import own_statistics
    from polysite.deploy.site.policy import TEXT

    for name in retinas.CAMERAS:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "site.toml").write_text(
            f'name = "{name}"\nserver = "localhost:1"\n[data]\nname = "files"\npath = "{eyes}"\nsites = ["{name}"]\n'
        )
        (folder / "policy.toml").write_text(TEXT.replace("fewest = 5", "fewest = 4"))
        own_statistics.write(folder, tmp_path / f"{name}.json")
    sent = (tmp_path / "drive.json").read_text()
    assert (
        json.loads(sent)["cases"] == 4 and str(eyes) not in sent and (tmp_path / "drive.json").stat().st_mode & 63 == 0
    )
    sites = [planning.statistics.read(tmp_path / f"{name}.json") for name in retinas.CAMERAS]
    study, _ = for_hospitals(sites, ("red", "green", "blue"), ("mask",))
    large, _ = for_hospitals(sites, ("red", "green", "blue"), ("mask",), "cuda")
    assert large.train.batch > study.train.batch
    words = ["data", "plan", *(str(tmp_path / f"{name}.json") for name in retinas.CAMERAS)]
    words += ["--modalities", "red, green, blue", "--labels", "mask", "--out", str(tmp_path / "study.toml")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "train.patch" in shown.stdout
    assert config.load(tmp_path / "study.toml") == study
    assert study.train == replace(ps.plan(eyes).train, device="auto") and study.data.dims == 2
    with pytest.raises(ConfigError, match="1 modalities are named, and the hospitals have 3"):
        for_hospitals(sites, ("t1",), ("mask",))
    (tmp_path / "drive" / "policy.toml").write_text(TEXT)
    with pytest.raises(ConfigError, match=r"4 cases are too few for medians: .*policy.toml says fewest = 5"):
        own_statistics.write(tmp_path / "drive", tmp_path / "no.json")
    (tmp_path / "drive" / "policy.toml").write_text(TEXT.replace("assess = true", "assess = false"))
    with pytest.raises(ConfigError, match=r"may not be described: .*policy.toml says assess = false"):
        own_statistics.write(tmp_path / "drive", tmp_path / "no.json")
    assert not (tmp_path / "no.json").exists()


def test_validation_that_outlasts_training_is_said(caplog):
    round = RoundRecord(
        1, 0, {"north": SiteRecord(loss=1.0, steps=1, lr_sum=1.0, seconds=20.0, bytes_down=0, bytes_up=0)}
    )
    with caplog.at_level(logging.WARNING, "polysite"):
        assert not phases._note_slow(Plan(), round, 19.0) and not caplog.text
        assert phases._note_slow(Plan(), round, 50.0)
    assert "validation took 50 s and training 20 s in round 2" in caplog.text
    assert "run.validate_every = 5" in caplog.text


@pytest.mark.soak
@pytest.mark.parametrize(("rounds", "least"), [(["run.rounds=4"], 0.6), ([], 0.8)], ids=["four", "all"])
def test_retinas_of_three_hospitals_train_with_no_setting_at_all(rounds, least, tmp_path):
    """Pictures of 600 x 600; a few of the thirty rounds suffice. Validation takes less time than training."""
    study = study_of(retinas.write(tmp_path / "scans", cases=6), [*rounds, "train.device=cpu"])
    run = ps.train(study, tmp_path / "run", evaluate=False)
    assert run.mean >= least
    records = run.folder.records()
    training = sum(site.seconds for r in records for site in r.sites.values())
    assert records[-1].elapsed - training < training
