"""The texts of a project: the configuration of a server and of a site, and what their folders tell a reader.

``coordinator.md`` and ``hospital.md`` become the README.md of a project and of an archive; ``server.toml`` is that of a
project without its hospitals, and ``data.toml`` the end of every ``site.toml``.
"""

from importlib import resources

COORDINATOR, HOSPITAL, SERVER, DATA = (
    resources.files("polysite").joinpath("deploy", name).read_text(encoding="utf-8")
    for name in ("coordinator.md", "hospital.md", "server.toml", "data.toml")
)

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
# worker = "unshare -rn"  # words before the command that opens the scans; these cut it off the network

# If this computer connects out through a proxy only: remove the # of these lines (docs/hospital.md has the others).
# [proxy]
# url = "http://proxy.example.org:3128"

{data}"""

FLARE_SITE = """\
# This hospital where NVIDIA FLARE connects it; polysite's executor reads this file at the start of every job. FLARE has
# the name of the site, the address of the server, the key and the certificate. Files are relative to this one.

policy = "policy.toml"  # what this hospital allows; yours to change
device = "auto"  # "auto", "cpu", "cuda", or "cuda:1" for a second GPU
# state = "/data/polysite"  # folder of the audit log, the memory and the models; by default below FLARE's workspace

{data}"""
