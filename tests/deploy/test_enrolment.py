"""Keys are made at the hospital; the coordinator signs requests, renews certificates and revokes keys while it runs."""

import stat
import zipfile
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from secrets import token_hex
from ssl import DER_cert_to_PEM_cert, PEM_cert_to_DER_cert

import pytest
from typer.testing import CliRunner

from consortium import free_port
from polysite.cli import app
from polysite.deploy import certificates, enrolment
from polysite.deploy import project as projects
from polysite.deploy.coordinator import run as coordinator
from polysite.deploy.flower.client import Fleet
from polysite.deploy.flower.connection import Lost, Refused
from polysite.deploy.project import Project, SiteConfig
from polysite.errors import ConfigError, DataError, PolysiteError, RunError
from wire_ends import HEADER, collected, received, send

ADDRESS = "fl.example.org:9443"


def polysite(*words):
    found = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture
def project(tmp_path):
    """A project for hospitals on other computers, before any of them has enrolled."""
    return projects.init(tmp_path / "project", ["north", "South 2"], ADDRESS)


def invited(project, name, folder):
    with zipfile.ZipFile(project.archive(name)) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def site(project, tmp_path):
    return invited(project, "north", tmp_path / "north")


def enrolled(project, folder):
    """Enrol a hospital, from its key to its certificate."""
    request, _ = enrolment.enrol(folder)
    enrolment.install(folder, enrolment.sign(project.folder, request).certificate)
    return SiteConfig.load(folder)


def test_no_private_key_of_a_hospital_is_ever_at_the_coordinator(project, site):
    assert "PRIVATE KEY" not in "".join((site / f).read_text() for f in ("README.md", "site.toml", "ca.crt"))
    assert {p.name for p in site.iterdir()} == {"site.toml", "policy.toml", "ca.crt", "README.md"}
    said = polysite("site", "enrol", site)
    key, request = site / "site.key", site / "site.csr"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and b"PRIVATE" not in request.read_bytes()
    signed = polysite("deploy", "sign", request, "--project", project.folder)
    lines = said.splitlines()
    (mark,) = {after.strip() for line, after in pairwise(lines) if "fingerprint" in line}
    assert mark in signed  # both read the same fingerprint
    polysite("site", "install", project.folder / "sites" / "north.crt", site)
    secret = key.read_bytes().splitlines()[1]
    assert not any(secret in p.read_bytes() for p in project.folder.rglob("*") if p.is_file())
    assert SiteConfig.load(site).name == "north"
    after = Project.load(project.folder)
    assert list(after.sites) == ["north"] and after.invited == ("South 2",)
    assert "South 2 has no certificate yet" in " ".join(after.remarks)
    with pytest.raises(ConfigError, match="1 of 2 hospitals are enrolled, and a round needs 2"):
        after.check_enrolled(after.min_sites)


def test_a_local_project_needs_one_command(tmp_path):
    polysite("deploy", "init", tmp_path / "p", "--site", "a", "--address", "localhost:9443")
    polysite("deploy", "add", "b", "--project", tmp_path / "p")
    made = Project.load(tmp_path / "p")
    assert list(made.sites) == ["a", "b"] and SiteConfig.load(invited(made, "a", tmp_path / "a")).name == "a"


def other_request(folder, name):
    path = folder / f"{token_hex(4)}.csr"
    path.write_bytes(certificates.signing_request(name, certificates.new_key()))
    return path


def contents(project):
    return {p: p.read_bytes() for p in project.folder.rglob("*") if p.is_file()}


def test_what_must_not_be_signed_or_installed_changes_nothing(project, site, tmp_path):
    enrolled(project, site)
    altered = site / "altered.csr"
    der = PEM_cert_to_DER_cert((site / "site.csr").read_text().replace(" REQUEST", "")).replace(b"north", b"South")
    altered.write_text(DER_cert_to_PEM_cert(der).replace("CERTIFICATE", "CERTIFICATE REQUEST"))
    before = contents(project)
    for request, said in (
        (other_request(site, "north"), "north has another key"),
        (other_request(site, "../north"), "is not among the hospitals"),
        (other_request(site, "east"), "'polysite deploy add' invites it"),
        (altered, "is not signed with a P-384 key of its own"),
        (site / "site.key", "is not a request for a certificate"),
        (site / "none", "cannot be read"),
    ):
        with pytest.raises(DataError, match=said):
            enrolment.sign(project.folder, request)
    project.ca_key.rename(project.folder.parent / "safe.key")
    with pytest.raises(DataError, match=r"ca\.key is missing"):
        enrolment.sign(project.folder, site / "site.csr")
    (project.folder.parent / "safe.key").rename(project.ca_key)
    assert contents(project) == before
    with pytest.raises(RunError, match="no key is overwritten"):
        enrolment.enrol(site)
    enrolment.enrol(invited(project, "South 2", tmp_path / "south"))
    made, before = enrolment.sign(project.folder, tmp_path / "south" / "site.csr"), (site / "site.crt").read_bytes()
    for wrong, said in ((made.certificate, "is not the key of"), (site / "no", "missing")):
        with pytest.raises(PolysiteError, match=said):
            enrolment.install(site, wrong)
    assert (site / "site.crt").read_bytes() == before


def test_a_renewal_with_the_same_key_needs_no_question_and_one_after_expiry_works(project, site, monkeypatch):
    enrolled(project, site)
    key, before = (site / "site.key").read_bytes(), certificates.expiry(site / "site.crt")
    later = datetime.now(UTC) + timedelta(days=725)
    assert any("expires on" in remark for remark in SiteConfig.load(site, now=later).remarks)
    with pytest.raises(DataError, match="'polysite site renew' at a hospital"):
        SiteConfig.load(site, now=later + timedelta(days=100))
    polysite("site", "renew", site)
    monkeypatch.setattr(certificates, "DAYS", 1000)
    made = enrolment.sign(project.folder, site / "site.csr")
    assert made.renewed and enrolment.install(site, made.certificate) > before
    assert (site / "site.key").read_bytes() == key and Project.load(project.folder).sites.keys() == {"north"}


def test_a_revoked_key_is_never_signed_again_and_its_hospital_enrols_with_another(project, site):
    enrolled(project, site)
    polysite("deploy", "revoke", "north", "--project", project.folder)
    assert Project.load(project.folder).invited == ("north", "South 2")
    enrolment.renew(site)
    with pytest.raises(DataError, match="was revoked"):
        enrolment.sign(project.folder, site / "site.csr")
    with pytest.raises(DataError, match="'north' has no key"):
        enrolment.revoke(project.folder, "north")
    (site / "site.key").unlink()
    enrolled(project, site)
    assert list(Project.load(project.folder).sites) == ["north"]


# while a server runs


@contextmanager
def running(tmp_path):
    """A server, and a hospital that is connected to it."""
    made = projects.init(tmp_path / "p", ["north"], f"localhost:{free_port()}", local=False)
    folder = invited(made, "north", tmp_path / "n")
    request, _ = enrolment.enrol(folder)
    enrolment.install(folder, enrolment.sign(made.folder, request).certificate)
    made, site = Project.load(made.folder), SiteConfig.load(folder)
    site.state.mkdir()
    files = {"key": site.key, "certificate": site.certificate, "ca": site.ca}
    with coordinator.listening(made) as link, Fleet(site.server, **files, patience=0.2) as fleet:
        fleet.connect()
        yield made, site, link, fleet


def test_a_key_that_is_revoked_is_refused_at_the_next_message(tmp_path):
    with running(tmp_path) as (project, _, link, north):
        sent = send(link, "north", HEADER, b"abc", 60, "1")
        asked = received(north)
        enrolment.revoke(project.folder, "north")
        assert link.online() == {}
        with pytest.raises(Lost, match="has revoked this site's key"):
            north.answer(asked, {}, b"late", patience=0.2)
        with pytest.raises(Refused, match="has revoked this site's key") as refused:
            north.connect()
        assert refused.value.slowly  # it waits for the hospital's people, and goes on trying
        assert list(link.collect([sent])) == []
        assert {"a key that was revoked"} == {i["what"] for i in link.incidents() if i["site"] == "north"}
        project.revoked.unlink()  # a mistake, mended while the server runs
        north.connect()
        assert north.answer(asked, {}, b"late") and collected(link, sent)[0].body == b"late"


def test_both_sides_are_warned_before_a_certificate_expires(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "DAYS", 5)
    with running(tmp_path) as (project, site, link, _north):
        (noted,) = link.incidents()
        assert noted["site"] == "north" and noted["what"].startswith("its certificate expires on ")
        assert any("server.crt expires on" in remark for remark in project.remarks)
        assert any("site.crt expires on" in remark for remark in site.remarks)
