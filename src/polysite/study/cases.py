"""The cases of a study: dealt to sites and splits, cut into slices, prepared or read from the cache."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from polysite import machine
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import SPLITS, Case, CaseRef
from polysite.data.files import Files
from polysite.data.parts import splitter
from polysite.data.sources import Phantom, PhantomClasses
from polysite.data.split import SiteSplit
from polysite.engines.watch import Watch
from polysite.errors import DataError
from polysite.training.network import device_of

Made = TypeVar("Made")
PreparedCases = Mapping[str, Mapping[str, Sequence[Case]]]  # by site and split


def deal_cases(study: Study, watch: Watch = Watch()) -> Mapping[str, SiteSplit]:
    """Return the training, validation and test cases of every site; slices, if the study has ``[slices]``.

    Only images that the federation measures or that are cut into slices are opened.
    """
    cases = cut(study, deal_volumes(study), watch)
    for split, purpose in (("train", "train on"), ("validation", "validate on")):
        if not any(splits[split] for splits in cases.values()) and (split == "train" or study.split.validation):
            raise DataError(f"no volume has a slice to {purpose}; set slices.labelled = false")
    return cases


def deal_volumes(study: Study) -> Mapping[str, SiteSplit]:
    """Return the training, validation and test cases of every site as the data list them, before slices are cut."""
    study.check()
    cases = study.data.case_refs(study.seed)
    study.split.check(cases)
    seed = study.split.seed_of(study.seed)
    dealt = study.federation.deal(cases, splitter(study.split, cases, seed), seed)
    if not any(splits["train"] for splits in dealt.values()):
        raise DataError("no site has a training case")
    if study.split.validation and not any(splits["validation"] for splits in dealt.values()):
        raise DataError("no site has a validation case, so no best round could be chosen; raise split.validation")
    return dealt


def cut(study: Study, dealt: Mapping[str, SiteSplit], watch: Watch = Watch()) -> Mapping[str, SiteSplit]:
    """Return the slices of dealt volumes; without ``[slices]`` the volumes themselves."""
    found = study.cut([case for splits in dealt.values() for k in SPLITS for case in splits[k]], watch.case)
    return {site: {k: [c for v in splits[k] for c in found[v]] for k in SPLITS} for site, splits in dealt.items()}


def load_cases(study: Study, dealt: Mapping[str, SiteSplit], watch: Watch = Watch()) -> PreparedCases:
    """Return the prepared cases of every site and split, newly made or mapped from the cache."""
    device_of(study.train.device)  # refuses one that is not here, before anything is read
    cache = Cache(place())

    def prepared(ref: CaseRef) -> Case:
        return cache.get(ref, study.prepare, study.train.patch)

    listed = [ref for splits in dealt.values() for split in SPLITS for ref in splits[split]]
    refuse_duplicates(listed)
    made = iter(in_parallel(prepared, listed, machine.cores(), isinstance(study.data, Files), watch))
    return {site: {split: [next(made) for _ in splits[split]] for split in SPLITS} for site, splits in dealt.items()}


def in_parallel(
    make: Callable[[CaseRef], Made], cases: Sequence[CaseRef], threads: int, files: bool, watch: Watch
) -> list[Made]:
    """Return what a function makes of every case, in threads; the first problem ends all.

    Args:
        make: The function.
        cases: The cases.
        threads: Cases at a time.
        files: Whether the cases are files that a user can check.
        watch: Observer of the progress.
    """
    made = []
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(make, case) for case in cases]
        try:
            for done, (case, job) in enumerate(zip(cases, jobs, strict=True), start=1):
                made.append(job.result())
                watch.case(done, len(cases), f"{case.site} · {case.name}")
        except BaseException as problem:
            pool.shutdown(cancel_futures=True)
            if isinstance(problem, DataError) and files:
                raise DataError(f"{problem} ('polysite data check' lists all problems)") from problem
            raise
    return made


def refuse_duplicates(cases: Iterable[CaseRef]) -> None:
    """Refuse the same scan in two cases, unless both are declared to be of one patient."""
    cache, seen = Cache(place()), dict[str, CaseRef]()
    for case in cases:
        twin = seen.setdefault(cache.digest(case.files[0]), case) if case.files else case
        if twin is not case and (not case.patient or twin.patient != case.patient):
            raise DataError(
                f"case {case.name!r} of site {case.site!r} is the same scan as case {twin.name!r} of site "
                f"{twin.site!r} ({case.files[0]}): one might train and the other test; remove one of them"
            )


def pinned(study: Study) -> Study:
    """Return the study with full paths and modality names, so that it can be resumed from any folder."""
    if isinstance(study.data, Files):
        files = study.data
        tables = tuple(str(Path(t).resolve()) for t in files.tables)
        path = str(Path(files.path).resolve())
        study = replace(study, data=replace(files, path=path, tables=tables, modalities=files.modality_names))
    if study.split.file:
        study = replace(study, split=replace(study.split, file=str(Path(study.split.file).resolve())))
    return study


def with_fixed_cases(study: Study) -> Study:
    """Return a study whose patients and splits stay the same with another seed."""
    data = study.data
    if isinstance(data, Phantom | PhantomClasses) and data.seed is None:
        data = replace(data, seed=study.seed)
    return replace(study, data=data, split=replace(study.split, seed=study.split.seed_of(study.seed)))
