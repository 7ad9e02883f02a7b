"""A small certificate authority, and checks of certificates before they are used."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from polysite.errors import ConfigError, DataError, RunError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519
    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as problem:
    raise RunError(
        "certificates need pip install 'polysite[deploy]', or 'polysite[flare]' for NVIDIA FLARE"
    ) from problem

DAYS = 730  # validity of certificates
AUTHORITY_DAYS = 3650  # validity of the authority, so that it can sign hospitals that come later
SOON = timedelta(days=30)
SIGNATURE_OF_REQUEST = ec.ECDSA(hashes.SHA256())
MAX_REQUEST = 16 << 10  # bytes of a request for a certificate
EARLY = timedelta(days=1)  # clocks differ


@dataclass(frozen=True)
class Signed:
    """A certificate, the chain above it, and its key."""

    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes
    pem: bytes
    key_pem: bytes


def find_authority(ca: Path | None, ca_key: Path | None) -> Signed:
    """Return the given authority, or a new one."""
    if (ca is None) != (ca_key is None):
        given, other = ("ca", "ca_key") if ca else ("ca_key", "ca")
        raise ConfigError(f"{given} is given without {other}: certificates of hospitals are signed by both together")
    if ca is None or ca_key is None:
        return issue(f"polysite {token_hex(4)}", None, AUTHORITY_DAYS)
    chain, key = _authorities(ca), _private(ca_key)
    _current(ca, chain, datetime.now(UTC))
    if chain[0].public_key() != key.public_key():
        raise DataError(f"{ca_key} is not the key of {ca}; give the two that belong together")
    return Signed(chain[0], key, ca.read_bytes(), b"")


def server_certificate(
    authority: Signed, host: str, certificate: Path | None, key: Path | None, ca: Path | None, days: int
) -> Signed:
    """Return the given certificate of the server, or a new one."""
    if certificate is None and key is None:
        return issue("polysite server", authority, days, host)
    if certificate is None or key is None:
        raise ConfigError("a server certificate and its key go together: give certificate and key, or neither")
    if ca is None:
        raise ConfigError("certificate is given without ca: give the authority that signed it, and its key")
    found, _ = verified(certificate, key, ca, datetime.now(UTC))
    serves(certificate, found, host)
    return Signed(found, _private(key), certificate.read_bytes(), key.read_bytes())


def issue(name: str, authority: Signed | None, days: int, host: str = "") -> Signed:
    """Return a new key and its certificate: for a hospital, for a server at ``host``, or, without an authority, for a
    new authority."""
    key = new_key()
    made = certify(name, key.public_key(), authority, days, host, key)
    return Signed(made, key, pem(made), private_pem(key))


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key, as polysite makes them."""
    return ec.generate_private_key(ec.SECP384R1())


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as it is written to a file."""
    return certificate.public_bytes(Encoding.PEM)


def certify(
    name: str,
    public: ec.EllipticCurvePublicKey,
    authority: Signed | None,
    days: int,
    host: str = "",
    key: CertificateIssuerPrivateKeyTypes | None = None,
) -> x509.Certificate:
    """Return a certificate for a public key, signed by the authority, or by ``key`` for a new authority."""
    if not 1 <= days <= AUTHORITY_DAYS:
        raise ConfigError(f"days = {days}: a certificate is valid for 1 to {AUTHORITY_DAYS} days")
    now = datetime.now(UTC)
    signer = cast(CertificateIssuerPrivateKeyTypes, authority.key if authority else key)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    end = now + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.certificate.subject if authority else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(min(end, authority.certificate.not_valid_after_utc) if authority else end)
    )
    for extension, critical in _extensions(public, authority, host):
        builder = builder.add_extension(extension, critical)
    own_hash = isinstance(signer, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    return builder.sign(signer, None if own_hash else hashes.SHA384())


def public_pem(public: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as PEM."""
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def public_line(public: Any) -> str:
    """Return a public key as server.toml has it."""
    return base64.b64encode(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()


def read_public(line: Any) -> ec.EllipticCurvePublicKey | None:
    """Return the public key of a line of server.toml; None if it is none."""
    try:
        key = serialization.load_der_public_key(base64.b64decode(line, validate=True))
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as it is written to a file."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def signing_request(name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a request for a certificate, signed with the key that it is for."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA384())
    return made.public_bytes(Encoding.PEM)


def read_request(content: bytes, where: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Return the name and the public key of a request; refuse one that was not signed with its own key."""
    try:
        if len(content) > MAX_REQUEST:
            raise ValueError(f"it has {len(content)} bytes")
        request = x509.load_pem_x509_csr(content)
        public, sound = request.public_key(), request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as problem:
        raise DataError(f"{where} is not a request for a certificate: {str(problem)[:100]}") from problem
    if not sound or not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP384R1):
        raise DataError(f"{where} is not signed with a P-384 key of its own; 'polysite site enrol' makes a request")
    return common_name(request), public


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a hospital."""
    key = _private(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DataError(f"{path} is not an elliptic curve key, as that of a hospital must be")
    return key


def expiry(path: Path) -> datetime:
    """Return when a certificate expires."""
    return min(c.not_valid_after_utc for c in _certificates(path))


def _extensions(public: Any, authority: Signed | None, host: str) -> Iterator[tuple[x509.ExtensionType, bool]]:
    """Yield the extensions of a certificate, and whether each is critical."""
    root = authority is None
    yield x509.BasicConstraints(ca=root, path_length=0 if root else None), True
    usage = x509.KeyUsage(
        digital_signature=not root, key_cert_sign=root, crl_sign=root, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    yield usage, True
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    yield own, False
    above = own if authority is None else _extension(authority.certificate, x509.SubjectKeyIdentifier)
    if above is not None:  # some authorities have no key identifier
        yield x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(above), False
    if not root:
        use = ExtendedKeyUsageOID.SERVER_AUTH if host else ExtendedKeyUsageOID.CLIENT_AUTH
        yield x509.ExtendedKeyUsage([use]), False
    if host:
        names = dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])
        yield x509.SubjectAlternativeName([_general(name) for name in names]), False


def _extension(certificate: x509.Certificate, kind: Any) -> Any:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, ValueError):
        return None


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(path: Path) -> CertificateIssuerPrivateKeyTypes:
    try:
        return cast(CertificateIssuerPrivateKeyTypes, serialization.load_pem_private_key(path.read_bytes(), None))
    except FileNotFoundError as problem:
        raise DataError(f"{path} is missing; it came with the certificate of the same name") from problem
    except TypeError as problem:
        raise DataError(
            f"{path} has a passphrase; give the key without one, in a place that only you can read"
        ) from problem
    except (OSError, ValueError, UnsupportedAlgorithm) as problem:
        raise DataError(f"{path} cannot be read as a private key (PEM): {problem}") from problem


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except FileNotFoundError as problem:
        raise DataError(f"the certificate {path} is missing") from problem
    except (OSError, ValueError) as problem:
        raise DataError(f"{path} cannot be read as a certificate (PEM): {problem}") from problem


def _authorities(path: Path) -> list[x509.Certificate]:
    """Return an authority and those above it, up to a self-signed one: TLS trusts no other."""
    chain = _certificates(path)
    constraints = [_extension(found, x509.BasicConstraints) for found in chain]
    if not all(c is not None and c.ca for c in constraints):
        raise DataError(f"{path} is not the certificate of an authority; it must be allowed to sign others")
    pairs = zip(chain, [*chain[1:], chain[-1]], strict=True)
    if not all(_signs(above, below) for below, above in pairs):
        raise DataError(f"{path} must hold the authority, then those above it, up to the one that signed itself")
    return chain


def verified(certificate: Path, key: Path, ca: Path, now: datetime) -> tuple[x509.Certificate, list[str]]:
    """Return the first certificate of a file, with remarks; refuse it if it does not belong to the key, does not come
    from the authority or is not valid now."""
    authority, chain = _authorities(ca), _certificates(certificate)
    if chain[0].public_key() != _private(key).public_key():
        raise DataError(f"{key} is not the key of {certificate}; one of them was replaced")
    remarks = [*_current(ca, authority, now), *_current(certificate, chain, now)]
    found, above = chain[0], chain[1:]
    while not any(_signs(a, found) for a in authority):
        by = next((c for c in above if _signs(c, found)), None)
        if by is None:
            raise DataError(f"{certificate} was not signed by {ca}; one of them was replaced")
        found, above = by, [c for c in above if c is not by]
    return chain[0], remarks


def _signs(above: x509.Certificate, below: x509.Certificate) -> bool:
    try:
        below.verify_directly_issued_by(above)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _current(path: Path, chain: Sequence[x509.Certificate], now: datetime) -> list[str]:
    """Refuse certificates that are not valid now; return remarks on those that expire soon."""
    end = min(c.not_valid_after_utc for c in chain)
    start = max(c.not_valid_before_utc for c in chain)
    if now < start:
        raise DataError(f"{path} is valid only from {start:%Y-%m-%d}; is the clock of this machine right?")
    if now > end:
        raise DataError(
            f"{path} expired on {end:%Y-%m-%d}; a new one is needed: 'polysite site renew' at a hospital, "
            "'polysite deploy renew' for the server"
        )
    return [f"{path} expires on {end:%Y-%m-%d}"] if end - now < SOON else []


def serves(path: Path, certificate: x509.Certificate, host: str) -> None:
    """Refuse a certificate that is not for a server at this host."""
    uses, names = (_extension(certificate, k) for k in (x509.ExtendedKeyUsage, x509.SubjectAlternativeName))
    if uses is not None and ExtendedKeyUsageOID.SERVER_AUTH not in uses:
        raise DataError(f"{path} is not for a server: its extended key usage lacks serverAuth")
    wanted, written = _general(host), list(names or ())
    hosts = {n.value.lower() for n in written if isinstance(n, x509.DNSName)}
    if wanted not in written and not (isinstance(wanted, x509.DNSName) and hosts & _patterns(host)):
        known = ", ".join(str(n.value) for n in written) or "no host at all"
        raise DataError(f"{path} is for {known}, not for {host!r}, by which hospitals reach the server")


def _patterns(host: str) -> set[str]:
    """Return the names by which a certificate may stand for a host.

    >>> sorted(_patterns("FL.example.org"))
    ['*.example.org', 'fl.example.org']
    """
    host = host.lower()
    return {host, f"*.{host.partition('.')[2]}"}


def common_name(certificate: Any) -> str:
    """Return the common name of a certificate or of a request for one, or an empty text."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""
