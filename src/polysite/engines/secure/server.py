"""The server's half of a secure sum: it passes keys and shares on, adds up masked replies, and removes the masks.

A site that does not answer a step, or not correctly, is left out from there on. One that has not sent a masked reply
when it was asked to is a drop-out: its masks are removed by shares of its key. Shares of a hostile site are noticed,
since every seed must fit its digest and every key its public key; other shares are then tried.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

import numpy as np

from polysite.engines.phase_sites import PhaseSites, Reply
from polysite.engines.replies import Exchange, Replies
from polysite.engines.reply_checks import asked_names, judge, kinds_of, look
from polysite.engines.secure import fixed_point, shamir
from polysite.engines.secure.masks import SEED, add_masks, public_key, require
from polysite.engines.secure.member import SESSION, MaskStep, packed, pair_seed, places, sign_of, threshold, unpacked
from polysite.engines.secure.settings import Secure
from polysite.errors import ConfigError, PayloadError
from polysite.payload import Payload, SiteId, plain

MAX_TRIES = 2000  # sets of shares that are tried for a secret

log = logging.getLogger("polysite")


class _TooFew(Exception):
    """Fewer sites are left than a secure sum needs."""


@dataclass
class Sum:
    """Running sum of masked replies of one form."""

    fields: dict[str, dict[str, Any]]
    sites: list[SiteId] = field(default_factory=list)

    def add(self, site: SiteId, reply: Payload) -> None:
        """Add a masked reply, modulo 2^64."""
        for name, arrays in reply.items():
            for k, x in arrays.items():
                total = self.fields[name][k]
                np.add(total, plain(x), out=total)
        self.sites.append(site)


def check_sites(settings: Secure, cohort: int) -> None:
    """Refuse a secure sum over too few sites before anything is trained."""
    require()
    if cohort < settings.fewest:
        raise ConfigError(
            f"{cohort} sites take part in a round, and a secure sum needs {settings.fewest}: let more take part "
            "(run.share), or leave out run.secure"
        )


def gather_masked(exchange: Exchange, settings: Secure) -> Replies:
    """Receive the replies of a round under masks; the outcome has the one reply that stands for all, if possible."""
    collector = _Collector(exchange, settings)
    try:
        return collector.run()
    except _TooFew as problem:
        unused = dict.fromkeys(collector.replies, "it is part of no secure sum")
        sentence = f"there is no secure sum in this round: {problem}"
        return Replies(collector.replies, {**unused, **collector.refused}, remarks=(sentence,))


class _Collector:
    """Takes the steps of one sum with the sites of an exchange.

    Args:
        exchange: The round.
        settings: Settings of secure sums.
    """

    def __init__(self, exchange: Exchange, settings: Secure):
        self.exchange, self.settings = exchange, settings
        self.transport: PhaseSites = exchange.transport
        self.id = secrets.token_bytes(SESSION)
        self.refused: dict[SiteId, str] = {}
        self.replies: dict[SiteId, Reply] = {}
        self.keys: dict[SiteId, dict[str, bytes]] = {}
        self.sealed: dict[SiteId, dict[SiteId, bytes]] = {}

    def run(self) -> Replies:
        """Return the replies of the round, with the one that stands for all."""
        self._exchange_keys()
        self._announce_members()
        total = self._collect()
        answered = sorted(total.sites)
        self._remove_masks(total, answered)
        return self._restored(total, answered)

    # keys and shares

    def _exchange_keys(self) -> None:
        """Have the sites exchange keys and shares, through the server, which can read the keys alone."""
        least = self.settings.fewest
        everyone = sorted(self.exchange.sent)
        self.keys = self._ask("keys", {i: {} for i in everyone}, self._checked_keys, least)
        names = {"mask": "mask_keys", "share": "share_keys", "digest": "digests"}
        parts = sorted({name for keys in self.keys.values() for name in keys} - names.keys())
        told: dict[str, Any] = {to: packed({i: k[name] for i, k in self.keys.items()}) for name, to in names.items()}
        for name in parts:
            told[f"signed_{name}"] = packed({i: k[name] for i, k in self.keys.items() if name in k})
        self.sealed = self._ask("shares", dict.fromkeys(self.keys, told), self._checked_shares, self._least)

    def _announce_members(self) -> None:
        """Give every site the shares that the others have dealt to it."""
        members = self.sealed.keys()
        mine = {i: {"sealed": packed({j: self.sealed[j][i] for j in members if j != i})} for i in members}
        self._ask("members", mine, lambda site, answer: True, self._least)

    @property
    def _threshold(self) -> int:
        return threshold(len(self.keys), self.settings.reveal)

    @property
    def _least(self) -> int:
        return max(self.settings.fewest, self._threshold)

    def _checked_keys(self, site: SiteId, answer: Payload) -> dict[str, bytes]:
        keys = unpacked(answer["keys"])
        if not {"mask", "share", "digest"} <= keys.keys() or any(len(keys[k]) != SEED for k in ("mask", "share")):
            raise PayloadError("its public keys are not complete")
        return keys

    def _checked_shares(self, site: SiteId, answer: Payload) -> dict[SiteId, bytes]:
        sealed = unpacked(answer["sealed"])
        if sealed.keys() != self.keys.keys() - {site}:
            raise PayloadError("it has not dealt a share to every site")
        return sealed

    def _ask(
        self,
        step: MaskStep,
        told: Mapping[SiteId, Mapping[str, Any]],
        check: Callable[[SiteId, Payload], Any],
        least: int,
    ) -> dict[SiteId, Any]:
        """Return the checked answers to a step; raise _TooFew if fewer than ``least`` are left."""
        session = packed({"id": self.id})
        sent = {i: Payload(session=session, **fields) for i, fields in told.items()}
        found = {}
        for site, answer in sorted(self.transport.mask_step(step, self.exchange.round, sent, least).items()):
            try:
                found[site] = check(site, answer)
            except (PayloadError, KeyError) as problem:
                self.refused[site] = f"its answer to the step {step!r} of a secure sum is not valid: {problem}"
        if len(found) < least:
            raise _TooFew(f"{len(found)} of {len(told)} sites answered the step {step!r}, and {least} are needed")
        return found

    # masked replies

    def _collect(self) -> Sum:
        """Have the members train, and add up their masked replies."""
        exchange, sums = self.exchange, dict[fixed_point.Form, Sum]()
        sent = {i: p for i, p in exchange.sent.items() if i in self.sealed}
        asked = asked_names(exchange.sent[min(self.sealed)], exchange.params)
        expected = fixed_point.form_of(exchange.algorithm.reply, {k: exchange.params[k] for k in asked})
        for site, reply in self.transport.train(exchange.round, sent):
            try:
                form = fixed_point.form(reply.payload)
                if site not in sent or site in self.replies or (expected is not None and form != expected):
                    raise PayloadError("it has not the form of a masked reply of this round")
            except PayloadError as problem:
                self.refused[site] = str(problem)
                continue
            if form not in sums:
                sums[form] = Sum({f: {k: np.zeros(x.shape, np.uint64) for k, x in v.items()}
                                  for f, v in reply.payload.items()})  # fmt: skip
            sums[form].add(site, reply.payload)
            fits = tuple(replace(fit, params={}, twin={}, personal={}) for fit in reply.fits)
            self.replies[site] = replace(reply, payload=Payload(), fits=fits)
            exchange.arrived(site, len(self.replies))
            del reply
        usual = max(sums.values(), key=lambda s: len(s.sites), default=Sum({}))
        for other in sums.values():
            if other is not usual:
                self.refused |= dict.fromkeys(other.sites, "its masked reply has another form than those of most sites")
        if len(usual.sites) < self._least:
            raise _TooFew(f"{len(usual.sites)} of {len(sent)} sites sent a masked reply, and {self._least} are needed")
        return usual

    # the sum

    def _remove_masks(self, total: Sum, answered: list[SiteId]) -> None:
        told = {"answered": packed(dict.fromkeys(answered, b""))}
        least = self._threshold
        shares = self._ask("reveal", dict.fromkeys(answered, told), self._checked_revealed, least)
        seeds = {i: self._secret(shares, "seeds", i) for i in answered}
        dropped = sorted(self.sealed.keys() - set(answered))
        keys = {i: self._secret(shares, "keys", i) for i in dropped}
        masks = [(seed, -1) for seed in seeds.values()]
        for site in dropped:
            masks += [
                (pair_seed(keys[site], self.keys[other]["mask"], self.id), -sign_of(other, site)) for other in answered
            ]
        flat = [total.fields[name][k].reshape(-1) for name in sorted(total.fields) for k in sorted(total.fields[name])]
        add_masks(flat, masks)

    def _checked_revealed(self, site: SiteId, answer: Payload) -> dict[str, dict[SiteId, bytes]]:
        found = {name: unpacked(answer[name]) for name in ("seeds", "keys")}
        if any(len(share) != shamir.SHARE for shares in found.values() for share in shares.values()):
            raise PayloadError("its shares are of another length")
        return found

    def _secret(self, shares: Mapping[SiteId, Any], name: str, of: SiteId) -> bytes:
        """Return a seed or a key from enough shares; shares that do not fit are passed over."""
        at, least = places(self.keys), self._threshold
        known = {at[i]: each[name][of] for i, each in shares.items() if of in each[name]}
        for some in islice(combinations(sorted(known), least), MAX_TRIES):
            secret = shamir.combine({x: known[x] for x in some})
            if secret is not None and self._fits(name, of, secret):
                return secret
        what = "seed" if name == "seeds" else "key"
        raise _TooFew(f"the shares that sites revealed do not give the {what} of {of!r}")

    def _fits(self, name: str, of: SiteId, secret: bytes) -> bool:
        keys = self.keys[of]
        if name == "seeds":
            return hashlib.sha256(secret).digest() == keys["digest"]
        return public_key(secret) == keys["mask"]

    def _restored(self, total: Sum, answered: list[SiteId]) -> Replies:
        """Return the mean and the totals, checked as a reply is."""
        exchange = self.exchange
        summed = Payload(**total.fields)
        kinds = kinds_of(exchange.algorithm.reply, exchange.sent[answered[0]], summed)
        refused = {i: why for i, why in self.refused.items() if i not in answered}
        replies = {i: self.replies[i] for i in answered}
        try:
            merged = fixed_point.decode(kinds, summed, self.settings.fraction, exchange.params)
            merged = merged.each(exchange.transport.lift)
        except (PayloadError, KeyError) as problem:
            raise _TooFew(str(problem)) from problem
        one = Payload(**{**merged, "weight": 1.0}) if kinds.get("weight") == "one" else merged
        first = answered[0]
        seen = look(exchange.algorithm.reply, exchange.params, exchange.sent[first], one)
        found = judge(exchange.params, exchange.sent, {first: seen})
        if found:
            raise _TooFew(f"the sum of the replies is refused: {found[first]}")
        return Replies(replies, refused, masked=merged)
