"""The coordinator's project folder and a hospital's site folder, as ``polysite deploy init`` writes them.

A small certificate authority signs one certificate for the server and one for every hospital, so that each side knows
the other before a byte of a study is exchanged. A hospital has one P-384 key, for its certificate and for Flower's
node authentication; the server knows its public key.

::

    server.toml     address of the server, and the hospitals with their public keys
    ca.crt ca.key   the authority; its key signs hospitals and the server
    server.crt server.key
    sites/NAME.zip  for one hospital: site.toml, site.key, site.crt, ca.crt, policy.toml, README.md
"""

import base64
import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from polysite.deploy.certificates import (
    DAYS,
    Signed,
    common_name,
    find_authority,
    issue,
    require,
    server_certificate,
    serves,
    verified,
)
from polysite.deploy.protocol import PROTOCOL
from polysite.deploy.site.policy import TEXT, SitePolicy, settings
from polysite.errors import ConfigError, DataError, RunError
from polysite.foreign import parse_toml
from polysite.storage import draft_folder, write_file

SITE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,62}[A-Za-z0-9_-])?")  # also a file name and a common name
HOST_NAME = re.compile(
    r"(?=.{1,253}$)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", re.I
)
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
MAX_SOCKET_PATH = 107  # bytes, on Linux


@dataclass(frozen=True)
class Project:
    """The coordinator's project folder.

    Args:
        folder: The folder.
        address: host:port at which hospitals reach the server.
        host: Address to listen on.
        port: Port to listen on.
        sites: Public key of every hospital, in Flower's format.
        min_sites: Number of sites that a round needs.
        deadline: Seconds after which a round continues without missing sites.
        remarks: Sentences for a person: files that others can read, certificates that end soon.
    """

    folder: Path
    address: str
    host: str
    port: int
    sites: Mapping[str, bytes]
    min_sites: int
    deadline: float
    remarks: tuple[str, ...] = ()

    @property
    def ca(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """Key of the authority."""
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        """Certificate of the server."""
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        """Key of the server."""
        return self.folder / "server.key"

    def archive(self, site: str) -> Path:
        """Return the archive for a hospital."""
        return self.folder / "sites" / f"{site}.zip"

    @classmethod
    def load(cls, folder: Path, now: datetime | None = None, check: bool = True) -> "Project":
        """Read ``server.toml``; with ``check``, also refuse certificates with which no hospital could connect."""
        require()
        file = folder / "server.toml"
        if not file.is_file():
            raise ConfigError(f"{folder} is no project: it has no server.toml; 'polysite deploy init' makes one")
        known = {"address": str, "host": str, "port": int, "min_sites": int, "deadline": float, "sites": dict}
        given = settings(file, known)
        for key in ("address", "sites"):
            if not given.get(key):
                raise ConfigError(f"{file} has no {key}; see what 'polysite deploy init' writes")
        try:
            host, port = endpoint(given["address"])
            sites = {name: _public(name, given["sites"][name]) for name in _distinct(given["sites"])}
            found = cls(
                folder=folder,
                address=given["address"],
                host=given.get("host", "0.0.0.0"),
                port=given.get("port", port),
                sites=sites,
                min_sites=given.get("min_sites", _quorum(len(sites))),
                deadline=given.get("deadline", 3600.0),
            )
            found._check_values()
        except ConfigError as problem:
            raise ConfigError(f"{file}: {problem}") from problem
        if not check:
            return found
        certificate, remarks = verified(found.certificate, found.key, found.ca, now or datetime.now(UTC))
        serves(found.certificate, certificate, host)
        secret = [found.ca_key, found.key, *sorted((folder / "sites").glob("*.zip"))]
        return replace(found, remarks=(*remarks, *_exposed(secret)))

    def _check_values(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} must lie between 1 and 65535")
        if not 1 <= self.min_sites <= len(self.sites):
            raise ConfigError(f"min_sites = {self.min_sites} must lie between 1 and the {len(self.sites)} sites")
        if not 0 < self.deadline < float("inf"):
            raise ConfigError(f"deadline = {self.deadline} must be more than 0 seconds")
        same = [n for n, k in self.sites.items() if list(self.sites.values()).count(k) > 1]
        if same:
            raise ConfigError(f"the sites {', '.join(same)} have the same key; each needs its own")


@dataclass(frozen=True)
class SiteConfig:
    """A hospital's ``site.toml``, with absolute paths.

    Args:
        path: The file itself.
        name: Name of the hospital in the federation.
        server: host:port of the coordinator.
        key: The hospital's private key.
        certificate: The hospital's certificate.
        ca: Certificate of the authority.
        policy: The file policy.toml.
        state: Folder of the ledger, the memories and the models.
        device: Device that trains.
        data: Section ``[data]`` of a study; empty if the hospital has named no cases yet.
        fingerprint: Changes with site.toml, policy.toml and the installed version.
        remarks: Sentences for a person.
    """

    path: Path
    name: str
    server: str
    key: Path
    certificate: Path
    ca: Path
    policy: Path
    state: Path
    device: str = "auto"
    data: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def socket(self) -> Path:
        """Socket between the courier and the worker."""
        return self.state / "worker.sock"

    @classmethod
    def load(cls, where: Path, check: bool = True, now: datetime | None = None) -> "SiteConfig":
        """Read a site.toml, or that of a folder; with ``check``, also check the files that it names."""
        file = (where / "site.toml" if where.is_dir() else where).resolve()
        if not file.is_file():
            raise ConfigError(f"there is no {file}; unpack the archive that the coordinator sent, and go there")
        files = {
            "key": "site.key",
            "certificate": "site.crt",
            "ca": "ca.crt",
            "policy": "policy.toml",
            "state": "state",
        }
        texts = dict.fromkeys(("name", "server", "device", *files), str)
        given = settings(file, {**texts, "data": dict})
        for key in ("name", "server"):
            if key not in given:
                raise ConfigError(f"{file} has no {key}; the coordinator's archive has one")
        try:
            _distinct([given["name"]])
            endpoint(given["server"])
            found = cls(
                path=file,
                name=given["name"],
                server=given["server"],
                device=given.get("device", "auto"),
                data=_placed(given.get("data", {}), file.parent),
                **{key: file.parent / given.get(key, default) for key, default in files.items()},
            )
            if not DEVICE.fullmatch(found.device):
                raise ConfigError(
                    f"device = {found.device!r} must be 'auto', 'cpu', 'cuda' or, as a second GPU, 'cuda:1'"
                )
        except ConfigError as problem:
            raise ConfigError(f"{file}: {problem}") from problem
        if not check:
            return found
        remarks = found._check_files(now or datetime.now(UTC))
        return replace(found, remarks=remarks, fingerprint=_digest(file, found.policy))

    def _check_files(self, now: datetime) -> tuple[str, ...]:
        require()
        policy = SitePolicy.load(self.policy)  # refuses a faulty one
        certificate, remarks = verified(self.certificate, self.key, self.ca, now)
        owner = common_name(certificate)
        if owner != self.name:
            raise ConfigError(f"{self.path}: name = {self.name!r}, but {self.certificate} is that of {owner!r}")
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            raise ConfigError(f"{self.path}: state = {str(self.state)!r} is too long for a socket; name a shorter one")
        data = self.data.get("path")
        if data is not None and not Path(data).exists():
            raise ConfigError(f"{self.path}: [data] path = {data!r} does not exist; name this hospital's cases")
        return (*remarks, *policy.remarks, *_exposed([self.key]))


def init(
    folder: Path,
    sites: Sequence[str],
    address: str,
    *,
    ca: Path | None = None,
    ca_key: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    days: int = DAYS,
) -> Project:
    """Write a new project folder.

    Args:
        folder: The new folder.
        sites: Names of the hospitals.
        address: host:port at which hospitals reach the server.
        ca: Certificate of an existing authority; by default a new one is made.
        ca_key: Key of that authority; it is not copied into the project.
        certificate: An existing server certificate, signed by ``ca``.
        key: Key of that certificate.
        days: Days for which new certificates are valid.
    """
    require()
    names, (host, port) = _distinct(sites), endpoint(address)
    if not names:
        raise ConfigError("a project needs at least one hospital: name its sites")
    if folder.exists():
        raise RunError(f"{folder} exists already; no project overwrites anything: choose another folder")
    authority = find_authority(ca, ca_key)
    server = server_certificate(authority, host, certificate, key, ca, days)
    keys: dict[str, str] = {}
    with draft_folder(folder, "project", private=False) as draft:  # each file has its own mode
        draft.chmod(0o700)
        _put(draft / "ca.crt", authority.pem)
        if ca_key is None:
            _put(draft / "ca.key", authority.key_pem, 0o600)
        _put(draft / "server.crt", server.pem)
        _put(draft / "server.key", server.key_pem, 0o600)
        (draft / "sites").mkdir(mode=0o700)
        for name in names:
            keys[name], archive = _onboard(name, address, authority, days)
            _put(draft / "sites" / f"{name}.zip", archive, 0o600)
        listen = "::" if ":" in host else "0.0.0.0"
        text = SERVER.format(address=address, host=listen, port=port, min_sites=_quorum(len(names)))
        _put(draft / "server.toml", (text + "".join(map(_line, keys, keys.values()))).encode())
        _put(draft / "README.md", COORDINATOR.format(address=address, port=port, folder=folder.name).encode())
    return Project.load(folder)


def add(folder: Path, name: str, *, ca_key: Path | None = None, days: int = DAYS) -> Path:
    """Add a hospital to a project, with a line in server.toml; return the path of its archive."""
    project, file = Project.load(folder), folder / "server.toml"
    _distinct([*project.sites, name])
    archive, signs = project.archive(name), ca_key or project.ca_key
    if archive.exists():
        raise RunError(f"{archive} exists already; an archive is never overwritten: move it away first")
    if not signs.is_file():
        raise DataError(f"{signs} is missing; it signs the certificate of every hospital: say where it is")
    public, content = _onboard(name, project.address, find_authority(project.ca, signs), days)
    before = file.read_text(encoding="utf-8-sig")
    after = before.rstrip() + "\n" + _line(name, public)
    if _sites(after) != {**_sites(before), name: public}:
        raise ConfigError(f"{file} does not end with its [sites]; move that section to the end of the file")
    archive.parent.mkdir(mode=0o700, exist_ok=True)
    write_file(archive, lambda p: _put(p, content, 0o600))
    try:
        write_file(file, lambda p: p.write_text(after, encoding="utf-8"))
    except RunError:
        archive.unlink()  # the server would not know this hospital
        raise
    return archive


def renew(folder: Path, *, ca_key: Path | None = None, days: int = DAYS) -> None:
    """Replace the server's certificate by a new one of the same authority; hospitals need not do anything. If this is
    killed between the two files, it can be repeated."""
    require()
    project = Project.load(folder, check=False)
    signs = ca_key or project.ca_key
    if not signs.is_file():
        raise DataError(f"{signs} is missing; it signs the certificate of the server: say where it is")
    host, _ = endpoint(project.address)
    server = server_certificate(find_authority(project.ca, signs), host, None, None, None, days)
    for path, content, mode in ((project.key, server.key_pem, 0o600), (project.certificate, server.pem, 0o644)):
        write_file(path, lambda p, c=content, m=mode: _put(p, c, m))  # type: ignore[misc]


def endpoint(address: str) -> tuple[str, int]:
    """Return host and port of an address; an IPv6 address stands in brackets.

    >>> endpoint("fl.example.org:9443"), endpoint("[2001:db8::7]:9443")
    (('fl.example.org', 9443), ('2001:db8::7', 9443))
    """
    host, colon, port = address.rpartition(":")
    six = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if six else host
    try:
        number = ip_address(host)
        sound = (number.version == 6) == six and not number.is_unspecified
    except ValueError:
        sound = not six and bool(HOST_NAME.fullmatch(host))
    if not sound or not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"the address {address!r} must be host:port, as in fl.example.org:9443 or 192.0.2.7:9443")
    return host, int(port)


def _distinct(names: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return the names of sites; refuse names that would be the same file on some systems."""
    seen: dict[str, str] = {}
    for name in names:
        if not SITE_NAME.fullmatch(name):
            raise ConfigError(
                f"the site {name!r} needs another name: at most 64 letters (a to z), digits, spaces, dots, dashes and "
                "underscores, with a letter or digit first and no space or dot last"
            )
        if name.lower() in seen:
            raise ConfigError(f"two sites are called {seen[name.lower()]!r} and {name!r}; they need different names")
        seen[name.lower()] = name
    return list(seen.values())


def _quorum(sites: int) -> int:
    """Return the default quorum: all sites but one, and two of two.

    >>> [_quorum(n) for n in (1, 2, 3, 5)]
    [1, 2, 2, 4]
    """
    return max(sites - 1, min(sites, 2))


# files


def _put(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a new file that is never readable by more people than ``mode`` says."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _onboard(name: str, address: str, authority: Signed, days: int) -> tuple[str, bytes]:
    """Return the public key of a new hospital, and the archive for it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    member = issue(name, authority, days)
    content = {
        "README.md": HOSPITAL.format(name=name, address=address).encode(),
        "site.toml": SITE.format(name=name, address=address).encode(),
        "policy.toml": TEXT.encode(),
        "site.key": member.key_pem,
        "site.crt": member.pem,
        "ca.crt": authority.pem,
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in content.items():
            info = zipfile.ZipInfo(file, datetime.now().timetuple()[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (stat.S_IFREG | (0o600 if file == "site.key" else 0o644)) << 16
            archive.writestr(info, data)
    der = member.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(der).decode(), made.getvalue()


def _line(name: str, public: str) -> str:
    return f'"{name}" = "{public}"\n'


def _sites(text: str) -> dict[str, Any]:
    try:
        return dict(parse_toml(text, "server.toml")["sites"])
    except (ConfigError, KeyError, TypeError, ValueError):
        return {}


def _public(name: str, line: Any) -> bytes:
    """Return a public key of server.toml in Flower's format, that of its ``public_key_to_bytes``."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

    try:
        key = load_der_public_key(base64.b64decode(line, validate=True))
    except (TypeError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePublicKey):
        raise ConfigError(
            f"the public key of the site {name!r} cannot be read; 'polysite deploy add' writes such lines"
        )
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _placed(data: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Return the section with absolute paths; those in site.toml are relative to it."""
    placed = dict(data)
    if isinstance(data.get("path"), str):
        if not data["path"]:
            raise ConfigError("[data] path is empty; name a folder or a manifest with this hospital's cases")
        placed["path"] = str(home / Path(data["path"]).expanduser())
    if isinstance(data.get("tables"), list):
        placed["tables"] = [str(home / Path(str(table)).expanduser()) for table in data["tables"]]
    return placed


def _exposed(secret: Sequence[Path]) -> Iterator[str]:
    for path in secret:
        if path.exists() and path.stat().st_mode & 0o077:
            yield f"{path} can be read by others on this machine: chmod 600 '{path}'"


def _digest(*files: Path) -> str:
    """Return a digest of the files and of the installed version, with which a running worker must agree."""
    parts = [hashlib.sha256(f.read_bytes()).digest() for f in files]
    return hashlib.sha256(b"".join((*parts, f"{version('polysite')} {PROTOCOL}".encode()))).hexdigest()[:16]


# files that people read


SERVER = """\
# The server of this federation; `polysite deploy run` reads it.

# host:port at which hospitals reach the server; server.crt is for this host, and the hospitals' archives name it
address = "{address}"

# address of this machine to listen on; "0.0.0.0" (with IPv6 "::") for all of its addresses
host = "{host}"
port = {port}

# number of hospitals that a round needs; with fewer, the server waits
min_sites = {min_sites}

# seconds after which a round continues without the hospitals that have not answered
deadline = 3600

# the hospitals and their public keys; a hospital without a line is refused (`polysite deploy add` adds one)
[sites]
"""

COORDINATOR = """\
# The coordinator's side of a federation

| file | what it is | secret |
|---|---|---|
| `server.toml` | where the server listens, which hospitals take part, when a round goes on without some | no |
| `sites/NAME.zip` | all that one hospital needs, with its private key | **yes** |
| `server.crt`, `server.key` | the certificate of the server, and its key | **the key** |
| `ca.crt`, `ca.key` | the authority that signed all certificates, and its key | **the key** |

Any person with `ca.key` can impersonate the server. It is needed only to add hospitals and to renew the server's
certificate: move it to a safe place, off this machine. (The key of an authority of your own was not copied.)

1. Send every hospital its archive, over a channel that you trust: it holds the key by which the server recognises the
   hospital. Then delete it here.
2. Let hospitals reach `{address}` over TCP. They connect to you; nothing connects to them.
3. Run a study from the folder above this one. Its `[data]` has `name = "hospitals"` and the modalities and labels that
   every hospital must have:

   ```sh
   polysite deploy run study.toml --project {folder}
   ```

To add a hospital: `polysite deploy add NAME --project {folder}`. To remove one: delete its line in `server.toml`. If
the key of a hospital was lost or seen by others: delete its line and its archive, then add it again.
"""

SITE = """\
# This hospital in the federation; `polysite site run .` reads it. Files are relative to this one.
# You only have to fill in [data], at the end.

name = "{name}"  # of this hospital, as the certificate has it
server = "{address}"  # the coordinator: the only machine that this one connects to

key = "site.key"  # secret: identifies this hospital; never give it away, not even to the coordinator
certificate = "site.crt"  # shown to the server
ca = "ca.crt"  # authority that signed the server's certificate
policy = "policy.toml"  # what this hospital allows; yours to change
state = "state"  # folder of everything that stays here: the audit log, the memory between rounds, the models
device = "auto"  # "auto", "cpu", "cuda", or "cuda:1" for a second GPU

# This hospital's cases. They are opened here and never leave. Remove the # in one of the two examples.
[data]
# a folder of NIfTI files (`polysite data formats` lists the layouts that are known), or a manifest, .csv or .jsonl
# name = "files"
# path = "/data/brain"
# format = "auto"  # the layout of the folder
# modalities = ["t1", "flair"]  # which of them, in the order of the study; all by default
# labels = {{ WT = [1, 2, 4], TC = [1, 4], ET = [4] }}  # meaning of the values in label maps, if no file tells

# a rehearsal without patients: phantoms, generated from a seed
# name = "phantom"
# shape = [64, 64, 64]
# sites."{name}" = {{ cases = 12 }}
"""

HOSPITAL = """\
# {name}: how to take part

This folder makes one computer of your hospital a member of a federation. The coordinator's server sends networks; this
computer trains them on your cases and returns trained networks and scores. Scans and names of patients do not leave.

1. **Install**, with Python 3.11 or later:

   ```sh
   pip install './polysite[deploy]' -c polysite/constraints.txt   # polysite: the source that the coordinator names
   ```

2. **Set `[data]` in `site.toml`** to your cases, and **read `policy.toml`**: it lists what may be asked of this
   computer and what may leave it. It is yours to change, and it is enforced here. To check the cases:
   `polysite data check /data/brain`, with your folder.

3. **Run**, in this folder:

   ```sh
   polysite site run .
   ```

   It connects to `{address}`; nothing connects to this computer, and no port has to be opened. It shows every request
   and everything that left. Stop it with Ctrl-C and start it again at any time.

**What left?** `polysite site log .` lists it and verifies that the log was not changed. The log is
`state/ledger.jsonl`, to which lines are only appended.

**Keep `site.key` secret** (`chmod 600 site.key`), and delete the archive that it came in. Any person with the key can
impersonate your hospital. If others have seen it, tell the coordinator, who revokes it and sends another one.
"""
