"""Write hospital.lock and hospital.cdx.json: every package of a hospital's installation, with its hash.

    python scripts/lock.py            writes both
    python scripts/lock.py --check    fails if a declared dependency is not in the lock, or the two differ

The lock is for Linux on x86-64 with the Python that runs this script; other machines have other files, hence other
hashes. torch is left out, since a hospital chooses its build (CPU, or a version of CUDA) and installs it first. The
second file is a software bill of materials (CycloneDX) of the same packages.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCK, BILL = ROOT / "hospital.lock", ROOT / "hospital.cdx.json"
CHOSEN = ("torch", "polysite")  # installed apart
HEAD = """\
# Every package of a hospital's site but torch and polysite itself, for Linux on x86-64 and Python {python}.
# Install torch first, then: pip install --require-hashes --no-deps -r hospital.lock, then polysite with --no-deps.
# Written by scripts/lock.py.
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true")
    if options.parse_args().check:
        check()
        return
    packages = resolved()
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, (version, digest) in sorted(packages.items())]
    LOCK.write_text(HEAD.format(python=f"{sys.version_info[0]}.{sys.version_info[1]}") + "\n".join(lines) + "\n")
    parts = [component(name, *known) for name, known in sorted(packages.items())]
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": parts}
    BILL.write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{len(lines)} packages")


def resolved() -> dict[str, tuple[str, str]]:
    """Return version and SHA-256 of every package that pip would install, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-c", str(ROOT / "constraints.txt"), f"{ROOT}[deploy]"]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    packages = {}
    for each in found:
        name = plain(each["metadata"]["name"])
        if name not in CHOSEN:
            packages[name] = (each["metadata"]["version"], each["download_info"]["archive_info"]["hashes"]["sha256"])
    return packages


def component(name: str, version: str, digest: str) -> dict[str, Any]:
    """Return the entry of a package in the bill of materials."""
    hashes = [{"alg": "SHA-256", "content": digest}]
    return {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}", "hashes": hashes}


def locked() -> dict[str, str]:
    """Return the version of every package in the lock, by name."""
    pairs = re.findall(r"^([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$", LOCK.read_text(), re.MULTILINE)
    return dict(pairs)


def check() -> None:
    """Compare the lock with the declared dependencies and with the bill of materials."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["deploy"]
    names = {plain(re.split(r"[<>=!~ \[;]", text)[0]) for text in declared} - set(CHOSEN)
    lock = locked()
    bill = {plain(c["name"]): c["version"] for c in json.loads(BILL.read_text())["components"]}
    missing = sorted(names - lock.keys())
    if missing or lock != bill:
        differ = sorted(lock.items() ^ bill.items())[:3]
        raise SystemExit(f"hospital.lock lacks {missing} or differs from its bill in {differ}; run scripts/lock.py")
    print(f"{len(lock)} packages, all declared ones among them")


def plain(name: str) -> str:
    """Return a name of a package in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
