"""Hosts of two quadratic sites, in phases that differ in what they ask of a site."""

from dataclasses import replace
from functools import cache

import numpy as np

import polysite as ps
import tiny
from polysite.engines.host import HostPhase, SiteHost
from polysite.engines.secure.settings import Secure
from polysite.payload import Payload
from polysite.privacy import Private
from polysite.training.cleaning import Clean
from quadratic import Quadratic

NAMES = ("north", "south")
START = {"w": np.array([3.0])}
NOISY = Private("hospital", clip=100.0, noise=0.1)
SECURE = Secure("on")
PHASES = (ps.FedAvg(), ps.Ditto(lam=0.5), ps.FedAvg(), ps.FedAvg(), ps.FineTune(lam=(0.0,)))
CLEANED, UNCLEANED = 5, 6  # phases of a network, whose masks are cleaned in the first of them
SENT = Payload(model=START)


def sites():
    return {name: Quadratic(1.0 + k, np.full(2 + k, k - 1.0)) for k, name in enumerate(NAMES)}


@cache
def network(phase):
    return tiny.site(replace(tiny.PLAIN, clean=Clean(largest=phase == CLEANED)))


def host(name):
    """Plain rounds, a memory, noise, masks, a phase that begins from an earlier model, and masks of scans."""
    site = sites()[name]
    settings = ({}, {}, {"private": NOISY}, {"secure": SECURE}, {})
    phases = {k: HostPhase(a, site, **more) for k, (a, more) in enumerate(zip(PHASES, settings, strict=True))}
    return SiteHost(name, phases | {k: HostPhase(ps.FedAvg(), network(k)) for k in (CLEANED, UNCLEANED)})


class Hosts:
    """What a worker of the Ray cluster holds."""

    def __init__(self, recipe, device): ...

    def load(self, names): ...

    def describe(self, name):
        return {}

    def host(self, name):
        return host(name)
