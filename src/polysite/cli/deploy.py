"""Commands for real hospitals: ``polysite deploy`` (the coordinator) and ``polysite site`` (a hospital)."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from polysite.cli.base import Config, Json, Override, Quiet, app, say, study_of, watching
from polysite.errors import PolysiteError, RunError, shown

coordinator = typer.Typer(help="Run a study over real hospitals: the coordinator's side.", no_args_is_help=True)
hospital = typer.Typer(help="Take part in studies: the hospital's side.", no_args_is_help=True)
app.add_typer(coordinator, name="deploy")
app.add_typer(hospital, name="site")

Project = Annotated[
    Path, Option(metavar="FOLDER", help="The folder of 'polysite deploy init'; this folder by default.")
]
Site = Annotated[Path, Argument(metavar="FOLDER", help="The unpacked archive; this folder by default.")]
Deadline = Annotated[
    float | None,
    Option(help="Longest duration of a round in seconds; by default as in server.toml.", show_default=False),
]
Wait = Annotated[float, Option(help="Seconds to wait for all sites, once there are enough.")]
CaKey = Annotated[Path | None, Option(metavar="FILE", help="The CA's key, if it lies elsewhere.")]
Local = Annotated[
    bool | None,
    Option(
        "--local/--remote",
        help="Whether archives hold private keys, for hospitals on this computer; by default at localhost only.",
        show_default=False,
    ),
]
HERE = Path()


@coordinator.command()
def init(
    project: Annotated[Path, Argument(metavar="PROJECT", help="A new folder.")],
    site: Annotated[list[str], Option(metavar="NAME", help="A hospital; once for each.")],
    address: Annotated[str, Option(metavar="HOST:PORT", help="Where the hospitals reach this machine.")],
    ca: Annotated[Path | None, Option(metavar="FILE", help="A CA certificate instead of a new one.")] = None,
    ca_key: Annotated[Path | None, Option(metavar="FILE", help="Its key, which signs the hospitals'.")] = None,
    certificate: Annotated[Path | None, Option(metavar="FILE", help="The server's own certificate.")] = None,
    key: Annotated[Path | None, Option(metavar="FILE", help="The key of that certificate.")] = None,
    local: Local = None,
) -> None:
    """Make a project: certificates of the server, and an archive for every hospital."""
    from polysite.deploy import project as projects

    made = projects.init(project, site, address, ca=ca, ca_key=ca_key, certificate=certificate, key=key, local=local)
    if made.invited:
        say(f"{project} is ready. Send every hospital its own archive; it makes its key itself and sends a request:")
    else:
        say(f"{project} is ready, for hospitals on this computer: their archives hold private keys.")
    for path in sorted((project / "sites").glob("*.zip")):
        say(f"  {path}")
    if made.invited:
        say(f"Then, for every request: polysite deploy sign REQUEST --project {project}")
    say(f"Then: polysite deploy run STUDY.toml --project {project}")


@coordinator.command()
def add(
    site: Annotated[str, Argument(metavar="NAME", help="The new hospital.")],
    project: Project = HERE,
    ca_key: CaKey = None,
    local: Local = None,
) -> None:
    """Add a hospital to a project."""
    from polysite.deploy import project as projects

    path = projects.add(project, site, ca_key=ca_key, local=local)
    say(f"Send it to {site}, which enrols with it: {path}")


@coordinator.command()
def sign(
    request: Annotated[Path, Argument(metavar="REQUEST", help="What a hospital sent: its site.csr.")],
    project: Project = HERE,
    ca_key: CaKey = None,
) -> None:
    """Make the certificate of a hospital from its request."""
    from polysite.deploy import enrolment

    made = enrolment.sign(project, request, ca_key=ca_key)
    if made.renewed:
        say(f"The certificate of {made.name} is renewed, for the key that was known.")
    else:
        say(f"{made.name} is enrolled. Its key has this fingerprint:", f"  {made.fingerprint}")
        say("Compare it over the telephone before you send the certificate.")
    say(f"Send it to {made.name}: {made.certificate}")


@coordinator.command()
def revoke(site: Annotated[str, Argument(metavar="NAME", help="The hospital.")], project: Project = HERE) -> None:
    """Refuse the key of a hospital from now on; a running server does so at its next message."""
    from polysite.deploy import enrolment

    enrolment.revoke(project, site)
    say(f"The key of {site} is revoked. It can enrol again with a new one.")


@coordinator.command()
def renew(project: Project = HERE, ca_key: CaKey = None) -> None:
    """Replace the server's certificate before it expires."""
    from polysite.deploy import project as projects

    projects.renew(project, ca_key=ca_key)
    say("The server has a new certificate; start it again. Hospitals need not do anything.")


@coordinator.command()
def run(
    config: Config = None,
    project: Project = HERE,
    override: Override = None,
    out: Annotated[Path | None, Option(help="The run folder; a new one below runs/ by default.")] = None,
    resume: Annotated[Path | None, Option(metavar="RUN", help="Continue this run folder.")] = None,
    min_sites: Annotated[
        int | None, Option(help="Sites that a round needs; by default as in server.toml.", show_default=False)
    ] = None,
    deadline: Deadline = None,
    wait: Wait = 60.0,
    assess: Annotated[bool, Option("--assess/--no-assess", help="Assess the hospitals before training.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train and evaluate a study with the hospitals that connect; write a run folder and a page, as ``train`` does."""
    if resume and (config or override or out):
        raise PolysiteError("--resume takes its configuration from the run folder; leave out the file, --set and --out")
    from polysite.deploy.coordinator import run as coordinator
    from polysite.deploy.project import Project as Loaded
    from polysite.engines.sites import Deadlines

    found = Loaded.load(project)
    for remark in found.remarks:
        say(remark, file=sys.stderr)
    found.check_enrolled(min_sites or found.min_sites)
    deadlines = Deadlines(quorum=min_sites or found.min_sites, deadline=deadline or found.deadline)
    study = None if resume else study_of(config, override or [])
    if study is not None:
        coordinator.check(study)
    stoppable()
    with coordinator.listening(found) as link, watching(quiet, as_json) as watch:
        if not quiet and not as_json:
            say(f"listening on {found.host}:{link.port} for {', '.join(found.sites)}", file=sys.stderr)
        names = list(found.sites)
        if resume:
            done = coordinator.resume(resume, link, watch, deadlines=deadlines, wait=wait)
        elif study is not None:
            done = coordinator.run(study, link, names, out, watch, deadlines=deadlines, assess=assess, wait=wait)
    _publish(done, quiet, as_json)


@coordinator.command()
def retrain(
    run_folder: Annotated[Path, Argument(metavar="RUN", help="The folder of a deployed run.")],
    without: Annotated[list[str], Option(metavar="NAME", help="A hospital to leave out; once for each.")],
    project: Project = HERE,
    out: Annotated[Path | None, Option(help="The new run folder; one below runs/ by default.")] = None,
    deadline: Deadline = None,
    wait: Wait = 60.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Repeat a study from its beginning without some hospitals, for instance those that have left."""
    from polysite.deploy.coordinator import run as coordinator
    from polysite.deploy.project import Project as Loaded
    from polysite.engines.sites import Deadlines

    found = Loaded.load(project)
    deadlines = Deadlines(quorum=found.min_sites, deadline=deadline or found.deadline)
    stoppable()
    with coordinator.listening(found) as link, watching(quiet, as_json) as watch:
        done = coordinator.retrain(run_folder, without, link, found.sites, out, watch, deadlines=deadlines, wait=wait)
    _publish(done, quiet, as_json)


@coordinator.command("leave")
def remove(
    site: Annotated[str, Argument(metavar="NAME", help="The hospital.")],
    project: Project = HERE,
    runs: Annotated[Path, Option(metavar="FOLDER", help="Where the run folders are.")] = Path("runs"),
) -> None:
    """Let a hospital leave: revoke its key, and delete what the runs hold of it alone."""
    from polysite.deploy import leaving

    found = leaving.remove(project, site, runs)
    say(f"The key of {site} is revoked, and {len(found)} files below {runs} that were of it alone are deleted.")
    say(f"To repeat a run without it: polysite deploy retrain RUN --without {site!r} --project {project}")


@coordinator.command()
def export(
    config: Config = None,
    out: Annotated[Path, Option(help="The new job folder.")] = Path("job"),
    engine: Annotated[str, Option(help="Whose job it is: flare (NVIDIA FLARE).")] = "flare",
    override: Override = None,
    site: Annotated[
        list[str] | None, Option(metavar="NAME", help="A FLARE client that takes part; once for each. All by default.")
    ] = None,
    min_sites: Annotated[int, Option(help="Sites that a round needs; with fewer, FLARE ends the job.")] = 2,
    deadline: Annotated[float, Option(help="Longest duration of a round in seconds.")] = 3600.0,
    wait: Wait = 60.0,
    assess: Annotated[bool, Option("--assess/--no-assess", help="Assess the hospitals before training.")] = True,
) -> None:
    """Write a study as a job for a consortium that runs NVIDIA FLARE; submitted again, it goes on where it ended."""
    if engine != "flare":
        raise PolysiteError(f"--engine {shown(engine, 40)}: the engine that takes jobs is 'flare'")
    from polysite.deploy.flare.job import export as write

    names = site or []
    study = study_of(config, override or [])
    write(study, out, sites=names, quorum=min_sites, deadline=deadline, wait=wait, assess=assess)
    sites = list(getattr(study.data, "sites", ())) or names or ["SITE,..."]
    say(f"{out} is ready. Server and sites need polysite[flare] and, once, 'polysite site flare WORKSPACE'. Then:")
    say(f"  nvflare job submit -j {out}")
    say("The same command goes on after the last round, if the job was lost. Or, all on this computer:")
    simulator = f"nvflare simulator {out} -w workspace -c {','.join(sites)} -t {len(sites)}"
    say(f"  polysite site flare workspace && {simulator}")


def _publish(done: Any, quiet: bool, as_json: bool) -> None:
    """Print the result of a run and write its page."""
    if as_json:
        print(json.dumps({"run": str(done.folder.path), **done.result.plain()}))
    from polysite.report import publish, tables

    shown = publish.run_page(done.folder.path)
    if not quiet and not as_json:
        tables.show(*shown)
        say(f"\nThe page: {done.folder.path / 'index.html'}")


@hospital.command("run")
def serve(site: Site = HERE, quiet: Quiet = False) -> None:
    """Take part in studies: connect to the coordinator, answer what the policy allows, show everything that leaves."""
    from polysite.deploy.project import SiteConfig
    from polysite.deploy.site import courier

    def tell(what: str) -> None:
        if not quiet:
            say(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {what}", hang=2)

    found = SiteConfig.load(site)
    for remark in found.remarks:
        tell(remark)
    stoppable()
    try:
        courier.run(found, tell)
    except KeyboardInterrupt:
        tell("stopped; the memory of this site is in its state folder")


@hospital.command("flare")
def admit(workspace: Annotated[Path, Argument(metavar="WORKSPACE", help="The unpacked startup kit of FLARE.")]) -> None:
    """Let a client or server of NVIDIA FLARE run polysite: its two classes, and this hospital's settings and policy."""
    from polysite.deploy.flare.site_folder import admit as let

    own = let(workspace)
    say(f"{own.parent / 'resources.json'} names polysite's two classes; start FLARE again.")
    say(f"At a hospital: set [data] in {own / 'site.toml'}, and read {own / 'policy.toml'}.")


@hospital.command("enrol")
def enrol(site: Site = HERE) -> None:
    """Make this hospital's key, and a request for its certificate."""
    from polysite.deploy import enrolment

    request, fingerprint = enrolment.enrol(site)
    say(f"The key was made; it stays here. Send the request to the coordinator: {request}")
    say("Tell them its fingerprint over the telephone:", f"  {fingerprint}")
    say(f"With the certificate that comes back: polysite site install CERTIFICATE {site}")


@hospital.command("install")
def install(
    certificate: Annotated[Path, Argument(metavar="CERTIFICATE", help="The file that the coordinator sent.")],
    site: Site = HERE,
) -> None:
    """Install the certificate that the coordinator made."""
    from polysite.deploy import enrolment

    end = enrolment.install(site, certificate)
    say(f"The certificate is installed; it expires on {end:%Y-%m-%d}. Then: polysite site run {site}")


@hospital.command("renew")
def renew_certificate(site: Site = HERE) -> None:
    """Make a request for a new certificate, signed with this hospital's key."""
    from polysite.deploy import enrolment

    request, _ = enrolment.renew(site)
    say(f"Send it to the coordinator: {request}")
    say(f"With the certificate that comes back: polysite site install CERTIFICATE {site}")


@hospital.command("leave")
def leave(
    site: Site = HERE,
    study: Annotated[str, Option(metavar="STUDY", help="Only this study, as 'polysite site log' names it.")] = "",
) -> None:
    """Leave the federation, or a study: delete this hospital's memories and models."""
    from polysite.deploy import leaving

    _show_left(leaving.leave(site, study))


@hospital.command("withdraw")
def withdraw(
    case: Annotated[str, Argument(metavar="CASE", help="Name of the case in your data.")], site: Site = HERE
) -> None:
    """Withdraw a case: no later study sees it, and all studies so far are left."""
    from polysite.deploy import leaving

    _show_left(leaving.withdraw(site, case))


def _show_left(studies: list[str]) -> None:
    which = ", ".join(studies) or "no study"
    say(f"Memories and models of {which} are deleted here; the log is kept. Tell the coordinator.")


def stoppable() -> None:
    """Let Ctrl-C and kill stop the command, even if the shell ignores them."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)


@hospital.command("statistics")
def write_statistics(
    site: Site = HERE, out: Annotated[Path | None, Option(help="New file; FOLDER/NAME.json by default.")] = None
) -> None:
    """Write median sizes of this hospital's images, from which the coordinator plans a study."""
    from polysite.deploy.site import own_statistics

    path, found = own_statistics.write(site, out)
    print(found.to_json())
    say(f"This is all that {path} says. Send it to the coordinator, for 'polysite data plan'.")


@hospital.command("package")
def show_package(
    name: Annotated[str, Argument(metavar="NAME", help="An installed package with own algorithms or networks.")],
) -> None:
    """Print the line by which policy.toml allows the code of a package."""
    from polysite import plugins

    print(f'packages = ["{name} {plugins.digest(name)}"]')


@hospital.command("log")
def show_log(site: Site = HERE, as_json: Json = False) -> None:
    """Show what was asked and what left, and verify the audit log."""
    from polysite.deploy.project import SiteConfig
    from polysite.deploy.site import ledger

    path = SiteConfig.load(site, check=False).state / "ledger.jsonl"
    if not path.exists():
        raise RunError(f"nothing has been asked here yet: there is no {path}")
    entries = ledger.check(path)
    if as_json:
        for entry in entries:
            print(json.dumps(entry))
        return
    for entry in entries:
        if entry["kind"] == "cut":
            say(f"line {entry['line']} was cut by a crash")
            continue
        where = f", round {entry['round'] + 1}" if entry.get("round", -1) >= 0 else ""
        no = entry.get("refused") or entry.get("error")
        left = f"refused: {no}" if no else f"{entry.get('bytes', 0)} bytes: {json.dumps(entry.get('left', {}))}"
        again = "  (once more)" if entry.get("again") else ""
        what = f"{entry.get('study', '')}  {entry.get('kind', '')}{where}  {left}{again}"
        say(shown(f"{entry['time']}  {what}", 1000), hang=2)
    say()
    for total in ledger.summary(entries):
        say(f"{total.study}  {total.kind}: {total.requests} asked, {total.refusals} refused, {total.bytes} bytes left")
    say(f"{len(entries)} entries; every one is tied to the one before it, none was changed or removed.")
