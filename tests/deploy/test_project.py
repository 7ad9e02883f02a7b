"""The coordinator's project and the hospitals' archives: real handshakes, who may read what, whole or not at all."""

import errno
import importlib
import os
import re
import ssl
import stat
import subprocess
import sys
import zipfile
from datetime import UTC, datetime, timedelta
from functools import partial
from shutil import copy

import pytest

from polysite.deploy import project as projects
from polysite.deploy.project import Project, SiteConfig, endpoint, renew
from polysite.deploy.site.policy import TEXT
from polysite.errors import ConfigError, DataError, PolysiteError, RunError

x509 = pytest.importorskip("cryptography.x509")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402

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


def serving(ca, certificate, key):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    return trusting(context, ca, certificate, key)


def calling(ca, certificate=None, key=None):
    return trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ca, certificate, key)


def trusting(context, ca, certificate, key):
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(ca)
    if certificate:
        context.load_cert_chain(certificate, key)
    return context


def of(project):
    return serving(project.ca, project.certificate, project.key)


def at(folder):
    return calling(folder / "ca.crt", folder / "site.crt", folder / "site.key")


def pem(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def signed(folder, name, key, by=None, ca=False, hosts=(), days=100, uses=()):
    """A certificate of somebody else's making: name.crt and name.key, as (certificate, key)."""
    issuer, signer = by or (None, key)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    start = datetime.now(UTC) - timedelta(days=200)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=200 + days))
        .add_extension(x509.BasicConstraints(ca, None), True)
        .add_extension(x509.SubjectKeyIdentifier(name.encode()), False)  # not derived from the key, which is allowed
    )
    if issuer:
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
            ),
            False,
        )
    if ca:
        usage = dict.fromkeys(["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False)
        rest = dict.fromkeys(["encipher_only", "decipher_only", "digital_signature"], False)
        builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage, **rest), True)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(h) for h in hosts]), False)
    if uses:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), False)
    found = builder.sign(signer, None if isinstance(signer, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    (folder / f"{name}.crt").write_bytes(found.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(pem(key))
    return found, key


def p256():
    return ec.generate_private_key(ec.SECP256R1())


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
    assert {name: oct(p.stat().st_mode & 0o777) for name, p in files.items()} == {
        name: "0o600" if name in secret else "0o644" for name in files
    }
    assert {p.stat().st_mode & 0o777 for p in (made.folder, made.folder / "sites")} == {0o700}
    assert [p.name for p in tmp_path.iterdir()] == ["project"]
    text = (made.folder / "README.md").read_text()
    assert all(word in text for word in ("ca.key", "server.key", "sites/NAME.zip", ADDRESS, "channel that you trust"))


def test_an_archive_has_the_keys_of_its_hospital_and_no_other(made):
    contents = {name: zipfile.ZipFile(made.archive(name)) for name in NAMES}
    keys = {name: archive.read("site.key") for name, archive in contents.items()}
    foreign = {"ca": made.ca_key.read_bytes(), "server": made.key.read_bytes(), **keys}
    assert len(set(foreign.values())) == len(NAMES) + 2
    for name, archive in contents.items():
        assert set(archive.namelist()) == INSIDE
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
        assert modes.pop("site.key") == 0o600 and set(modes.values()) == {0o644}
        everything = b"".join(archive.read(file) for file in INSIDE)
        assert everything.count(b"PRIVATE KEY-----") == 2  # where it begins and where it ends
        assert [who for who, key in foreign.items() if key.splitlines()[1] in everything] == [name]
        assert archive.read("policy.toml").decode() == TEXT
        assert archive.read("ca.crt") == made.ca.read_bytes()
        assert "polysite site run ." in archive.read("README.md").decode()


def test_the_project_reads_what_was_written(made):
    assert (made.address, made.host, made.port) == (ADDRESS, "0.0.0.0", 9443)
    assert (made.min_sites, made.deadline, made.remarks) == (2, 3600.0, ())
    assert list(made.sites) == NAMES and Project.load(made.folder) == made


def test_public_keys_are_as_flower_has_them(made):
    pytest.importorskip("flwr")
    from flwr.supercore.primitives import asymmetric

    for name in NAMES:
        key = asymmetric.bytes_to_private_key(zipfile.ZipFile(made.archive(name)).read("site.key"))
        assert made.sites[name] == asymmetric.public_key_to_bytes(key.public_key())
        assert asymmetric.uses_nist_ec_curve(key.public_key())


def test_certificates_are_good_for_one_thing_each(made, tmp_path):
    folder = unpacked(made, "north", tmp_path / "north")
    ca, server, site = (
        x509.load_pem_x509_certificate(p.read_bytes()) for p in (made.ca, made.certificate, folder / "site.crt")
    )
    assert {c.public_key().curve.name for c in (ca, server, site)} == {"secp384r1"}
    assert {c.signature_hash_algorithm.name for c in (ca, server, site)} == {"sha384"}

    def extension(certificate, kind):
        return certificate.extensions.get_extension_for_class(kind)

    limits = {c: extension(c, x509.BasicConstraints) for c in (ca, server, site)}
    assert all(found.critical for found in limits.values())
    assert (limits[ca].value.ca, limits[ca].value.path_length) == (True, 0)
    assert not limits[server].value.ca and not limits[site].value.ca
    assert extension(ca, x509.KeyUsage).value.key_cert_sign and not extension(site, x509.KeyUsage).value.key_cert_sign
    assert list(extension(server, x509.ExtendedKeyUsage).value) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    assert list(extension(site, x509.ExtendedKeyUsage).value) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    hosts = [str(name.value) for name in extension(server, x509.SubjectAlternativeName).value]
    assert hosts == ["fl.example.org", "localhost", "127.0.0.1", "::1"]
    assert timedelta(days=729) < server.not_valid_after_utc - datetime.now(UTC) < timedelta(days=730)


# who may connect


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", ["fl.example.org", "localhost", "127.0.0.1", "::1"])
def test_hospitals_and_the_server_know_each_other(made, tmp_path, name, host):
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
    refused = [
        (of(made), calling(made.ca), "fl.example.org"),  # no certificate
        (of(made), calling(made.ca, theirs / "site.crt", theirs / "site.key"), "fl.example.org"),  # another authority's
        (of(made), calling(made.ca, made.certificate, made.key), "fl.example.org"),  # a server as a hospital
        (of(other), at(mine), "fl.example.org"),  # another server
        (serving(made.ca, mine / "site.crt", mine / "site.key"), at(mine), "fl.example.org"),  # a hospital as a server
        (of(made), at(mine), "fl.example.com"),
    ]
    for server, client, host in refused:
        with pytest.raises(ssl.SSLError):
            handshake(server, client, host)


def test_a_server_whose_certificate_has_ended_gets_another(project, site):
    later = datetime.now(UTC) + timedelta(days=731)
    with pytest.raises(DataError, match=r"server\.crt"):
        Project.load(project.folder, later)
    before = project.certificate.read_bytes()
    renew(project.folder, days=3000)
    assert project.certificate.read_bytes() != before and stat.S_IMODE(project.key.stat().st_mode) == 0o600
    Project.load(project.folder, later)
    assert handshake(of(project), at(site), "fl.example.org")  # a hospital notices nothing
    project.ca_key.unlink()
    with pytest.raises(DataError, match=r"ca\.key is missing"):
        renew(project.folder)


# whole or not at all


@pytest.mark.parametrize("calls", [0, 1, 5, 9])
@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_init_that_fails(tmp_path, monkeypatch, calls, problem):
    left = [None] * calls

    def fsync(handle):
        if not left:
            raise problem
        left.pop()

    monkeypatch.setattr(os, "fsync", fsync)
    expected = RunError if isinstance(problem, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if expected is RunError else None):
        init(tmp_path / "project", ["a", "b", "c", "d"], ADDRESS)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    with pytest.raises(RunError, match="exists already"):
        init(folder, ["a"], ADDRESS)
    monkeypatch.setattr(type(folder), "exists", lambda _: False)  # somebody is faster
    (folder / "precious").touch()
    with pytest.raises(RunError, match="could not be written"):
        init(folder, ["a"], ADDRESS)
    assert [p.name for p in tmp_path.rglob("*")] == ["project", "precious"]


@pytest.mark.parametrize(
    "names, said",
    [
        ([], "at least one hospital"),
        (["a", ""], "needs another name"),
        (["../a"], "needs another name"),
        ([".."], "needs another name"),
        ([".hidden"], "needs another name"),
        (["a "], "needs another name"),
        (["a."], "needs another name"),
        (["a\n"], "needs another name"),
        (['a"b'], "needs another name"),
        (["Köln"], "needs another name"),
        (["x" * 65], "at most 64"),
        (["North", "north"], "'North' and 'north'"),
        (["a", "a"], "different names"),
    ],
)
def test_names_that_cannot_be_told_apart_or_written_are_refused(tmp_path, names, said):
    with pytest.raises(ConfigError, match=said):
        init(tmp_path / "project", names, ADDRESS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "host",
            "host:",
            ":9443",
            "host:0",
            "host:65536",
            "host:99999999",
            "host:-1",
            "host: 1",
            "https://host:1",
        ),
        *("0.0.0.0:1", "[::]:1", "::1:9443", "[127.0.0.1]:1", "[host]:1", "300.1.1.1:1", "ho st:1", "-a:1", "a..b:1"),
        *('a"b:1', "a\n:1", "a:1\n", "hö:1", "a:１", f"{'a' * 64}:1", f"{'a.' * 127}a:1"),
    ],
)
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(ConfigError, match="must be host:port"):
        endpoint(address)


@pytest.mark.parametrize("days", [0, -1, 3651, 10**12])
def test_certificates_do_not_last_for_ever(tmp_path, days):
    with pytest.raises(ConfigError, match=f"days = {days}"):
        init(tmp_path / "project", ["a"], ADDRESS, days=days)
    assert list(tmp_path.iterdir()) == []


def test_deployment_needs_cryptography_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "polysite.deploy.certificates")
    with pytest.raises(RunError, match=re.escape("deployment needs Flower: pip install 'polysite[deploy]'")):
        importlib.import_module("polysite.deploy.certificates")


def test_no_framework_is_imported():
    code = (
        "import sys, polysite.deploy.project, polysite.deploy.site.policy, polysite.deploy.site.ledger\n"
        "print({'torch', 'monai', 'flwr', 'matplotlib', 'nibabel'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# an authority or a certificate that is given


@pytest.mark.parametrize(
    "key",
    [p256, ed25519.Ed25519PrivateKey.generate, lambda: rsa.generate_private_key(65537, 2048)],
    ids=["P-256", "Ed25519", "RSA"],
)
def test_an_authority_of_ones_own_signs_and_keeps_its_key(tmp_path, key):
    signed(tmp_path, "root", key(), ca=True)
    project = init(tmp_path / "p", ["a"], ADDRESS, ca=tmp_path / "root.crt", ca_key=tmp_path / "root.key")
    assert not project.ca_key.exists() and project.ca.read_bytes() == (tmp_path / "root.crt").read_bytes()
    assert handshake(of(project), at(unpacked(project, "a", tmp_path / "a")))
    with pytest.raises(DataError, match=r"ca\.key is missing"):
        add(project.folder, "b")
    assert add(project.folder, "b", ca_key=tmp_path / "root.key") == project.archive("b")
    assert handshake(of(project), at(unpacked(project, "b", tmp_path / "b")))
    site = x509.load_pem_x509_certificate((tmp_path / "a" / "site.crt").read_bytes())
    root = x509.load_pem_x509_certificate(project.ca.read_bytes())
    assert site.not_valid_after_utc == root.not_valid_after_utc  # nothing outlives its authority


def test_an_authority_below_another_brings_it_along(tmp_path):
    root = signed(tmp_path, "root", p256(), ca=True)
    signed(tmp_path, "middle", p256(), root, ca=True)
    chain = tmp_path / "chain.crt"
    chain.write_bytes((tmp_path / "middle.crt").read_bytes() + (tmp_path / "root.crt").read_bytes())
    project = init(tmp_path / "p", ["a"], ADDRESS, ca=chain, ca_key=tmp_path / "middle.key")
    assert handshake(of(project), at(unpacked(project, "a", tmp_path / "a")))


@pytest.mark.parametrize("hosts", [["FL.example.org"], ["x.org", "*.example.org"]])
@pytest.mark.parametrize("between", [False, True])
def test_a_server_certificate_of_ones_own_is_used(tmp_path, hosts, between):
    by = root = signed(tmp_path, "root", p256(), ca=True)
    if between:
        by = signed(tmp_path, "middle", p256(), root, ca=True)
    signed(tmp_path, "own", p256(), by, hosts=hosts)
    whole = (tmp_path / "own.crt").read_bytes() + ((tmp_path / "middle.crt").read_bytes() if between else b"")
    (tmp_path / "own.crt").write_bytes(whole)
    files = {"ca": "root.crt", "ca_key": "root.key", "certificate": "own.crt", "key": "own.key"}
    project = init(tmp_path / "p", ["a"], ADDRESS, **{k: tmp_path / v for k, v in files.items()})
    assert project.certificate.read_bytes() == whole and project.key.stat().st_mode & 0o777 == 0o600
    assert handshake(of(project), at(unpacked(project, "a", tmp_path / "a")))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Certificates with one thing wrong each."""
    folder = tmp_path_factory.mktemp("others")
    root = signed(folder, "root", p256(), ca=True)
    signed(folder, "stranger", p256(), ca=True)
    signed(folder, "past", p256(), ca=True, days=-1)
    middle = signed(folder, "middle", p256(), root, ca=True)
    hosts = ["fl.example.org"]
    signed(folder, "own", p256(), root, hosts=hosts)
    signed(folder, "below", p256(), middle, hosts=hosts)
    signed(folder, "expired", p256(), root, hosts=hosts, days=-1)
    signed(folder, "elsewhere", p256(), root, hosts=["example.org", "*.fl.example.org"])
    signed(folder, "nameless", p256(), root)
    signed(folder, "client", p256(), root, hosts=hosts, uses=[x509.ExtendedKeyUsageOID.CLIENT_AUTH])
    (folder / "garbage").write_text("garbage")
    locked = serialization.BestAvailableEncryption(b"secret")
    (folder / "locked.key").write_bytes(
        root[1].private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    return folder


ROOT = {"ca": "root.crt", "ca_key": "root.key"}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"ca": "root.crt"}, "ca is given without ca_key"),
        ({"ca_key": "root.key"}, "ca_key is given without ca"),
        ({"certificate": "own.crt"}, "give certificate and key, or neither"),
        ({**ROOT, "key": "own.key"}, "give certificate and key, or neither"),
        ({"certificate": "own.crt", "key": "own.key"}, "certificate is given without ca"),
        ({"ca": "root.crt", "certificate": "own.crt", "key": "own.key"}, "ca is given without ca_key"),
        ({"ca": "root.crt", "ca_key": "own.key"}, "is not the key of"),
        ({"ca": "root.crt", "ca_key": "locked.key"}, "has a passphrase"),
        ({"ca": "root.crt", "ca_key": "garbage"}, "cannot be read as a private key"),
        ({"ca": "root.crt", "ca_key": "nowhere"}, "is missing"),
        ({"ca": "nowhere", "ca_key": "root.key"}, "is missing"),
        ({"ca": "garbage", "ca_key": "root.key"}, "cannot be read as a certificate"),
        ({"ca": "own.crt", "ca_key": "own.key"}, "is not the certificate of an authority"),
        ({"ca": "middle.crt", "ca_key": "middle.key"}, "up to the one that signed itself"),
        ({"ca": "past.crt", "ca_key": "past.key"}, "expired on"),
        ({**ROOT, "certificate": "own.crt", "key": "root.key"}, "is not the key of"),
        ({**ROOT, "certificate": "below.crt", "key": "below.key"}, "was not signed by"),
        ({**ROOT, "certificate": "stranger.crt", "key": "stranger.key"}, "was not signed by"),
        ({**ROOT, "certificate": "expired.crt", "key": "expired.key"}, "expired on"),
        ({**ROOT, "certificate": "elsewhere.crt", "key": "elsewhere.key"}, "not for 'fl.example.org'"),
        ({**ROOT, "certificate": "nameless.crt", "key": "nameless.key"}, "no host at all"),
        ({**ROOT, "certificate": "client.crt", "key": "client.key"}, "not for a server"),
    ],
)
def test_what_is_given_must_fit_together(tmp_path, others, given, said):
    with pytest.raises((ConfigError, DataError), match=said):
        init(tmp_path / "p", ["a"], ADDRESS, **{k: others / v for k, v in given.items()})
    assert list(tmp_path.iterdir()) == []


# one more hospital


def test_a_hospital_can_come_later(project, tmp_path):
    file = project.folder / "server.toml"
    edit(file, "deadline = 3600", "deadline = 60  # ours")
    edit(file, "min_sites = 2", "min_sites = 1")
    before = {p: p.read_bytes() for p in (project.folder / "sites").iterdir()}
    assert add(project.folder, "east") == project.archive("east")
    after = Project.load(project.folder)
    assert list(after.sites) == ["north", "South 2", "east"] and (after.deadline, after.min_sites) == (60, 1)
    assert {k: after.sites[k] for k in project.sites} == project.sites and "# ours" in file.read_text()
    assert after.archive("east").stat().st_mode & 0o777 == 0o600
    assert {p: p.read_bytes() for p in before} == before
    peer = handshake(of(project), at(unpacked(after, "east", tmp_path / "east")))
    assert peer["subject"] == ((("commonName", "east"),),)


@pytest.mark.parametrize(
    "spoil, name, said",
    [
        (lambda p: None, "NORTH", "'north' and 'NORTH'"),
        (lambda p: None, "a/b", "needs another name"),
        (lambda p: (p / "ca.key").unlink(), "east", r"ca\.key is missing"),
        (lambda p: copy(p / "server.key", p / "ca.key"), "east", "is not the key of"),
        (lambda p: (p / "sites" / "east.zip").touch(), "east", "exists already"),
        (lambda p: inline(p / "server.toml"), "east", r"does not end with its \[sites\]"),
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
def test_a_full_disk_adds_nobody(project, monkeypatch, calls):
    before, left = sorted(project.folder.rglob("*")), [None] * calls
    sync = os.fsync

    def fsync(handle):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match="No space left"):
        add(project.folder, "east")
    assert sorted(project.folder.rglob("*")) == before and Project.load(project.folder) == project


# what is read again


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def same_key(file):
    text = file.read_text()
    key = re.search(r'"north" = (.*)', text)[1]
    file.write_text(re.sub(r'"South 2" = .*', f'"South 2" = {key}', text))


PROJECTS = {
    "no server.toml; 'polysite deploy init' makes one": lambda p: (p / "server.toml").unlink(),
    "not valid TOML": lambda p: edit(p / "server.toml", "port = 9443", "port ="),
    "did you mean 'deadline'": lambda p: edit(p / "server.toml", "deadline", "dedline"),
    "has no address": lambda p: edit(p / "server.toml", "address =", "# address ="),
    "must be host:port": lambda p: edit(p / "server.toml", ADDRESS, "fl.example.org"),
    "port = 70000 must lie": lambda p: edit(p / "server.toml", "port = 9443", "port = 70000"),
    "must be a whole number": lambda p: edit(p / "server.toml", "port = 9443", "port = '9443'"),
    "min_sites = 3 must lie between 1 and the 2": lambda p: edit(p / "server.toml", "min_sites = 2", "min_sites = 3"),
    "min_sites = 0": lambda p: edit(p / "server.toml", "min_sites = 2", "min_sites = 0"),
    "deadline = nan": lambda p: edit(p / "server.toml", "deadline = 3600", "deadline = nan"),
    "deadline = 0": lambda p: edit(p / "server.toml", "deadline = 3600", "deadline = 0"),
    "has no sites": lambda p: (p / "server.toml").write_text((p / "server.toml").read_text().split("[sites]")[0]),
    "key of the site 'north' cannot be read": lambda p: edit(p / "server.toml", '"north" = "MH', '"north" = "HM'),
    "key of the site 'west' cannot be read": lambda p: edit(p / "server.toml", "[sites]", "[sites]\nwest = 1"),
    "'north' and 'NORTH'": lambda p: edit(p / "server.toml", '"South 2" =', '"NORTH" ='),
    "have the same key": lambda p: same_key(p / "server.toml"),
    "ca.crt is missing": lambda p: (p / "ca.crt").unlink(),
    "server.key is missing": lambda p: (p / "server.key").unlink(),
    "server.key cannot be read": lambda p: (p / "server.key").write_text("x"),
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
        now = datetime.now(UTC)
        assert load(where, now=now + timedelta(days=690)).remarks == ()
        (remark,) = load(where, now=now + timedelta(days=705)).remarks
        assert "expires on 20" in remark
        with pytest.raises(DataError, match="expired on 20"):
            load(where, now=now + timedelta(days=731))
        with pytest.raises(DataError, match="is the clock of this machine right"):
            load(where, now=now - timedelta(days=2))


def test_secrets_that_others_can_read_are_remarked_on(project, site):
    for path in (project.key, project.ca_key, project.archive("north"), site / "site.key"):
        path.chmod(0o640)
    assert [r.split()[0] for r in Project.load(project.folder).remarks] == [
        str(p) for p in (project.ca_key, project.key, project.archive("north"))
    ]
    (remark,) = SiteConfig.load(site).remarks
    assert "chmod 600" in remark and "site.key" in remark


def test_the_authority_s_key_may_be_elsewhere(project):
    project.ca_key.unlink()
    assert Project.load(project.folder) == project


def test_keys_that_are_left_out_have_defaults(project):
    file = project.folder / "server.toml"
    file.write_text(re.sub(r"(?m)^(host|port|min_sites|deadline) = .*\n", "", file.read_text()))
    assert Project.load(project.folder) == project


# a hospital's side


def test_a_site_reads_its_archive(site):
    found = SiteConfig.load(site)
    assert (found.name, found.server, found.device, found.data) == ("north", ADDRESS, "auto", {})
    assert found == SiteConfig.load(site / "site.toml") and found.path == site / "site.toml"
    files = {"key": "site.key", "certificate": "site.crt", "ca": "ca.crt", "policy": "policy.toml", "state": "state"}
    assert {k: getattr(found, k) for k in files} == {k: site / v for k, v in files.items()}
    assert found.remarks == () and found.socket.parent == found.state


@pytest.mark.parametrize("example", ["files", "phantom"])
def test_the_examples_of_site_toml_are_data(site, example):
    from polysite.config import build

    text = (site / "site.toml").read_text()
    head, files, phantom = text.rpartition("[data]")[0] + "[data]\n", *text.rpartition("[data]")[2].split("\n\n")
    lines = (files if example == "files" else phantom).strip().splitlines()[1:]
    body = "\n".join(line.removeprefix("# ") for line in lines)
    (site / "scans").mkdir()
    (site / "site.toml").write_text(head + body.replace("/data/brain", "scans"))
    found = SiteConfig.load(site)
    data = build({"data": found.data}).data
    assert found.data["name"] == example
    if example == "files":
        assert found.data["path"] == str(site / "scans") and data.labels["TC"] == (1, 4)
    else:
        assert data.sites["north"].cases == 12


def test_files_of_the_data_are_relative_to_site_toml(site, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.csv").touch()
    edit(site / "site.toml", "\n[data]", '\n[data]\npath = "~/m.csv"\ntables = ["a.csv", "/b.csv"]')
    assert SiteConfig.load(site).data == {"path": str(tmp_path / "m.csv"), "tables": [str(site / "a.csv"), "/b.csv"]}


def test_the_fingerprint_changes_with_what_the_worker_must_know(site):
    prints = {SiteConfig.load(site).fingerprint}
    for file in ("site.toml", "policy.toml"):
        edit(site / file, "# ", "#  ")
        prints.add(SiteConfig.load(site).fingerprint)
    assert len(prints) == 3


def proxied(site, text, login=None):
    edit(site / "site.toml", "\n[data]", f"\n[proxy]\n{text}\n[data]")
    if login is not None:
        (site / "login").write_text(login)


def test_a_site_may_connect_through_a_proxy(site, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://elsewhere:1")  # of no effect: only site.toml counts
    assert SiteConfig.load(site).proxy is None
    proxied(site, 'url = "http://proxy.example.org:3128"\nca = "./ca.crt"')
    found = SiteConfig.load(site).proxy
    assert (found.host, found.port, found.ca, found.headers) == ("proxy.example.org", 3128, site / "ca.crt", {})
    monkeypatch.setenv("POLYSITE_PROXY_LOGIN", "north:geheim")
    assert SiteConfig.load(site).proxy.headers == {"Proxy-Authorization": "Basic bm9ydGg6Z2VoZWlt"}
    edit(site / "site.toml", 'ca = "./ca.crt"', 'login = "login"')
    (site / "login").write_text("file:secret\n")
    (site / "login").chmod(0o644)
    found = SiteConfig.load(site)
    assert "login can be read by others" in found.remarks[-1]
    assert found.proxy.login == "file:secret" and "secret" not in repr(found)


@pytest.mark.parametrize(
    "text, login, said",
    [
        ('url = "https://proxy:1"', None, "must be http://HOST:PORT"),
        ('url = "http://proxy"', None, "must be http://HOST:PORT"),
        ('url = "http://proxy:99999"', None, "is not an address"),
        ('url = "http://north:geheim@proxy:1"', None, "url holds a login"),
        ('url = "http://proxy:1"\nca = "none.crt"', None, "does not exist"),
        ('url = "http://proxy:1"\nlogin = "login"', "geheim", "USER:PASSWORD in one line"),
        ('url = "http://proxy:1"\nlogin = "login"', "geheim:\nb", "USER:PASSWORD in one line"),
        ('url = "http://proxy:1"\nlogin = "login"', None, "cannot be read"),
        ("url = 1", None, "must be a text"),
        ('logn = "x"', None, "did you mean 'login'"),
        ('login = "x"', None, "has no url"),
    ],
)
def test_a_proxy_that_cannot_be_meant_is_refused_without_its_login(site, text, login, said):
    proxied(site, text, login)
    with pytest.raises((ConfigError, DataError), match=re.escape(said)) as refused:
        SiteConfig.load(site)
    assert "geheim" not in str(refused.value)


SITES = {
    "unpack the archive": lambda s: (s / "site.toml").unlink(),
    "has no name": lambda s: edit(s / "site.toml", "name =", "# name ="),
    "has no server": lambda s: edit(s / "site.toml", "server =", "# server ="),
    "did you mean 'policy'": lambda s: edit(s / "site.toml", "policy =", "polcy ="),
    "must be host:port": lambda s: edit(s / "site.toml", ADDRESS, "nowhere"),
    "needs another name": lambda s: edit(s / "site.toml", '"north"', '"../north"'),
    "device = 'gpu'": lambda s: edit(s / "site.toml", 'device = "auto"', 'device = "gpu"'),
    "data = 'x' must be a section": lambda s: edit(s / "site.toml", "\n[data]", "\ndata = 'x'"),
    "path is empty": lambda s: edit(s / "site.toml", "\n[data]", "\n[data]\npath = ''"),
    "does not exist; name this hospital's cases": lambda s: edit(s / "site.toml", "\n[data]", "\n[data]\npath = 'no'"),
    "is that of 'north'": lambda s: edit(s / "site.toml", '"north"', '"South 2"'),
    "too long for a socket": lambda s: edit(s / "site.toml", 'state = "state"', f'state = "{"x" * 100}"'),
    "site.key is missing": lambda s: (s / "site.key").unlink(),
    "site.crt is missing": lambda s: (s / "site.crt").unlink(),
    "ca.crt cannot be read": lambda s: (s / "ca.crt").write_text(""),
    "policy.toml is missing": lambda s: (s / "policy.toml").unlink(),
    "fewest = 0 must be": lambda s: edit(s / "policy.toml", "fewest = 5", "fewest = 0"),
    "site.key is not the key of": lambda s: (s / "site.key").write_bytes(pem(p256())),
}


@pytest.mark.parametrize("said", SITES)
def test_a_site_that_would_not_work_says_why(site, said):
    SITES[said](site)
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        SiteConfig.load(site)


def test_a_site_whose_certificate_is_gone_still_finds_its_log(site):
    for file in ("site.key", "site.crt", "ca.crt", "policy.toml"):
        (site / file).unlink()
    assert SiteConfig.load(site, check=False).state == site / "state"


def test_every_file_of_an_archive_is_what_site_toml_names(made):
    text = zipfile.ZipFile(made.archive("north")).read("site.toml").decode()
    assert {f for f in INSIDE if f'"{f}"' in text} == INSIDE - {"site.toml", "README.md"}
