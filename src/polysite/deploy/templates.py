"""The texts of a project: the configuration of a server and of a site, and what their folders tell a reader.

``coordinator.md`` and ``hospital.md`` become the README.md of a project and of an archive.
"""

from importlib import resources

COORDINATOR, HOSPITAL = (
    resources.files("polysite").joinpath("deploy", f"{name}.md").read_text(encoding="utf-8")
    for name in ("coordinator", "hospital")
)

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

# the hospitals and their public keys; a hospital without a line is refused (`polysite deploy add` adds one). An empty
# key is that of a hospital that was invited and has no certificate yet (`polysite deploy sign` makes it)
[sites]
"""

DATA = """\
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
