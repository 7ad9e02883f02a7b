"""What the answers of a hospital share: its settings and policy, its cases, and its state folder.

::

    STATE/format                       version of this layout; 0.1.0 wrote none
    STATE/ledger.jsonl                 what was asked and what left
    STATE/secret                       key of the pseudonyms
    STATE/withdrawn.txt                cases that no study may see any more
    STATE/left                         the federation was left; in the folder of a study: that study was left
    STATE/privacy.jsonl                what studies have spent of the privacy budget (``privacy_budget.py``)
    STATE/studies.jsonl                the studies that this hospital agreed to, with digests of their cases
    STATE/runs/STUDY/study.toml        the study that this hospital agreed to
    STATE/runs/STUDY/split.json        the part of every case, by digest, so that no change of the data moves a case
    STATE/runs/STUDY/memory/           the site's memory, by version
    STATE/runs/STUDY/phase-K           the model that phase K began from, and a copy
    STATE/runs/STUDY/KIND.count        how many requests of a kind were answered; "late": how many took too long
    STATE/runs/STUDY/secure/           keys of the current secure sum, and what left under masks (``masked_sums.py``)
    STATE/runs/STUDY/models/           the models that this hospital is served, best and last
"""

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from polysite import config
from polysite.data.sources import Phantom, PhantomClasses, Source
from polysite.deploy.project import SiteConfig
from polysite.deploy.site.limits import folder_size
from polysite.deploy.site.policy import GIGABYTE, Refusal, SitePolicy
from polysite.deploy.site.privacy_budget import PrivacyBudget
from polysite.deploy.site.pseudonyms import Pseudonyms
from polysite.deploy.site.studies import Studies
from polysite.engines.run_folder import file_name
from polysite.errors import ConfigError, shown
from polysite.storage import private_folder, write_file

log = logging.getLogger("polysite")

STATE_FORMAT = 2  # of the state folder; 0.1.0 wrote 1, without saying so


class Hospital:
    """A hospital, as the wrappers around its host see it.

    Args:
        site: The site's configuration.
        policy: What the hospital allows.
        now: The clock by which the policy's hours are kept.
    """

    def __init__(self, site: SiteConfig, policy: SitePolicy, now: Callable[[], datetime] = datetime.now):
        self.site, self.policy, self.now = site, policy, now
        _check_state(site.state)
        self.pseudonyms = Pseudonyms(site.state / "secret")
        self.studies = Studies(site.state / "studies.jsonl")
        self.budget = PrivacyBudget(site.state)
        self.incidents: list[str] = []  # sent to the coordinator with the next response

    def folder(self, study: str) -> Path:
        """Return the folder of a study."""
        return self.site.state / "runs" / file_name(study)

    def source(self, wanted: Source | None = None) -> Source:
        """Return the hospital's own cases; for a rehearsal, generated ones, so that no patient is involved."""
        if isinstance(wanted, Phantom | PhantomClasses):
            return wanted
        if self.site.data:
            files = wanted is not None and self.site.data.get("name") == "files"
            wish = {"modalities": list(wanted.modality_names)} if wanted and files else {}
            return config.build({"data": {**wish, **self.site.data}}).data
        raise ConfigError(f"{self.site.path} names no data: fill in [data]")  # the coordinator's are never opened

    def describe_data(self) -> str:
        """Count the hospital's cases, for the courier's screen; refuse data that cannot be read."""
        if not self.site.data:
            return "[data] names no cases: only rehearsals with generated patients are possible"
        source = self.source()
        count, where = sum(map(len, source.case_refs(0).values())), self.site.data.get("path", "drawings")
        return f"{count} cases ({', '.join(source.modality_names)}) found in {where}"

    def make_room(self, folder: Path, count: int) -> None:
        """Refuse to write more bytes for a study than the policy allows it on the disk."""
        if folder_size(folder) + count > self.policy.disk * GIGABYTE:
            most = f"{self.policy.disk:g}"
            raise Refusal(f"the files of this study take too much space here: policy.toml says disk = {most}")

    def note(self, what: str) -> None:
        """Report an incident in the log and, with the response, to the coordinator: it names no case and no file."""
        log.warning("%s", what)
        self.incidents.append(what)


def _check_state(state: Path) -> None:
    """Refuse the state folder of a later version; that of 0.1.0 has the same layout and is marked as current."""
    file = state / "format"
    given = file.read_text().strip() if file.exists() else "1"
    if given not in map(str, range(1, STATE_FORMAT + 1)):
        raise ConfigError(
            f"{state} has format {shown(given, 20)}, and this polysite reads up to {STATE_FORMAT}: install a newer one"
        )
    if given != str(STATE_FORMAT):
        private_folder(state)
        write_file(file, lambda p: p.write_text(f"{STATE_FORMAT}\n"))
