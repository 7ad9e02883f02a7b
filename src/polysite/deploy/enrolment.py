"""How a hospital gets, renews and loses its certificate. Its private key is made at the hospital and stays there.

::

    hospital                       coordinator
    enrol    site.key, site.csr →
                                   sign      server.toml gets the public key, sites/NAME.crt
    install  site.crt           ←
    renew    site.csr           →  sign      a request with the key that is known needs no question

A key that is listed in revoked.txt is refused; a running server reads that file again whenever it changes.
"""

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polysite.deploy import certificates
from polysite.deploy.project import Project, SiteConfig, public_key, set_key, signing_authority
from polysite.deploy.revocations import HEAD, der, listed
from polysite.errors import ConfigError, DataError, RunError, shown
from polysite.storage import write_file, write_private


@dataclass(frozen=True)
class Enrolled:
    """A certificate that was made: of which hospital, where it lies, and whether it renews another one."""

    name: str
    certificate: Path
    fingerprint: str
    renewed: bool


def fingerprint(public: str) -> str:
    """Return the fingerprint of a public key as server.toml has it, in groups that can be read out over the telephone.

    >>> fingerprint("QUJD")
    'b5d4 045c 3f46 6fa9 1fe2 cc6a be79 232a'
    """
    digest = hashlib.sha256(base64.b64decode(public)).hexdigest()[:32]
    return " ".join(digest[k : k + 4] for k in range(0, 32, 4))


# at the hospital


def enrol(folder: Path) -> tuple[Path, str]:
    """Make the key of a hospital and a request for its certificate; return the request and its fingerprint."""
    site = SiteConfig.load(folder, check=False)
    if site.key.exists():
        raise RunError(
            f"{site.key} exists already, and no key is overwritten: 'polysite site renew' asks for a new certificate; "
            "for a new key, move the old one away"
        )
    key = certificates.new_key()
    write_private(site.key, certificates.private_pem(key))
    return _request(site, key)


def renew(folder: Path) -> tuple[Path, str]:
    """Make a request for a new certificate, signed with the key of the old one; return it and its fingerprint."""
    site = SiteConfig.load(folder, check=False)
    return _request(site, certificates.read_key(site.key))


def _request(site: SiteConfig, key: Any) -> tuple[Path, str]:
    path = site.path.parent / "site.csr"
    write_file(path, lambda p: p.write_bytes(certificates.signing_request(site.name, key)))
    return path, fingerprint(certificates.public_line(key.public_key()))


def install(folder: Path, certificate: Path) -> datetime:
    """Install the certificate of a hospital; return when it expires. Refuse one that is not for its key and name, or
    not from its authority."""
    site = SiteConfig.load(folder, check=False)
    found, _ = certificates.verified(certificate, site.key, site.ca, datetime.now(UTC))
    owner = certificates.common_name(found)
    if owner != site.name:
        raise ConfigError(f"{certificate} is that of {shown(owner, 64)!r}, and this site is {site.name!r}")
    content = certificate.read_bytes()
    write_file(site.certificate, lambda p: p.write_bytes(content))
    return certificates.expiry(site.certificate)


# at the coordinator


def sign(folder: Path, request: Path, *, ca_key: Path | None = None) -> Enrolled:
    """Make the certificate of a hospital from its request: of one that was invited, or that renews with its key."""
    project = Project.load(folder, check=False)
    try:
        content = request.read_bytes()
    except OSError as problem:
        raise DataError(f"the request {request} cannot be read: {problem.strerror}") from problem
    name, public = certificates.read_request(content, str(request))
    line, renewed = certificates.public_line(public), name in project.sites
    _check(project, name, line, str(request))
    made = certificates.certify(name, public, signing_authority(project, ca_key), certificates.DAYS)
    path = project.folder / "sites" / f"{name}.crt"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_file(path, lambda p: p.write_bytes(certificates.pem(made)))
    if not renewed:
        set_key(project, name, line)
    return Enrolled(name, path, fingerprint(line), renewed)


def _check(project: Project, name: str, line: str, where: str) -> None:
    """Refuse a request of a hospital that was not invited, has another key, or whose key was revoked."""
    if name not in project.names:
        raise DataError(
            f"{where} is for {shown(name, 64)!r}, which is not among the hospitals {', '.join(project.names)}: "
            "'polysite deploy add' invites it"
        )
    if base64.b64decode(line) in listed(project.revoked):
        raise DataError(f"the key of {where} was revoked; {name} has to enrol with a new one")
    if name in project.sites and project.sites[name] != public_key(name, line):
        raise DataError(
            f"{name} has another key than {where}: only the key that is known can be renewed; for a new one, "
            f"'polysite deploy revoke {name}' first"
        )


def revoke(folder: Path, name: str) -> None:
    """Put the key of a hospital on the list of revoked ones, and let the hospital enrol again with another key."""
    project = Project.load(folder, check=False)
    if name not in project.sites:
        raise DataError(
            f"{name!r} has no key in {folder / 'server.toml'}; the hospitals are {', '.join(project.sites)}"
        )
    line = base64.b64encode(der(project.sites[name])).decode()
    before = project.revoked.read_text(encoding="utf-8") if project.revoked.exists() else HEAD
    entry = f"{line}  {datetime.now(UTC):%Y-%m-%d}  {name}\n"
    write_file(project.revoked, lambda p: p.write_text(before + entry, encoding="utf-8"))  # first: nothing may pass
    set_key(project, name, "")
