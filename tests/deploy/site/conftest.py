"""A worker of a hospital, in this process."""

import pytest

from polysite.deploy.project import SiteConfig
from polysite.deploy.site.policy import SitePolicy
from polysite.deploy.site.worker import Worker


@pytest.fixture
def hospital(tmp_path):
    """A maker of workers that share a state folder, as after a restart."""

    def made(data=None, **policy):
        files = dict.fromkeys(("key", "certificate", "ca", "policy"), tmp_path)
        scans = {"name": "files", "path": str(data), "labels": {"WT": [1, 2, 4], "TC": [1, 4], "ET": [4]}}
        given = {"state": tmp_path / "state", "device": "cpu", "data": scans if data else {}}
        site = SiteConfig(tmp_path / "site.toml", "north", "c:1", **files, **given)
        return Worker(site, SitePolicy(**policy))

    return made
