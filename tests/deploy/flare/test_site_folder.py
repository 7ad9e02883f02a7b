"""A hospital's settings where FLARE connects it: its own files, careful defaults, FLARE's list of classes."""

import json

import pytest
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from typer.testing import CliRunner

from polysite.cli import app
from polysite.deploy.flare.job import CONTROLLER, EXECUTOR
from polysite.deploy.flare.site_folder import admit, prepare
from polysite.deploy.site.policy import SitePolicy
from polysite.errors import ConfigError


def prepared(root):
    return prepare(root, root / "local", "north")


def test_a_site_without_settings_has_no_cases_and_the_careful_policy(tmp_path):
    site = prepared(tmp_path)
    assert (site.name, site.engine, site.server, site.data) == ("north", "flare", "FLARE", {})
    assert site.state == tmp_path / "polysite" and site.state.stat().st_mode & 0o077 == 0
    assert SitePolicy.load(site.policy) == SitePolicy()


def test_the_hospitals_own_files_decide(tmp_path):
    assert CliRunner().invoke(app, ["site", "flare", str(tmp_path)]).exit_code == 0
    own = tmp_path / "local" / "polysite"
    assert prepared(tmp_path).data == {}
    (own / "cases").mkdir()
    (own / "site.toml").write_text('device = "cpu"\nstate = "kept"\n[data]\nname = "files"\npath = "cases"\n')
    site = prepared(tmp_path)
    assert site.data == {"name": "files", "path": str(own / "cases")} and site.device == "cpu"
    assert site.state == own / "kept" and site.policy == own / "policy.toml"
    (own / "policy.toml").write_text("fewest = 9\n")
    changed = prepared(tmp_path)
    assert SitePolicy.load(changed.policy).fewest == 9


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("polysite/site.toml", 'server = "evil:1"', "unknown key 'server'"),
        ("polysite/site.toml", 'policy = "mine.toml"', "mine.toml is missing"),
        ("polysite/site.toml", '[data]\nname = "files"\npath = "nowhere"', "does not exist"),
        ("polysite/site.toml", 'device = "tpu"', "must be 'auto'"),
        ("resources.json", "{", "cannot be read"),
        ("resources.json", "[1]", "no table"),
        ("resources.json", '{"class_allow_list": "x"}', "not a list"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_and_kept(file, text, why, tmp_path):
    place = tmp_path / "local" / file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    with pytest.raises(ConfigError, match=why):
        (admit if file == "resources.json" else prepared)(tmp_path)
    assert place.read_text() == text


def test_polysites_classes_are_added_to_flares_list_and_nothing_is_lost(tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    default = {"format_version": 2, "class_allow_list": ["nvflare.app_common.x.Y"], "components": [{"id": "kept"}]}
    (local / "resources.json.default").write_text(json.dumps(default))
    own = admit(tmp_path)
    (own / "policy.toml").write_text("fewest = 9\n")
    admit(tmp_path)
    found = json.loads((local / "resources.json").read_text())
    assert found == {**default, "class_allow_list": ["nvflare.app_common.x.Y", CONTROLLER, EXECUTOR]}
    assert (own / "policy.toml").read_text() == "fewest = 9\n"
    assert json.loads((local / "resources.json.default").read_text()) == default
    # FLARE builds exactly these classes
    listed, *_ = ComponentPathAuthorizer()._get_policy_from_resources(found)
    matches = ComponentPathAuthorizer._path_matches_prefix
    assert all(any(matches(name, prefix) for prefix in listed) for name in (CONTROLLER, EXECUTOR))
    assert not any(matches("polysite.deploy.project.init", prefix) for prefix in listed)
