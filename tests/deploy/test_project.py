"""The coordinator's project and the hospitals' archives: real handshakes, who may read what, whole or not at all."""

import errno
import os
import re
import ssl
import stat
import zipfile
from datetime import UTC, datetime, timedelta
from functools import partial
from shutil import copy

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from consortium import change as edit
from polysite.config import build
from polysite.deploy import certificates
from polysite.deploy import project as projects
from polysite.deploy.project import Project, SiteConfig, endpoint, renew
from polysite.deploy.site.policy import TEXT
from polysite.errors import ConfigError, DataError, PolysiteError, RunError

ADDRESS = "fl.example.org:9443"
NAMES = ["north", "South 2", "c.d_e-f"]
INSIDE = {"site.toml", "site.key", "site.crt", "ca.crt", "policy.toml", "README.md"}


# local projects, whose archives hold keys: they differ from others only in that
init, add = partial(projects.init, local=True), partial(projects.add, local=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A project that no test changes."""
    return init(tmp_path_factory.mktemp("coordinator") / "project", NAMES, ADDRESS)


@pytest.fixture
def project(tmp_path):
    return init(tmp_path / "project", NAMES[:2], ADDRESS)


@pytest.fixture
def site(project, tmp_path):
    return unpacked(project, "north", tmp_path / "hospital")


def unpacked(project, name, folder):
    with zipfile.ZipFile(project.archive(name)) as archive:
        archive.extractall(folder)
    (folder / "site.key").chmod(0o600)
    return folder


def handshake(server, client, host="fl.example.org"):
    """Both sides of a TLS connection, in memory; raises what either side says against it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=host),
    ]
    for _ in range(10):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return sides[0].getpeercert()


def context(protocol, ca, certificate=None, key=None):
    found = ssl.SSLContext(protocol)
    found.verify_mode = ssl.CERT_REQUIRED
    found.verify_flags |= ssl.VERIFY_X509_STRICT
    found.load_verify_locations(ca)
    if certificate:
        found.load_cert_chain(certificate, key)
    return found


serving, calling = partial(context, ssl.PROTOCOL_TLS_SERVER), partial(context, ssl.PROTOCOL_TLS_CLIENT)


def of(project):
    return serving(project.ca, project.certificate, project.key)


def at(folder):
    return calling(folder / "ca.crt", folder / "site.crt", folder / "site.key")


def pem(key, lock=serialization.NoEncryption()):
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


# what init writes


def test_the_project_has_what_it_says_and_secrets_are_the_owner_s_alone(tmp_path):
    before = os.umask(0)
    try:
        made = init(tmp_path / "project", NAMES, ADDRESS)
    finally:
        os.umask(before)
    secret = {"ca.key", "server.key", *(f"sites/{name}.zip" for name in NAMES)}
    files = {p.relative_to(made.folder).as_posix(): p for p in made.folder.rglob("*") if p.is_file()}
    assert files.keys() == secret | {"README.md", "server.toml", "ca.crt", "server.crt"}
    assert all(p.stat().st_mode & 0o777 == (0o600 if name in secret else 0o644) for name, p in files.items())
    assert {p.stat().st_mode & 0o777 for p in (made.folder, made.folder / "sites")} == {0o700}
    assert [p.name for p in tmp_path.iterdir()] == ["project"]


def test_an_archive_has_the_keys_of_its_hospital_and_no_other(made):
    contents = {name: zipfile.ZipFile(made.archive(name)) for name in NAMES}
    keys = {name: archive.read("site.key") for name, archive in contents.items()}
    foreign = {"ca": made.ca_key.read_bytes(), "server": made.key.read_bytes(), **keys}
    assert len(set(foreign.values())) == len(NAMES) + 2
    for name, archive in contents.items():
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
        assert modes.keys() == INSIDE and modes.pop("site.key") == 0o600 and set(modes.values()) == {0o644}
        everything = b"".join(archive.read(file) for file in INSIDE)
        assert everything.count(b"PRIVATE KEY-----") == 2  # where it begins and where it ends
        assert [who for who, key in foreign.items() if key.splitlines()[1] in everything] == [name]
        assert archive.read("policy.toml").decode() == TEXT and archive.read("ca.crt") == made.ca.read_bytes()


# who may connect


@pytest.mark.parametrize("name", NAMES)
def test_hospitals_and_the_server_know_each_other(made, tmp_path, name):
    for host in ("fl.example.org", "localhost", "127.0.0.1", "::1"):
        peer = handshake(of(made), at(unpacked(made, name, tmp_path)), host)
        assert peer["subject"] == ((("commonName", name),),)


@pytest.mark.parametrize("address, host", [("192.0.2.7:1", "192.0.2.7"), ("[2001:db8::7]:65535", "2001:db8::7")])
def test_addresses_may_be_numbers(tmp_path, address, host):
    project = init(tmp_path / "project", ["a", "b"], address)
    assert project.host == ("::" if ":" in host else "0.0.0.0")
    assert handshake(of(project), at(unpacked(project, "a", tmp_path / "a")), host)


def test_strangers_are_refused(made, tmp_path):
    other = init(tmp_path / "other", ["north"], ADDRESS)
    mine, theirs = unpacked(made, "north", tmp_path / "mine"), unpacked(other, "north", tmp_path / "theirs")
    own = x509.load_pem_x509_certificate((mine / "site.crt").read_bytes())
    by = certificates.Signed(own, certificates.read_key(mine / "site.key"))
    below = certificates.issue("below", by, 100)
    (tmp_path / "below.crt").write_bytes(below.pem + by.pem)
    (tmp_path / "below.key").write_bytes(below.key_pem)
    for server, client, host in (
        (of(made), calling(made.ca), "fl.example.org"),  # no certificate
        (of(made), calling(made.ca, theirs / "site.crt", theirs / "site.key"), "fl.example.org"),  # another authority's
        (of(made), calling(made.ca, made.certificate, made.key), "fl.example.org"),  # a server as a hospital
        (of(other), at(mine), "fl.example.org"),  # another server
        (serving(made.ca, mine / "site.crt", mine / "site.key"), at(mine), "fl.example.org"),  # a hospital as a server
        (of(made), at(mine), "fl.example.com"),
        (of(made), calling(made.ca, tmp_path / "below.crt", tmp_path / "below.key"), "fl.example.org"),  # signed by one
    ):
        with pytest.raises(ssl.SSLError):
            handshake(server, client, host)


def test_a_server_whose_certificate_has_ended_gets_another(project, site, monkeypatch):
    later = datetime.now(UTC) + timedelta(days=731)
    before = project.certificate.read_bytes()
    monkeypatch.setattr(certificates, "DAYS", 3000)
    renew(project.folder)
    assert project.certificate.read_bytes() != before and stat.S_IMODE(project.key.stat().st_mode) == 0o600
    Project.load(project.folder, later)
    assert handshake(of(project), at(site), "fl.example.org")  # a hospital notices nothing
    project.ca_key.unlink()
    with pytest.raises(DataError, match=r"ca\.key is missing"):
        renew(project.folder)


# whole or not at all


def test_nothing_is_overwritten(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    with pytest.raises(RunError, match="exists already"):
        init(tmp_path / "project", ["a"], ADDRESS)
    monkeypatch.setattr("polysite.deploy.project.vacant", lambda *_: None)
    monkeypatch.setattr(type(tmp_path), "exists", lambda _: False)  # somebody is faster
    (tmp_path / "project" / "precious").touch()
    with pytest.raises(RunError, match="could not be written"):
        init(tmp_path / "project", ["a"], ADDRESS)
    assert [p.name for p in tmp_path.rglob("*")] == ["project", "precious"]


NO_PORT = ["", "host", "host:", "host:0", "host:65536", "host:-1", "host: 1", "a:1\n", "a:１", "https://host:1"]
NO_HOST = [":9443", "0.0.0.0:1", "[::]:1", "::1:9443", "[127.0.0.1]:1", "[host]:1", "300.1.1.1:1", "ho st:1", "-a:1"]
ODD = ["a..b:1", 'a"b:1', "a\n:1", "hö:1", f"{'a' * 64}:1", f"{'a.' * 127}a:1"]


@pytest.mark.parametrize("address", [*NO_PORT, *NO_HOST, *ODD])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(ConfigError, match="must be host:port"):
        endpoint(address)


NAMELESS = ("", "../a", ".hidden", "a ", "a.", "a\n", 'a"b', "Köln")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"sites": []}, "at least one hospital"),
        *(({"sites": ["a", name]}, "needs another name") for name in NAMELESS),
        ({"sites": ["x" * 65]}, "at most 64"),
        ({"sites": ["North", "north"]}, "'North' and 'north'"),
        ({"sites": ["a", "a"]}, "different names"),
    ],
)
def test_what_cannot_be_a_project_is_refused_and_nothing_is_written(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        init(tmp_path / "p", **{"sites": ["a"], "address": ADDRESS, **given})
    assert list(tmp_path.iterdir()) == []


# one more hospital


def test_a_hospital_can_come_later(project, tmp_path):
    file = project.folder / "server.toml"
    edit(file, "deadline = 3600", "deadline = 60  # ours")
    before = {p: p.read_bytes() for p in (project.folder / "sites").iterdir()}
    assert add(project.folder, "east") == project.archive("east")
    after = Project.load(project.folder)
    assert list(after.sites) == ["north", "South 2", "east"] and (after.deadline, after.min_sites) == (60, 2)
    assert {k: after.sites[k] for k in project.sites} == project.sites and "# ours" in file.read_text()
    assert after.archive("east").stat().st_mode & 0o777 == 0o600
    assert {p: p.read_bytes() for p in before} == before
    assert handshake(of(project), at(unpacked(after, "east", tmp_path / "east")))["subject"][0][0][1] == "east"


@pytest.mark.parametrize(
    "spoil, name, said",
    [
        (lambda p: None, "NORTH", "'north' and 'NORTH'"),
        (lambda p: (p / "ca.key").unlink(), "east", r"ca\.key is missing"),
        (lambda p: copy(p / "server.key", p / "ca.key"), "east", "is not the key of"),
        (lambda p: (p / "sites" / "east.zip").touch(), "east", "exists already"),
        (lambda p: inline(p / "server.toml"), "east", r"\[sites\] must be its last section"),
    ],
)
def test_a_hospital_that_cannot_be_added_changes_nothing(project, spoil, name, said):
    spoil(project.folder)
    before = {p: p.read_bytes() for p in project.folder.rglob("*") if p.is_file()}
    with pytest.raises(PolysiteError, match=said):
        add(project.folder, name)
    assert {p: p.read_bytes() for p in project.folder.rglob("*") if p.is_file()} == before


def inline(file):
    """The same sites, written in one line before everything else."""
    head, _, sites = file.read_text().partition("[sites]\n")
    file.write_text(f"sites = {{ {', '.join(sites.strip().splitlines())} }}\n{head}")


@pytest.mark.parametrize("calls", [0, 1])
def test_a_full_disk_leaves_nothing_of_a_project_or_of_a_hospital(project, tmp_path, monkeypatch, calls):
    before, left, sync = sorted(tmp_path.rglob("*")), [], os.fsync

    def fsync(handle):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    for write in (lambda: add(project.folder, "east"), lambda: init(tmp_path / "new", ["a", "b"], ADDRESS)):
        left[:] = [None] * calls
        with pytest.raises(RunError, match="No space left"):
            write()
        assert sorted(tmp_path.rglob("*")) == before and Project.load(project.folder) == project


def locked(key):
    return pem(certificates.read_key(key), serialization.BestAvailableEncryption(b"secret"))


AUTHORITIES = {
    "is not the key of": lambda key: pem(certificates.new_key()),
    "has a passphrase": locked,
    "cannot be read as a private key": lambda key: b"garbage",
    "is not an elliptic curve key": lambda key: pem(ed25519.Ed25519PrivateKey.generate()),
}


@pytest.mark.parametrize("said", AUTHORITIES)
def test_a_key_that_does_not_sign_says_why(project, tmp_path, said):
    (tmp_path / "other.key").write_bytes(AUTHORITIES[said](project.ca_key))
    with pytest.raises(DataError, match=said):
        add(project.folder, "east", ca_key=tmp_path / "other.key")
    assert "east" not in Project.load(project.folder).names


# what is read again


def same_key(file):
    text = file.read_text()
    key = re.search(r'"north" = (.*)', text)[1]
    file.write_text(re.sub(r'"South 2" = .*', f'"South 2" = {key}', text))


PROJECTS = {
    "no server.toml; 'polysite deploy init' makes one": lambda p: (p / "server.toml").unlink(),
    "must be host:port": lambda p: edit(p / "server.toml", ADDRESS, "fl.example.org"),
    "port = 70000 must lie": lambda p: edit(p / "server.toml", "port = 9443", "port = 70000"),
    "min_sites = 3 must lie between 1 and the 2": lambda p: edit(p / "server.toml", "min_sites = 2", "min_sites = 3"),
    "deadline = nan": lambda p: edit(p / "server.toml", "deadline = 3600", "deadline = nan"),
    "has no sites": lambda p: (p / "server.toml").write_text((p / "server.toml").read_text().split("[sites]")[0]),
    "key of the site 'north' cannot be read": lambda p: edit(p / "server.toml", '"north" = "MH', '"north" = "HM'),
    "'north' and 'NORTH'": lambda p: edit(p / "server.toml", '"South 2" =', '"NORTH" ='),
    "have the same key": lambda p: same_key(p / "server.toml"),
    "ca.crt is missing": lambda p: (p / "ca.crt").unlink(),
    "server.key is missing": lambda p: (p / "server.key").unlink(),
    "server.key is not the key of": lambda p: copy(p / "ca.key", p / "server.key"),
    "server.crt was not signed by": lambda p: copy(init(p.parent / "other", ["a"], ADDRESS).ca, p / "ca.crt"),
    "not for 'fl.example.com'": lambda p: edit(p / "server.toml", ADDRESS, "fl.example.com:9443"),
}


@pytest.mark.parametrize("said", PROJECTS)
def test_a_project_that_would_not_work_says_why(project, said):
    PROJECTS[said](project.folder)
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        Project.load(project.folder)


def test_certificates_end(project, site):
    for load, where in ((Project.load, project.folder), (SiteConfig.load, site)):
        days = {n: datetime.now(UTC) + timedelta(days=n) for n in (-2, 690, 705, 731)}
        assert load(where, now=days[690]).remarks == ()
        assert ["expires on 20" in remark for remark in load(where, now=days[705]).remarks] == [True]
        with pytest.raises(DataError, match="expired on 20"):
            load(where, now=days[731])
        with pytest.raises(DataError, match="is the clock of this machine right"):
            load(where, now=days[-2])


def test_secrets_that_others_can_read_are_remarked_on(project, site):
    secret = project.ca_key, project.key, project.archive("north")
    for path in (*secret, site / "site.key"):
        path.chmod(0o640)
    assert [r.split()[0] for r in Project.load(project.folder).remarks] == [str(p) for p in secret]
    (remark,) = SiteConfig.load(site).remarks
    assert "chmod 600" in remark and "site.key" in remark


def test_keys_that_are_left_out_have_defaults_and_that_of_the_authority_may_be_elsewhere(project):
    file = project.folder / "server.toml"
    file.write_text(re.sub(r"(?m)^(host|port|min_sites|deadline) = .*\n", "", file.read_text()))
    project.ca_key.unlink()
    assert Project.load(project.folder) == project


# a hospital's side


def test_the_examples_of_site_toml_are_data(site):
    head, _, tail = (site / "site.toml").read_text().rpartition("[data]")
    (site / "scans").mkdir()
    found = {}
    for example in tail.split("\n\n")[:2]:
        body = "\n".join(line.removeprefix("# ") for line in example.strip().splitlines()[1:])
        (site / "site.toml").write_text(f"{head}[data]\n{body.replace('/data/brain', 'scans')}")
        given = SiteConfig.load(site).data
        found[given["name"]] = build({"data": given}).data
    assert found["files"].path == str(site / "scans") and found["files"].labels["TC"] == (1, 4)
    assert found["phantom"].sites["north"].cases == 12


def test_files_of_the_data_are_relative_to_site_toml(site, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.csv").touch()
    edit(site / "site.toml", "\n[data]", '\n[data]\npath = "~/m.csv"\ntables = ["a.csv", "/b.csv"]')
    assert SiteConfig.load(site).data == {"path": str(tmp_path / "m.csv"), "tables": [str(site / "a.csv"), "/b.csv"]}


def proxied(site, text):
    edit(site / "site.toml", "\n[data]", f"\n[proxy]\n{text}\n[data]")


def test_a_site_may_connect_through_a_proxy(site, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://elsewhere:1")  # of no effect: only site.toml counts
    assert SiteConfig.load(site).proxy is None
    proxied(site, 'url = "http://proxy.example.org:3128"')
    found = SiteConfig.load(site).proxy
    assert (found.host, found.port, found.headers) == ("proxy.example.org", 3128, {})
    edit(site / "site.toml", "[proxy]\nurl", '[proxy]\nlogin = "login"\nurl')
    (site / "login").write_text("north:geheim\n")
    (site / "login").chmod(0o644)
    found = SiteConfig.load(site)
    assert "login can be read by others" in found.remarks[-1]
    assert found.proxy.headers == {"Proxy-Authorization": "Basic bm9ydGg6Z2VoZWlt"} and "geheim" not in repr(found)


URL = 'url = "http://proxy:1"\n'


@pytest.mark.parametrize(
    "text, login, said",
    [
        ('url = "https://proxy:1"', None, "must be http://HOST:PORT"),
        ('url = "http://proxy:99999"', None, "is not an address"),
        ('url = "http://north:geheim@proxy:1"', None, "url holds a login"),
        (f'{URL}login = "login"', "geheim", "USER:PASSWORD in one line"),
        (f'{URL}login = "login"', "geheim:\nb", "USER:PASSWORD in one line"),
        (f'{URL}login = "login"', None, "cannot be read"),
        ('logn = "x"', None, "did you mean 'login'"),
        ('login = "x"', None, "has no url"),
    ],
)
def test_a_proxy_that_cannot_be_meant_is_refused_without_its_login(site, text, login, said):
    proxied(site, text)
    if login is not None:
        (site / "login").write_text(login)
    with pytest.raises((ConfigError, DataError), match=re.escape(said)) as refused:
        SiteConfig.load(site)
    assert "geheim" not in str(refused.value)


SITES = {
    "unpack the archive": lambda s: (s / "site.toml").unlink(),
    "did you mean 'policy'": lambda s: edit(s / "site.toml", "policy =", "polcy ="),
    "must be host:port": lambda s: edit(s / "site.toml", ADDRESS, "nowhere"),
    "device = 'gpu'": lambda s: edit(s / "site.toml", 'device = "auto"', 'device = "gpu"'),
    "path is empty": lambda s: edit(s / "site.toml", "\n[data]", "\n[data]\npath = ''"),
    "does not exist; name this hospital's cases": lambda s: edit(s / "site.toml", "\n[data]", "\n[data]\npath = 'no'"),
    "is that of 'north'": lambda s: edit(s / "site.toml", '"north"', '"South 2"'),
    "site.key is missing": lambda s: (s / "site.key").unlink(),
    "site.crt is missing": lambda s: (s / "site.crt").unlink(),
    "policy.toml is missing": lambda s: (s / "policy.toml").unlink(),
    "fewest = 0 must be": lambda s: edit(s / "policy.toml", "fewest = 5", "fewest = 0"),
    "site.key is not the key of": lambda s: (s / "site.key").write_bytes(pem(certificates.new_key())),
}


@pytest.mark.parametrize("said", SITES)
def test_a_site_that_would_not_work_says_why(site, said):
    SITES[said](site)
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        SiteConfig.load(site)
