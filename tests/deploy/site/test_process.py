"""The worker as a process of its own."""

import os

from polysite.deploy.project import SiteConfig
from polysite.deploy.site.worker_process import WorkerProcess


def test_a_worker_starts_by_the_words_of_site_toml_and_ends_with_its_courier(tmp_path):
    (tmp_path / "policy.toml").touch()
    (tmp_path / "state").mkdir()
    (tmp_path / "site.toml").write_text('name = "north"\nengine = "flare"\nworker = "nice -n 5"\n')
    site = SiteConfig.load(tmp_path)
    worker = WorkerProcess(site, print)
    line, process = worker.line(), worker._process
    assert "names no cases" in worker.words
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
    assert "refused" in worker.ask({}, b"")[0]
    line.close()  # as if the courier was killed
    process.wait(10)
