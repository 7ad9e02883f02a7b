"""Settings from the data: rules by hand, what a study keeps, and pictures that train with no setting at all."""

import json
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
from polysite.deploy.site import own_statistics
from polysite.deploy.site.policy import TEXT
from polysite.errors import ConfigError, DataError
from polysite.planning import SiteStatistics, make_plan
from polysite.planning.rules import Frame
from polysite.planning.studies import for_hospitals

HEAD, MM = (140, 172, 140), (1.0, 1.0, 1.0)
BRAIN = SiteStatistics("north", 20, 4, 3, "segmentation", HEAD, MM, 1.0, ("RAS",), HEAD, MM)
PHOTO = SiteStatistics("drive", 40, 3, 1, "segmentation", (999, 960), turned_shape=(999, 960))


def test_volumes_of_one_spacing_are_left_as_they_are_and_patches_fit_the_images():
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
    # a large picture is not validated in small windows
    plan = make_plan([PHOTO])
    assert plan.values["train.patch"] == (256, 256) and "train.window" not in plan.values  # that of the patch
    assert plan.values["run.validate_every"] == 3  # a validation takes 0.2 * 49 / (0.6 * 5 * 3) rounds
    small = make_plan([replace(PHOTO, shape=(70, 50), turned_shape=(70, 50))]).values
    assert small["train.patch"] == (72, 56) and small["train.batch"] == 12


def test_unlike_spacings_and_axes_are_brought_together():
    shape, spacing = (400, 420, 30), (0.5, 0.5, 5.0)
    thick = replace(BRAIN, site="south", cases=30, axes=("LPS",), shape=shape, spacing=spacing)
    thick = replace(thick, turned_shape=shape, turned_spacing=spacing)
    values = make_plan([BRAIN, thick]).values
    assert values["prepare.orientation"] == "RAS"
    assert values["prepare.spacing"] == (0.5, 0.5, 1.0)  # 5 mm is more than 3 times 0.5: as at the finest site
    assert values["train.patch"][2] < 64
    near = replace(BRAIN, site="south", spacing=(1.05, 1, 1), turned_spacing=(1.05, 1, 1))
    assert "prepare.spacing" not in make_plan([BRAIN, near]).values
    own = make_plan([BRAIN, thick], Frame(spacing=(2.0, 2.0, 2.0), orientation="LPS")).values
    assert not {"prepare.spacing", "prepare.orientation"} & own.keys()
    assert make_plan([BRAIN], Frame(slices="coronal")).values["train.patch"] == (144, 144)
    with pytest.raises(DataError, match=r"site 'drive' has 3 modalities of 2D images .* and site 'north' 4 of 3D"):
        make_plan([BRAIN, PHOTO])


def test_the_statistics_of_a_folder_are_medians(tmp_path):
    rows = ["site,case,t1,label,labels"]
    ras, spl = np.diag([1, 2, 3, 1.0]), np.array([[0, 0, -1, 0], [0, -2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 1.0]])
    for k, (affine, shape) in enumerate(((ras, (30, 20, 10)), (ras, (30, 20, 10)), (spl, (10, 20, 30)))):
        image = np.zeros(shape, np.float32)
        image[2:-2, 1:-1, 1:-1] = np.random.default_rng(k).random(np.array(shape) - (4, 2, 2)) + 1
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


@pytest.mark.parametrize("side", ["1" + 400 * "0", "1e999", "NaN", "-3", "0", "{}", "[]"])
def test_statistics_that_no_images_have_are_refused(side):
    text = SiteStatistics("north", 9, 2, 3, "segmentation", (140, 77, 88)).to_json().replace("77", side)
    for odd in (text, side, '{"site": "north", "cases": 9}'):
        with pytest.raises(DataError, match=r"north\.json (holds statistics that no images have|does not hold)"):
            SiteStatistics.parse(odd, "north.json")


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    return retinas.write(tmp_path_factory.mktemp("eyes") / "scans", cases=4, side=160)


def test_only_what_a_study_leaves_open_is_planned(eyes, tmp_path):
    said = []
    study = study_of(eyes, ["train.lr=0.5", "run.rounds=4"], said)
    assert study.train.patch == (160, 160) and study.train.lr == 0.5 and study.run.rounds == 4
    assert not any("train.lr" in line for line in said) and "the median image has" in said[0]
    assert config.parse(config.dump(study)) == study  # as config.toml has it
    own, files = tmp_path / "study.toml", f'[data]\nname = "files"\npath = "{eyes}"\n'
    own.write_text(f"{files}[train]\nbatch = 3\n")
    assert study_of(own, []).train.patch == (160, 160) and study_of(own, []).train.batch == 3
    for text in (
        f"{files}[train]\npatch = [64, 64]\n",
        f'preset = "fets_benchmark"\n{files}',
        '[data]\nname = "files"\npath = "nowhere.csv"\n',  # 'train --print-config' needs no images
    ):
        own.write_text(text)
        assert study_of(own, []) == config.load(own)
    assert study_of(None, []) == config.Study()
    assert study_of(eyes, ["train.patch=[32,32]"]).train.patch == (32, 32)


def test_hospitals_send_medians_if_their_policy_allows_it(eyes, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in retinas.CAMERAS}
    for name, file in files.items():
        folder = tmp_path / name
        folder.mkdir()
        data = f'[data]\nname = "files"\npath = "{eyes}"\nsites = ["{name}"]\n'
        (folder / "site.toml").write_text(f'name = "{name}"\nserver = "localhost:1"\n{data}')
        (folder / "policy.toml").write_text(TEXT.replace("fewest = 5", "fewest = 4"))
        own_statistics.write(folder, file)
    sent = files["drive"].read_text()
    assert json.loads(sent)["cases"] == 4 and str(eyes) not in sent and files["drive"].stat().st_mode & 63 == 0
    sites = [planning.statistics.read(file) for file in files.values()]
    study, _ = for_hospitals(sites, ("red", "green", "blue"), ("mask",))
    large, _ = for_hospitals(sites, ("red", "green", "blue"), ("mask",), "cuda")
    assert large.train.batch > study.train.batch
    words = ["--modalities", "red, green, blue", "--labels", "mask", "--out", str(tmp_path / "study.toml")]
    shown = CliRunner().invoke(app, ["data", "plan", *map(str, files.values()), *words])
    assert shown.exit_code == 0 and "train.patch" in shown.stdout
    assert config.load(tmp_path / "study.toml") == study
    assert study.train == replace(ps.plan(eyes).train, device="auto") and study.data.dims == 2
    with pytest.raises(ConfigError, match="1 modalities are named, and the hospitals have 3"):
        for_hospitals(sites, ("t1",), ("mask",))
    for policy, words in (
        (TEXT, r"4 cases are too few for medians: .*policy.toml says fewest = 5"),
        (TEXT.replace("assess = true", "assess = false"), r"may not be described: .*policy.toml says assess = false"),
    ):
        (tmp_path / "drive" / "policy.toml").write_text(policy)
        with pytest.raises(ConfigError, match=words):
            own_statistics.write(tmp_path / "drive", tmp_path / "no.json")
    assert not (tmp_path / "no.json").exists()


@pytest.mark.soak
def test_retinas_of_three_hospitals_train_with_no_setting_at_all(tmp_path):
    """Pictures of 600 x 600. Validation takes less time than training."""
    study = study_of(retinas.write(tmp_path / "scans", cases=6), ["train.device=cpu"])
    run = ps.train(study, tmp_path / "run", evaluate=False)
    assert run.mean >= 0.8
    records = run.folder.records()
    training = sum(site.seconds for r in records for site in r.sites.values())
    assert records[-1].elapsed - training < training
