"""The files of a MONAI bundle: configuration for inference, metadata, README.

The preparation is written in MONAI's transforms, in the order and with the numbers of ``prepare``, and the weights are
read by a line of Python, so that a bundle needs MONAI and the reader of its scans only (NiBabel or Pillow). Without
ground truth, a crop depends on the image alone, whereas training also keeps
labelled voxels outside of it.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from statistics import fmean
from typing import Any

import torch

from polysite.data.prepare import Prepare
from polysite.engines.record import mean_score
from polysite.export.served_model import ServedModel, method_of
from polysite.models import Model
from polysite.models.ensemble import Ensemble
from polysite.models.monai import Monai
from polysite.models.unet import UNet
from polysite.training import tasks
from polysite.training.network import Network
from polysite.training.predict import BATCH, mirror_axes

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
SUPERVISION = "supervision."  # names of the further heads of a network with deep supervision
WEIGHTS = "models/model.safetensors"
VERSION = "1.0.0"  # of every bundle; a new export is a new bundle
IMPORTS = ("import json", "import pathlib", "import numpy as np", "import torch")
TYPES = "{'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16, 'I64': torch.int64}"
SAVE_PICTURE = "Image.fromarray(mask).save(path)"
SAVE_VOLUME = (
    "[(image.header.set_xyzt_units(*grid.header.get_xyzt_units()), nibabel.save(image, path))"
    " for grid in [nibabel.load(scan)] for image in [nibabel.Nifti1Image(mask, grid.affine)]]"
)
Config = dict[str, Any]


@dataclass(frozen=True)
class Scans:
    """The image files of a case."""

    modalities: tuple[str, ...]
    channels: tuple[int, ...] = ()  # of the modalities in one file; empty: one file per modality
    hidden: tuple[int, ...] = ()  # modalities that are hidden from the hospital
    flat: bool = False  # pictures (PNG, TIFF, JPEG); otherwise NIfTI
    boxes: bool = False  # a case is a box cut out of a scan

    @property
    def files(self) -> list[str]:
        """Names of the files of all channels; for a hidden channel another file is read and set to zero."""
        seen = next(m for k, m in enumerate(self.modalities) if k not in self.hidden)
        return [seen if k in self.hidden else m for k, m in enumerate(self.modalities)]

    @property
    def one(self) -> bool:
        """Whether a case is a single file."""
        return bool(self.channels) or len(self.modalities) == 1


@dataclass(frozen=True)
class Bundle(ServedModel):
    """A served model with its scans."""

    scans: Scans = field(kw_only=True)

    @property
    def labels(self) -> list[str]:
        """Names of the labels."""
        return list(self.result.labels)

    @property
    def task(self) -> tasks.Task:
        """The task."""
        return tasks.find(self.result.task, self.study.train.exclusive)

    @property
    def dims(self) -> int:
        """Number of spatial dimensions."""
        return len(self.study.train.patch)

    @property
    def cut(self) -> bool:
        """Whether the network sees the slices of a volume one by one."""
        return bool(self.study.slices.axis)

    @property
    def prepare(self) -> Prepare:
        """The preparation of a scan; a volume to be cut is turned so that slices lie along its first axis."""
        return self.study.slices.oriented(self.study.prepare)

    @property
    def channels(self) -> list[str]:
        """Names of the network's output channels."""
        return ["background", *self.labels] if isinstance(self.task, tasks.Exclusive) else self.labels

    @property
    def owner(self) -> str:
        """The owner of the model, for the copyright."""
        return f"the hospital {self.site!r}" if self.whose == "own" else "the hospitals that trained it together"

    @property
    def packages(self) -> dict[str, str]:
        """Versions of the required packages besides MONAI, torch and numpy."""
        reader = "pillow" if self.scans.flat else "nibabel"
        return {reader: version(reader)}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers of the model by the names of the network, without heads that do not predict."""
        module = self.study.model.build(
            dims=self.dims, modalities=len(self.scans.modalities), outputs=len(self.channels), seed=self.study.seed
        )
        network = Network(module, replace(self.study.train, device="cpu", compile=False))
        network.write({k: torch.as_tensor(v, device="cpu") for k, v in self.model.items()})
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {k: v.detach().contiguous() for k, v in tensors.items() if not k.startswith(SUPERVISION)}

    def scores(self, split: str) -> dict[str, float]:
        """Return the mean score over the cases of the model's hospital, or of all, and that of every label."""
        scores = self.result.test if split == "test" else self.result.validation
        own = {s: c for s, c in scores.items() if c and self.site in (None, s)}
        cases = [case for site in own.values() for case in site.values()]
        if not cases:
            return {}
        means = {k: fmean(case.labels[k] for case in cases) for k in cases[0].labels}
        return {"mean": mean_score(own, "case"), **means}


def inference(bundle: Bundle) -> Config:
    """Return the configuration that MONAI runs."""
    flat = bundle.scans.flat
    return {
        "imports": [f"${line}" for line in (*IMPORTS, "from PIL import Image" if flat else "import nibabel")],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/scans'",
        "output_dir": "$@bundle_root + '/predictions'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        **_data(bundle.scans),
        **_network(bundle.study.model, bundle.dims, len(bundle.scans.modalities), len(bundle.channels)),
        **_weights(),
        "preprocessing": {"_target_": "Compose", "transforms": _preparation(bundle)},
        "dataset": {"_target_": "Dataset", "data": "@data", "transform": "@preprocessing"},
        "inferer": _inferer(bundle),
        "predict": _predict(bundle),
        "postprocessing": {"_target_": "Compose", "transforms": _decision(bundle)},
        "evaluator": "$lambda case: @postprocessing({**case, 'pred': @predict(case['image'])})",
        **_writing(bundle),
    }


def _weights() -> Config:
    """Return the entries that read the safetensors file of the weights into the network; another network is refused."""
    own = "{**dict(@network_def.named_parameters()), **dict(@network_def.named_buffers())}"
    copied = "[own[k].data.copy_(@weights[k].reshape(own[k].shape)) for k in {**own, **@weights}]"
    piece = "@stored[@begin + v['data_offsets'][0] : @begin + v['data_offsets'][1]]"
    array = f"torch.frombuffer(bytearray({piece}), dtype={TYPES}[v['dtype']]).reshape(v['shape'])"
    return {
        "stored": f"$pathlib.Path(@bundle_root + '/{WEIGHTS}').read_bytes()",
        "begin": "$8 + int.from_bytes(@stored[:8], 'little')",
        "weights": f"${{k: {array} for k, v in json.loads(@stored[8 : @begin]).items() if k != '__metadata__'}}",
        "network": f"$(lambda own: ({copied}, @network_def.to(@device).eval())[1])({own})",
    }


def _data(scans: Scans) -> Config:
    """Return the entries that list the files and the name of every case."""
    ends = (".png", ".jpg", ".jpeg", ".tif", ".tiff") if scans.flat else (".nii.gz", ".nii")
    path = "pathlib.Path(meta['filename_or_obj'])"
    if scans.one:
        return {
            "suffixes": f"${ends!r}",
            "data": "$[{'image': str(f)} for f in sorted(pathlib.Path(@dataset_dir).iterdir())"
            " if f.name.endswith(@suffixes)]",
            "case_of": f"$lambda meta: next({path}.name.removesuffix(s) for s in @suffixes if {path}.name.endswith(s))",
        }
    wanted = "f.name.endswith(tuple(modality + s for s in @suffixes))"
    return {
        "suffixes": f"${ends!r}",
        "files": scans.files,
        "find": f"$lambda folder, modality: next((f for f in sorted(folder.iterdir()) if {wanted}),"
        " folder / (modality + @suffixes[0]))",
        "data": "$[{'image': [str(@find(folder, m)) for m in @files]}"
        " for folder in sorted(pathlib.Path(@dataset_dir).iterdir()) if folder.is_dir()]",
        "case_of": f"$lambda meta: {path}.parent.name",
    }


def _network(model: Model, dims: int, modalities: int, outputs: int) -> Config:
    """Return the network as ``models`` builds it; loading the weights refuses any other."""
    if isinstance(model, Ensemble):
        return _ensemble(model, dims, modalities, outputs)
    if isinstance(model, Monai):
        shape: Config = model.shape(dims=dims, modalities=modalities, outputs=outputs)
        sizes = {k: list(v) if isinstance(v, tuple) else v for k, v in shape.items()}  # as JSON has it
        return {"network_def": {"_target_": f"monai.networks.nets.{model.network}", **sizes}}
    shape = {"spatial_dims": dims, "in_channels": modalities, "out_channels": outputs}
    assert isinstance(model, UNet)  # others have no bundle: MONAI has no such network
    return _unet(model, shape)


def _ensemble(model: Ensemble, dims: int, modalities: int, outputs: int) -> Config:
    """Return the networks of the members, each under names of its own, and the network of the ensemble."""
    entries: Config = {}
    for k, member in enumerate(model.members):
        own = _network(member, dims, modalities, outputs)
        for name, entry in own.items():
            for other in own if isinstance(entry, str) else ():
                entry = entry.replace(f"@{other}", f"@member_{k}_{other}")
            entries[f"member_{k}_{name}"] = entry
    count = len(model.members)
    listed = ", ".join(f"@member_{k}_network_def" for k in range(count))
    net = f"torch.nn.ModuleDict({{'members': torch.nn.ModuleList([{listed}])}})"
    shares = f"net.register_buffer('weights', torch.full(({count},), 1 / {count}))"
    mean = "lambda x: torch.stack([w * m(x).float() for w, m in zip(net.weights, net['members'])]).sum(0)"
    return {**entries, "network_def": f"$(lambda net: ({shares}, setattr(net, 'forward', {mean}), net)[2])({net})"}


def _unet(model: UNet, shape: Config) -> Config:
    depth = len(model.filters)
    plain = {
        "_target_": "monai.networks.nets.DynUNet",
        **shape,
        "kernel_size": [3] * depth,
        "strides": [1] + [2] * (depth - 1),
        "upsample_kernel_size": [2] * (depth - 1),
        "filters": list(model.filters),
        "norm_name": ["INSTANCE", {"affine": False}],
        "act_name": ["leakyrelu", {"inplace": True, "negative_slope": 0.01}],
        "trans_bias": model.bias,
    }
    if not model.bias:
        return {"network_def": plain}
    lacking = "hasattr(m, 'out_channels') and getattr(m, 'bias', 0) is None"
    zeros = "torch.nn.Parameter(torch.zeros(m.out_channels))"
    biases = f"[m.register_parameter('bias', {zeros}) for m in @without_biases.modules() if {lacking}]"
    return {"without_biases": plain, "network_def": f"$(@without_biases, {biases})[0]"}


def _preparation(bundle: Bundle) -> list[Config]:
    """Return MONAI transforms that give the same bits as ``Prepare``."""
    prepare, scans, flat = bundle.prepare, bundle.scans, [1] * bundle.cut
    steps = [_step("Lambda", func=f"$lambda x: x[{list(scans.channels)}]")] if scans.channels else []
    if scans.hidden:
        seen = [float(k not in scans.hidden) for k in range(len(scans.modalities))]
        shape = [-1, *flat, *[1] * bundle.dims]
        steps.append(_step("Lambda", func=f"$lambda x: x * torch.tensor({seen}).view({shape})"))
    if prepare.orientation:
        steps.append(_step("Orientation", axcodes=prepare.orientation, labels=None))
    if prepare.spacing:
        how = {"mode": "bilinear", "padding_mode": "border", "dtype": "$np.float32"}
        steps.append(_step("Spacing", pixdim=list(prepare.spacing), **how))
    for value, above in zip(prepare.clip, (True, False), strict=False):
        steps.append(_step("ThresholdIntensity", threshold=value, above=above, cval=value))
    if prepare.crop:
        none: Config = {"start_coord_key": None, "end_coord_key": None}
        steps.append(_step("CropForeground", source_key="image", select_fn="$lambda x: x != 0", **none))
    if prepare.size:
        steps += _resized(prepare)
    return [_loading(scans), *steps, *_intensities(prepare, [*flat, *bundle.study.train.patch])]


def _loading(scans: Scans) -> Config:
    if not scans.flat:
        return _step("LoadImage", reader="NibabelReader", squeeze_non_spatial_dims=True, ensure_channel_first=True)
    opaque = "$lambda x: x.convert({'RGBA': 'RGB', 'LA': 'L', 'PA': 'P'}.get(x.mode, x.mode))"
    return _step("LoadImage", reader="PILReader", converter=opaque, reverse_indexing=False, ensure_channel_first=True)


def _intensities(prepare: Prepare, patch: list[int]) -> list[Config]:
    """Return normalisation and padding: with zeros, or with the minimum of every modality if zero is no background."""
    normalised = _step("NormalizeIntensity", nonzero=prepare.normalise == "nonzero", channel_wise=True)
    dense = _step("Lambda", func="$lambda x: x.clone()")  # a sum over a strided crop would round differently
    zeros = _step("SpatialPad", spatial_size=patch)
    if prepare.normalise == "nonzero":
        return [normalised, zeros]
    if prepare.normalise == "padded":
        return [zeros, dense, normalised]
    padded = _with_the_darkest("SpatialPad", patch)
    return padded if prepare.normalise == "none" else [dense, normalised, *padded]


def _resized(prepare: Prepare) -> list[Config]:
    """Return the crop or padding about the centre to ``prepare.size``."""
    size = [side or -1 for side in prepare.size]
    if prepare.normalise in ("nonzero", "padded"):
        return [_step("ResizeWithPadOrCrop", spatial_size=size)]
    return _with_the_darkest("ResizeWithPadOrCrop", size)


def _with_the_darkest(kind: str, size: list[int]) -> list[Config]:
    """Return steps that pad with the minimum of every modality."""
    darkest = "x.nan_to_num(float('inf')).amin(tuple(range(1, x.ndim)), keepdim=True)"
    return [
        _step(kind, spatial_size=size, value="$float('nan')"),
        _step("Lambda", func=f"$lambda x: torch.where(x.isnan(), {darkest}, x)"),
    ]


def _step(kind: str, key: str = "image", **options: Any) -> Config:
    """Return a dictionary transform of MONAI."""
    return {"_target_": f"{kind}d", "keys": key, **options}


def _inferer(bundle: Bundle) -> Config:
    train = bundle.study.train
    kind: Config = {"_target_": "SlidingWindowInferer"}
    if bundle.cut:
        kind = {"_target_": "SliceInferer", "spatial_dim": 0}
    window = list(train.window or train.patch)
    return {**kind, "roi_size": window, "sw_batch_size": BATCH, "overlap": train.overlap, "mode": "gaussian"}


def _predict(bundle: Bundle) -> str:
    """Return the function from image to logits; on a GPU in bfloat16, if the run used it."""
    windows = f"@inferer(image.as_tensor()[None].to(@device), {_logits(bundle)})[0].cpu()"
    alone = f"lambda image: {windows}"
    if bundle.study.train.autocast:
        alone = f"torch.autocast(@device.type, torch.bfloat16, enabled=@device.type == 'cuda')({alone})"
    return f"$torch.no_grad()({alone})"


def _logits(bundle: Bundle) -> str:
    """Return the function from a batch of windows to logits: their mean over all mirror images, if the run used it."""
    if not bundle.study.train.mirror:
        return "lambda x: @network(x).float()"
    flips = mirror_axes(bundle.dims)
    return f"lambda x: sum(@network(x.flip(axes)).float().flip(axes) for axes in {flips}) / {len(flips)}"


def _decision(bundle: Bundle) -> list[Config]:
    """Return the steps from logits to masks on the grid of the scan (nearest neighbour)."""
    exclusive = isinstance(bundle.task, tasks.Exclusive)
    decide = "$lambda x: x.argmax(0, keepdim=True).float()" if exclusive else "$lambda x: (x > 0).float()"
    back = _step("Invert", "pred", orig_keys="image", transform="@preprocessing", post_func="$lambda x: x.byte()")
    return [_step("Lambda", "pred", func=decide), back]


def file_names(labels: Sequence[str]) -> list[str]:
    """Return the labels as parts of file names.

    >>> file_names(["whole tumour", "ET"]), file_names(["a b", "a/b"])
    (['whole_tumour', 'ET'], ['1_a_b', '2_a_b'])
    """
    plain = [re.sub(r"\W+", "_", label) for label in labels]
    return plain if len(set(plain)) == len(plain) else [f"{k}_{name}" for k, name in enumerate(plain, start=1)]


def _writing(bundle: Bundle) -> Config:
    """Return the entries that write masks with the affine of the scan.

    MONAI 1.6's SaveImage takes the affine of a volume with one channel for that of a 2D image, and fails on sagittal
    scans.
    """
    end, save = (".png", SAVE_PICTURE) if bundle.scans.flat else (".nii.gz", SAVE_VOLUME)
    each = "@save(mask, done['image'].meta['filename_or_obj'], @place(@case_of(done['image'].meta), name))"
    return {
        "masks": ["labels"] if isinstance(bundle.task, tasks.Exclusive) else file_names(bundle.labels),
        "place": f"$lambda case, name: pathlib.Path(@output_dir, case, f'{{case}}_{{name}}{end}')",
        "save": f"$lambda mask, scan, path: (path.parent.mkdir(parents=True, exist_ok=True), {save}, print(path))",
        "run": [
            f"$[[{each} for name, mask in zip(@masks, done['pred'].numpy())] for done in map(@evaluator, @dataset)]",
        ],
    }


def metadata(bundle: Bundle, weights: bytes) -> Config:
    """Return the metadata of a bundle with this file of weights."""
    train, scans = bundle.study.train, bundle.scans
    shape = list(train.window or train.patch)
    known = bundle.study.prepare.clip if bundle.study.prepare.normalise == "none" else ()
    tensor: Config = {"spatial_shape": shape, "dtype": "float32", "is_patch_data": True}
    names = ", ".join(scans.modalities)
    image = _tensor("image", "magnitude", scans.modalities, modality=names, **tensor, value_range=list(known))
    kind = "labels" if isinstance(bundle.task, tasks.Exclusive) else "classes"
    pred = _tensor("image", kind, bundle.channels, **tensor, value_range=[])
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "changelog": {VERSION: f"round {bundle.result.round_of(bundle.site) + 1} of the run {bundle.run!r}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": bundle.packages,
        "name": f"polysite {method_of(bundle.study)}",
        "task": f"Segmentation: {', '.join(bundle.labels)}",
        "description": _about(bundle),
        "authors": f"Trained with polysite {version('polysite')} by {bundle.owner}",
        "copyright": f"Belongs to {bundle.owner}",
        "intended_use": "Research; not a medical device",
        "eval_metrics": {
            f"{split}_{name}": value for split in ("validation", "test") for name, value in bundle.scores(split).items()
        },
        "weights": {"file": WEIGHTS, "sha256": hashlib.sha256(weights).hexdigest()},
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
    }


def _tensor(kind: str, format: str, channels: Sequence[str], **more: Any) -> Config:
    """Return the description of an input or output of the network."""
    named = {str(k): name for k, name in enumerate(channels)}
    return {"type": kind, "format": format, "num_channels": len(channels), **more, "channel_def": named}


def _about(bundle: Bundle) -> str:
    whose = {
        "all": "The model that all hospitals share",
        "own": f"The model of the hospital {bundle.site!r}",
        "others": f"The model that the hospital {bundle.site!r} uses, which did not train",
    }[bundle.whose]
    if isinstance(bundle.study.model, Ensemble):
        return f"{whose}, from the run {bundle.run!r}: an {method_of(bundle.study)}, whose logits are averaged."
    when = f"round {bundle.result.round_of(bundle.site) + 1} of {bundle.result.rounds}, the best by validation"
    return f"{whose}, from the run {bundle.run!r} ({method_of(bundle.study)}): {when}."


def readme(bundle: Bundle, name: str) -> str:
    """Return the README of a bundle: what it is and how to run it."""
    needs = " ".join(f"{p}=={number}" for p, number in bundle.packages.items())
    own = "It was trained on patients of this hospital, for this hospital, and belongs there.\n\n"
    home = own if bundle.whose == "own" else ""
    run = "python -m monai.bundle run --config_file configs/inference.json"
    options = 'dataset_dir="SCANS", output_dir="PREDICTIONS"'
    return f"""# {name}

{_about(bundle)}

{home}{_scores(bundle)}
## Use

```sh
pip install "monai[fire]=={version("monai")}" {needs}
cd {name}
{run} --dataset_dir SCANS --output_dir PREDICTIONS
```

or in Python, in this folder: `monai.bundle.run(config_file="configs/inference.json", {options})`.
The bundle was written with these versions; newer ones should work.

**Input.** {_wanted(bundle)}

**Output.** {_given(bundle)}

`configs/inference.json` prepares and predicts scans exactly as polysite does. The weights are in `{WEIGHTS}`; their
SHA-256 is in `configs/metadata.json`.
"""


def _scores(bundle: Bundle) -> str:
    """Return the table of scores."""
    scores = {split: found for split in ("validation", "test") if (found := bundle.scores(split))}
    if not scores:
        return "It was not evaluated on cases of this hospital.\n"
    columns = list(next(iter(scores.values())))
    whose = f"the cases of {bundle.site!r}" if bundle.site else "the cases of all hospitals"
    rows = [f"| {split} | {' | '.join(f'{found[k]:.3f}' for k in columns)} |" for split, found in scores.items()]
    head = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    return "\n".join([f"Dice on {whose}:", "", *head, *rows, ""])


def _wanted(bundle: Bundle) -> str:
    """Return the section of the README that describes the input files of a case."""
    scans = bundle.scans
    kind, end = ("picture (PNG, TIFF or JPEG)", ".png") if scans.flat else ("NIfTI file", ".nii.gz")
    order, blind = ", ".join(scans.modalities), ", ".join(scans.modalities[k] for k in scans.hidden)
    if scans.one:
        sentences = [f"SCANS holds one {kind} per case, with {'the channels ' if scans.channels else ''}{order}."]
    else:
        sentences = [
            f"SCANS holds one folder per case, with one {kind} for each of {order}, on one grid. File names end in the "
            f"modality: `{scans.files[0]}{end}` or `scan_{scans.files[0]}{end}`."
        ]
    if blind:
        sentences.append(f"This hospital was trained without {blind}: the model gets zeros, and no such file is read.")
    if "missing" in getattr(bundle.study.data, "allow", ()):
        sentences.append("A modality that was not acquired is a file of zeros on that grid.")
    if scans.boxes:
        sentences.append("A case is a box cut out of a scan, as in training.")
    return " ".join(sentences)


def _given(bundle: Bundle) -> str:
    """Return the section of the README that describes the output files."""
    end = ".png" if bundle.scans.flat else ".nii.gz"
    if isinstance(bundle.task, tasks.Exclusive):
        values = ", ".join(f"{k} {label}" for k, label in enumerate(bundle.labels, start=1))
        return f"`PREDICTIONS/CASE/CASE_labels{end}` on the grid of the scan: 0 background, {values}."
    names = ", ".join(f"`CASE_{n}{end}`" for n in file_names(bundle.labels))
    where = "In `PREDICTIONS/CASE/`, on the grid of the scan"
    return f"{where}, a mask of 0 and 1 per label (they may overlap): {names}."
