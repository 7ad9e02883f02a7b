"""Statistics of a hospital's cases for the plan of a study, if the hospital's policy allows them.

A person writes the file and sends it; nothing leaves by itself. It holds medians, as ``planning.statistics`` defines
them: the policy must allow an assessment, and at least ``fewest`` cases must be behind the medians.
"""

from pathlib import Path

from polysite import config
from polysite.data.files import Files
from polysite.deploy.project import SiteConfig
from polysite.deploy.site.policy import SitePolicy
from polysite.errors import ConfigError, RunError
from polysite.planning.statistics import SiteStatistics, joined, measure
from polysite.storage import write_private


def write(folder: Path, out: Path | None = None) -> tuple[Path, SiteStatistics]:
    """Write the statistics of a hospital into a file; return the file and what it says."""
    site = SiteConfig.load(folder, check=False)
    policy = SitePolicy.load(site.policy)
    if not policy.assess:
        raise ConfigError(f"the cases here may not be described: {site.policy} says assess = false")
    data = config.build({"data": dict(site.data)}).data if site.data else None
    if not isinstance(data, Files):
        raise ConfigError(f"{site.path} names no images yet: write their manifest or folder below [data]")
    count = len(data.manifest.rows)
    if count < policy.fewest:
        raise ConfigError(f"{count} cases are too few for medians: {site.policy} says fewest = {policy.fewest}")
    path = out or site.path.parent / f"{site.name}.json"
    if path.exists():
        raise RunError(f"{path} exists already; give another --out")
    found = joined(site.name, measure(data, least=policy.fewest))
    write_private(path, found.to_json() + "\n")
    return path, found
