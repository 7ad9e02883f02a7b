"""Everything in polysite that reads what others wrote, with sound examples, for ``scripts/fuzz.py``."""

import gzip
import json
import math
import shutil
import socket
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fuzz_mutations as mutate
import h5py
import nibabel as nib
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from PIL import Image

from polysite import config, payload
from polysite.assessment import read_verdict
from polysite.benchmark import bench
from polysite.data import images, manifest, tables
from polysite.data.case import CaseRef
from polysite.data.split import Split
from polysite.deploy import protocol
from polysite.deploy.flare import messages as flare_messages
from polysite.deploy.flare import site_folder
from polysite.deploy.project import Project, SiteConfig
from polysite.deploy.site import ipc, kept_split, ledger
from polysite.deploy.site.policy import TEXT, SitePolicy
from polysite.deploy.site.privacy_budget import PrivacyBudget
from polysite.deploy.site.pseudonyms import Pseudonyms
from polysite.deploy.site.studies import Studies
from polysite.engines import checkpoint, messages, site_memory
from polysite.engines.messages import Measured
from polysite.engines.run_folder import RunFolder
from polysite.errors import PolysiteError
from polysite.metrics.measures import MEASURES
from polysite.payload import Payload
from polysite.planning import statistics
from polysite.planning.statistics import SiteStatistics
from polysite.report import evaluations, runs, site_distances
from polysite.site import CaseScore, Examined
from polysite.tuning import space

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "v0.1.0"
DEPLOYED = FIXTURES / "deployed" / "finished"
STUDY = "0123456789abcdef"
# studies of a few keys, which are damaged and read several times as fast as whole ones, and together have all sections
SHORT = tuple(
    text.replace("; ", "\n").encode() + b"\n"
    for text in (
        'seed = 1; [algorithm]; name = "fedprox"; mu = 0.1; [run]; rounds = 2; guard.use = "on"',
        '[data]; name = "phantom"; shape = [24, 24, 24]; [data.sites.a]; cases = 6; gamma = 1.2; [split]; test = 0.2',
        '[train]; lr = 0.1; patch = [16, 16, 16]; augment = "light"; [model]; name = "unet_small"; filters = [2, 4, 4]',
        '[data]; name = "files"; path = "x"; modalities = ["t1"]; [prepare]; spacing = [1, 1, 1]; [federation]; '
        'name = "natural"',
        '[algorithm]; name = "clustered"; groups = { one = ["a"] }; [[then]]; algorithm.name = "fine_tune"; '
        "run.rounds = 2",
        '[assess]; permutations = 99; fewest = 2; [encoder]; name = "bundled"; [cost]; up = 2.0; [slices]; '
        'axis = "axial"',
    )
)


@dataclass(frozen=True)
class Reader:
    """A reader with sound examples of what it reads, the damages that suit them, and whether it accepts them."""

    name: str
    examples: tuple[bytes, ...]
    read: Callable[[bytes], object]
    mutation: mutate.Mutation = mutate.BYTES
    accepts: bool = True  # the first example; some belong to other data than there are here


def readers(folder: Path) -> Iterator[Reader]:
    """Yield every reader. Files are written to the folder."""
    yield from _settings(folder)
    yield from _run_folders(folder)
    yield from _at_hospitals(folder)
    yield from _data(folder)
    yield from _messages()


def from_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a reader of bytes from a reader of files."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def call(content: bytes) -> object:
        path.write_bytes(content)
        return read(path)

    return call


def _settings(folder: Path) -> Iterator[Reader]:
    """Yield the readers of TOML."""
    study = (DEPLOYED / "run" / "config.toml").read_bytes()
    phases = (FIXTURES / "phases" / "config.toml").read_bytes()
    yield Reader("study", (*SHORT, study, phases), from_file(folder / "s.toml", config.load), mutate.TOML)
    yield Reader("policy", (TEXT.encode(), (DEPLOYED / "a" / "policy.toml").read_bytes()),
                 from_file(folder / "policy.toml", SitePolicy.load), mutate.TOML)  # fmt: skip
    site = b'name = "north"\nserver = "localhost:9443"\n[data]\nname = "files"\npath = "x"\n'
    yield Reader("site.toml", (site, (DEPLOYED / "a" / "site.toml").read_bytes()),
                 from_file(folder / "site.toml", partial(SiteConfig.load, check=False)), mutate.TOML)  # fmt: skip
    own = b'device = "cpu"\n[data]\nname = "phantom"\n'
    read = from_file(folder / "kit" / "local" / "polysite" / "site.toml", _kit)
    yield Reader("site.toml of FLARE", (own,), read, mutate.TOML)
    resources = b'{"format_version": 2, "class_allow_list": ["a.B"], "components": []}'
    read = from_file(folder / "kit2" / "local" / "resources.json", lambda path: site_folder.admit(path.parents[1]))
    yield Reader("resources.json of FLARE", (resources,), read, mutate.JSON)
    server = b'address = "localhost:9443"\nport = 9443\nmin_sites = 1\ndeadline = 60\n[sites]\n'
    read = from_file(folder / "project" / "server.toml", lambda path: Project.load(path.parent, check=False))
    yield Reader("server.toml", (server + b'north = "%s"\n' % _public_key(), server), read, mutate.TOML)
    small = b'seeds = [0, 1]\n[study]\nrun.rounds = 2\n[methods.fedavg]\n[methods.m]\nalgorithm = "fedprox"\n'
    more = small + b'[sweep]\n"train.lr" = [0.1]\n[tiny.study]\nrun.rounds = 1\n[compare]\nalpha = 0.05\n'
    read = from_file(folder / "b.toml", lambda path: bench.load(str(path)))
    yield Reader("benchmark", (small, more), read, mutate.TOML)
    tried = b'reference = "fedavg"\ndefault = ["m"]\n[search]\n"train.lr" = [0.1]\n[methods.m]\nalgorithm = "fedprox"\n'
    medians = SiteStatistics("north", 9, 2, 3, "segmentation", (140, 172, 140), (1.0, 1.0, 2.0), 1.2, ("RAS",))
    told = replace(medians, turned_shape=medians.shape, turned_spacing=medians.spacing).to_json().encode()
    yield Reader("site statistics", (told,), from_file(folder / "north.json", statistics.read), mutate.JSON)
    yield Reader("search space", (tried,), from_file(folder / "space.toml", space.load), mutate.TOML)


def _kit(path: Path) -> object:
    """Read the settings of a hospital in the workspace of its FLARE client."""
    return site_folder.prepare(path.parents[2], path.parents[1], "north")


def _public_key() -> bytes:
    """Return the public key of a hospital, as server.toml has it."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return b64encode(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _run_folders(folder: Path) -> Iterator[Reader]:
    """Yield the readers of run folders, evaluations, checkpoints and assessments."""
    run, kinds = DEPLOYED / "run", {"config.toml": mutate.TOML}
    short = {"config.toml": b'[algorithm]\nname = "fedavg"\n', "rounds.jsonl": _lines(run / "rounds.jsonl", 1)}
    for name in ("config.toml", "result.json", "rounds.jsonl", "versions.json"):
        copy = folder / f"run-{name}"
        copy.mkdir()
        for each in ("config.toml", "result.json", "rounds.jsonl", "versions.json"):
            (copy / each).write_bytes(short.get(each) or (run / each).read_bytes())
        read = from_file(copy / name, lambda path: runs.read(path.parent))
        examples = {"config.toml": SHORT[0], "rounds.jsonl": _lines(run / "rounds.jsonl", 2)}
        whole = (run / name).read_bytes()
        yield Reader(f"run {name}", (examples.get(name, whole), whole), read, kinds.get(name, mutate.JSON))
    needed = from_file(folder / "run-needed" / "checkpoints" / "round-000001.json", _needed)
    yield Reader("versions of memories", (b'{"north": 1, "south": 2}',), needed, mutate.JSON)
    cost = b'{"north": {"noise": 2.0, "rate": 1.0, "steps": 1, "delta": 1e-05}}'
    paid = from_file(folder / "paid" / "assessment" / "privacy.json", _paid)
    yield Reader("cost of an assessment", (cost,), paid, mutate.JSON)
    sound = next((FIXTURES / "phases" / "checkpoints").glob("round-*.safetensors"))
    yield Reader("checkpoint", (sound.read_bytes(),), from_file(folder / "c.safetensors", _checkpoint), mutate.TENSORS,
                 accepts=False)  # fmt: skip
    evaluated = FIXTURES / "classes" / "evaluation" / "test"
    for name in ("about.json", "cases.csv"):
        copy = folder / f"evaluated-{name}" / "evaluation" / "test"
        shutil.copytree(evaluated, copy)
        read = from_file(copy / name, lambda path: evaluations.read_evaluation(path.parents[2], "test"))
        yield Reader(f"evaluation {name}", ((evaluated / name).read_bytes(),), read,
                     mutate.JSON if name.endswith("json") else mutate.BYTES)  # fmt: skip
    np.savez_compressed(folder / "whole.npz", **{"north/a/image": np.ones((1, 2, 2)), "north/a/truth": np.ones((1, 2))})
    kept = from_file(
        folder / "kept" / "scans.npz", lambda path: evaluations.Evaluation(path.parent, {}, ()).scan("north", "a")
    )
    yield Reader("scans.npz", ((folder / "whole.npz").read_bytes(),), kept)
    assessed = (FIXTURES / "assessment" / "assessment.json").read_bytes()
    examples = (*(_trimmed(assessed),) * 3, assessed)
    yield Reader("assessment.json", examples, from_file(folder / "x" / "assessment.json", _assessment), mutate.JSON)


def _at_hospitals(folder: Path) -> Iterator[Reader]:
    """Yield the readers of a hospital's state folder and of the socket between its processes."""
    state = DEPLOYED / "a" / "state"
    memory = next((state / "runs").glob("*/memory/round-000003.safetensors"))
    load = from_file(folder / "memory.safetensors", site_memory.load_any)
    yield Reader("site memory", (memory.read_bytes(),), load, mutate.TENSORS)
    log = folder / "ledger"
    log.mkdir()
    shutil.copy(state / "ledger.jsonl.head", log)
    read = from_file(log / "ledger.jsonl", lambda path: ledger.summary(ledger.check(path)))
    yield Reader("ledger", ((state / "ledger.jsonl").read_bytes(),), read, mutate.JSON)
    names = Pseudonyms(folder / "secrets" / "secret")
    parts = {names.digest(f"{k}"): part for k, part in enumerate(("train", "train", "validation", "test", "out"))}
    cases = [CaseRef("a", f"{k}", None, None) for k in range(6)]  # type: ignore[arg-type]
    dealt = {"train": cases[:4], "validation": cases[4:5], "test": cases[5:]}
    keep = from_file(folder / "split.json", lambda path: kept_split.keep_split(path, cases, dealt, names))
    yield Reader("split.json", (json.dumps({"format": 1, "cases": parts}).encode(),), keep, mutate.JSON)
    trace = {"study": "s", "time": 1e9, "train": ["a"], "assessed": [], "seed": 1, "seen": [8], "of_one": 1}
    within = from_file(folder / "studies.jsonl", lambda path: Studies(path).within(1e6))
    yield Reader("studies.jsonl", (json.dumps(trace).encode() + b"\n",), within, mutate.JSON)
    release = {"noise": 2.0, "rate": 0.4, "steps": 3, "delta": 1e-5}
    entry = {"study": STUDY, "phase": 0, "round": 3, "time": 1.8e9, "release": release}
    spent = from_file(folder / "privacy.jsonl", lambda path: PrivacyBudget(path.parent).entries())
    yield Reader("privacy.jsonl", (json.dumps(entry).encode() + b"\n",), spent, mutate.JSON)
    frame = {"request": {"kind": "train", "round": 1}, "incidents": ["x"]}
    yield Reader("socket", (json.dumps(frame).encode(),), _frame, mutate.JSON)


def _data(folder: Path) -> Iterator[Reader]:
    """Yield the readers of manifests, tables, splits and images."""
    rows = b"Subject_ID,Partition_ID,Split,Site\na,b,train,b\nc,b,validation,b\nd,b,train,b\ne,b,test,b\n"
    yield Reader(
        "split.csv", (rows, (DEPLOYED / "run" / "split.csv").read_bytes()), from_file(folder / "split.csv", _split)
    )
    table = b'site,case,t1,label,labels\nnorth,a,a.nii,a_seg.nii,tumour=1\nsouth,b,b.nii,b_seg.nii,"tumour=1,4"\n'
    yield Reader("manifest", (table,), from_file(folder / "manifest.csv", manifest.read))
    row = b'{"site": "n", "case": "a", "t1": "a.nii", "label": "s.nii", "labels": {"tumour": [1]}}'
    yield Reader(
        "manifest of JSON",
        (row + b"\n" + row.replace(b'"a"', b'"b"'),),
        from_file(folder / "m.jsonl", manifest.read),
        mutate.JSON,
    )
    people = b"participant_id\tsite\tgrade\nsub-01\t1\tHGG\nsub-02\t2\tLGG\n"
    yield Reader("table", (people,), from_file(folder / "participants.tsv", tables.read_rows))
    nib.save(nib.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4)), folder / "whole.nii")
    yield Reader("NIfTI", ((folder / "whole.nii").read_bytes(),), from_file(folder / "x.nii", images.read))
    meta = b"ObjectType = Image\nNDims = 3\nDimSize = 2 3 4\nElementType = MET_SHORT\nElementDataFile = LOCAL\n"
    yield Reader("MetaImage", (meta + bytes(48),), from_file(folder / "x.mha", images.read))
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(folder / "whole.png")
    yield Reader("PNG", ((folder / "whole.png").read_bytes(),), from_file(folder / "x.png", images.read))
    yield from _other_images(folder)


def _other_images(folder: Path) -> Iterator[Reader]:
    """Yield the readers of NRRD, DICOM, arrays, GIF and PPM."""
    nrrd = b"NRRD0004\ntype: short\ndimension: 3\nsizes: 2 3 4\nencoding: raw\nendian: little\nspace: LPS\n"
    nrrd += b"space directions: (1,0,0) (0,1,0) (0,0,2)\nspace origin: (0,0,0)\n\n" + bytes(48)
    packed = nrrd[:-48].replace(b"raw", b"gzip") + gzip.compress(bytes(48))
    yield Reader("NRRD", (nrrd, packed), from_file(folder / "x.nrrd", images.read))
    voxels = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    np.save(folder / "whole.npy", voxels)
    yield Reader("NPY", ((folder / "whole.npy").read_bytes(),), from_file(folder / "x.npy", images.read))
    np.savez(folder / "plain.npz", image=voxels)
    np.savez_compressed(folder / "packed.npz", image=voxels)
    archives = tuple((folder / f"{kind}.npz").read_bytes() for kind in ("plain", "packed"))
    keyed = from_file(folder / "x.npz", lambda path: (images.keys(path), images.read(Path(f"{path}#image"))))
    yield Reader("NPZ", archives, keyed)
    with h5py.File(folder / "whole.h5", "w") as file:
        file.create_dataset("image", data=voxels, compression="gzip")
        file["more/label"] = voxels > 9
    keyed = from_file(folder / "x.h5", lambda path: (images.keys(path), images.read(Path(f"{path}#image"))))
    yield Reader("HDF5", ((folder / "whole.h5").read_bytes(),), keyed)
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(folder / "whole.gif")
    yield Reader("GIF", ((folder / "whole.gif").read_bytes(),), from_file(folder / "x.gif", images.read))
    yield Reader(
        "PPM", (b"P6 4 2 255\n" + bytes(24), b"P5 4 2 255\n" + bytes(8)), from_file(folder / "x.ppm", images.read)
    )
    series = from_file(folder / "series" / "1.dcm", lambda path: images.read(path.parent))
    yield Reader("DICOM series", (_dicom(),), series)
    yield Reader("DICOM slice", (_dicom(),), from_file(folder / "slice.dcm", images.read))


def _dicom() -> bytes:
    """Return a slice of DICOM, tag by tag: explicit lengths, little endian."""

    def tag(group: int, element: int, kind: bytes, value: bytes) -> bytes:
        value += b" " * (len(value) % 2)
        size = b"\0\0" + struct.pack("<I", len(value)) if kind in (b"OB", b"OW") else struct.pack("<H", len(value))
        return struct.pack("<HH", group, element) + kind + size + value

    syntax = tag(2, 0x10, b"UI", b"1.2.840.10008.1.2.1\0")
    head = tag(2, 0, b"UL", struct.pack("<I", len(syntax))) + syntax
    short = {(0x28, 2): 1, (0x28, 0x10): 4, (0x28, 0x11): 3, (0x28, 0x100): 16, (0x28, 0x101): 16, (0x28, 0x102): 15,
             (0x28, 0x103): 1}  # fmt: skip
    text = {(8, 0x60): b"CT", (0x10, 0x10): b"Doe^Jane", (0x20, 0x32): b"0\\0\\5", (0x20, 0x37): b"1\\0\\0\\0\\1\\0",
            (0x28, 4): b"MONOCHROME2", (0x28, 0x30): b"0.5\\0.7",
            (0x28, 0x1052): b"-1024", (0x28, 0x1053): b"1"}  # fmt: skip
    kinds = {(8, 0x60): b"CS", (0x10, 0x10): b"PN", (0x28, 4): b"CS"}
    tags = {at: tag(*at, b"US", struct.pack("<H", value)) for at, value in short.items()}
    tags |= {at: tag(*at, kinds.get(at, b"DS"), value) for at, value in text.items()}
    body = b"".join(tags[at] for at in sorted(tags)) + tag(0x7FE0, 0x10, b"OW", bytes(24))
    return bytes(128) + b"DICM" + head + body


def _messages() -> Iterator[Reader]:
    """Yield the readers of payloads, requests and responses between coordinator and sites."""
    model = {"conv.weight": np.ones((2, 3), np.float32), "conv.bias": np.zeros(2, np.float32)}
    sound = bytes(payload.encode(Payload(model=model, cases=3.0)))
    yield Reader("payload", (sound,), payload.decode, mutate.TENSORS)
    yield Reader("header over FLARE", (b'{"kind": "train", "round": 1, "keep": [0]}',), _flare_header, mutate.JSON)
    subject, cases = protocol.Subject(("tumour", "oedema")), {"train": 5, "validation": 2, "test": 2}
    ask = {
        "protocol": protocol.PROTOCOL, "study": STUDY, "phase": 0, "round": 1, "version": 0, "keep": [0, 1],
        "split": "test", "tolerance": 1.0, "name": "best", "config": "seed = 1", "begins": 0, "before": 0,
    }  # fmt: skip
    for kind, made in protocol.NAMED.items():
        request = json.dumps({**ask, "kind": kind}).encode()
        yield Reader(f"request {kind}", (request,), lambda b: protocol.parse_request(_header(b)), mutate.JSON)
        wanted = made(split="test") if kind in ("score", "examine") else made()
        parse = partial(protocol.parse_response, wanted, take=lambda: sound, cases=cases, subject=subject)
        yield Reader(f"response {kind}", (json.dumps(_answer(cases)).encode(),),
                     lambda b, parse=parse: _response(parse(_header(b))), mutate.JSON)  # fmt: skip


def _flare_header(content: bytes) -> object:
    """Read the header of a message that FLARE brought."""
    text = content.decode(errors="replace")
    return flare_messages.unpack({flare_messages.HEADER: text, flare_messages.BODY: b""})


def _answer(cases: dict[str, int]) -> dict[str, Any]:
    """Return the header of a response that has the fields of every kind."""
    score = {"labels": {"tumour": 0.5, "oedema": 0.25}, "loss": 0.1}
    return {
        **cases, "may_score": True, "torch": "2", "device": "cpu", "seconds": 1.5, "fit_loss": [0.5], "fit_steps": [3],
        "fit_lr_sum": [0.1], "fit_reach": [1.0], "scores": json.dumps({"case": score}), "digests": ["0" * 64],
        "measures": _measures(), "studies": 3,
    }  # fmt: skip


def _measures() -> str:
    """Return the measures of a case as a site sends them."""
    low = {name: max(known.low, 0.0) for name, known in MEASURES.items()}
    score = CaseScore({"tumour": 0.5, "oedema": 0.25}, math.nan, counts={})
    case = Examined("case", score, {"tumour": low, "oedema": low}, None, "mm")
    return str(protocol.measures_header(Measured((case,)))["measures"])


def _header(content: bytes) -> dict[str, Any]:
    """Return the header in a message; what is no JSON object never reaches the protocol."""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _response(found: messages.Response) -> messages.Response:
    """Return a response; the coordinator takes one that is not valid for a failure with a reason."""
    if isinstance(found, messages.Failed | messages.Refused):
        raise PolysiteError(found.reason)
    return found


def _frame(content: bytes) -> object:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5)
        there.settimeout(5)
        there.sendall(ipc.LENGTHS.pack(len(content), 0) + content)
        return ipc.receive(here)


def _lines(path: Path, count: int) -> bytes:
    """Return the first lines of a file."""
    return b"".join(line + b"\n" for line in path.read_bytes().splitlines()[:count])


def _trimmed(assessed: bytes) -> bytes:
    """Return an assessment with the values that are read, at most two of each kind."""
    found = json.loads(assessed)
    kept = {
        "quantities": {k: {"kind": q["kind"], "matrix": q["matrix"]} for k, q in [*found["quantities"].items()][:2]},
        "distances": {k: d and {"matrix": d["matrix"]} for k, d in [*found["distances"].items()][:2]},
        "verdict": found["verdict"],
    }
    return json.dumps(kept).encode()


def _scan(path: Path) -> object:
    return evaluations.Evaluation(path.parent, {}, ()).scan("north", "a")


def _needed(path: Path) -> object:
    return RunFolder(path.parents[1]).needed()


def _paid(path: Path) -> object:
    return RunFolder(path.parents[1]).assessed()


def _checkpoint(path: Path) -> object:
    return checkpoint.load(path), checkpoint.load(path, mapped=True)


def _assessment(path: Path) -> object:
    return {"matrices": site_distances.read(path.parent)}, read_verdict(path.parent)


def _split(path: Path) -> object:
    return Split(file=str(path)).apply({"b": [CaseRef("b", name, None, None) for name in "aced"]}, 0)  # type: ignore[arg-type]
