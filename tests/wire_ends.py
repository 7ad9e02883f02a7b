"""Both ends of the wire on this machine: keys and certificates of a small consortium, and messages there and back."""

import datetime
import http.client
import ipaddress
import secrets
import ssl
import time
from base64 import b64encode

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polysite.deploy.flower.client import Fleet
from polysite.deploy.flower.messages import CHUNK, INSTANCE
from polysite.deploy.flower.server import Link

from flwr.common.constant import TIMESTAMP_HEADER  # isort: skip
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

HEADER = {"round": 3, "what": "train", "rate": 0.5, "last": False, "labels": ["a", "b"], "none": []}


class Consortium:
    """A folder of keys and certificates: one CA, the coordinator, sites; and a CA that the sites do not know."""

    def __init__(self, folder):
        self.folder = folder
        self.cas = {ca: self.make(ca, None) for ca in ("ca", "other")}
        self.keys = {name: self.make(name, "ca") for name in ("server", "north", "south", "unregistered")}
        self.make("impostor", "other")
        self.sites = {name: public_key_to_bytes(self.keys[name].public_key()) for name in ("north", "south")}

    def make(self, name, issuer):
        key = ec.generate_private_key(ec.SECP384R1())
        subject, signer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, issuer or name))
        today = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(signer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(today - datetime.timedelta(days=1))
            .not_valid_after(today + datetime.timedelta(days=100))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .sign(self.cas[issuer] if issuer else key, hashes.SHA256())
        )
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(pem))
        (self.folder / f"{name}.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        return key

    def files(self, name, ca="ca"):
        return {kind: self.folder / f"{name}.{end}" for kind, end in (("certificate", "crt"), ("key", "key"))} | {
            "ca": self.folder / f"{ca}.crt"
        }

    def link(self, port=0, **others):
        return Link("127.0.0.1", port, **self.files("server"), sites=self.sites, **others)

    def fleet(self, link, name, **others):
        files = self.files(name) | others
        return Fleet(f"127.0.0.1:{link.port}", **files)

    def context(self, name=None):
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        if name:
            context.load_cert_chain(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        return context

    def signed(self, name, instance):
        moment = now().isoformat()
        signature = sign_message(self.keys[name], moment.encode())
        key = public_key_to_bytes(self.keys[name].public_key())
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(key).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
            TIMESTAMP_HEADER: moment,
            INSTANCE: instance,
            "content-type": PROTOBUF_MEDIA_TYPE,
        }

    def connection(self, link, name):
        return http.client.HTTPSConnection("127.0.0.1", link.port, context=self.context(name), timeout=20)

    def post(self, link, name, call, headers, body=b""):
        connection = self.connection(link, name)
        try:
            connection.request("POST", f"/v1/fleet/{call}", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def until(look):
    """What is found by looking again and again, for a minute at most."""
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end, "nothing came within a minute"
        time.sleep(0.01)
    return found


def collected(link, *ids):
    """All answers."""
    found = []

    def look():
        found.extend(link.collect(ids))
        return len(found) == len(ids)

    until(look)
    return found


def received(fleet):
    return until(fleet.receive)


def exchange(link, fleet, site="north", size=CHUNK + 1000):
    """There and back, bit for bit."""
    body = secrets.token_bytes(size)
    sent = link.send(site, HEADER, body, 60, "1")
    asked = received(fleet)
    assert (asked.header, asked.body) == (HEADER, body)
    assert fleet.answer(asked, {"ok": True}, body[::-1])
    (answer,) = collected(link, sent)
    assert (answer.id, answer.error) == (sent, "")
    assert (answer.header, answer.body) == ({"ok": True}, body[::-1])


def empty(link):
    state = link._state
    return not any(
        map(len, (link._store, state.message_ins_store, state.message_res_store, state._object_push_sessions))
    )
