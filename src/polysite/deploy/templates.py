"""The texts of a project: the configuration of a server and of a site, and what their folders tell a reader."""

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

COORDINATOR = """\
# The coordinator's side of a federation

| file | what it is | secret |
|---|---|---|
| `server.toml` | where the server listens, which hospitals take part, when a round goes on without some | no |
| `sites/NAME.zip` | what one hospital needs to enrol; in a local project also its key | **in a local project** |
| `sites/NAME.crt` | the certificate of a hospital, made from its request | no |
| `revoked.txt` | keys that are not accepted any more; a running server reads it again whenever it changes | no |
| `server.crt`, `server.key` | the certificate of the server, and its key | **the key** |
| `ca.crt`, `ca.key` | the authority that signed all certificates, and its key | **the key** |

Any person with `ca.key` can impersonate the server. It is needed only to sign the requests of hospitals and to renew
certificates: move it to a safe place, off this machine.

1. Send every hospital its archive, over a channel that you trust: by `ca.crt` in it the hospital recognises your
   server. It makes its own key and sends you a request (`site.csr`); its private key never leaves it. Compare the
   fingerprint over the telephone, then sign and send the certificate back:

   ```sh
   polysite deploy sign site.csr --project {folder}
   ```

   (In a local project the archives hold keys already: only for hospitals that are rehearsed on one computer.)
2. Let hospitals reach `{address}` over TCP. They connect to you; nothing connects to them.
3. Run a study from the folder above this one. Its `[data]` has `name = "hospitals"` and the modalities and labels that
   every hospital must have:

   ```sh
   polysite deploy run study.toml --project {folder}
   ```

To add a hospital: `polysite deploy add NAME --project {folder}`. If the key of a hospital was lost or seen by others,
or if it has left: `polysite deploy revoke NAME --project {folder}`; a running server refuses its next message.
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

{enrol}3. **Run**, in this folder:

   ```sh
   polysite site run .
   ```

   It connects to `{address}`; nothing connects to this computer, and no port has to be opened. It shows every request
   and everything that left. Stop it with Ctrl-C and start it again at any time.

**What left?** `polysite site log .` lists it and verifies that the log was not changed. The log is
`state/ledger.jsonl`, to which lines are only appended.

**Keep `site.key` secret** (`chmod 600 site.key`): never send it to anybody, not even to the coordinator. Any person
with the key can impersonate your hospital. If others have seen it, tell the coordinator, who revokes it; then enrol
again.
"""

ENROL = """\
   **Enrol**: `polysite site enrol .` makes your key here and a request, `site.csr`. Send the request to the
   coordinator, and compare the fingerprint that it prints over the telephone. You get a certificate back, `NAME.crt`:
   `polysite site install NAME.crt .`

"""
