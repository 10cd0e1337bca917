"""The certificate authority of one run, made by `meshrl run init`. It lets members in for a day at a time.

Its key never leaves its folder, a member's key never its host: the member sends a request signed with its key. The
certificate's URI, spiffe://meshrl/RUN/ROLE/NAME, has role and name; its DNS names are those of the role's servers and
the hosts bound to the member's token.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshrl.client.credentials import TRUST_FILE
from meshrl.client.names import MEMBER_URI, canonical_host, check_name, member_name, server_name
from meshrl.client.private import private_folder, write_private
from meshrl.client.trust import SERVING, Role, Trust, TrustFile

CERTIFICATE_S = 24 * 3600.0
AUTHORITY_DAYS = 3650
BACKDATED_S = 300.0
"""Clocks differ."""

SERVER_NAMES = 8
"""The newest of a role in each certificate, for clients that have not learned of the last revocations."""


class AuthorityError(ValueError):
    """The message names the remedy."""


class Authority:
    """ca.key, ca.pem and the trust file of a folder. Every method raises AuthorityError and OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trust = folder, TrustFile(folder / TRUST_FILE)
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
            self.certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise AuthorityError(
                f"{folder} holds no authority of a run ({error}); make one with `meshrl run init -o OUTPUT_DIR`"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise AuthorityError(f"{folder / 'ca.key'} is no key of an authority of ours; run `meshrl run init` anew")
        self._key = key

    @classmethod
    def create(cls, folder: Path, run: str) -> Authority:
        """Raises AuthorityError if the folder has one."""
        check_name(run)
        if (folder / "ca.key").exists():
            raise AuthorityError(f"{folder} holds an authority already; use it, or name another folder")
        private_folder(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"meshrl run {run}")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(seconds=BACKDATED_S))
            .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{MEMBER_URI}{run}")]), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        write_private(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
        TrustFile(folder / TRUST_FILE).create()
        write_private(folder / "ca.key", _pem_of(key))
        return cls(folder)

    @property
    def run(self) -> str:
        names = self.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.UniformResourceIdentifier)[0].rpartition("/")[2]

    @property
    def fingerprint(self) -> str:
        """sha256:HEX of the public key, by which a host that joins recognises this run."""
        return key_hash(self.certificate)

    def enroll(self, token: str, name: str, request_pem: bytes, hosts: Sequence[str]) -> tuple[Role, bytes]:
        """Raises TokenError, and ValueError for anything else."""
        member = self.trust.enroll(token, name, _key_hash(_key_of(request_pem)), hosts)
        return member.role, self.sign(request_pem, member.role, member.name, hosts=member.hosts)

    def renew(self, role: Role, name: str, request_pem: bytes) -> bytes:
        """For the same hosts. Raises ValueError for a member that is revoked or unknown."""
        member = self.trust.renewed(role, name, _key_hash(_key_of(request_pem)))
        return self.sign(request_pem, role, name, hosts=member.hosts)

    def certify(
        self, request_pem: bytes, role: Role, name: str, by: str, *,
        hosts: Sequence[str] = (), ttl_s: float = CERTIFICATE_S,
    ) -> bytes:  # fmt: skip
        """`by` stands in place of a token. Raises ValueError."""
        bound = tuple(map(canonical_host, hosts))
        member = self.trust.note_member(role, name, by, _key_hash(_key_of(request_pem)), bound)
        return self.sign(request_pem, role, member.name, ttl_s=ttl_s, hosts=member.hosts)

    def sign(
        self, request_pem: bytes, role: Role, name: str, *, ttl_s: float = CERTIFICATE_S, hosts: Sequence[str] = ()
    ) -> bytes:
        """A member's certificate and the authority's own, in PEM.

        Only the request's key counts, and the proof that its sender has it. `hosts`: DNS names and addresses that the
        certificate names besides. Raises AuthorityError for a bad request, a revoked member and hosts of a role that
        does not serve, ValueError for bad hosts.
        """
        key, name = _key_of(request_pem), member_name(name)
        trust = self.trust.read()  # at one moment: a member that is revoked later has none of the later names
        if (role.value, name) in trust.revoked:
            raise AuthorityError(f"{role}/{name} is revoked; give it another name")
        if hosts and role not in SERVING:
            raise AuthorityError(f"{role}/{name} serves nobody, so its certificate names no hosts; leave them out")
        generation = trust.num_revoked(role)
        latest = range(max(1, generation - SERVER_NAMES + 1), generation + 1)
        servers = [server_name(role), *(server_name(role, number) for number in latest)]
        now = datetime.datetime.now(datetime.UTC)
        uri = f"{MEMBER_URI}{self.run}/{role.value}/{name}"
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri), *map(x509.DNSName, servers)]
        names += [_host_name(host) for host in hosts]
        certificate = (
            x509.CertificateBuilder(issuer_name=self.certificate.subject, public_key=key)
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(seconds=BACKDATED_S))
            .not_valid_after(now + datetime.timedelta(seconds=ttl_s))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return certificate.public_bytes(pem) + self.certificate.public_bytes(pem)

    def issue(
        self, folder: Path, role: Role, name: str, *, hosts: Sequence[str] = (), ttl_s: float = CERTIFICATE_S
    ) -> None:
        chain = self.certify(request_for(folder, name), role, name, "this host", hosts=hosts, ttl_s=ttl_s)
        save_certificate(folder, chain)


def request_for(folder: Path, name: str) -> bytes:
    """In PEM, for the key in `folder`, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / "key.pem"
    if not file.exists():
        write_private(file, _pem_of(ec.generate_private_key(ec.SECP256R1())))
    key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AuthorityError(f"{file} is no key of ECDSA on P-256; delete it, and another is made")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def save_certificate(folder: Path, chain: bytes) -> None:
    certificates = x509.load_pem_x509_certificates(chain)
    write_private(folder / "ca.pem", certificates[-1].public_bytes(serialization.Encoding.PEM))
    write_private(folder / "cert.pem", chain)


def key_hash(certificate: x509.Certificate) -> str:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return ""  # of no authority of ours
    return _key_hash(key)


def _key_hash(key: ec.EllipticCurvePublicKey) -> str:
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}"


def names_lack(cert: Path, trust: Trust) -> bool:
    """Whether the certificate lacks its role's present server name. Raises OSError, ValueError."""
    certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = names.get_values_for_type(x509.DNSName)
    roles = [role for role in Role if server_name(role) in found]
    return any(server_name(role, trust.num_revoked(role)) not in found for role in roles)


def renew_in_s(cert: Path) -> float:
    """Seconds until two thirds of its life are over, at least 0. Raises OSError, ValueError."""
    certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    due = certificate.not_valid_before_utc + life * 2 / 3
    return max(0.0, (due - datetime.datetime.now(datetime.UTC)).total_seconds())


def why_not_now(certificate: x509.Certificate) -> str:
    """Why a certificate is not valid by this host's clock; "" while it is."""
    now, begin, end = (
        moment.replace(microsecond=0, tzinfo=None)
        for moment in (
            datetime.datetime.now(datetime.UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc,
        )
    )  # fmt: skip
    if now < begin:
        return f"is valid from {begin} UTC on, and the clock of this host is at {now}: set the one that is wrong"
    if now > end:
        return (
            f"was valid until {end} UTC, and the clock of this host is at {now}: join the run under another name"
            " (meshrl join), or set the clock"
        )
    return ""


def _host_name(host: str) -> x509.GeneralName:
    canonical = canonical_host(host)
    try:
        return x509.IPAddress(ipaddress.ip_address(canonical))
    except ValueError:  # a name
        return x509.DNSName(canonical)


def _key_of(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Raises AuthorityError without proof that the sender has the key."""
    try:
        request = x509.load_pem_x509_csr(request_pem)
        proven = request.is_signature_valid
    except (ValueError, InvalidSignature) as error:
        raise AuthorityError(f"the certificate request cannot be read: {error}; send one in PEM") from error
    key = request.public_key()
    if not proven or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise AuthorityError("the certificate request must be signed with its own key, of ECDSA on P-256")
    return key


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=sign_certificates, crl_sign=sign_certificates,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
