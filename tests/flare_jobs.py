"""Jobs of NVIDIA FLARE for tests: several studies in one job, and a workspace of the simulator for drawn patients."""

import json
import shutil

from consortium import NAMES, change
from polysite.deploy.flare.job import export
from polysite.deploy.flare.site_folder import admit


def several(folder, studies, **settings):
    """One job that runs these studies one after the other, so that FLARE and the workers start once."""
    job, workflows = folder / "job", []
    for name, chosen in studies.items():
        single = export(chosen, folder / "single" / name, sites=NAMES, quorum=len(NAMES), assess=False, **settings)
        inside = single / "app" / "config"
        server = json.loads((inside / "config_fed_server.json").read_text())
        (workflow,) = server["workflows"]
        workflow["id"], workflow["args"]["study"] = name, f"{name}.toml"
        workflows.append(workflow)
        if not job.exists():
            shutil.copytree(single, job)
        shutil.copy(inside / "study.toml", job / "app" / "config" / f"{name}.toml")
    (job / "app" / "config" / "config_fed_server.json").write_text(json.dumps({**server, "workflows": workflows}))
    return job, {each["id"]: each["args"]["id"] for each in workflows}


def workspace(folder):
    """A workspace whose sites accept studies with few cases, and many of them."""
    own = admit(folder)
    change(own / "policy.toml", "fewest = 5", "fewest = 1")
    change(own / "policy.toml", "studies = 20", "studies = 1000")
    change(own / "site.toml", 'device = "auto"', 'device = "cpu"')
    return folder
