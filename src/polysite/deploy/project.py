"""The coordinator's project folder and a hospital's site folder, as ``polysite deploy init`` writes them.

A small certificate authority signs one certificate for the server and one for every hospital, so that each side knows
the other before a byte of a study is exchanged. A hospital has one P-384 key, for its certificate and for the
signatures of its requests; the server knows its public key.

::

    server.toml     address of the server, and the hospitals with their public keys
    ca.crt ca.key   the authority; its key signs hospitals and the server
    server.crt server.key
    sites/NAME.zip  for one hospital: site.toml, ca.crt, policy.toml, README.md
    sites/NAME.crt  the certificate that was made from its request (``polysite.deploy.enrolment``)
    revoked.txt     keys that are not accepted any more

A hospital makes its key itself. Only in a local project, where all hospitals are rehearsed on one computer, the
archives hold keys and certificates, so that they need no more than to be unpacked.
"""

import io
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from polysite.deploy import certificates, templates
from polysite.deploy.certificates import Signed
from polysite.deploy.proxy import Proxy
from polysite.deploy.site.policy import TEXT, SitePolicy, settings
from polysite.errors import ConfigError, DataError, RunError
from polysite.foreign import parse_toml
from polysite.storage import draft_folder, vacant, write_file, write_private

SITE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,62}[A-Za-z0-9_-])?")  # also a file name and a common name
HOST_NAME = re.compile(
    r"(?=.{1,253}$)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", re.I
)
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
# files and the folder that a site.toml may place elsewhere
FILES = {"key": "site.key", "certificate": "site.crt", "ca": "ca.crt", "policy": "policy.toml", "state": "state"}


@dataclass(frozen=True)
class Project:
    """The coordinator's project folder.

    Args:
        folder: The folder.
        address: host:port at which hospitals reach the server.
        host: Address to listen on.
        port: Port to listen on.
        sites: Public key of every hospital that was enrolled, as PEM.
        min_sites: Number of sites that a round needs.
        deadline: Seconds after which a round continues without missing sites.
        invited: Hospitals that have no certificate yet.
        remarks: Sentences for a person: files that others can read, certificates that end soon, hospitals that are
            not enrolled yet.
    """

    folder: Path
    address: str
    host: str
    port: int
    sites: Mapping[str, bytes]
    min_sites: int
    deadline: float
    invited: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All hospitals, enrolled or not."""
        return (*self.sites, *self.invited)

    @property
    def revoked(self) -> Path:
        """Keys that are not accepted any more."""
        return self.folder / "revoked.txt"

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
        file = folder / "server.toml"
        if not file.is_file():
            raise ConfigError(f"{folder} is no project: it has no server.toml; 'polysite deploy init' makes one")
        known = {"address": str, "host": str, "port": int, "min_sites": int, "deadline": float, "sites": dict}
        given = settings(file, known, "server")
        for key in ("address", "sites"):
            if not given.get(key):
                raise ConfigError(f"{file} has no {key}; see what 'polysite deploy init' writes")
        try:
            host, port = endpoint(given["address"])
            lines = {name: given["sites"][name] for name in _distinct(given["sites"])}
            sites = {name: public_key(name, line) for name, line in lines.items() if line != ""}
            found = cls(
                folder=folder,
                address=given["address"],
                host=given.get("host", "0.0.0.0"),
                port=given.get("port", port),
                sites=sites,
                min_sites=given.get("min_sites", _quorum(len(lines))),
                deadline=given.get("deadline", 3600.0),
                invited=tuple(name for name, line in lines.items() if line == ""),
            )
            found._check_values()
        except ConfigError as problem:
            raise ConfigError(f"{file}: {problem}") from problem
        if not check:
            return found
        certificate, remarks = certificates.verified(found.certificate, found.key, found.ca, now or datetime.now(UTC))
        certificates.serves(found.certificate, certificate, host)
        secret = [found.ca_key, found.key, *sorted((folder / "sites").glob("*.zip"))]
        unsigned = (
            f"{n} has no certificate yet: 'polysite deploy sign' makes one from its request" for n in found.invited
        )
        return replace(found, remarks=(*remarks, *_exposed(secret), *unsigned))

    def check_enrolled(self, quorum: int) -> None:
        """Refuse a study while fewer hospitals than it needs have certificates."""
        if len(self.sites) < quorum:
            raise ConfigError(
                f"{len(self.sites)} of {len(self.names)} hospitals are enrolled, and a round needs {quorum}: "
                f"{', '.join(self.invited)} must send requests, which 'polysite deploy sign' makes certificates from"
            )

    def _check_values(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} must lie between 1 and 65535")
        if not 1 <= self.min_sites <= len(self.names):
            raise ConfigError(f"min_sites = {self.min_sites} must lie between 1 and the {len(self.names)} sites")
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
        server: host:port of the coordinator; the word FLARE where NVIDIA FLARE connects.
        key: The hospital's private key.
        certificate: The hospital's certificate.
        ca: Certificate of the authority.
        policy: The file policy.toml.
        state: Folder of the ledger, the memories and the models.
        device: Device that trains.
        data: Section ``[data]`` of a study; empty if the hospital has named no cases yet.
        proxy: Proxy through which to connect.
        engine: What connects and authenticates: ``flower``, or ``flare``, which needs no key and certificate here.
        worker: Command by which the worker is started, such as ``unshare -rn``; empty for none.
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
    proxy: Proxy | None = None
    engine: str = "flower"
    worker: str = ""
    remarks: tuple[str, ...] = ()

    @classmethod
    def load(cls, where: Path, check: bool = True, now: datetime | None = None) -> "SiteConfig":
        """Read a site.toml, or that of a folder; with ``check``, also check the files that it names."""
        file = (where / "site.toml" if where.is_dir() else where).resolve()
        if not file.is_file():
            raise ConfigError(f"there is no {file}; unpack the archive that the coordinator sent, and go there")
        texts = dict.fromkeys(("name", "server", "device", "engine", "worker", *FILES), str)
        given = settings(file, {**texts, "data": dict, "proxy": dict}, "site")
        engine = given.get("engine", "flower")
        if engine not in ("flower", "flare"):
            raise ConfigError(f"{file}: engine = {engine!r} must be 'flower' or 'flare'")
        if engine == "flare":
            given.setdefault("server", "FLARE")
        for key in ("name", "server"):
            if key not in given:
                raise ConfigError(f"{file} has no {key}; the coordinator's archive has one")
        try:
            _distinct([given["name"]])
            if engine == "flower":
                endpoint(given["server"])
            found = cls(
                path=file,
                name=given["name"],
                server=given["server"],
                device=given.get("device", "auto"),
                data=_placed(given.get("data", {}), file.parent),
                proxy=Proxy.parse(given.get("proxy", {}), file.parent) if check else None,
                engine=engine,
                worker=given.get("worker", ""),
                **{key: file.parent / given.get(key, default) for key, default in FILES.items()},
            )
            if not DEVICE.fullmatch(found.device):
                raise ConfigError(
                    f"device = {found.device!r} must be 'auto', 'cpu', 'cuda' or, as a second GPU, 'cuda:1'"
                )
        except ConfigError as problem:
            raise ConfigError(f"{file}: {problem}") from problem
        if not check:
            return found
        return replace(found, remarks=found._check_files(now or datetime.now(UTC)))

    def _check_files(self, now: datetime) -> tuple[str, ...]:
        policy = SitePolicy.load(self.policy)  # refuses a faulty one
        remarks = self._check_certificate(now) if self.engine == "flower" else ()
        data = self.data.get("path")
        if data is not None and not Path(data).exists():
            raise ConfigError(f"{self.path}: [data] path = {data!r} does not exist; name this hospital's cases")
        login = [self.proxy.file] if self.proxy and self.proxy.file else []
        return (*remarks, *policy.remarks, *_exposed([self.key, *login]))

    def _check_certificate(self, now: datetime) -> tuple[str, ...]:
        """Check the key and the certificate with which the courier connects; return what to remark about them."""
        if not self.key.exists():
            raise DataError(f"{self.key} is missing; 'polysite site enrol' makes a key and a request for a certificate")
        if not self.certificate.exists():
            raise DataError(
                f"the certificate {self.certificate} is missing; send the request of 'polysite site enrol' to the "
                "coordinator, and install what comes back: 'polysite site install'"
            )
        certificate, remarks = certificates.verified(self.certificate, self.key, self.ca, now)
        owner = certificates.common_name(certificate)
        if owner != self.name:
            raise ConfigError(f"{self.path}: name = {self.name!r}, but {self.certificate} is that of {owner!r}")
        return tuple(remarks)


def init(folder: Path, sites: Sequence[str], address: str, *, local: bool | None = None) -> Project:
    """Write a new project folder.

    Args:
        folder: The new folder.
        sites: Names of the hospitals.
        address: host:port at which hospitals reach the server.
        local: Whether the archives hold keys and certificates, for hospitals that are rehearsed on this computer; by
            default where the address is of this computer only.
    """
    names, (host, port) = _distinct(sites), endpoint(address)
    if not names:
        raise ConfigError("a project needs at least one hospital: name its sites")
    vacant(folder, "project")
    authority = certificates.new_authority()
    server = certificates.issue("polysite server", authority, certificates.DAYS, host)
    keys: dict[str, str] = {}
    with draft_folder(folder, "project", private=False) as draft:  # each file has its own mode
        draft.chmod(0o700)
        put(draft / "ca.crt", authority.pem)
        put(draft / "ca.key", authority.key_pem, 0o600)
        put(draft / "server.crt", server.pem)
        put(draft / "server.key", server.key_pem, 0o600)
        (draft / "sites").mkdir(mode=0o700)
        for name in names:
            keys[name], archive = _onboard(name, address, authority, is_local(host) if local is None else local)
            put(draft / "sites" / f"{name}.zip", archive, 0o600)
        listen = "::" if ":" in host else "0.0.0.0"
        text = templates.SERVER.format(address=address, host=listen, port=port, min_sites=_quorum(len(names)))
        put(draft / "server.toml", (text + "".join(map(_line, keys, keys.values()))).encode())
        put(draft / "README.md", templates.COORDINATOR.format(address=address, port=port, folder=folder.name).encode())
    return Project.load(folder)


def add(folder: Path, name: str, *, ca_key: Path | None = None, local: bool | None = None) -> Path:
    """Add a hospital to a project, with a line in server.toml; return the path of its archive. Only in a local project
    (see ``init``) it holds a key and a certificate."""
    project, file = Project.load(folder), folder / "server.toml"
    _distinct([*project.names, name])
    archive, signs = project.archive(name), ca_key or project.ca_key
    if archive.exists():
        raise RunError(f"{archive} exists already; an archive is never overwritten: move it away first")
    if is_local(endpoint(project.address)[0]) if local is None else local:
        public, content = _onboard(name, project.address, signing_authority(project, signs), True)
    else:
        public, content = "", _archive(name, project.address, project.ca.read_bytes())
    after = _with_key(file, name, public)
    archive.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        write_private(archive, content)
        write_file(file, lambda p: p.write_text(after, encoding="utf-8"))
    except RunError:
        archive.unlink(missing_ok=True)  # the server would not know this hospital
        raise
    return archive


def set_key(project: Project, name: str, public: str) -> None:
    """Replace the public key of a hospital in server.toml; the empty text is for one that has to enrol."""
    file = project.folder / "server.toml"
    after = _with_key(file, name, public)
    write_file(file, lambda p: p.write_text(after, encoding="utf-8"))


def _with_key(file: Path, name: str, public: str) -> str:
    """Return the text of server.toml with the public key of a hospital, in its own line, or in a new one at the end."""
    before = file.read_text(encoding="utf-8-sig")
    line = re.compile(rf"""^(["']?){re.escape(name)}\1[ \t]*=.*\n?""", re.MULTILINE)
    after, found = line.subn(lambda _: _line(name, public), before)
    after = after if found else f"{before.rstrip()}\n{_line(name, public)}"
    if _sites(after) != {**_sites(before), name: public}:
        raise ConfigError(f"{file}: [sites] must be its last section, and {name!r} must have one line of its own there")
    return after


def signing_authority(project: Project, ca_key: Path | None = None) -> Signed:
    """Return the authority of a project with its key, which may lie elsewhere."""
    signs = ca_key or project.ca_key
    if not signs.is_file():
        raise DataError(f"{signs} is missing; it signs all certificates: say where it is")
    return certificates.read_authority(project.ca, signs)


def is_local(host: str) -> bool:
    """Whether a host is this computer, for itself alone.

    >>> [is_local(h) for h in ("localhost", "127.0.0.1", "::1", "fl.example.org", "192.0.2.7")]
    [True, True, True, False, False]
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def renew(folder: Path, *, ca_key: Path | None = None) -> None:
    """Replace the server's certificate by a new one of the same authority; hospitals need not do anything. If this is
    killed between the two files, it can be repeated."""
    project = Project.load(folder, check=False)
    host, _ = endpoint(project.address)
    server = certificates.issue("polysite server", signing_authority(project, ca_key), certificates.DAYS, host)
    write_private(project.key, server.key_pem)
    write_file(project.certificate, lambda p: put(p, server.pem))


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


def put(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a new file that is never readable by more people than ``mode`` says."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _onboard(name: str, address: str, authority: Signed, local: bool) -> tuple[str, bytes]:
    """Return the public key of a new hospital, and the archive for it; the key is empty where the hospital makes it."""
    if not local:
        return "", _archive(name, address, authority.pem)
    member = certificates.issue(name, authority, certificates.DAYS)
    return certificates.public_line(member.key.public_key()), _archive(name, address, authority.pem, member)


def _archive(name: str, address: str, ca: bytes, member: Signed | None = None) -> bytes:
    """Return the archive for a hospital, with a key and a certificate in a local project."""
    content = {
        "README.md": templates.HOSPITAL.format(name=name, address=address).encode(),
        "site.toml": templates.SITE.format(name=name, address=address, data=templates.DATA.format(name=name)).encode(),
        "policy.toml": TEXT.encode(),
        **({"site.key": member.key_pem, "site.crt": member.pem} if member else {}),
        "ca.crt": ca,
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in content.items():
            info = zipfile.ZipInfo(file, datetime.now().timetuple()[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (stat.S_IFREG | (0o600 if file == "site.key" else 0o644)) << 16
            archive.writestr(info, data)
    return made.getvalue()


def _line(name: str, public: str) -> str:
    return f'"{name}" = "{public}"\n'


def _sites(text: str) -> dict[str, Any]:
    try:
        return dict(parse_toml(text, "server.toml")["sites"])
    except (ConfigError, KeyError, TypeError, ValueError):
        return {}


def public_key(name: str, line: Any) -> bytes:
    """Return a public key of server.toml as PEM."""
    key = certificates.read_public(line)
    if key is None:
        raise ConfigError(
            f"the public key of the site {name!r} cannot be read; 'polysite deploy add' writes such lines"
        )
    return certificates.public_pem(key)


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
