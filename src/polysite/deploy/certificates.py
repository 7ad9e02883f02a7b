"""The certificate authority of a federation, and checks of its certificates before they are used.

The authority signs one certificate for the server and one for every hospital, directly. All keys are P-384 keys.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from polysite.errors import DataError, RunError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
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
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """The certificate as it is written to a file."""
        return pem(self.certificate)

    @property
    def key_pem(self) -> bytes:
        """The key as it is written to a file."""
        return private_pem(self.key)


def new_authority() -> Signed:
    """Return a new authority."""
    return issue(f"polysite {token_hex(4)}", None, AUTHORITY_DAYS)


def read_authority(ca: Path, ca_key: Path) -> Signed:
    """Return the authority of a project with its key, which may lie elsewhere."""
    found, key = _certificate(ca), read_key(ca_key)
    _current(ca, found, datetime.now(UTC))
    if found.public_key() != key.public_key():
        raise DataError(f"{ca_key} is not the key of {ca}; give the two that belong together")
    return Signed(found, key)


def issue(name: str, authority: Signed | None, days: int, host: str = "") -> Signed:
    """Return a new key and its certificate: for a hospital, for a server at ``host``, or, without an authority, for a
    new authority."""
    key = new_key()
    return Signed(certify(name, key.public_key(), authority, days, host, key), key)


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
    key: ec.EllipticCurvePrivateKey | None = None,
) -> x509.Certificate:
    """Return a certificate for a public key, signed by the authority, or by ``key`` for a new authority."""
    now = datetime.now(UTC)
    signer = cast(ec.EllipticCurvePrivateKey, authority.key if authority else key)
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
    return builder.sign(signer, hashes.SHA384())


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
    """Return the private key of a hospital, of the server or of the authority."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError as problem:
        raise DataError(f"{path} is missing; it came with the certificate of the same name") from problem
    except TypeError as problem:
        raise DataError(
            f"{path} has a passphrase; give the key without one, in a place that only you can read"
        ) from problem
    except (OSError, ValueError, UnsupportedAlgorithm) as problem:
        raise DataError(f"{path} cannot be read as a private key (PEM): {problem}") from problem
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DataError(f"{path} is not an elliptic curve key, as all keys of a federation are")
    return key


def expiry(path: Path) -> datetime:
    """Return when a certificate expires."""
    return _certificate(path).not_valid_after_utc


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
    above = authority.certificate.extensions if authority else None
    signer = above.get_extension_for_class(x509.SubjectKeyIdentifier).value if above else own
    yield x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), False
    if not root:
        use = ExtendedKeyUsageOID.SERVER_AUTH if host else ExtendedKeyUsageOID.CLIENT_AUTH
        yield x509.ExtendedKeyUsage([use]), False
    if host:
        names = dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])
        yield x509.SubjectAlternativeName([_general(name) for name in names]), False


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError as problem:
        raise DataError(f"the certificate {path} is missing") from problem
    except (OSError, ValueError) as problem:
        raise DataError(f"{path} cannot be read as a certificate (PEM): {problem}") from problem


def verified(certificate: Path, key: Path, ca: Path, now: datetime) -> tuple[x509.Certificate, list[str]]:
    """Return the certificate of a file, with remarks; refuse it if it does not belong to the key, does not come from
    the authority or is not valid now."""
    authority, found = _certificate(ca), _certificate(certificate)
    if found.public_key() != read_key(key).public_key():
        raise DataError(f"{key} is not the key of {certificate}; one of them was replaced")
    remarks = [*_current(ca, authority, now), *_current(certificate, found, now)]
    try:
        found.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as problem:
        raise DataError(f"{certificate} was not signed by {ca}; one of them was replaced") from problem
    return found, remarks


def _current(path: Path, certificate: x509.Certificate, now: datetime) -> list[str]:
    """Refuse a certificate that is not valid now; return a remark on one that expires soon."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
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
    try:
        names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    if _general(host.lower()) not in names and _general(host) not in names:
        known = ", ".join(str(n.value) for n in names) or "no host at all"
        raise DataError(f"{path} is for {known}, not for {host!r}, by which hospitals reach the server")


def common_name(certificate: Any) -> str:
    """Return the common name of a certificate or of a request for one, or an empty text."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""
